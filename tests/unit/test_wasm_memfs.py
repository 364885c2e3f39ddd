"""The run's file tree: what it may hold, and that a path never leaves it (X7, X8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.runtimes.wasm.memfs import Tree
from lockgate.runtimes.wasm.nodes import Directory, File, Quota
from lockgate.runtimes.wasm.wasi_errno import Errno, Refused

KiB = 1024


def make(disk: int = 64 * KiB, inodes: int = 16) -> tuple[Tree, Directory, Quota]:
    tree = Tree(lambda: 7)
    quota = Quota(disk, inodes)
    run = tree.place("/run", quota)
    tree.place_file("/usr/lib/x.zip", memoryview(b"archive"))
    return tree, run, quota


def new(tree: Tree, run: Directory, name: bytes) -> File:
    return tree.make_file(*tree.slot(run, name))


def errno_of(function, *args: object) -> Errno:
    with pytest.raises(Refused) as error:
        function(*args)
    return error.value.errno


def test_bytes_have_an_end() -> None:
    tree, run, quota = make(disk=10)
    file = new(tree, run, b"a")
    assert file.write(0, b"x" * 8) == 8
    assert file.write(8, b"y" * 8) == 2  # a short write, as on a full disk
    assert errno_of(file.write, 10, b"z") == Errno.NOSPC
    assert quota.used == 10
    file.write(0, b"over")  # no more bytes than there are
    assert bytes(file.data) == b"overxxxxyy"


def test_a_hole_counts_as_what_it_would_hold() -> None:
    tree, run, quota = make(disk=100)
    file = new(tree, run, b"a")
    assert errno_of(file.write, 1 << 30, b"x") == Errno.NOSPC
    assert errno_of(file.resize, 101) == Errno.NOSPC
    assert errno_of(file.resize, 1 << 40) == Errno.FBIG
    file.resize(100)
    assert quota.used == 100
    file.resize(1)
    assert quota.used == 1


def test_names_have_an_end_and_come_back() -> None:
    tree, run, quota = make(inodes=4)
    for name in (b"a", b"b"):
        new(tree, run, name)
    tree.make_directory(run, b"d")
    assert errno_of(new, tree, run, b"c") == Errno.NOSPC
    assert errno_of(tree.make_directory, run, b"e") == Errno.NOSPC
    tree.unlink(run, b"a")
    tree.remove_directory(run, b"d")
    new(tree, run, b"c")
    assert quota.count == 3


def test_an_unlinked_file_is_counted_while_it_is_open() -> None:
    tree, run, quota = make(disk=10, inodes=2)
    file = new(tree, run, b"a")
    file.opened += 1
    file.write(0, b"x" * 10)
    tree.unlink(run, b"a")
    assert errno_of(new, tree, run, b"b") == Errno.NOSPC
    file.opened -= 1
    file.forget()
    assert (quota.used, quota.count) == (0, 1)


@pytest.mark.parametrize("path", [b"/x", b"../x", b"../../../x", b"../usr/x", b"/usr/lib/x", b"..//./../etc/x"])
def test_nothing_is_made_outside_of_the_runs_directory(path: bytes) -> None:
    tree, run, _ = make()
    start = tree.root if path.startswith(b"/") else run
    assert errno_of(tree.make_directory, start, path) in {Errno.ROFS, Errno.NOENT}
    with pytest.raises(Refused):
        tree.make_file(*tree.slot(start, path))
    assert errno_of(tree.rename, run, b"nope", start, path) in {Errno.NOENT, Errno.ROFS}


def test_the_library_cannot_be_moved_or_removed() -> None:
    tree, run, _ = make()
    assert errno_of(tree.unlink, tree.root, b"usr/lib/x.zip") == Errno.ROFS
    assert errno_of(tree.rename, tree.root, b"usr/lib/x.zip", run, b"mine") == Errno.ROFS
    assert errno_of(tree.rename, tree.root, b"usr", run, b"mine") == Errno.ROFS
    assert errno_of(tree.remove_directory, tree.root, b"run") == Errno.ROFS


def test_the_roots_parent_is_the_root() -> None:
    tree, run, _ = make()
    assert tree.find(run, b"../../../../../run") is run


@pytest.mark.parametrize(
    ("path", "errno"),
    [
        (b"", Errno.NOENT),
        (b"nope", Errno.NOENT),
        (b"file/x", Errno.NOTDIR),
        (b"file/", Errno.NOTDIR),
        (b"file/.", Errno.NOTDIR),
        (b"file/..", Errno.NOTDIR),
        (b"a\0b", Errno.INVAL),
        (b"n" * 256, Errno.NAMETOOLONG),
        (b"n/" * 3000, Errno.NAMETOOLONG),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path: bytes, errno: Errno) -> None:
    tree, run, _ = make()
    new(tree, run, b"file")
    assert errno_of(tree.find, run, path) == errno


def test_a_directory_cannot_be_moved_into_itself() -> None:
    tree, run, _ = make()
    for path in (b"a", b"a/b", b"a/b/c"):
        tree.make_directory(run, path)
    assert errno_of(tree.rename, run, b"a", run, b"a/b/c/d") == Errno.INVAL
    assert errno_of(tree.rename, run, b"a", run, b"a/b") in {Errno.INVAL, Errno.NOTEMPTY}
    tree.rename(run, b"a/b/c", run, b"top")
    assert tree.find(run, b"top/..") is run


def test_a_rename_replaces_and_gives_back() -> None:
    tree, run, quota = make()
    new(tree, run, b"a").write(0, b"aa")
    new(tree, run, b"b").write(0, b"bbbb")
    tree.rename(run, b"a", run, b"b")
    assert list(run.entries) == [b"b"]
    assert (quota.used, quota.count) == (2, 2)
    tree.rename(run, b"b", run, b"b")
    assert list(run.entries) == [b"b"]
    tree.make_directory(run, b"d")
    assert errno_of(tree.rename, run, b"b", run, b"d") == Errno.ISDIR
    assert errno_of(tree.rename, run, b"d", run, b"b") == Errno.NOTDIR
    assert errno_of(tree.rename, run, b"b", run, b"e/") == Errno.NOTDIR


def test_what_was_removed_takes_nothing_new() -> None:
    tree, run, _ = make()
    tree.make_directory(run, b"d")
    gone = tree.find(run, b"d")
    assert isinstance(gone, Directory)
    tree.remove_directory(run, b"d")
    assert errno_of(tree.make_file, gone, b"x") == Errno.NOENT


_paths = st.lists(st.sampled_from([b"a", b"b", b"c", b"..", b".", b""]), max_size=5).map(b"/".join)
_operations = st.lists(
    st.tuples(
        st.sampled_from(["file", "dir", "unlink", "rmdir", "rename", "write", "resize"]),
        _paths,
        _paths,
        st.integers(0, 40),
    ),
    max_size=40,
)


@given(_operations)
def test_the_count_is_what_is_there_whatever_was_done(operations: list[tuple[str, bytes, bytes, int]]) -> None:
    """Whatever a run does: the quota says what the tree holds, and never more than it may."""
    tree, run, quota = make(disk=100, inodes=6)
    for kind, path, other, number in operations:
        try:
            if kind == "file":
                where, name = tree.slot(run, path)
                if name not in where.entries:
                    tree.make_file(where, name)
            elif kind == "dir":
                tree.make_directory(run, path)
            elif kind == "unlink":
                tree.unlink(run, path)
            elif kind == "rmdir":
                tree.remove_directory(run, path)
            elif kind == "rename":
                tree.rename(run, path, run, other)
            else:
                node = tree.find(run, path)
                if isinstance(node, File):
                    node.write(number, b"x" * number) if kind == "write" else node.resize(number)
        except Refused:
            pass
        found = _count(run)
        assert (quota.count, quota.used) == found
        assert found[0] <= 6
        assert found[1] <= 100
        assert set(tree.root.entries) == {b"run", b"usr"}


def _count(directory: Directory) -> tuple[int, int]:
    names, used = 1, 0
    for node in directory.entries.values():
        if isinstance(node, Directory):
            assert node.parent is directory
            below = _count(node)
            names, used = names + below[0], used + below[1]
        else:
            names, used = names + 1, used + node.size
    return names, used

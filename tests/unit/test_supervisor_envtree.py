"""A package tree holds what its wheels vouch for, and nothing else (X11)."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest

from lockgate.contract.errors import ConfigError, EnvBuildFailed, UnknownEnv
from lockgate.supervisor import envs, envtree


def make(tree: Path, **files: bytes) -> Path:
    info = tree / "pkg-1.0.dist-info"
    info.mkdir(parents=True)
    lines = []
    for name, data in {"pkg/__init__.py": b"x = 1\n", "pkg/data.bin": b"\0\1", **files}.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    lines += ["pkg-1.0.dist-info/RECORD,,\n", "../../bin/tool,sha256=abc,1\n", "pkg/__pycache__/a.cpython-311.pyc,,\n"]
    (info / "RECORD").write_text("".join(lines))
    return tree


def test_a_tree_as_its_records_say_passes(tmp_path):
    envtree.check_records(make(tmp_path / "t"))


def test_an_altered_file_is_found(tmp_path):
    tree = make(tmp_path / "t")
    (tree / "pkg/data.bin").write_bytes(b"\0\2")
    with pytest.raises(EnvBuildFailed, match=r"data\.bin"):
        envtree.check_records(tree)


def test_a_file_nobody_vouches_for_is_found(tmp_path):
    tree = make(tmp_path / "t")
    (tree / "sitecustomize.py").write_text("boom\n")
    with pytest.raises(EnvBuildFailed, match="sitecustomize"):
        envtree.check_records(tree)


def test_a_missing_file_is_found(tmp_path):
    tree = make(tmp_path / "t")
    (tree / "pkg/data.bin").unlink()
    with pytest.raises(EnvBuildFailed, match=r"data\.bin"):
        envtree.check_records(tree)


def test_a_file_without_a_hash_is_found(tmp_path):
    tree = make(tmp_path / "t")
    record = tree / "pkg-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace("pkg/data.bin,sha256=", "pkg/data.bin,md5="))
    with pytest.raises(EnvBuildFailed, match=r"data\.bin"):
        envtree.check_records(tree)


@pytest.mark.parametrize("plant", ["link", "dirlink", "fifo"])
def test_nothing_is_followed(tmp_path, plant):
    """X11: what a package plants in the tree to lead out of it ends the build."""
    tree = make(tmp_path / "t")
    match plant:
        case "link":
            (tree / "pkg/shadow").symlink_to("/etc/passwd")
        case "dirlink":
            (tree / "pkg/etc").symlink_to("/etc")
        case _:
            os.mkfifo(tree / "pkg/pipe")
    with pytest.raises(EnvBuildFailed, match="neither a file nor a directory"):
        envtree.check_records(tree)


def test_a_listed_link_is_no_file(tmp_path):
    tree = make(tmp_path / "t")
    target = tmp_path / "outside"
    target.write_bytes(b"\0\1")
    (tree / "pkg/data.bin").unlink()
    (tree / "pkg/data.bin").symlink_to(target)
    with pytest.raises(EnvBuildFailed):
        envtree.check_records(tree)


def test_the_digest_is_of_content_and_place_alone(tmp_path):
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    os.utime(two / "pkg/data.bin", (1, 1))
    assert envtree.digest(one, "3.11") == envtree.digest(two, "3.11")
    assert envtree.digest(one, "3.11").digest != envtree.digest(one, "3.12").digest
    (two / "pkg/data.bin").rename(two / "pkg/other.bin")
    assert envtree.digest(one, "3.11").digest != envtree.digest(two, "3.11").digest


def test_compiled_files_carry_the_sandboxs_paths_and_do_not_change_the_digest(tmp_path):
    """X8: no host path in a code object, hence none in a traceback."""
    tree = make(tmp_path / "t")
    before = envtree.digest(tree, "3.11").digest
    envtree.compile_tree(tree)
    (compiled,) = tree.glob("pkg/__pycache__/*.pyc")
    assert str(tmp_path).encode() not in compiled.read_bytes()
    assert b"/packages/pkg/__init__.py" in compiled.read_bytes()
    assert envtree.digest(tree, "3.11").digest == before


def test_a_sealed_tree_is_read_only_and_can_still_be_removed(tmp_path):
    tree = make(tmp_path / "t")
    envtree.seal(tree)
    assert all(not path.stat().st_mode & 0o222 for path in (tree, *tree.rglob("*")))
    envtree.remove(tree)
    assert not tree.exists()


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "x" * 65, "-a", ".a", "a/b", "a\n"])
def test_names_that_could_be_paths_are_refused(name, tmp_path):
    with pytest.raises(ConfigError):
        envs.check_name(name)
    with pytest.raises(UnknownEnv):
        envs.find(name, tmp_path)


def test_an_unknown_set_says_how_to_build_it(tmp_path):
    with pytest.raises(UnknownEnv, match=r"lockgate env build data -r requirements\.txt"):
        envs.find("data", tmp_path)
    assert envs.list_envs(tmp_path) == []


def test_a_planted_name_that_leads_out_of_the_store_is_no_set(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "set.json").write_text("{}")
    store = tmp_path / "store"
    (store / "names").mkdir(parents=True)
    (store / "sets").mkdir()
    (store / "names" / "evil").symlink_to(outside)
    with pytest.raises(UnknownEnv):
        envs.find("evil", store)


def test_errors_of_pip_lose_the_addresses_they_carry():
    """An index address may hold a password."""
    error = envs._pip_error("ERROR: Could not install https://u:sk-synthetic-1@index.test/simple/x because")
    assert "sk-synthetic" not in str(error)
    assert "<address>" in str(error)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/usr/bin/python3: No module named pip", "ensurepip"),
        ("WARNING: Retrying NewConnectionError('x')\nERROR: No matching distribution found for a", "cannot be reached"),
        ("ERROR: No matching distribution found for zzz==9", "cannot be met by wheels"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "DO NOT MATCH"),
    ],
)
def test_errors_of_pip_say_what_to_do(output, words):
    assert words in str(envs._pip_error(output))

"""The gvisor rung without a sentry: which runsc is taken, what a bundle holds, what is refused and how (X2, X3)."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import msgspec
import pytest

from lockgate.config import load_text
from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.contract.rungs import GvisorChoices
from lockgate.gate.start import supervisor_settings
from lockgate.runtimes.container import plan
from lockgate.runtimes.gvisor import GvisorRuntime, binary, bundle, fetching, image, layout
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.supervisor import settings as supervisor_settings_of


# ---- which runsc -------------------------------------------------------------------------------------------------
def _go_file(path: Path, version: bytes, *, flags: int = 2, shift: int = 0) -> Path:
    header = b"\xff Go buildinf:" + bytes([8, flags]) + bytes(16)
    path.write_bytes(b"\x7fELF" + bytes(12 + 64 + shift) + header + bytes([len(version)]) + version + bytes(64))
    return path


@pytest.mark.parametrize("version", [b"go1.24.4", b"go1.26.2", b"devel go1.27-abc"])
def test_the_compiler_is_read_from_the_file(tmp_path: Path, version: bytes) -> None:
    assert binary.go_version(_go_file(tmp_path / "x", version)) == version.decode()


@pytest.mark.parametrize(("flags", "shift"), [(0, 0), (2, 7)])
def test_what_is_no_go_program_of_that_format_names_no_compiler(tmp_path: Path, flags: int, shift: int) -> None:
    assert binary.go_version(_go_file(tmp_path / "x", b"go1.24.4", flags=flags, shift=shift)) == ""


def test_a_cut_file_names_no_compiler(tmp_path: Path) -> None:
    whole = _go_file(tmp_path / "x", b"go1.24.4").read_bytes()
    for size in range(16, len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:size])
        assert binary.go_version(tmp_path / "cut") in {"", "go1.24.4", *("go1.24.4"[:n] for n in range(9))}


def _runsc(release: int, go: str) -> binary.Runsc:
    return binary.Runsc(path="/x", sha256="0" * 64, version=f"release-{release}.0", release=release, go=go)


@pytest.mark.parametrize(("release", "go"), [(20240729, "go1.26.2"), (20240101, "go1.27"), (20240729, "go2.0")])
def test_a_build_that_is_older_than_its_compiler_is_refused_by_name(release: int, go: str) -> None:
    with pytest.raises(CannotIsolate, match="crashes"):
        binary.refuse_known_bad(_runsc(release, go))


@pytest.mark.parametrize(("release", "go"), [(20240729, "go1.24.4"), (20260817, "go1.26.2"), (20240729, "")])
def test_other_builds_have_to_pass_their_boots(release: int, go: str) -> None:
    binary.refuse_known_bad(_runsc(release, go))


def test_age_is_told_by_the_release() -> None:
    assert _runsc(20240729, "").old
    assert _runsc(0, "").old
    assert not _runsc(binary.MINIMUM, "").old


def test_the_operators_choice_wins_and_is_missed_by_name(tmp_path: Path) -> None:
    own, unpacked = tmp_path / "own", tmp_path / "unpacked"
    own.touch()
    unpacked.touch()
    assert binary.locate(str(own), unpacked) == own
    with pytest.raises(CannotIsolate, match=r"no runsc at /no/such\..*\[execution\.gvisor\] runsc"):
        binary.locate("/no/such", unpacked)


def test_the_unpacked_copy_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, unpacked = tmp_path / "usual" / "runsc", tmp_path / "unpacked"
    usual.parent.mkdir()
    usual.touch()
    usual.chmod(0o755)
    unpacked.touch()
    monkeypatch.setattr(binary, "USUAL", str(usual.parent))
    assert binary.locate(None, unpacked) == usual
    usual.unlink()
    assert binary.locate(None, unpacked) == unpacked
    unpacked.unlink()
    with pytest.raises(CannotIsolate, match="lockgate gvisor fetch"):
        binary.locate(None, unpacked)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_runsc_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """X3: it runs with our rights, outside of every box."""
    path = tmp_path / "runsc"
    path.touch()
    path.chmod(0o755)
    binary.check_owner(path)
    path.chmod(mode)
    with pytest.raises(CannotIsolate, match="could be changed by others"):
        binary.check_owner(path)


def test_a_directory_that_others_may_write_is_refused_unless_names_in_it_are_safe(tmp_path: Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    path = place / "runsc"
    path.touch()
    path.chmod(0o755)
    place.chmod(0o777)
    with pytest.raises(CannotIsolate, match="could be changed by others"):
        binary.check_owner(path)
    place.chmod(0o1777)
    binary.check_owner(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_runsc_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runsc"
    path.touch()
    os.chown(path, 12345, 0)
    with pytest.raises(CannotIsolate, match="could be changed by others"):
        binary.check_owner(path)


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 0\n", "#!/bin/sh\necho runsc version release-20260817.0\n", "x"])
def test_what_is_no_runsc_is_refused_with_what_it_lacks(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runsc"
    path.write_text(text)
    path.chmod(0o755)
    with pytest.raises(CannotIsolate, match=r"has no flag --platform|cannot be run"):
        binary.inspect(path)


# ---- fetching ----------------------------------------------------------------------------------------------------
def test_a_package_that_is_not_the_tested_one_is_a_typed_error(tmp_path: Path) -> None:
    deb = tmp_path / "runsc_1_amd64.deb"
    deb.write_bytes(b"rebuilt")
    with pytest.raises(CannotIsolate, match=r"runsc_1_amd64\.deb has SHA-256 [0-9a-f]{64}, not 3c25a513") as caught:
        fetching.check_digest(deb)
    assert "Debian rebuilt it" in caught.value.next_step


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "deb http://archive.example/debian bookworm main\n"),
        (
            "sources.list",
            "# deb http://other.example/debian x main\ndeb [arch=amd64] http://archive.example/debian x y\n",
        ),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://archive.example/debian/\nSuites: bookworm\n"),
    ],
)
def test_the_archive_is_the_one_that_this_host_uses(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    assert fetching.mirror(tmp_path) == "http://archive.example/debian"


def test_a_host_without_a_debian_archive_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://archive.example/ubuntu noble main\n")
    with pytest.raises(ConfigError, match="no Debian archive"):
        fetching.mirror(tmp_path)


# ---- the bundle --------------------------------------------------------------------------------------------------
def test_a_box_has_no_directory_device_or_socket_of_the_host() -> None:
    """X4, X8: what the sentry is given is one image and the descriptors of one run."""
    config = bundle.config(Path("/store/x.erofs"))
    assert [mount["destination"] for mount in config["mounts"]] == ["/proc"]  # the sentry's own
    assert config["annotations"]["dev.gvisor.spec.rootfs.source"] == "/store/x.erofs"
    assert "devices" not in config["linux"]
    assert {one["type"] for one in config["linux"]["namespaces"]} == {"pid", "network", "ipc", "uts", "mount"}
    assert not any("path" in one for one in config["linux"]["namespaces"])
    assert config["process"]["noNewPrivileges"] is True
    assert {one.partition("=")[0] for one in config["process"]["env"]} & {"HOME", "USER", "SSH_AUTH_SOCK"} == set()


def test_no_flag_that_opens_a_box_is_ever_given() -> None:
    given = dict(flag.removeprefix("--").partition("=")[::2] for flag in bundle.FLAGS)
    assert (given["network"], given["host-uds"], given["host-fifo"]) == ("none", "none", "none")
    assert (given["directfs"], given["net-raw"], given["overlay2"]) == ("false", "false", "none")
    assert "oci-seccomp" in given  # without it a list in the bundle is ignored in silence
    assert not any(
        name.startswith(("TESTONLY", "profile", "allow-flag-override", "rootless", "debug")) for name in given
    )


def test_the_guest_is_sent_only_what_it_needs() -> None:
    """X8: our modules go through the channel and lie in no file of the box; nothing of the host's paths is in them."""
    sent = json.loads(bundle.modules({"preload": []}))
    assert set(sent) == {"modules", "guest", "settings"}
    assert {name for name in sent["modules"] if name.startswith("lockgate.runtimes")} == {
        "lockgate.runtimes", "lockgate.runtimes.gvisor", "lockgate.runtimes.gvisor.layout",
        "lockgate.runtimes.gvisor.zygote",
    }  # fmt: skip
    assert set(sent["guest"]) == {"host", "runner", "values"}
    assert len(json.dumps(sent)) < layout.BIRTH_BYTES
    compile(bundle.PROGRAM, "<program>", "exec")


def test_births_are_framed_as_the_program_reads_them() -> None:
    assert layout.BIRTH_HEADER.pack(5) == struct.pack(">I", 5)
    assert "exactly(4)" in bundle.PROGRAM


# ---- the image ---------------------------------------------------------------------------------------------------
def test_an_image_is_named_by_what_it_is_made_of(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "one.py").write_text("1")
    sources = plan.Plan(binds=[(str(tree), layout.PACKAGES)])
    first = image._key(sources)
    assert image._key(sources) == first
    (tree / "one.py").write_text("22")
    second = image._key(sources)
    (tree / "two.py").write_text("")
    assert len({first, second, image._key(sources)}) == 3


def test_an_image_holds_files_only_and_nothing_that_is_covered(tmp_path: Path) -> None:
    tree = tmp_path / "lib"
    for name in ("a.py", "site-packages/b.py", "test/c.py", "config-3.11/libpython.a", "__pycache__/a.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    (tree / "out").symlink_to("/etc")
    target = f"{layout.STDLIB}/python3.11"
    sources = plan.Plan(binds=[(str(tree), target)], covers=[f"{target}/site-packages"])
    assert image._files(sources) == [(f"{tree}/a.py", f"{target}/a.py")]


# ---- what an operator decides ------------------------------------------------------------------------------------
def test_the_choices_reach_the_supervisor(tmp_path: Path) -> None:
    text = '[execution]\nrung = "gvisor"\n[execution.gvisor]\nrunsc = "bin/runsc"\nallow_old = true\n'
    config = load_text(text, name="lockgate.toml", base=tmp_path)
    assert config.execution.gvisor == GvisorChoices(runsc=f"{tmp_path}/bin/runsc", allow_old=True)
    settings = supervisor_settings_of.decode(supervisor_settings(config.execution, accept_shared_kernel=False))
    assert settings.gvisor == config.execution.gvisor
    assert settings.accepted == ("old runtime",)
    assert msgspec.structs.replace(settings, gvisor=GvisorChoices()).accepted == ()


def test_a_key_that_nobody_reads_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"execution\.gvisor\.alow_old.*allow_old"):
        load_text("[execution.gvisor]\nalow_old = true\n", name="lockgate.toml", base=tmp_path)


def test_it_is_refused_where_nothing_bounds_a_sentry(tmp_path: Path) -> None:
    """X3, X6: no group, no box; nothing is started and nothing written."""
    with pytest.raises(CannotIsolate, match="needs memory and pids control groups"):
        GvisorRuntime(GvisorChoices(store=str(tmp_path))).start(TemplateSpec(memory_by_rlimit=True))
    assert list(tmp_path.iterdir()) == []


def test_another_architecture_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "ARCHITECTURES", {"pdp11": "SCMP_ARCH_PDP11"})
    missing = GvisorRuntime(GvisorChoices(store=str(tmp_path))).probe()
    assert missing is not None
    assert os.uname().machine in missing.missing


def test_a_plain_users_runsc_is_told_that_it_is_one() -> None:
    assert bundle.flags(rootless=True) == (*bundle.FLAGS, "--rootless")
    assert bundle.flags(rootless=False) == bundle.FLAGS


def test_whoever_builds_an_image_everybody_may_walk_in_it(tmp_path: Path) -> None:
    """The supervisor's umask is strict, and the worker of a box is nobody."""
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "one.py").write_text("1")
    root = tmp_path / "root"
    before = os.umask(0o077)
    try:
        image._lay_out(plan.Plan(binds=[(str(tree), layout.PACKAGES)]), root)
        (root / "box" / "packages" / "deep" / "made.pyc").write_bytes(b"x")
        image._open_up(root)
    finally:
        os.umask(before)
    found = [path for path in (root, *root.rglob("*")) if not path.is_symlink()]
    assert [path for path in found if path.is_dir() and path.stat().st_mode & 0o777 != 0o755] == []
    assert [path for path in found if path.is_file() and path.stat().st_mode & 0o444 != 0o444] == []

"""Images: the same bytes from every build, sealed, and laid over a fresh guest copy-on-write (X10)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wasmtime", reason="the wasm extra is not installed")

from lockgate.contract.errors import CannotIsolate, EnvBuildFailed
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.wasm import artifacts, build, driver, image_recipe, image_unsafe
from lockgate.runtimes.wasm.engine_unsafe import EngineError
from wasm_guest_fixtures import built

MiB = 1 << 20


def copy_or_link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(image_recipe.SETS))
def test_two_builds_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Another process, time zone, directory and name of the library: byte for byte what the store's build gave."""
    found = built(name)
    stdlib = tmp_path / "library-elsewhere.zip"
    stdlib.symlink_to(found.stdlib)
    out = tmp_path / "out.image"
    workshop = [sys.executable, "-m", "lockgate.runtimes.wasm.workshop"]
    subprocess.run(
        [*workshop, "image", name, found.cwasm, str(stdlib), str(out)],
        check=True,
        env={"TZ": "UTC5", "PYTHONHASHSEED": "5", "LANG": "de_DE.UTF-8"},
        cwd=tmp_path,
        timeout=250,
    )
    assert sha256(out) == found.image_sha256
    image = out.read_bytes()
    assert image == Path(found.image).read_bytes()
    assert str(tmp_path).encode() not in image  # nothing of the place where it was made


def test_an_image_is_sealed_and_its_digest_is_checked() -> None:
    found = built("stdlib")
    with pytest.raises(EngineError, match="not the one that was built"):
        image_unsafe.seal(found.image, "0" * 64)
    fd = image_unsafe.seal(found.image, found.image_sha256)
    try:
        assert image_unsafe.is_sealed(fd)
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1), lambda: os.ftruncate(fd, 1 << 30)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


def test_a_file_or_an_open_memfd_is_no_image(tmp_path: Path) -> None:
    """What somebody could still change is refused: a plain file, and a memfd without its seals."""
    found = built("stdlib")
    stdlib = os.open(found.stdlib, os.O_RDONLY | os.O_CLOEXEC)
    unsealed = os.memfd_create("open", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    plain = os.open(found.image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.truncate(unsealed, 1024 * 65_536)
        for fd in (unsealed, plain):
            with pytest.raises(EngineError, match="sealed"):
                driver.Instance(
                    found.cwasm, stdlib, fd, driver.Limits(memory=512 * MiB, disk=1, inodes=1),
                    output=lambda _fd, _data: None, relay=lambda body: body,
                )  # fmt: skip
    finally:
        for fd in (stdlib, unsealed, plain):
            os.close(fd)


def test_a_build_that_finds_everything_does_nothing() -> None:
    built("stdlib")
    said: list[str] = []
    again = build.build(("stdlib",), progress=said.append)
    assert again.made == ()
    assert not any("compiling" in one for one in said)


def test_a_new_recipe_makes_an_image_and_no_code(tmp_path: Path) -> None:
    """A store that lacks the image alone: it is made in seconds, the compiled guest stays as it was."""
    found = built("stdlib")
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    for name in (artifacts.guest_name(), artifacts.compiled_name(found.engine)):
        source, place = artifacts.default_store() / name, store / name
        place.mkdir(mode=0o700)
        for file in source.iterdir():
            if file.is_file():
                copy_or_link(file, place / file.name)
    with pytest.raises(CannotIsolate, match="memory image 'stdlib' was not built"):
        artifacts.find("stdlib", store)
    made = build.build(("stdlib",), store=store)
    assert made.made == (artifacts.image_name("stdlib"),)
    assert made.sets[0].image_sha256 == found.image_sha256
    assert (store / made.made[0]).stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (store / made.made[0]).iterdir())


def test_a_planting_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = built("stdlib")
    from lockgate.runtimes.wasm import workshop

    for source, says in (
        (b"1/0", "ZeroDivisionError"),
        (b"print('hello')", "not silent"),
        (b"f = open('/usr/local/lib/python315.zip')", "files open"),
    ):
        monkeypatch.setattr(image_recipe, "boot", lambda _name, source=source: source)
        with pytest.raises(EngineError, match=says):
            workshop.make_image("stdlib", found.cwasm, Path(found.stdlib))


def test_code_of_another_engine_or_none_is_refused_in_words(tmp_path: Path) -> None:
    bad = tmp_path / "python.cwasm"
    bad.write_bytes(b"\x7fELF" + bytes(4096))
    code = tmp_path / "code"
    code.mkdir()
    bad.rename(code / "python.cwasm")
    guest = artifacts.default_store() / artifacts.guest_name()
    built("stdlib")
    with pytest.raises(EnvBuildFailed, match="making the memory image 'stdlib' failed"):
        build.make_image(tmp_path, guest, code, tmp_path / "image", name="stdlib", progress=lambda _text: None)


def test_the_verbs_say_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from lockgate.cli.app import guarded

    built("stdlib")
    assert guarded(["wasm", "build", "--json", "--image", "stdlib"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["made"] == []
    assert report["sets"][0]["name"] == "stdlib"
    assert guarded(["wasm", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"guest", "code", "image"} <= {one["kind"] for one in rows["built"] if one["current"]}
    assert rows["refused"] is None
    assert guarded(["wasm", "packages", "--json"]) == 0
    assert {"name": "pandas", "version": "3.0.6"} in json.loads(capsys.readouterr().out)
    assert guarded(["wasm", "build", "--image", "torch"]) == 2
    assert "numpy-pandas, stdlib" in capsys.readouterr().err


def test_without_the_fixed_streams_no_two_images_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: chance does reach an image, so that equal bytes say something."""
    from lockgate.runtimes.wasm import workshop

    found = built("stdlib")
    monkeypatch.setattr(workshop, "_Stream", lambda: os.urandom)
    images = {
        hashlib.sha256(workshop.make_image("stdlib", found.cwasm, Path(found.stdlib))).hexdigest() for _ in range(2)
    }
    assert len(images | {found.image_sha256}) == 3

"""Which engine may be used, what built files are called, and who could have written them (X3)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from lockgate.contract.errors import CannotIsolate, EnvBuildFailed, UnknownEnv
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.wasm import artifacts, build, image_recipe, steps
from lockgate.runtimes.wasm.artifacts import GUEST, Manifest


# ---- engine ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", ["49.0.0", "50.0.0", "1.0.0", "0.0.0", "50.0.0.post1"])
def test_an_engine_below_the_minimum_is_refused_by_advisory(version: str) -> None:
    refusal = artifacts.check_engine(version)
    assert refusal is not None
    assert all(name in refusal.missing for name in artifacts.ADVISORIES)
    assert "wasmtime>=50.0.1" in refusal.fix
    assert "lockgate wasm build" in refusal.fix


def test_the_doctors_probe_names_the_advisory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `lockgate doctor` shows of a rung that cannot be had is what its probe says."""
    from lockgate.runtimes.wasm.runtime import WasmRuntime

    monkeypatch.setattr(artifacts, "engine_version", lambda: "50.0.0")
    said = WasmRuntime().probe()
    assert said is not None
    assert artifacts.ADVISORIES[0] in said.missing
    assert "pip install --upgrade" in said.fix


@pytest.mark.parametrize("version", [None, "51.0.0", "60.1.2", "dev", "50", "50.0", "50.x.1", ""])
def test_an_engine_that_is_not_there_or_not_known_is_refused(version: str | None) -> None:
    refusal = artifacts.check_engine(version)
    assert refusal is not None
    assert "pip install" in refusal.fix


@pytest.mark.parametrize("version", ["50.0.1", "50.0.2", "50.1.0", "50.10.0"])
def test_an_engine_at_or_above_the_minimum_is_taken(version: str) -> None:
    assert artifacts.check_engine(version) is None


def test_a_withdrawn_engine_is_refused_by_its_advisory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(artifacts.WITHDRAWN, "50.0.7", "GHSA-synthetic")
    refusal = artifacts.check_engine("50.0.7")
    assert refusal is not None
    assert "GHSA-synthetic" in refusal.missing


# ---- names -----------------------------------------------------------------------------------------------------------
def test_the_name_of_machine_code_changes_with_whatever_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {artifacts.compiled_name("50.0.1"), artifacts.compiled_name("50.0.2")}
    names.add(artifacts.compiled_name("50.0.1", msgspec.structs.replace(GUEST, module_sha256="0" * 64)))
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "SETTINGS", artifacts.SETTINGS + " x=1")
        names.add(artifacts.compiled_name("50.0.1"))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse3\n")
    monkeypatch.setattr(artifacts, "_CPUINFO", cpuinfo)
    names.add(artifacts.compiled_name("50.0.1"))
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse3 avx2\n")
    names.add(artifacts.compiled_name("50.0.1"))
    assert len(names) == 6
    same = artifacts.compiled_name("50.0.1")
    cpuinfo.write_text("processor\t: 1\nflags\t\t: avx2 vmx sse3\n")  # a feature that no compiler uses, another order
    assert artifacts.compiled_name("50.0.1") == same


def test_the_name_of_an_image_changes_with_every_file_that_is_planted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {artifacts.image_name(name) for name in image_recipe.SETS}
    copy = tmp_path / "guest"
    shutil.copytree(image_recipe.guest_directory(), copy)
    monkeypatch.setattr(image_recipe, "guest_directory", lambda: copy)
    assert {artifacts.image_name(name) for name in image_recipe.SETS} == names
    for file in sorted(copy.glob("*.py")) + sorted((copy / "wasm").glob("*.py")):
        before = artifacts.image_name("stdlib")
        file.write_text(file.read_text() + "\n# changed\n")
        assert artifacts.image_name("stdlib") != before, file.name


def test_a_set_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownEnv, match="numpy-pandas, stdlib"):
        artifacts.find("torch", tmp_path)


# ---- files -----------------------------------------------------------------------------------------------------------
def store(root: Path, *kinds: str) -> Path:
    """A store with small stand-ins for the built files, complete and private."""
    root.mkdir(mode=0o700, exist_ok=True)
    places = {
        "guest": (
            artifacts.guest_name(),
            {"python.wasm": b"m", "stdlib.zip": b"z", "MANIFEST": b"package numpy 2.5.2\npython 3\n"},
        ),
        "code": (artifacts.compiled_name("50.0.1"), {"python.cwasm": b"code"}),
        "image": (artifacts.image_name("stdlib"), {"memory.image": b"i" * 65_536}),
    }
    for kind in kinds or places:
        name, files = places[kind]
        place = root / name
        place.mkdir(mode=0o700)
        digests: dict[str, str] = {}
        for file, content in files.items():
            (place / file).write_bytes(content)
            (place / file).chmod(0o600)
            digests[file] = sha256(place / file)
        (place / "manifest.json").write_bytes(msgspec.json.encode(Manifest(kind=kind, files=digests, guest="g")))
        (place / "manifest.json").chmod(0o600)
    return root


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "engine_version", lambda: "50.0.1")


def test_what_was_built_is_found(tmp_path: Path) -> None:
    found = artifacts.find("stdlib", store(tmp_path / "store"))
    assert Path(found.cwasm).read_bytes() == b"code"
    assert found.packages == (("numpy", "2.5.2"),)


@pytest.mark.parametrize("missing", ["guest", "code", "image"])
def test_what_was_not_built_is_named_with_the_command(tmp_path: Path, missing: str) -> None:
    kinds = {"guest", "code", "image"} - {missing}
    with pytest.raises(CannotIsolate, match="not built") as refusal:
        artifacts.find("stdlib", store(tmp_path / "store", *kinds))
    assert "lockgate wasm build" in refusal.value.next_step


def test_a_low_engine_is_refused_before_anything_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(tmp_path / "store")
    monkeypatch.setattr(artifacts, "engine_version", lambda: "49.0.0")
    with pytest.raises(CannotIsolate, match=artifacts.ADVISORIES[0]):
        artifacts.find("stdlib", root)


def test_an_altered_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = artifacts.find("stdlib", store(tmp_path / "store"))
    found = msgspec.structs.replace(found, stdlib_sha256=sha256(Path(found.stdlib)))
    artifacts.verify(found)
    for name in ("cwasm", "stdlib", "image"):
        path = Path(getattr(found, name))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CannotIsolate, match="not the file that was built"):
            artifacts.verify(found)
        path.unlink()
        with pytest.raises(CannotIsolate, match="cannot be read"):
            artifacts.verify(found)
        path.write_bytes(whole)
    artifacts.verify(found)


@pytest.mark.parametrize("target", ["", "code", "code/python.cwasm", "code/manifest.json"])
@pytest.mark.parametrize("mode", [0o777, 0o750, 0o722, 0o704])
def test_a_file_that_others_could_write_or_read_is_refused(tmp_path: Path, target: str, mode: int) -> None:
    root = store(tmp_path / "store")
    path = root / target.replace("code", artifacts.compiled_name("50.0.1"))
    path.chmod(mode)
    with pytest.raises(CannotIsolate, match="others may read or write"):
        artifacts.find("stdlib", root)


def test_a_link_is_no_file_of_ours(tmp_path: Path) -> None:
    root = store(tmp_path / "store")
    code = root / artifacts.compiled_name("50.0.1") / "python.cwasm"
    code.rename(tmp_path / "elsewhere")
    code.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotIsolate, match="is a link"):
        artifacts.find("stdlib", root)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to somebody else takes root")
def test_a_strangers_file_is_refused(tmp_path: Path) -> None:
    root = store(tmp_path / "store")
    os.chown(root / artifacts.compiled_name("50.0.1") / "python.cwasm", 12_345, 12_345)
    with pytest.raises(CannotIsolate, match="belongs to user 12345"):
        artifacts.find("stdlib", root)


# ---- building --------------------------------------------------------------------------------------------------------
def test_a_package_with_another_digest_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / GUEST.wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GUEST.module, b"\0asm")
    with pytest.raises(EnvBuildFailed, match="which is not the guest's"):
        build.build(("stdlib",), store=tmp_path / "store", wheel=wheel)
    assert [one.name for one in (tmp_path / "store").iterdir()] == ["lock"]  # nothing half made is left


def test_a_file_with_another_digest_inside_the_package_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / GUEST.wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (GUEST.module, GUEST.stdlib, GUEST.manifest):
            archive.writestr(name, b"other")
    guest = msgspec.structs.replace(GUEST, sha256=sha256(wheel))
    with pytest.raises(EnvBuildFailed, match=r"python\.wasm of the guest has sha256"):
        build.unpack(wheel, tmp_path, guest)


def test_a_store_that_others_can_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(CannotIsolate, match="run as native code"):
        build.build(("stdlib",), store=root)


def test_too_little_memory_is_said_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(tmp_path / "store", "guest")
    module = root / artifacts.guest_name() / "python.wasm"
    monkeypatch.setattr(artifacts, "GUEST", msgspec.structs.replace(GUEST, module_sha256=sha256(module)))
    monkeypatch.setattr(build, "GUEST", artifacts.GUEST)
    monkeypatch.setattr(steps, "available_memory", lambda: 1 << 30)
    started: list[object] = []
    monkeypatch.setattr(steps.subprocess, "Popen", lambda *a, **k: started.append(a))
    with pytest.raises(EnvBuildFailed, match="3072 MiB of memory, and 1024 are free"):
        build.build(("stdlib",), store=root)
    assert started == []


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/a/b", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "unified", ("memory.max", "memory.current", "active_file")),
        ("4:cpu,memory:/a/b", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_the_memory_that_a_control_group_leaves_counts(
    tmp_path: Path, line: str, top: str, names: tuple[str, str, str]
) -> None:
    """Version 2, hybrid and version 1; a group above counts too, and a cache of files makes room."""
    limit, used, cache = names
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    above, own = cgroup / top / "a", cgroup / top / "a" / "b"
    (proc / "self").mkdir(parents=True)
    own.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    assert steps.available_memory(proc, cgroup) == 8_000_000 * 1024
    (above / limit).write_text("1000\n")
    (above / used).write_text("400\n")
    (above / "memory.stat").write_text(f"anon 5\n{cache} 250\n")
    (own / limit).write_text("max\n" if limit == "memory.max" else f"{1 << 62}\n")
    (own / used).write_text("300\n")
    assert steps.available_memory(proc, cgroup) == 850
    assert steps.available_memory(tmp_path / "nothing", cgroup) is None


def test_a_limit_of_the_process_counts() -> None:
    program = (
        "import resource\nfrom lockgate.runtimes.wasm import steps\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1))\nprint(steps.available_memory() <= 1 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("code", "says"),
    [("import os; os.kill(os.getpid(), 9)", "want of memory"), ("import sys; sys.exit('no way')", "no way")],
)
def test_a_step_that_dies_says_why(monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    """A real process, killed as the kernel kills for memory, or failing with words."""
    plain = steps.subprocess.Popen
    monkeypatch.setattr(steps.subprocess, "Popen", lambda command, **k: plain([sys.executable, "-c", code], **k))
    with pytest.raises(EnvBuildFailed, match=says):
        steps.step("compiling", [], 60.0, 1, lambda _text: None)


def test_what_is_old_is_listed_and_pruned(tmp_path: Path) -> None:
    root = store(tmp_path / "store")
    old = root / "image-stdlib-0000000000000000"
    shutil.copytree(root / artifacts.image_name("stdlib"), old)
    for path in (old, *old.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert {one.name: one.current for one in build.inventory(root)}[old.name] is False
    assert build.prune(root) == [old.name]
    assert artifacts.find("stdlib", root).name == "stdlib"

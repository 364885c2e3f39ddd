"""Package sets from real wheels, by the real pip, used in real runs (X11)."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockgate.contract import wire
from lockgate.contract.errors import EnvBuildFailed, UnknownEnv
from lockgate.supervisor import envs


def wheel(directory: Path, name: str, version: str, source: str, *, requires: str = "", forge: bool = False) -> Path:
    """Write a small pure wheel; `forge` gives its module a wrong hash in RECORD."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        data = b"forged" if forge and path.endswith("__init__.py") else text.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    record += f"{info}/RECORD,,\n"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)
    return path


@pytest.fixture
def shop(tmp_path) -> Path:
    """A directory of wheels, and requirement files that use nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "tinycore", "1.0", "def greet():\n    return 'hello from ' + __name__\n")
    wheel(wheels, "tinyapp", "2.1", "import tinycore\nfrom tinycore import greet\n", requires="tinycore>=1")
    return tmp_path


@pytest.fixture
def store() -> Iterator[Path]:
    """A store that others can walk to, as a sandbox of another id must."""
    root = Path(tempfile.mkdtemp(prefix="env-store-"))
    root.chmod(0o755)
    yield root
    for sealed in root.glob("sets/*"):
        from lockgate.supervisor import envtree

        envtree.remove(sealed)
    shutil.rmtree(root)


def ask(shop: Path, *lines: str) -> Path:
    path = shop / "requirements.txt"
    path.write_text("\n".join(["--no-index", f"--find-links {shop / 'wheels'}", *lines]) + "\n")
    return path


def test_a_set_is_resolved_pinned_sealed_and_found(shop, store):
    said: list[str] = []
    info = envs.build("tiny", ask(shop, "tinyapp"), store=store, progress=said.append)
    assert info.packages == (("tinyapp", "2.1"), ("tinycore", "1.0"))
    assert (info.name, info.preload) == ("tiny", ())
    assert [said[0].split()[0], said[-1]] == ["resolving", "sealing"]
    assert envs.find("tiny", store) == info
    assert envs.list_envs(store) == [info]
    envs.verify(info)
    tree = Path(info.tree)
    assert tree.parent.name == info.digest
    assert all(not path.stat().st_mode & 0o222 for path in tree.rglob("*"))
    lock = (tree.parent / "lock.txt").read_text()
    digest = hashlib.sha256((shop / "wheels" / "tinycore-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert f"tinycore==1.0 --hash=sha256:{digest}" in lock
    assert list((store / "tmp").iterdir()) == []


def test_builds_at_the_same_time_are_safe(shop, store):
    """Two of one name and one of another: all succeed, and equal content has one place."""
    old = envs.build("same", ask(shop, "tinycore"), store=store)
    requirements = ask(shop, "tinyapp")
    results: list[object] = []

    def build(name: str) -> None:
        try:
            results.append(envs.build(name, requirements, store=store))
        except Exception as err:
            results.append(err)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("same", "same", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, envs.EnvInfo) for result in results), results
    assert {env.name for env in envs.list_envs(store)} == {"same", "other"}
    new = envs.find("same", store)
    envs.verify(new)
    envs.verify(old)  # the name moved; the old set stays whole for who still uses it
    assert new.digest == envs.find("other", store).digest != old.digest
    assert len(list((store / "sets").iterdir())) == 2


def test_a_wheel_that_is_not_what_its_record_says_is_refused(shop, store):
    wheel(shop / "wheels", "forged", "1.0", "x = 1\n", forge=True)
    with pytest.raises(EnvBuildFailed, match="RECORD"):
        envs.build("bad", ask(shop, "forged"), store=store)
    with pytest.raises(UnknownEnv):
        envs.find("bad", store)
    assert list((store / "tmp").iterdir()) == []


def test_a_wheel_swapped_between_resolving_and_installing_is_refused(shop, store, monkeypatch):
    """The lock is the promise: what was resolved is what is installed."""
    requirements = ask(shop, "tinycore")
    real = envs._resolve

    def swap(requirements, wheels):
        resolved = real(requirements, wheels)
        wheel(wheels, "tinycore", "1.0", "x = 'another'\n")
        return resolved

    monkeypatch.setattr(envs, "_resolve", swap)
    with pytest.raises(EnvBuildFailed, match="HASH"):
        envs.build("tiny", requirements, store=store)
    assert envs.list_envs(store) == []


def test_a_package_without_a_wheel_is_refused(shop, store):
    with pytest.raises(EnvBuildFailed, match="wheels"):
        envs.build("none", ask(shop, "no-such-package-here"), store=store)


def test_a_source_archive_cannot_be_pinned(shop, store):
    import tarfile

    with tarfile.open(shop / "wheels" / "onlysource-1.0.tar.gz", "w:gz") as archive:
        archive.add(__file__, "onlysource-1.0/setup.py")
    with pytest.raises(EnvBuildFailed, match="wheels"):
        envs.build("source", ask(shop, "onlysource"), store=store)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_nothing_asked_is_nothing_built(shop, store, text):
    path = shop / "empty.txt"
    path.write_text(text)
    with pytest.raises(EnvBuildFailed):
        envs.build("empty", path, store=store)


def test_a_missing_requirements_file_is_told(shop, store):
    with pytest.raises(EnvBuildFailed, match="no requirements file"):
        envs.build("x", shop / "absent.txt", store=store)


def test_an_altered_set_is_noticed_and_one_for_another_python_not_used(shop, store, monkeypatch):
    info = envs.build("tiny", ask(shop, "tinycore"), store=store)
    module = Path(info.tree) / "tinycore" / "__init__.py"
    module.chmod(0o644)
    module.write_text("x = 'planted'\n")
    with pytest.raises(EnvBuildFailed, match="not what was built"):
        envs.verify(info)
    monkeypatch.setattr(envs, "python_version", lambda: "3.99")
    with pytest.raises(UnknownEnv, match="build it again"):
        envs.find("tiny", store)


def test_a_run_imports_it_and_cannot_change_it(shop, store, own_supervisor):
    """X8, X11: the tree is there, read-only, at the sandbox's own path; there is no pip and nothing of the host's."""
    envs.build("tiny", ask(shop, "tinyapp"), store=store)
    client = own_supervisor(env_store=str(store), env="tiny")
    assert client.ready.facts["available"], client.ready.facts
    result = client.code("import tinyapp\n[tinyapp.greet(), tinyapp.__file__]", env="tiny")
    assert bytes(result.value) == b'["hello from tinycore","/packages/tinyapp/__init__.py"]', result
    assert client.broker.attached[f"t{result.id}"].env == "tiny"
    write = client.code("open('/packages/tinyapp/__init__.py', 'a')", env="tiny")
    assert write.error.name in ("OSError", "PermissionError")
    assert client.code("import pip", env="tiny").error.name == "ModuleNotFoundError"
    # Negative control: without the set there is no such module.
    assert client.code("import tinyapp").error.name == "ModuleNotFoundError"


def test_a_preload_that_cannot_be_imported_is_a_typed_refusal(shop, store, own_supervisor):
    wheel(shop / "wheels", "broken", "1.0", "raise RuntimeError('no')\n")
    envs.build("broken", ask(shop, "broken"), store=store, preload=("broken",))
    client = own_supervisor(env_store=str(store))
    refused = client.code("1", env="broken")
    assert isinstance(refused, wire.Refused)
    assert "broken" in refused.fault.message
    assert bytes(client.code("1+1").value) == b"2"


@pytest.mark.slow
def test_pandas_and_numpy_inside_a_run(store, own_supervisor, tmp_path):
    """X11 for real: resolved from the index that pip is configured with, preloaded, used under the default bounds."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("pandas\nnumpy\n")
    try:
        info = envs.build("data", requirements, store=store)
    except EnvBuildFailed as err:
        if "cannot be reached" in str(err):
            pytest.skip("no package index can be reached from here")
        raise
    assert info.preload == ("numpy", "pandas")
    client = own_supervisor(env_store=str(store), env="data", pool=1)
    assert client.ready.facts["available"], client.ready.facts
    code = (
        "import numpy as np, pandas as pd\n"
        "df = pd.DataFrame({'k': list('aabb'), 'v': np.arange(4.0)})\n"
        "df.to_csv('out.csv')\n"
        "[df.groupby('k').v.sum().to_dict(), float(np.linalg.det(np.eye(3))), len(open('out.csv').read()) > 10]"
    )
    result = client.code(code, env="data")
    assert bytes(result.value) == b'[{"a":1.0,"b":5.0},1.0,true]', result

"""Ordinary clients under `lockgate egress run`: what is allowed works, with a proxy setting and without one (E1)."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from egress_fixtures import ALLOWED, ENV, Confined, drive
from egress_world import World

PY = [sys.executable, "-I", "-c"]
GIT_ID = {f"GIT_{who}_{what}": "t@t.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
GIT_ID |= {"GIT_CONFIG_GLOBAL": "/dev/null", "PATH": os.defpath, "HOME": "/nonexistent"}


def publish_git(world: World, scratch: Path) -> None:
    """A repository that is served as plain files (gitprotocol-http, "dumb")."""
    work, bare = scratch / "work", world.www / "git.allowed.example" / "repo.git"
    for argv in (
        ["git", "init", "-q", "-b", "main", str(work)],
        ["git", "-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"],
        ["git", "clone", "-q", "--bare", str(work), str(bare)],
        ["git", "-C", str(bare), "update-server-info"],
    ):
        subprocess.run(argv, check=True, env=GIT_ID, capture_output=True)


def publish_wheel(world: World) -> None:
    """An index with one wheel (PEP 503, PEP 427)."""
    files = {
        "demo.py": b"WORD = 'from the wheel'\n",
        "demo-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files["demo-1.0.dist-info/RECORD"] = (record + "demo-1.0.dist-info/RECORD,,\n").encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    world.page("pip.allowed.example", "files/demo-1.0-py3-none-any.whl", packed.getvalue())
    link = '<a href="/files/demo-1.0-py3-none-any.whl">demo-1.0-py3-none-any.whl</a>'
    world.page("pip.allowed.example", "simple/demo/index.html", f"<!DOCTYPE html><html><body>{link}</body></html>")


def publish_npm(world: World) -> None:
    """A registry with one package."""
    body = json.dumps({"name": "demo", "version": "1.0.0"}).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("package/package.json")
        entry.size = len(body)
        archive.addfile(entry, io.BytesIO(body))
    data = packed.getvalue()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    world.page("npm.allowed.example", "t/demo-1.0.0.tgz", data)
    dist = {"tarball": "https://npm.allowed.example/t/demo-1.0.0.tgz", "integrity": integrity}
    version = {"name": "demo", "version": "1.0.0", "dist": dist}
    packument = {"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    world.page("npm.allowed.example", "demo", json.dumps(packument))


FETCH = "import urllib.request as u; print(u.urlopen('{}', timeout=40).read().decode())"
NODE_FETCH = "fetch('https://api.allowed.example/hello').then(r => r.text()).then(t => console.log(t), e => {console.error(e); process.exit(1)})"  # noqa: E501
NODE_HTTP = "require('http').get('http://plain.allowed.example/hello', r => r.pipe(process.stdout))"
POST = "import urllib.request as u; print(u.urlopen(u.Request('http://plain.allowed.example/e', data=b'x' * 100000), timeout=40).read().count(b'x'))"  # noqa: E501


def commands(home: str) -> dict[str, dict[str, Any]]:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", "--retries",
           "0", "--no-deps", "--index-url", "https://pip.allowed.example/simple"]  # fmt: skip
    npm = ["npm", "install", "demo", "--registry", "https://npm.allowed.example/", "--no-audit", "--no-fund",
           "--no-update-notifier", "--fetch-retries=0", "--prefix"]  # fmt: skip
    curl = ["curl", "-sSf", "-m", "40"]
    found: dict[str, dict[str, Any]] = {
        "curl": {"argv": [*curl, "https://api.allowed.example/hello"]},
        "curl http": {"argv": [*curl, "http://plain.allowed.example/hello"]},
        "curl wildcard": {"argv": [*curl, "-o", "/dev/null", "-w", "%{ssl_verify_result}", "https://a.wild.example/"]},
        "git": {"argv": ["git", "clone", "-q", "https://git.allowed.example/repo.git", f"{home}/cloned"]},
        "pip": {"argv": [*pip, "--target", f"{home}/wheel", "demo"]},
        "npm": {"argv": [*npm, f"{home}/npm"]},
        "python": {"argv": [*PY, FETCH.format("https://api.allowed.example/hello")]},
    }
    unaware: dict[str, dict[str, Any]] = {
        "curl": {"argv": [*curl, "https://api.allowed.example/hello"]},
        "curl IPv6": {"argv": [*curl, "-6", "https://api.allowed.example/hello"]},
        "curl http": {"argv": [*curl, "http://plain.allowed.example/hello"]},
        "git": {"argv": ["git", "clone", "-q", "https://git.allowed.example/repo.git", f"{home}/cloned-2"]},
        "node": {"argv": ["node", "-e", NODE_FETCH]},
        "node http": {"argv": ["node", "-e", NODE_HTTP]},
        "python": {"argv": [*PY, FETCH.format("https://api.allowed.example/hello")]},
        "python post": {"argv": [*PY, POST]},
    }
    found |= {f"{name}, no proxy setting": {**one, "unset": True} for name, one in unaware.items()}
    base = {"HOME": home, "npm_config_cache": f"{home}/cache", "GIT_CONFIG_GLOBAL": "/dev/null"}
    return {
        name: {**one, "env": {**base, **one.get("env", {})}}
        for name, one in found.items()
        if shutil.which(one["argv"][0])
    }


API, PLAIN = "hello from api", "hello from plain"
EXPECTED = {
    "curl": API, "curl http": PLAIN, "curl wildcard": "0", "git": "", "pip": "", "npm": "added", "python": API,
    "curl, no proxy setting": API, "curl IPv6, no proxy setting": API, "curl http, no proxy setting": PLAIN,
    "git, no proxy setting": "", "node, no proxy setting": API, "node http, no proxy setting": PLAIN,
    "python, no proxy setting": API, "python post, no proxy setting": "100000",
}  # fmt: skip
TRUST = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "npm_config_cafile")


class Done:
    """One run of all clients."""

    def __init__(self, world: World) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="egress-clients-"))
        publish_git(world, self.home)
        publish_wheel(world)
        publish_npm(world)
        trust = [f"--env={name}={world.ca}" for name in TRUST]
        asked = len(world.queries())
        self.results, self.run = drive(world, commands(str(self.home)), *trust)
        self.queries = world.queries()[asked:]
        self.denied = self.run.denied()
        self.run.remove()


@pytest.mark.timeout(300)
def test_allowed_destinations_are_reached(egress_world: World) -> None:
    """Sixteen clients in one run, half of them without a proxy setting, and not one denial among their rows."""
    done = Done(egress_world)
    try:
        wanted = {
            name: text for name, text in EXPECTED.items() if name in done.results and
            (egress_world.ready["ipv6"] or "IPv6" not in name)
        }  # fmt: skip
        failed = {
            name: done.results[name]
            for name, text in wanted.items()
            if text not in done.results[name][1] or done.results[name][0] not in ((0, 22) if "wild" in name else (0,))
        }
        assert failed == {}
        assert done.denied == []

        assert (done.home / "cloned" / ".git").is_dir()
        assert "from the wheel" in (done.home / "wheel" / "demo.py").read_text()
        if "npm" in done.results:
            assert (done.home / "npm" / "node_modules" / "demo" / "package.json").is_file()

        # E3: the gateway asked for nothing that the list does not name.
        names = {one.split()[0] for one in done.queries}
        assert names <= {one.partition(":")[0] for one in ALLOWED} | {"a.wild.example"}
        assert "api.allowed.example" in names
    finally:
        shutil.rmtree(done.home, ignore_errors=True)


def test_input_and_output_are_the_command_s(egress_world: World) -> None:
    """An MCP server speaks over its streams: byte for byte, and nothing of ours among them; words are any bytes."""
    run = Confined(egress_world, ["sh", "-c", 'printf %s "$1"; cat', "sh", os.fsdecode(b"caf\xe9")])
    try:
        data = bytes(range(256)) * 1000
        out, _ = run.process.communicate(data, timeout=100)
        assert out == b"caf\xe9" + data, run.report.read_text()
        assert run.process.returncode == 0
    finally:
        run.remove()


def test_rules_inside_a_tunnel_hold_for_clients_that_trust_the_run(egress_world: World, tmp_path: Path) -> None:
    """E1, E7: the authority of the run reaches curl, Python and Node by their variables; a decoy in a body ends it."""
    world = egress_world
    world.page("api.allowed.example", "v1/hello", "hello from v1\n")
    (tmp_path / "lockgate.toml").write_text(
        '[egress]\nallow = ["api.allowed.example:443"]\n[[egress.endpoint]]\nhost = "api.allowed.example:443"\n'
        'rules = [{ method = ["GET", "POST"], path = "/v1/*" }]\n'
    )
    url = "https://api.allowed.example"
    fetch = f"fetch('{url}/v1/hello').then(r => r.text()).then(t => console.log(t))"
    urllib = f"import urllib.request as u; print(u.urlopen('{url}/v1/hello', timeout=40).read())"
    script = (
        f"curl -sS -m 40 {url}/v1/hello; echo; "
        f'command -v node >/dev/null && node -e "{fetch}"; echo; '
        f'{sys.executable} -I -c "{urllib}"; '
        f"curl -sS -m 40 -o /dev/null -w '%{{http_code}}\\n' {url}/hello; "
        f"curl -sS -m 40 -d @/dev/lockgate/backup-service.key {url}/v1/notes; sleep 90; echo still here"
    )
    seen = len(world.requests())
    run = Confined(world, ["sh", "-c", script], "--config", str(tmp_path / "lockgate.toml"), allow=())
    try:
        out = run.finish()
        assert out.count("hello from v1") == (3 if shutil.which("node", path=ENV["PATH"]) else 2), (
            run.report.read_text()
        )
        assert "403" in out
        assert "still here" not in out
        assert run.process.returncode == 137
        assert run.said["ended_by"] == "canary"
        reasons = {reason for _, reason, _ in run.denied()}
        assert reasons - {"tls_failed"} == {"path_not_allowed", "canary"}  # a client may go without a good-bye
        assert {one.split()[-1] for one in world.requests()[seen:]} == {"/v1/hello"}
    finally:
        run.remove()

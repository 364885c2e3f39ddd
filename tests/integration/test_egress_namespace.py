"""The namespace of `egress run` by itself: what is in it, what leads out of it, how it ends (E1, E3)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockgate.egress.inside import Plan
from lockgate.egress.namespace import CommandNotExecutable, CommandNotFound, Ended, Namespace
from lockgate.egress.view import View

NOBODY = 65534
PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
USERS = [pytest.param(-1, id="as-caller")] + (
    [pytest.param(NOBODY, id="as-nobody")] if os.getuid() == 0 and os.access("/usr/bin/python3", os.X_OK) else []
)
Start = Callable[..., Namespace]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command whose stdout goes to a pipe; `namespace.out` reads it."""
    with contextlib.ExitStack() as stack:

        def begin(*argv: str, uid: int = -1, **more: object) -> Namespace:
            reader, writer = os.pipe()
            saved = os.dup(1)
            try:
                os.dup2(writer, 1)
                env = {"PATH": os.defpath, **more.pop("env", {})}  # type: ignore[dict-item]
                pairs = tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items())
                words = tuple(os.fsencode(word) for word in argv)
                plan = Plan(argv=words, env=pairs, port=3128, uid=uid, gid=uid, **more)  # type: ignore[arg-type]
                namespace = Namespace(plan, cwd=Path("/"))
            finally:
                os.dup2(saved, 1)
                os.close(saved)
                os.close(writer)
            stack.callback(os.close, reader)
            stack.callback(namespace.close)
            namespace.out = reader  # type: ignore[attr-defined]
            namespace.prepare()
            namespace.started()
            return namespace

        yield begin


def output(namespace: Namespace) -> str:
    """Everything the command wrote; ends when its last process has closed stdout."""
    found = b""
    while True:
        assert select.select([namespace.out], [], [], 60)[0], "no output and no end"  # type: ignore[attr-defined]
        data = os.read(namespace.out, 65536)  # type: ignore[attr-defined]
        if not data:
            return found.decode()
        found += data


def ended(namespace: Namespace) -> Ended:
    assert select.select([namespace], [], [], 60)[0], "it did not end"
    found = namespace.poll()
    assert found is not None
    return found


def python(start: Start, source: str, **more: object) -> object:
    """Run Python inside and return what it prints, as JSON."""
    namespace = start(PYTHON, "-I", "-S", "-c", source, **more)
    text = output(namespace)
    assert ended(namespace).exit_code == 0
    return json.loads(text)


def alive(marker: str) -> list[str]:
    """Processes of this host whose command line holds `marker`."""
    found: list[str] = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in one.read_bytes():
                found.append(one.parent.name)
    return found


def gone(marker: str) -> bool:
    deadline = time.monotonic() + 60
    while alive(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


NETWORK = """
import json
def lines(name):
    try: return open(name).read().splitlines()
    except OSError: return []
print(json.dumps({
    "interfaces": [line.split(":")[0].strip() for line in lines("/proc/net/dev")[2:]],
    "routes": lines("/proc/net/route")[1:],
    "routes6": sorted({line.split()[-1] for line in lines("/proc/net/ipv6_route")}),
}))"""


@pytest.mark.parametrize("uid", USERS)
def test_there_is_loopback_and_no_route(start: Start, uid: int) -> None:
    """E1: one interface, no route that leads anywhere else."""
    found = python(start, NETWORK, uid=uid)
    assert isinstance(found, dict)
    assert found["interfaces"] == ["lo"]
    assert found["routes"] == []
    assert set(found["routes6"]) <= {"lo"}


SENDS = """
import errno, json, socket
def attempt(family, kind, proto, address):
    try:
        with socket.socket(family, kind, proto) as sock:
            sock.settimeout(5)
            if kind == socket.SOCK_STREAM:
                sock.connect(address)
            else:
                sock.sendto(b"synthetic", address)
        return "sent"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
I4, I6, D, S = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM, socket.SOCK_STREAM
print(json.dumps({
    "udp": attempt(I4, D, 0, ("8.8.8.8", 443)),
    "dns elsewhere": attempt(I4, D, 0, ("8.8.8.8", 53)),
    "ntp": attempt(I4, D, 0, ("162.159.200.1", 123)),
    "mdns": attempt(I4, D, 0, ("224.0.0.251", 5353)),
    "broadcast": attempt(I4, D, 0, ("255.255.255.255", 67)),
    "tcp": attempt(I4, S, 0, ("8.8.8.8", 443)),
    "metadata": attempt(I4, S, 0, ("169.254.169.254", 80)),
    "udp6": attempt(I6, D, 0, ("2001:4860:4860::8888", 53)),
    "tcp6": attempt(I6, S, 0, ("2001:4860:4860::8888", 443)),
    "nat64": attempt(I6, S, 0, ("64:ff9b::808:808", 443)),
    "icmp": attempt(I4, D, 1, ("8.8.8.8", 0)),
    "icmp raw": attempt(I4, socket.SOCK_RAW, 1, ("8.8.8.8", 0)),
    "raw6": attempt(I6, socket.SOCK_RAW, 58, ("2001:4860:4860::8888", 0)),
    "sctp": attempt(I4, S, 132, ("8.8.8.8", 443)),
    "vsock": attempt(40, S, 0, (2, 1024)),
    "packet": attempt(17, socket.SOCK_RAW, 0x0300, ("lo", 0)),
    "bluetooth": attempt(31, S, 3, ("00:00:00:00:00:01", 1)),
}))"""


@pytest.mark.parametrize("uid", USERS)
def test_no_protocol_has_a_way_out(start: Start, uid: int) -> None:
    """E1 (EG-191, EG-200 to EG-202): every family and protocol, by itself; nothing is sent."""
    found = python(start, SENDS, uid=uid)
    assert isinstance(found, dict)
    assert "sent" not in found.values(), found
    refused = {"ENETUNREACH", "EHOSTUNREACH", "EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT",
               "EADDRNOTAVAIL"}  # fmt: skip
    assert set(found.values()) <= refused, found
    for name in ("vsock", "packet", "bluetooth"):
        assert found[name] == "EAFNOSUPPORT", "the filter, whatever this kernel has"


def test_the_probe_sees_a_way_where_there_is_one(start: Start) -> None:
    """The control of the test above: its own addresses answer, in the same namespace."""
    ask = "print(json.dumps([attempt(I4, k, 0, ('127.0.0.1', p)) for k, p in ((D, 53), (S, 3128), (S, 3129))]))"
    source = SENDS.partition("print(")[0] + ask
    assert python(start, source) == ["sent", "sent", "ECONNREFUSED"]


UNIX = """
import errno, json, socket, sys
def attempt():
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(sys.argv[1] if sys.argv[1][0] != "@" else chr(0) + sys.argv[1][1:])
        return "connected"
    except OSError as error:
        return errno.errorcode[error.errno]
one, other = socket.socketpair()
print(json.dumps(attempt()))"""


def test_servers_with_a_socket_in_the_file_system_are_out_of_reach(start: Start, tmp_path: Path) -> None:
    """A container engine or resolver behind such a socket would be a network; `unix` is the operator's risk."""
    place = f"/tmp/lockgate-{secrets.token_hex(6)}"  # short enough for sun_path
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(place)
        os.chmod(place, 0o777)
        try:
            server.listen()
            answers: list[object] = []
            for unix in (False, True):
                namespace = start(PYTHON, "-I", "-S", "-c", UNIX, place, unix=unix)
                answers.append(json.loads(output(namespace)))
        finally:
            os.unlink(place)
    assert answers == ["EAFNOSUPPORT", "connected"]


def test_abstract_sockets_belong_to_the_namespace(start: Start) -> None:
    name = f"lockgate-{secrets.token_hex(6)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        namespace = start(PYTHON, "-I", "-S", "-c", UNIX, "@" + name, unix=True)
        assert json.loads(output(namespace)) == "ECONNREFUSED"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + name)  # the control: it does listen


CALLS = """
import ctypes, errno, json, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (425, 249, 250, 248), "aarch64": (425, 218, 219, 217)}[platform.machine()]
def call(number, *args):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno(), "ok") if libc.syscall(number, *args) < 0 else "ok"
import fcntl
def ioctl(number):
    try: fcntl.ioctl(0, number, b"x"); return "ok"
    except OSError as error: return errno.errorcode[error.errno]
print(json.dumps([call(numbers[0], 1, 0), call(numbers[1], b"dns_resolver", b"leak.evil.test", 0, -3),
                  call(numbers[2], 0, -3, 0), call(numbers[3], b"user", b"x", b"y", 1, -3),
                  ioctl(0x5412), ioctl(0x541C), call(9999)]))"""


def test_the_kernel_is_not_asked_to_go_out_for_it(start: Start) -> None:
    """io_uring, keys of type dns_resolver, typing into the operator's terminal."""
    assert python(start, CALLS) == ["ENOSYS", "EPERM", "EPERM", "EPERM", "EPERM", "EPERM", "ENOSYS"]
    outside = subprocess.run(
        [PYTHON, "-I", "-S", "-c", CALLS], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert json.loads(outside.stdout)[4] != "EPERM", "the control: no filter, so it is no terminal or switched off"


STATE = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
def writable(name):
    try: os.close(os.open(name, os.O_WRONLY)); return True
    except OSError: return False
print(json.dumps({"caps": {status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16},
    "privileges": status["NoNewPrivs"].strip(), "fds": sorted(set(os.listdir("/proc/self/fd")) - {"3"}),
    "kernel": [name for name in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper")
               if writable(name)],
    "first": writable("/proc/1/mem"), "env": sorted(os.environ), "uid": os.getuid(),
    "dev": sorted(os.listdir("/dev"))}))"""


@pytest.mark.parametrize("uid", USERS)
def test_the_command_holds_nothing(start: Start, uid: int) -> None:
    """No capability, no descriptor, no variable beyond its own; root cannot change what is the host's."""
    found = python(start, STATE, uid=uid, env={"ONE": "1"})
    assert isinstance(found, dict)
    assert found["caps"]
    assert found["privileges"] == "1"
    assert found["fds"] == ["0", "1", "2"]
    assert found["kernel"] == []
    assert not found["first"]
    assert set(found["env"]) <= {"ONE", "PATH", "LC_CTYPE"}
    assert found["uid"] == (os.getuid() if uid < 0 else uid)
    assert set(found["dev"]) <= {"fd", "full", "lockgate", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin",
                                 "stdout", "tty", "urandom", "zero"}  # fmt: skip


def test_names_are_asked_of_the_responder_alone(start: Start) -> None:
    """E3: what glibc reads names one server, no suffix, and no other source than files and that server."""
    namespace = start("cat", "/etc/resolv.conf", "/etc/nsswitch.conf")
    text = output(namespace)
    assert re.findall(r"^nameserver (.*)$", text, re.MULTILINE) in (["127.0.0.1"], [])
    assert not re.search(r"^(search|domain) [^.]", text, re.MULTILINE)
    if Path("/etc/nsswitch.conf").exists():
        assert re.findall(r"^hosts:.*$", text, re.MULTILINE) == ["hosts: files dns"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("true",), 0), (("false",), 1), (("sh", "-c", "exit 77"), 77), (("sh", "-c", "kill -TERM $$"), 143),
     (("sh", "-c", "kill -KILL $$"), 137)],
)  # fmt: skip
def test_the_exit_code_is_the_command_s(start: Start, argv: tuple[str, ...], code: int) -> None:
    assert ended(start(*argv)).exit_code == code


def test_a_command_that_is_not_there_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program") as missing:
        ended(start("no-such-program"))
    assert missing.value.exit_code == 127
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(CommandNotExecutable) as refused:
        ended(start(str(plain)))
    assert refused.value.exit_code == 126


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(start: Start, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    # A shell sets no trap for what it finds ignored, as in a job with "&".
    before = signal.signal(number, lambda *_: None)
    try:
        namespace = start("sh", "-c", f"trap 'echo got; exit 5' {name}; echo ready; while :; do sleep 0.05; done")
    finally:
        signal.signal(number, before)
    assert os.read(namespace.out, 6) == b"ready\n"  # type: ignore[attr-defined]
    namespace.signal(number)
    assert output(namespace) == "got\n"
    assert ended(namespace) == Ended(code=5)


@pytest.mark.parametrize("uid", USERS)
def test_nothing_outlives_the_command(start: Start, uid: int) -> None:
    """Daemons that left their session and their parent end with the namespace."""
    marker = f"marker-{secrets.token_hex(6)}"
    daemon = f"import time, sys; sys.argv; time.sleep(600)  # {marker}"
    script = f"setsid {PYTHON} -I -S -c '{daemon}' </dev/null >/dev/null 2>&1 & sleep 0.2; exec true"
    namespace = start("sh", "-c", script, uid=uid)
    assert ended(namespace).exit_code == 0
    namespace.close()
    assert gone(marker)


@pytest.mark.parametrize("how", ["close", "kill the first process", "kill its parent"])
def test_whatever_ends_first_ends_all(start: Start, how: str) -> None:
    marker = f"marker-{secrets.token_hex(6)}"
    script = f"import signal, time\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\nprint('ready', flush=True)\ntime.sleep(600)  # {marker}"  # noqa: E501
    namespace = start(PYTHON, "-I", "-S", "-c", script)
    assert os.read(namespace.out, 6) == b"ready\n"  # type: ignore[attr-defined]
    assert len(alive(marker)) == 1, "the control: it is there and can be seen"
    if how == "close":
        namespace.close()
    elif how == "kill its parent":
        namespace.process.kill()
    else:
        pid = namespace.process.pid
        first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(first, signal.SIGKILL)
    assert gone(marker)


def test_the_host_keeps_its_mounts(start: Start) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    namespace = start("sh", "-c", "echo ready; read x", view=View(files=(("one", "text"),)))
    assert os.read(namespace.out, 6) == b"ready\n"  # type: ignore[attr-defined]
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not Path("/dev/lockgate").exists()
    namespace.close()
    assert Path("/proc/self/mountinfo").read_text() == before


def test_its_files_are_there_and_cannot_be_changed(start: Start) -> None:
    script = "cat /dev/lockgate/one; echo x 2>/dev/null > /dev/lockgate/one || echo refused"
    namespace = start("sh", "-c", script, view=View(files=(("one", "text\n"),)))
    assert output(namespace) == "text\nrefused\n"


def test_a_namespace_that_cannot_be_made_says_what_to_do(start: Start) -> None:
    """A limit of zero is what a host without user namespaces answers."""
    limit = "/proc/sys/user/max_user_namespaces"
    script = (
        "import sys\nfrom lockgate.egress.inside import Plan\nfrom lockgate.egress.namespace import Namespace\n"
        "from lockgate.contract.errors import CannotIsolate\n"
        f"open({limit!r}, 'w').write('0')\n"
        "one = Namespace(Plan(argv=(b'true',), env=(), port=3128))\n"
        "try: one.prepare()\nexcept CannotIsolate as error: print(error)\nfinally: one.close()"
    )
    # In a user namespace of its own, where the limit is the test's to set and holds for nobody else.
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"the limit cannot be set here: {done.stderr.strip()[-120:]}")
    assert "cannot have a network namespace here" in done.stdout, done.stderr
    assert "max_user_namespaces" in done.stdout


ELSEWHERE = """
set -e
mkdir "$1/etc"
mount -t tmpfs none "$1/etc"
cp -a /etc/nsswitch.conf /etc/passwd /etc/group "$1/etc/" 2>/dev/null || true
mount --bind "$1/etc" /etc
mount -t tmpfs none /run
mkdir -p /run/systemd/resolve
echo "nameserver 127.0.0.53" > /run/systemd/resolve/stub-resolv.conf
[ "$2" = none ] || ln -s ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
exec "$3" -c "$4"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give itself another /etc to try it in")
@pytest.mark.parametrize("how", ["systemd-resolved", "none"])
def test_resolv_conf_may_be_a_link_to_what_is_covered_or_missing(tmp_path: Path, how: str) -> None:
    """E3: on a host with systemd-resolved the file lies beside the socket that must not be reached."""
    source = (
        "import os, sys\nfrom lockgate.egress.inside import Plan\nfrom lockgate.egress.namespace import Namespace\n"
        "argv = (b'sh', b'-c', b'cat /etc/resolv.conf; ls /run/systemd/resolve; echo x > /run/systemd/resolve/y')\n"
        "one = Namespace(Plan(argv=argv, env=((b'PATH', os.defpath.encode()),), port=3128))\n"
        "one.prepare(); one.started(); one.poll(); one.close()"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", ELSEWHERE, "sh", str(tmp_path), how, sys.executable, source],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = done.stdout.splitlines()
    assert "127.0.0.53" not in done.stdout
    assert "y" not in lines
    assert ("nameserver 127.0.0.1" in lines) is (how != "none"), (done.stdout, done.stderr)
    assert "Read-only" in done.stderr


def test_a_namespace_of_its_own_uncovers_nothing(start: Start) -> None:
    """E1: mounts that a less privileged namespace inherits are locked (mount_namespaces(7)); its own are not."""
    script = (
        "for path in /etc/resolv.conf /dev/lockgate /dev /proc/sys /sys; do "
        "umount -l $path 2>/dev/null && echo $path; done; "
        "mount --bind /dev /mnt 2>/dev/null && echo bound; mount -t tmpfs none /mnt && umount /mnt && echo own"
    )
    uid = NOBODY if os.getuid() == 0 else -1
    namespace = start("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, uid=uid)
    assert output(namespace) == "own\n"

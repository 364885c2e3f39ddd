"""What a confined command gets, and what it may not ask of the kernel: the pure part (E1)."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from lockgate.config import load_text
from lockgate.contract.errors import ConfigError
from lockgate.egress import callfilter, confine
from lockgate.kernel import bpf
from lockgate.kernel.arch import AARCH64, X86_64, Arch

ROUTED = [(socket.inet_aton("198.18.0.1"), 443)]


@pytest.mark.parametrize(
    ("proto", "dst", "port", "way"),
    [
        ("tcp", "127.0.0.1", 3128, "gateway"),
        ("tcp", "127.0.0.1", 53, "dns"),
        ("udp", "127.0.0.1", 53, "dns"),
        ("tcp", "198.18.0.1", 443, "gateway"),
        ("tcp", "198.18.0.1", 80, "no_route"),
        ("tcp", "198.18.0.2", 443, "no_route"),
        ("udp", "198.18.0.1", 443, "no_route"),
        ("udp", "127.0.0.1", 3128, "no_route"),
        ("tcp", "127.0.0.1", 9090, "no_route"),
        ("tcp", "127.0.0.2", 3128, "no_route"),
        ("udp", "127.0.0.53", 53, "no_route"),
        ("udp", "8.8.8.8", 53, "no_route"),
        ("tcp", "8.8.8.8", 853, "no_route"),
        ("udp", "api.allowed.example", 443, "no_route"),
        ("icmp", "8.8.8.8", None, "no_route"),
        ("icmp", "127.0.0.1", None, "no_route"),
        ("udp", "pool.ntp.org", 123, "no_route"),
        ("tcp", "127.0.0.1", None, "no_route"),
        ("tcp", "::1", 3128, "no_route"),
        ("tcp", "[::ffff:127.0.0.1]", 3128, "no_route"),
        ("tcp", "0x7f.1", 3128, "no_route"),
        ("sctp", "127.0.0.1", 3128, "no_route"),
        ("vsock", "2", 1024, "no_route"),
        ("unix", "/var/run/docker.sock", None, "no_route"),
        ("tcp", "169.254.169.254", 80, "no_route"),
        ("", "", None, "no_route"),
    ],
)
def test_three_places_answer(proto: str, dst: str, port: int | None, way: str) -> None:
    """EG-191, EG-200 to EG-204 and their kinds."""
    assert confine.route(proto, dst, port, 3128, ROUTED) == way


def test_the_environment_is_a_list_of_names() -> None:
    """C6: a secret that nobody declared is not handed on, whatever it is called."""
    ambient = {
        "PATH": "/usr/bin", "HOME": "/home/u", "LANG": "C.UTF-8", "OPENAI_API_KEY": "sk-synthetic-1",
        "AWS_SECRET_ACCESS_KEY": "synthetic", "DATABASE_URL": "x",
        "SSH_AUTH_SOCK": "/tmp/agent", "LD_PRELOAD": "/tmp/x",
        "NO_PROXY": "*",
        "HTTPS_PROXY": "http://evil.test:1", "PYTHONPATH": "/tmp", "DOCKER_HOST": "tcp://127.0.0.1:2375",
    }  # fmt: skip
    env = confine.child_env(ambient, {"LOG_LEVEL": "debug"})
    assert set(env) - set(confine.proxy_variables(1)) == {"PATH", "HOME", "LANG", "LOG_LEVEL"}
    assert env["HTTPS_PROXY"] == env["https_proxy"] == "http://127.0.0.1:3128"
    assert "*" not in env["NO_PROXY"]


def test_what_the_operator_declares_wins() -> None:
    env = confine.child_env({"PATH": "/a"}, {"PATH": "/b", "NO_PROXY": "x"}, port=4000, ca=True)
    assert (env["PATH"], env["NO_PROXY"], env["http_proxy"]) == ("/b", "x", "http://127.0.0.1:4000")
    assert env["NODE_EXTRA_CA_CERTS"] == "/dev/lockgate/ca.pem"
    assert "NODE_EXTRA_CA_CERTS" not in confine.child_env({}, {})
    assert confine.child_env({}, {})["PATH"]


@pytest.mark.parametrize("pair", ["", "=x", "A", "1A=x", "A B=x", "A-B=x", "A=x\0y", "É=x", "A=" + "x" * 70_000])
def test_a_variable_is_name_and_value(pair: str) -> None:
    with pytest.raises(ConfigError) as refused:
        confine.declared_variables([pair])
    assert "next" in str(refused.value).lower()
    assert len(str(refused.value)) < 300


def test_a_value_may_hold_anything_else() -> None:
    assert confine.declared_variables(["A=b=c", "E="]) == {"A": "b=c", "E": ""}
    with pytest.raises(ConfigError):
        confine.variable_name("A=b")


def run(program: bytes, arch: Arch, number: int, *args: int, audit: int | None = None) -> int:
    """Walk a filter as the kernel does (Documentation/networking/filter.rst); the action it answers."""
    data = struct.pack("<iIQ6Q", number, arch.audit if audit is None else audit, 0, *args, *[0] * (6 - len(args)))
    code = list(struct.iter_unpack("<HBBI", program))
    value, at = 0, 0
    while True:
        op, true, false, k = code[at]
        at += 1
        if op == bpf.LD_W_ABS:
            (value,) = struct.unpack_from("<I", data, k)
        elif op == bpf.JMP_JA:
            at += k
        elif op == bpf.RET:
            return k
        else:
            test = {bpf.JMP_JEQ: value == k, bpf.JMP_JGE: value >= k, bpf.JMP_JSET: bool(value & k)}[op]
            at += true if test else false


@pytest.mark.parametrize("arch", [X86_64, AARCH64], ids=lambda one: one.machine)
@pytest.mark.parametrize("unix", [False, True])
def test_sockets_of_other_families_are_refused(arch: Arch, unix: bool) -> None:
    """AF_VSOCK is confined by no network namespace; a route socket is harmless and libc asks for it."""
    program = callfilter.build(arch, unix=unix)
    number = arch.calls["socket"]
    allowed = {family for family in range(64) if run(program, arch, number, family, 1, 0) == bpf.ALLOW}
    assert allowed == {2, 10, 16, *((1,) if unix else ())}
    assert run(program, arch, number, 40, 1, 0) == bpf.ERRNO | errno.EAFNOSUPPORT
    assert [proto for proto in range(32) if run(program, arch, number, 16, 3, proto) == bpf.ALLOW] == [0]
    assert run(program, arch, number, 2 | 1 << 32, 1, 0) == bpf.ALLOW, "the kernel reads the low half too"


@pytest.mark.parametrize("arch", [X86_64, AARCH64], ids=lambda one: one.machine)
def test_every_other_call_is_the_program_s_own(arch: Arch) -> None:
    program = callfilter.build(arch, unix=False)
    refused = {name for name, number in arch.calls.items() if run(program, arch, number) != bpf.ALLOW} - {"socket"}
    assert refused == set(callfilter.REFUSED)
    assert run(program, arch, arch.calls["ioctl"], 0, 0x5412) == bpf.ERRNO | errno.EPERM
    assert run(program, arch, arch.calls["ioctl"], 0, 0x541C) == bpf.ERRNO | errno.EPERM
    assert run(program, arch, arch.calls["ioctl"], 0, 0x5413) == bpf.ALLOW
    assert run(program, arch, 5000) == bpf.ERRNO | errno.ENOSYS, "calls that nobody has looked at"
    assert run(program, arch, 1, audit=0x40000003) == bpf.KILL_PROCESS, "i386 numbers mean other calls"
    if arch.x32 is not None:
        assert run(program, arch, arch.x32 + 41, 1, 1, 0) == bpf.KILL_PROCESS


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('[egress]\nallow = ["pypi.org:443"]', "registry"),
        ('[egress]\nallow = ["*"]', "next step"),
        ('[egress]\nallow = ["api.partner.example"]', "port"),
        ("[egress]\nalow = []", "allow"),
        ('[egress]\nmode = "off"', "enforce, report"),
        ("[egress.limits]\nbytes = 1", "bytes_out"),
    ],
)
def test_the_table_is_checked_when_it_is_read(table: str, says: str) -> None:
    """E1: with the file and the place, before anything is started."""
    with pytest.raises(ConfigError) as wrong:
        load_text(table, "/")
    assert says in str(wrong.value).lower()
    assert "lockgate.toml" in str(wrong.value)


def test_a_file_without_the_table_allows_nothing() -> None:
    assert load_text("", "/").egress.allow == ()
    assert load_text('[egress]\nallow = ["api.partner.example:443"]', "/").egress.allow == ("api.partner.example:443",)

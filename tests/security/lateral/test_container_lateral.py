"""Lateral: reach another process, another run or what runs share (X8, X10)."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.container import ContainerMachine, ContainerTemplate
from lockgate.runtimes.protocol import MachineFailed, MachineReady, MachineResult
from lockgate.runtimes.single import Outcome

if TYPE_CHECKING:
    from container_fixtures import ContainerAttack

# Each id is a probe of guest/probes that asks for one primitive; its control answers on any host that runs the rung.
PROBES = (
    "ptrace-traceme",
    "ptrace-seize-parent",
    "process-vm-readv",
    "process-vm-writev",
    "pidfd-getfd",
    "kcmp",
    "process-madvise",
    "move-pages",
    "keyctl-session",
    "keyctl-read",
    "add-key",
    "request-key",
    "shmget",
    "msgget",
    "semget",
    "mq-open",
    "inotify",
    "fanotify",
    "dnotify",
    "rt-sigqueueinfo",
    "fcntl-setown",
    "flock-shared-file",
)


@pytest.mark.parametrize("ident", PROBES)
def test_no_other_process_is_in_reach(container_attack: ContainerAttack, ident: str) -> None:
    """X8, X10: no tracing, no keyring, no kernel-held IPC, no watch on shared files.

    Control: the same question reaches its primitive in an open slot, under the marker filter or with no sandbox.
    """
    assert container_attack.reached_by(ident), "the probe is dead: it proves nothing"
    row = container_attack.slot[ident]
    assert not row.reached, row.detail


class Live:
    """Two slots of one template that are alive at the same time."""

    def __init__(self, template: ContainerTemplate) -> None:
        self.template = template
        self.machines = [template.request(Bounds()) for _ in range(2)]
        for machine in self.machines:
            assert isinstance(self.next(machine), MachineReady)

    def next(self, machine: ContainerMachine) -> object:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            readable = select.select([self.template.fileno(), machine.control], [], [], 1)[0]
            if self.template.fileno() in readable:
                assert not [one for one in self.template.on_readable() if isinstance(one, MachineFailed)]
            if machine.control in readable:
                return machine.on_control()[0]
        raise AssertionError("nothing came in ten seconds")

    def close(self) -> None:
        for machine in self.machines:
            machine.kill()
            assert select.select([machine.pidfd], [], [], 10)[0]
            machine.close()


LOOK = """
import os, fcntl, signal
def errno_of(f):
    try:
        return f()
    except OSError as e:
        return -e.errno
mine = os.getpid()
{
    'pids': [p for p in range(1, 3000) if errno_of(lambda: os.kill(p, 0)) != -3],
    'files': os.listdir('.'),
    'group': errno_of(lambda: os.killpg(0, 0)),
    'lock': errno_of(lambda: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)),
}
"""


def test_two_live_slots_see_nothing_of_each_other(container_template: ContainerTemplate) -> None:
    """X8, X10: own pids, own files, no lock on what both can open; on the host they are different ids (as root)."""
    live = Live(container_template)
    try:
        one, two = live.machines
        one.send_code(b"open('planted', 'w').write('x')\nimport time\ntime.sleep(60)", Bounds())
        two.send_code(LOOK.encode(), Bounds())
        answer = live.next(two)
        assert isinstance(answer, MachineResult), answer
        seen = msgspec.json.decode(answer.value or b"")
        assert seen == {"pids": [1], "files": [], "group": None, "lock": -1}
        owners = [Path(f"/proc/{machine.host_pid}").stat().st_uid for machine in live.machines]
        status = [Path(f"/proc/{machine.host_pid}/status").read_text() for machine in live.machines]
        ids = [next(line for line in text.splitlines() if line.startswith("Uid:")).split()[1] for text in status]
        if os.getuid() == 0:
            assert ids[0] != ids[1]
            assert all(int(one) >= 200_000 for one in ids)
        else:
            assert ids == [str(os.getuid())] * 2
        assert owners  # not dumpable: /proc entries belong to the host's root, not to the slot
        spaces = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]
        links = [[os.readlink(f"/proc/{m.host_pid}/ns/{name}") for name in spaces] for m in live.machines]
        assert not set(links[0]) & set(links[1])
        assert not set(links[0]) & {os.readlink(f"/proc/self/ns/{name}") for name in spaces}
    finally:
        live.close()


PLANT = """
import builtins, sys, os, json, random
builtins.planted = sys.planted = json.planted = 1
os.environ['PLANTED'] = '1'
os.umask(0)
random.seed(1)
sys.path.append('/planted')
open('planted', 'w').close()
os.mkdir('deep')
'done'
"""
FIND = """
import builtins, sys, os, json
[hasattr(builtins, 'planted'), hasattr(sys, 'planted'), hasattr(json, 'planted'), 'PLANTED' in os.environ,
 os.umask(0) == 0, '/planted' in sys.path, bool(os.listdir('.'))]
"""


def test_nothing_is_left_for_the_next_run(container_run: Callable[..., Outcome]) -> None:
    """X10: modules, environment, umask, path and files of a run end with it. Control: one run finds its own."""

    def value(source: str) -> Any:
        outcome = container_run(source)
        assert outcome.result is not None
        return msgspec.json.decode(outcome.result.value or b"")

    assert value(PLANT) == "done"
    assert value(FIND) == [False] * 7
    assert value(PLANT + FIND) == [True] * 7


def test_runs_leave_nothing_on_the_host(container_run: Callable[..., Outcome]) -> None:
    """X10: after twenty runs of every sort this process has the mounts and descriptors it had before."""

    def counts() -> tuple[int, int]:
        return len(Path("/proc/self/mountinfo").read_text().splitlines()), len(os.listdir("/proc/self/fd"))

    container_run("1")
    before = counts()
    for source in (
        "1",
        "import os\nos.fork()",
        "x = bytearray(10 << 20)",
        "print('x' * 100_000)",
        "raise SystemExit(1)",
    ) * 4:
        container_run(source)
    assert counts() == before


def test_descriptors_passed_by_a_run_are_dropped(container_run: Callable[..., Outcome]) -> None:
    """X9: a run cannot fill this process with descriptors: control is read in a way that drops them."""
    before = len(os.listdir("/proc/self/fd"))
    outcome = container_run(
        "import socket, array\ns = socket.socket(fileno=4)\n"
        "fds = array.array('i', [0] * 200)\n"
        'import struct\nbody = b\'{"value":1,"text":"","error":null,"exit_code":0,"truncated":{}}\'\n'
        "s.sendmsg([struct.pack('>I', len(body)) + body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n"
        "import time\ntime.sleep(60)",
        wall=10,
    )
    assert outcome.result is not None
    assert outcome.result.value == b"1"
    assert len(os.listdir("/proc/self/fd")) == before

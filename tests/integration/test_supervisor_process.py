"""The supervisor as a real process: links, refusals, ends, and what it leaves (X3, X5, X9, X10)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockgate.contract import wire
from supervisor_client import Client, descendants, groups_of


def wait_until(what, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def alive(pids):
    """Those that still exist and are no zombies of somebody else."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


# ---- one run -----------------------------------------------------------------------------------------------------
def test_a_run_from_start_to_finish(supervisor):
    result = supervisor.code("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[1, {'a': None}]")
    assert isinstance(result, wire.Finished)
    assert bytes(result.value) == b'[1,{"a":null}]'
    assert (result.stdout, result.stderr, result.exit_code, result.killed_by) == ("out\n", "err\n", 0, None)
    ticket = f"t{result.id}"
    wait_until(lambda: ticket in supervisor.broker.detached)
    attach, detach = supervisor.broker.attached[ticket], supervisor.broker.detached[ticket]
    assert attach.rung == "container"
    assert attach.shared_kernel is True
    assert attach.memory_by in ("cgroup v1", "cgroup v2", "rlimit")
    assert len(attach.code_sha256) == 64
    assert (detach.exit_code, detach.killed_by) == (0, None)
    assert detach.duration > 0


def test_failing_code_is_a_result(supervisor):
    result = supervisor.code("1/0")
    assert (result.exit_code, result.error.name, result.killed_by) == (1, "ZeroDivisionError", None)


def test_streaming_pushes_come_before_the_end(supervisor):
    ident = supervisor.start(
        "import time\nprint('a', flush=True)\ntime.sleep(0.2)\nprint('b', flush=True)", stream=True
    )
    first = supervisor.receive()
    assert isinstance(first, wire.Output)
    assert (first.id, first.stream) == (ident, "stdout")
    assert first.data.startswith(b"a\n")
    assert supervisor.finish(ident).stdout == "a\nb\n"


def test_the_machine_has_its_channel(supervisor):
    """What the broker got is the other end of the run's fd 3."""
    ident = supervisor.start("import os\nos.write(3, b'ping')\nos.read(3, 4).decode()")
    ticket = f"t{ident}"
    wait_until(lambda: ticket in supervisor.broker.channels)
    channel = supervisor.broker.channels[ticket]
    assert channel.recv(4) == b"ping"
    channel.send(b"pong")
    assert bytes(supervisor.finish(ident).value) == b'"pong"'


def test_runs_side_by_side(supervisor):
    idents = [supervisor.start(f"import time\ntime.sleep(0.1)\n{n}") for n in range(8)]
    results = {ident: supervisor.finish(ident) for ident in idents}
    assert [int(bytes(results[ident].value)) for ident in idents] == list(range(8))


# ---- refusals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"accept": False}, "cannot_isolate", "accept"),
        ({"env": "no-such"}, "unknown_env", "lockgate env build no-such"),
        ({"wall": 31.0}, "config", "30.0"),
    ],
)
def test_what_may_not_run_is_refused_before_a_machine_is_taken(supervisor, options, code, word):
    before = supervisor.quiet()["reaped"]
    refused = supervisor.code("1", **options)
    assert isinstance(refused, wire.Refused)
    assert refused.fault.code == code
    assert word in refused.fault.message + refused.fault.next_step
    assert supervisor.quiet()["reaped"] == before


def test_a_bad_script_is_refused(supervisor):
    assert supervisor.code("a\0b").fault.code == "bad_script"


def test_an_unknown_rung_is_a_refusal_not_an_end(supervisor):
    ident = supervisor.next_id()
    body = b'{"type":"Start","id":%d,"spec":{"ticket":"x","code":"1","rung":"jail"}}' % ident
    from lockgate.contract import frames

    supervisor.agent.sendall(frames.encode(body))
    assert supervisor.finish(ident).fault.code == "config"
    assert bytes(supervisor.code("1+1").value) == b"2"


def test_a_ticket_that_the_broker_refuses_runs_nothing(own_supervisor):
    """C3, X10: no code is sent, and the machine that was taken is destroyed, not put back."""
    client = own_supervisor()
    client.broker.ok = False
    before = client.quiet(warm=1)["reaped"]
    refused = client.code("open('/run/ran', 'w')")
    assert isinstance(refused, wire.Refused)
    assert "ticket" in refused.fault.message
    assert client.quiet(warm=1)["reaped"] == before + 1
    client.broker.ok = True
    assert bytes(client.code("1+1").value) == b"2"


def test_nothing_of_the_code_runs_before_the_broker_knows_the_run(own_supervisor):
    """C5, X10: the code is compiled meanwhile; its first line waits. The second half shows that the look can see."""
    client = own_supervisor()
    client.quiet(warm=1)
    client.broker.silent = True
    ident = client.start("import os\nos.write(3, b'ran')\n1")
    wait_until(lambda: f"t{ident}" in client.broker.channels)
    with client.broker.channels[f"t{ident}"].dup() as channel:  # the broker closes its own as soon as the run ends
        channel.settimeout(0.5)
        with pytest.raises(TimeoutError):
            channel.recv(16)
        client.broker.send(wire.Attached(ticket=f"t{ident}", ok=True))
        channel.settimeout(20)
        assert channel.recv(16) == b"ran"
    assert bytes(client.finish(ident).value) == b"1"


@pytest.mark.parametrize(
    ("code", "name"), [("def (:", "SyntaxError"), ("(" * 5000, "SyntaxError"), ("\\", "SyntaxError")]
)
def test_what_does_not_compile_is_a_result_however_late_the_broker_is(own_supervisor, code, name):
    """X1: the fault is the code's, also when the machine was done before the broker answered."""
    client = own_supervisor()
    client.quiet(warm=1)
    client.broker.silent = True
    ident = client.start(code)
    wait_until(lambda: f"t{ident}" in client.broker.channels)
    time.sleep(0.2)
    client.broker.send(wire.Attached(ticket=f"t{ident}", ok=True))
    done = client.finish(ident)
    assert done.error.name == name
    assert done.exit_code == 1


def test_what_the_compiler_says_is_output_of_the_run(own_supervisor):
    """X9: a warning is written before the broker has answered; it is neither lost nor taken for a broken machine."""
    client = own_supervisor()
    client.quiet(warm=1)
    client.broker.silent = True
    ident = client.start("1 is 1")
    wait_until(lambda: f"t{ident}" in client.broker.channels)
    time.sleep(0.2)
    client.broker.send(wire.Attached(ticket=f"t{ident}", ok=True))
    done = client.finish(ident)
    assert bytes(done.value) == b"true"
    assert "SyntaxWarning" in done.stderr


def test_memory_that_the_compiler_eats_is_the_runs(own_supervisor):
    """X6: the whole run ends by it, also before the broker has answered."""
    client = own_supervisor()
    client.quiet(warm=1)
    client.broker.silent = True
    ident = client.start("+".join(["1"] * 300_000), memory=128 << 20)
    wait_until(lambda: f"t{ident}" in client.broker.channels)
    time.sleep(1.5)
    client.broker.send(wire.Attached(ticket=f"t{ident}", ok=True))
    done = client.finish(ident)
    assert done.killed_by == "memory" or done.error.name == "MemoryError"


def test_the_same_ticket_twice_is_refused(supervisor):
    first = supervisor.start("import time\ntime.sleep(0.5)\n1")
    from lockgate.contract.run import RunSpec

    again = supervisor.next_id()
    supervisor.send(wire.Start(id=again, spec=RunSpec(ticket=f"t{first}", code="2", accept_shared_kernel=True)))
    assert supervisor.finish(again).fault.code == "host_fault"
    assert bytes(supervisor.finish(first).value) == b"1"


def test_bad_settings_are_told_and_end_the_process():
    client = Client(nonsense=1)
    try:
        assert isinstance(client.ready, wire.Failed)
        assert "nonsense" in client.ready.fault.message
        assert client.process.wait(10) == 2
    finally:
        client.close()


# ---- orders ------------------------------------------------------------------------------------------------------
def test_cancel_ends_a_run(supervisor):
    ident = supervisor.start("while True: pass")
    wait_until(lambda: f"t{ident}" in supervisor.broker.attached)
    supervisor.send(wire.Cancel(id=ident))
    result = supervisor.finish(ident)
    assert (result.exit_code, result.error.name) == (137, "Cancelled")


def test_the_brokers_kill_is_a_protocol_kill(supervisor):
    ident = supervisor.start("while True: pass")
    wait_until(lambda: f"t{ident}" in supervisor.broker.channels)
    time.sleep(0.05)
    supervisor.broker.send(wire.Kill(ticket=f"t{ident}"))
    result = supervisor.finish(ident)
    assert (result.killed_by, result.exit_code) == ("protocol", 137)


def test_prewarm_answers_when_the_machines_are_there(own_supervisor):
    client = own_supervisor()
    answer = client.ask(wire.Prewarm, rung="container", count=6)
    assert answer.data["warm"] >= 6
    assert client.stats()["warm"] >= 6
    assert client.ask(wire.Prewarm, rung="container", count=2000).fault.code == "config"


# ---- what is lost on the way -------------------------------------------------------------------------------------
def test_a_broker_that_died_ends_every_run_with_a_typed_error(own_supervisor):
    client = own_supervisor()
    ident = client.start("while True: pass")
    wait_until(lambda: f"t{ident}" in client.broker.attached)
    client.broker.sock.shutdown(2)
    refused = client.finish(ident, 5)
    assert refused.fault.code == "process_died"
    assert client.code("1").fault.code == "process_died"
    assert client.quiet()["runs"] == 0


def test_a_machine_that_dies_on_the_shelf_is_replaced(own_supervisor):
    client = own_supervisor(pool=1)
    client.quiet(warm=1)
    reaped = client.stats()["reaped"]
    warm = [pid for pid in descendants(client.process.pid) if not (descendants(pid))]
    newest = max(warm)
    os.kill(newest, signal.SIGKILL)
    wait_until(lambda: client.stats()["reaped"] > reaped)
    client.quiet(warm=1)
    assert bytes(client.code("1+1").value) == b"2"


def test_a_template_that_dies_is_replaced(own_supervisor):
    client = own_supervisor(pool=1)
    client.quiet(warm=1)
    # The launcher is the child that has children; with it go template and machines.
    launchers = [pid for pid in descendants(client.process.pid) if descendants(pid)]
    ident = client.start("while True: pass")
    wait_until(lambda: f"t{ident}" in client.broker.attached)
    time.sleep(0.05)
    os.kill(min(launchers), signal.SIGKILL)
    refused = client.finish(ident, 10)
    assert isinstance(refused, wire.Refused)  # not the code's fault, and not its success
    assert refused.fault.code == "host_fault"
    client.quiet(warm=1)
    assert bytes(client.code("1+1").value) == b"2"


def test_worn_out_templates_are_replaced(own_supervisor):
    client = own_supervisor(pool=1, recycle=3)
    for n in range(10):
        assert bytes(client.code(str(n)).value) == str(n).encode()
    stats = client.quiet(warm=1)
    assert stats["templates"] <= 2
    wait_until(lambda: client.stats()["templates"] == 1)


def test_a_keeper_that_died_stops_the_pool(own_supervisor):
    client = own_supervisor(pool=1)
    if client.ready.facts["memory_by"] == "rlimit":
        pytest.skip("no cgroup can be made by this user, so there is no keeper")
    client.quiet(warm=1)
    children = [
        int(c) for c in Path(f"/proc/{client.process.pid}/task/{client.process.pid}/children").read_text().split()
    ]
    keeper = next(pid for pid in children if b"lockgate.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: client.stats()["fault"] is not None)
    assert client.code("1").fault.code == "process_died"
    pid = client.process.pid
    client.close()
    assert groups_of(pid) == []


# ---- the end -----------------------------------------------------------------------------------------------------
def busy(client):
    """Start runs of several kinds and wait until they run."""
    idents = [client.start("while True: pass"), client.start("import time\ntime.sleep(60)")]
    wait_until(lambda: all(f"t{ident}" in client.broker.attached for ident in idents))
    time.sleep(0.1)
    return client.process.pid, descendants(client.process.pid)


@pytest.mark.parametrize("how", ["agent gone", "sigterm"])
def test_nothing_is_left_when_it_ends(how):
    """X10: no process, no control group, no mount."""
    client = Client(pool=2, memory="rlimit")
    pid, below = busy(client)
    assert len(below) >= 4
    if how == "sigterm":
        client.process.send_signal(signal.SIGTERM)
        client.process.wait(20)
    assert client.close() == 0
    wait_until(lambda: not alive(below))
    assert groups_of(pid) == []


def test_nothing_is_left_when_it_is_killed():
    """X5: even SIGKILL of the supervisor leaves nothing: slots die with their template, groups with the keeper."""
    client = Client(pool=2, memory="rlimit")
    pid, below = busy(client)
    begun = time.monotonic()
    client.process.kill()
    client.process.wait()
    wait_until(lambda: not alive(below), 20)
    wait_until(lambda: groups_of(pid) == [], 20)
    assert time.monotonic() - begun < 20
    client.close()


def test_it_dies_with_its_parent():
    """PR_SET_PDEATHSIG: a gate that is killed takes its supervisor along."""
    script = (
        "import sys, time\nsys.path.insert(0, sys.argv[1])\nfrom supervisor_client import Client\n"
        "c = Client(memory='rlimit')\nprint(c.process.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive([pid]))
    wait_until(lambda: groups_of(pid) == [])


MIX = {
    "normal": ("1+1", {}),
    "prints": ("print('x' * 1000)", {}),
    "fails": ("1/0", {}),
    "forks": ("import os\nfor _ in range(5):\n    if os.fork() == 0:\n        while True: pass\n1", {}),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory": 64 << 20}),
    "loop": ("while True: pass", {"wall": 0.05}),
    "flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"output_kill": 4 << 20}),
    "leaves": ("import ctypes\nctypes.string_at(0)", {}),
    "files": ("[open(f'f{n}', 'w').write('x' * 1000) for n in range(100)][0]", {}),
    "refused": ("a\0", {}),
}


def test_a_hundred_mixed_runs_leak_nothing(own_supervisor):
    """The figure of a thousand is the bench's; here a hundred: fds, groups, processes, mounts, resident memory."""
    client = own_supervisor(pool=2)
    for name in MIX:
        client.code(MIX[name][0], **MIX[name][1])
    before = client.quiet(warm=2)
    below = len(descendants(client.process.pid))
    mounts = len(Path("/proc/self/mounts").read_text().splitlines())
    for _ in range(10):
        idents = [client.start(code, **bounds) for code, bounds in MIX.values()]
        for ident in idents:
            client.finish(ident)
    after = client.quiet(warm=2)
    assert after["fds"] == before["fds"]
    assert after["watched"] == before["watched"]
    assert after["groups"] == before["groups"]
    assert after["rss"] - before["rss"] < 1 << 20
    assert after["slowest_reap"] < 10
    assert after["fault"] is None
    assert len(descendants(client.process.pid)) == below
    assert len(Path("/proc/self/mounts").read_text().splitlines()) == mounts


# ---- a template that cannot harden -------------------------------------------------------------------------------
HARDEN = """
import json, sys, time
import msgspec
from lockgate.contract.run import RunSpec
from lockgate.runtimes.container import ContainerRuntime
from lockgate.supervisor import engine
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.settings import Settings
engine.runtimes = lambda *_: {"container": ContainerRuntime((f"--fail={sys.argv[1]}",))}
reactor, sent = Reactor(), []
def send(message):
    sent.append(message)
    reactor.leave()
def attach(message, run):
    sent.append("attached")
host = engine.Engine(Settings(memory="rlimit", acquire=20), reactor, attach, lambda m: None, send)
host.start(1, RunSpec(ticket="t", code="1", accept_shared_kernel=True))
if not sent:
    reactor.run(time.monotonic() + 30)
host.close()
print(json.dumps(msgspec.to_builtins(sent)))
"""


@pytest.mark.parametrize("step", ["landlock", "seccomp", "caps", "tmpfs", "mdwe"])
def test_a_machine_that_cannot_harden_is_a_typed_refusal(step):
    """X3: fail closed: whatever step fails, no machine is handed out, and the error names the step."""
    done = subprocess.run([sys.executable, "-c", HARDEN, step], capture_output=True, text=True, timeout=60, check=True)
    import json

    (message,) = json.loads(done.stdout)
    assert message["type"] == "Refused"
    assert message["fault"]["code"] == "cannot_isolate"
    assert step in message["fault"]["message"]
    assert "lockgate doctor" in message["fault"]["next_step"]

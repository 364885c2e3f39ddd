"""A broker that cannot start says whose fault it is and what to do, without a value of the operator's (C6)."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from broker_client import OPERATIONS, WAIT, Broker, broker
from lockgate.contract import wire

SECRET = "sk-synthetic-start-0001"


def failure(base: Path, *, operations: str = OPERATIONS, config: str = "", audit: str = "audit.db") -> wire.Fault:
    """The fault with which it ends; afterwards both processes are gone and nothing was printed of the secret."""
    one = Broker(base, operations=operations, config=config, audit=audit)
    try:
        assert isinstance(one.ready, wire.Failed), one.ready
        assert one.process.wait(WAIT) == 1
        text = f"{one.ready.fault} {one.log.read_text()}"
        assert SECRET not in text
        assert "Traceback" not in text
        assert one.ready.fault.next_step
        return one.ready.fault
    finally:
        one.close()


IMPORTS = {
    f"raise RuntimeError('{SECRET}')": ("config", "RuntimeError at operations.py line 1"),
    f"KEY = '{SECRET}'\nint(KEY)": ("config", "ValueError at operations.py line 2"),
    f"KEY = '{SECRET}'\nif": ("config", "SyntaxError at operations.py line 2"),
    "import no_such_module_here": ("config", "ModuleNotFoundError 'no_such_module_here' at operations.py line 1"),
    f"import sys\nsys.exit('{SECRET}')": ("config", "SystemExit at operations.py line 2"),
    "import os\nos.fork()": ("config", "PermissionError at operations.py line 2"),
    "import subprocess\nsubprocess.run(['/bin/true'])": ("config", "PermissionError at"),
    "ops = 5": ("config", "is not a lockgate.Operations"),
    "x = 5": ("config", "is not a lockgate.Operations"),
}


@pytest.mark.parametrize("operations", IMPORTS)
def test_operations_that_cannot_be_imported(tmp_path: Path, operations: str) -> None:
    code, says = IMPORTS[operations]
    fault = failure(tmp_path, operations=operations)
    assert fault.code == code
    assert says in fault.message


def test_an_operation_that_could_not_be_held_names_itself(tmp_path: Path) -> None:
    bad = OPERATIONS + "\nclass Bad(lg.Args):\n    tenant: Annotated[str, lg.Text(9)]\n"
    bad += '@ops.operation(effect="read", max_result=10)\ndef bad(call: lg.Call, args: Bad) -> Said:\n    return None\n'
    fault = failure(tmp_path, operations=bad)
    assert fault.code == "registration"
    assert "bad" in fault.message
    assert "tenant" in fault.message


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    base = tmp_path / "elsewhere"
    base.mkdir()
    one = Broker(tmp_path, config="")
    one.close()
    (tmp_path / "operations.py").rename(base / "operations.py")
    argv_config = tmp_path / "lockgate.toml"
    argv_config.write_text('operations = "absent_operations:ops"\n')
    agent, theirs = socket.socketpair()
    supervisor, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    audit, writer = socket.socketpair()
    fds = [theirs.fileno(), other.fileno(), writer.fileno()]
    argv = [sys.executable, "-I", "-m", "lockgate.broker", "--config", str(argv_config)]
    argv += ["--agent-fd", str(fds[0]), "--supervisor-fd", str(fds[1]), "--audit-fd", str(fds[2])]
    done = subprocess.run(argv, pass_fds=fds, env={}, timeout=WAIT, check=False, capture_output=True)
    assert done.returncode == 1
    assert b"no module 'absent_operations' beside the configuration" in agent.recv(65536)
    for sock in (agent, theirs, supervisor, other, audit, writer):
        sock.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[audti]\npath = 'x'\n", "audti"),
        (f"[secrets.payments]\nvalue = '{SECRET}'\n", "secrets.payments"),
        ("[broker]\nuser = 'no-such-user-here'\n", "no user 'no-such-user-here'"),
        ("[broker]\napproval_wait = -1\n", "approval_wait"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, config: str, says: str) -> None:
    fault = failure(tmp_path, config=config)
    assert fault.code == "config"
    assert says in fault.message


def test_an_audit_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a directory should be")
    fault = failure(tmp_path, audit="blocked/audit.db")
    assert fault.code in {"audit_unavailable", "host_fault"}


def test_a_place_that_is_not_safe_for_the_audit_file_is_named(tmp_path: Path) -> None:
    """The writer ends before the broker is there; its words are not lost."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    fault = failure(tmp_path, audit="open/audit.db")
    assert fault.code == "audit_unavailable"
    assert "anybody may write" in fault.message
    assert "chmod o-w" in fault.next_step


def test_the_key_file_is_made_once_and_kept_private(tmp_path: Path) -> None:
    for _ in range(2):
        with broker(tmp_path):
            pass
    key = tmp_path / "audit.db.key"
    assert key.stat().st_mode & 0o777 == 0o600
    first = key.read_bytes()
    assert len(first) == 32
    assert sorted(path.name for path in tmp_path.glob("audit.db.key*")) == ["audit.db.key"]
    key.chmod(0o644)
    assert "open to others" in failure(tmp_path).message
    key.chmod(0o600)
    key.write_bytes(b"short")
    assert "not one that lockgate wrote" in failure(tmp_path).message


def test_nothing_is_written_into_the_operators_directory(tmp_path: Path) -> None:
    with broker(tmp_path):
        pass
    assert not (tmp_path / "__pycache__").exists()


def test_without_operations_everything_is_unavailable(tmp_path: Path) -> None:
    one = Broker(tmp_path)
    one.close()
    (tmp_path / "plain").mkdir()
    with broker(tmp_path / "plain", operations="import lockgate as lg\nops = lg.Operations()\n") as empty:
        run = empty.open_run({})
        assert empty.tool(run.run, "get_order", order_id="ord_1").reason == "not_available"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_broker_that_root_starts_as_another_user(tmp_path: Path) -> None:
    """[broker] user: ids change before anything is read, and dumpable is 0 after it (prctl(2))."""
    entry = pwd.getpwnam("nobody")
    for parent in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(parent, parent.stat().st_mode | 0o055)
    one = Broker(tmp_path, config='[broker]\nuser = "nobody"\n')
    try:
        # Where the interpreter itself stands in a place that only root may enter, the import after the change fails.
        if isinstance(one.ready, wire.Ready):
            assert one.ready.facts["uid"] == entry.pw_uid
            assert one.ready.facts["dumpable"] is False
            status = Path(f"/proc/{one.process.pid}/status").read_text()
            uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
            assert set(uids) == {str(entry.pw_uid)}
            assert "Groups:\t \n" in status or "Groups:\t\n" in status
        else:
            assert "could not start" in one.ready.fault.message or one.ready.fault.code == "config"
    finally:
        one.close()

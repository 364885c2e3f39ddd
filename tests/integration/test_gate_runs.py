"""The public API over the real processes: calls, code, denials, exports, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockgate as lg


def test_code_and_tools_reach_the_same_operation(gate: lg.sync.Gate, gate_run: lg.sync.Run):
    """C2: one edge behind `run.call` and `host.call`."""
    assert gate_run.call("echo", text="hi") == {"text": "hi"}
    result = gate_run.code('host.call("echo", text="hi")')
    assert result.value == {"text": "hi"}
    assert [(call.operation, call.verdict, call.status) for call in result.calls] == [("echo", "allow", "ok")]
    assert result.run_id == gate_run.id


def test_failing_code_is_data_and_not_an_exception(gate_run: lg.sync.Run):
    result = gate_run.code("1/0")
    assert (result.ok, result.error and result.error.name, result.exit_code) == (False, "ZeroDivisionError", 1)
    assert gate_run.code("import sys; sys.exit(7)").exit_code == 7
    assert gate_run.code("def (:").error.name == "SyntaxError"
    assert gate_run.code("").value is None


def test_a_denial_is_typed_and_the_same_for_unknown_and_out_of_scope(gate: lg.sync.Gate):
    """C8: nobody learns from a denial what exists."""
    scope = lg.Scope(user="dana", agent="atlas", tenant="acme", expires=60, allow={"echo": {}})
    with gate.run_scope(scope) as run:
        seen = []
        for name in ("pay", "no_such_operation"):
            with pytest.raises(lg.Denied) as caught:
                run.call(name, order="ord_1", amount=1)
            assert caught.value.reason == "not_available"
            assert caught.value.audit_id
            seen.append((caught.value.message.replace(name, "*"), caught.value.next_step))
        assert seen[0] == seen[1]
        outcome = run.try_call("pay", order="ord_1", amount=1)
        assert (outcome.ok, outcome.value, outcome.reason) == (False, None, "not_available")
        inside = run.code('try: host.call("pay", order="ord_1", amount=1)\nexcept host.Denied as d: x = d.reason\nx')
        assert inside.value == "not_available"
        assert [call.operation for call in inside.denials] == ["pay"]


def test_results_that_do_not_pass_and_bad_arguments_are_told_apart(gate_run: lg.sync.Run):
    with pytest.raises(lg.ResultWithheld) as withheld:
        gate_run.call("shout", text="a" * 60)
    assert withheld.value.reason == "result_too_large"
    with pytest.raises(lg.Denied) as bad:
        gate_run.call("echo", text=1)
    assert bad.value.reason == "bad_request"
    with pytest.raises(lg.ConfigError):
        gate_run.call("echo", text=object())


def test_a_child_run_can_only_narrow(gate_run: lg.sync.Run):
    """C3."""
    with gate_run.narrow(allow={"echo": lg.where(text=lg.one_of("a"))}) as child:
        assert child.call("echo", text="a") == {"text": "a"}
        assert child.try_call("echo", text="b").reason == "argument_not_allowed"
        assert child.try_call("pay", order="ord_1", amount=1).reason == "not_available"
    with pytest.raises(lg.ScopeError), gate_run.narrow(allow={"nothing": {}}):
        pass


def test_bad_scopes_are_refused_on_entry(gate: lg.sync.Gate):
    good = {"user": "u", "agent": "a", "tenant": "t", "expires": 60, "allow": {"echo": {}}}
    for change in ({"expires": 0}, {"expires": -1}, {"user": ""}, {"allow": {"nope": {}}}, {"allow": 3}, {"more": 1}):
        with pytest.raises(lg.ScopeError), gate.run_scope({**good, **change}):
            pass
    with gate.run_scope({**good, "allow": {}}) as run:
        assert run.try_call("echo", text="x").reason == "not_available"


@pytest.mark.parametrize("source", [b"\xff\xfe", "x = '\ud800'", "a\0b", "#" * (1024 * 1024 + 1), b"#" * 50_000_000])
def test_bad_scripts_are_refused_before_anything_is_sent(gate_run: lg.sync.Run, source: str | bytes):
    with pytest.raises(lg.BadScript) as caught:
        gate_run.code(source)
    assert caught.value.next_step


def test_unknown_things_are_named_with_the_nearest(gate_run: lg.sync.Run):
    with pytest.raises(lg.UnknownRung) as rung:
        gate_run.code("1", rung="contaner")
    assert "container" in rung.value.next_step
    with pytest.raises(lg.UnknownEnv):
        gate_run.code("1", env="never-built")
    with pytest.raises(lg.ConfigError) as bound:
        gate_run.code("1", bounds={"wal": 1})
    assert "wall" in bound.value.next_step
    with pytest.raises(lg.ConfigError):
        gate_run.code("1", timeout=3600)


@pytest.mark.parametrize("rung", ["gvisor", "microvm", "wasm"])
def test_a_rung_that_is_not_there_is_never_replaced(gate_run: lg.sync.Run, rung: str):
    """X3: no silent downgrade: the rung that was asked for, or a refusal that names it."""
    try:
        result = gate_run.code("1", rung=rung)
    except lg.CannotIsolate as error:
        refusal = (rung in error.message, bool(error.next_step))
    else:
        refusal = None
        assert (result.rung, result.value, result.weakness) == (rung, 1, None)
    assert refusal in (None, (True, True))


def test_the_shared_kernel_must_be_accepted(gate_run: lg.sync.Run):
    """X3: the container rung is refused unless somebody said yes; the same call with a yes runs."""
    with pytest.raises(lg.CannotIsolate) as caught:
        gate_run.code("1", accept_shared_kernel=False)
    assert "accept_shared_kernel=True" in caught.value.next_step
    assert gate_run.code("1", accept_shared_kernel=True).value == 1


def test_streaming_passes_text_in_whole_characters_and_bytes_as_written(gate_run: lg.sync.Run):
    text: list[str] = []
    raw: list[tuple[str, bytes]] = []
    code = (
        "import os, time\nfor b in 'ä€😀'.encode():\n    os.write(1, bytes([b])); time.sleep(0.005)\n"
        "os.write(2, b'\\xff!')"
    )
    result = gate_run.code(code, on_stdout=text.append, on_bytes=lambda name, data: raw.append((name, data)))
    assert "".join(text) == "ä€😀" == result.stdout
    assert "\ufffd" not in "".join(text)
    assert b"".join(data for name, data in raw if name == "stderr") == b"\xff!"


def test_a_callback_that_fails_ends_the_run_and_is_raised(gate_run: lg.sync.Run):
    class Mine(Exception):
        pass

    def fail(_text: str) -> None:
        raise Mine

    with pytest.raises(Mine):
        gate_run.code("import time\nwhile True: print('x', flush=True); time.sleep(0.01)", on_stdout=fail)
    assert gate_run.code("1").value == 1


def test_exports_are_written_new_and_nothing_there_is_touched(gate_run: lg.sync.Run, tmp_path: Path):
    """X7: the caller's directory is written with O_EXCL and O_NOFOLLOW; what is there stays as it is."""
    target = tmp_path / "out"
    result = gate_run.code("host.export('a.txt', b'hello'); host.export('big', b'x' * 5_000_000)", export_to=target)
    assert (target / "a.txt").read_bytes() == b"hello"
    assert (target / "big").read_bytes() == b"x" * 5_000_000
    assert (target / "a.txt").stat().st_mode & 0o777 == 0o600
    assert {export.name: export.size for export in result.exports} == {"a.txt": 5, "big": 5_000_000}

    victim = tmp_path / "victim"
    victim.write_text("mine")
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "a.txt").symlink_to(victim)
    with pytest.raises(lg.ExportRefused) as caught:
        gate_run.code("host.export('a.txt', b'overwritten'); 42", export_to=planted)
    assert victim.read_text() == "mine"
    assert isinstance(caught.value.result, lg.RunResult)
    assert caught.value.result.value == 42
    with pytest.raises(lg.ExportRefused):
        gate_run.code("host.export('a.txt', b'again')", export_to=target)
    assert (target / "a.txt").read_bytes() == b"hello"


def test_an_export_directory_that_cannot_be_is_refused_before_the_run(gate_run: lg.sync.Run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "no" / "parent"):
        with pytest.raises(lg.ExportRefused) as caught:
            gate_run.code("host.export('a', b'')", export_to=bad)
        assert caught.value.result is None


def test_narrowed_broker_bounds_hold(gate_run: lg.sync.Run):
    """C3, X7: bounds that the broker owns travel with the ticket."""
    result = gate_run.code(
        "n = 0\ntry:\n    for _ in range(5): host.call('echo', text='x'); n += 1\n"
        "except host.Denied as d: n = (n, d.reason)\nn",
        bounds={"calls": 3},
    )
    assert result.value[0] == 3
    assert gate_run.code("for _ in range(5): host.call('echo', text='x')\n5").value == 5


def test_the_registry_explain_doctor_and_stats(gate: lg.sync.Gate, gate_run: lg.sync.Run):
    names = [one["name"] for one in gate.operations()]
    assert names == ["echo", "pay", "shout", "wait"]
    assert [one["name"] for one in gate_run.allowed()] == names
    scope = lg.Scope(user="u", agent="a", tenant="t", expires=60, allow={"pay": lg.where(amount=lg.at_most(5))})
    verdict = gate.explain(scope, "pay", {"order": "ord_1", "amount": 6})
    assert (verdict["effect"], verdict["rule"], verdict["path"]) == ("deny", "pay.amount.at_most", "/amount")
    assert gate.explain(scope, "pay", {"order": "ord_1", "amount": 5})["effect"] == "allow"
    assert gate.stats()["runs"] == 0
    gate.prewarm(2)
    assert gate.stats()["warm"] >= 2
    assert gate.facts["supervisor"]["rung"] == "container"


def test_a_closed_run_and_a_closed_gate_say_so(gate: lg.sync.Gate, gate_config: Path):
    with gate.run_scope(lg.Scope(user="u", agent="a", tenant="t", expires=60, allow={})) as run:
        pass
    for attempt in (lambda: run.code("1"), lambda: run.call("echo", text="x")):
        with pytest.raises(lg.HostFault):
            attempt()
    with pytest.raises(lg.HostFault):
        lg.sync.Gate(gate_config).operations()


def test_no_environment_reaches_any_child(gate: lg.sync.Gate):
    """C6: each child starts with an empty environment; the control is this process, which has one."""
    children = gate._session._children
    assert children is not None
    for child in children.all:
        environment = Path(f"/proc/{child.process.pid}/environ")
        try:
            found = environment.read_bytes()
        except PermissionError:
            continue  # it made itself undumpable, so that its own user cannot look either
        assert found.rstrip(b"\0") in (b"", b"LC_CTYPE=C.UTF-8"), child.name
    assert Path("/proc/self/environ").read_bytes()


def test_children_inherit_only_the_descriptors_in_their_argv(gate_config: Path):
    """An inheritable descriptor of the agent, here a file with a secret in its name, does not go along."""
    planted = os.memfd_create("lockgate-planted", 0)
    try:
        os.set_inheritable(planted, True)
        with lg.sync.Gate(gate_config) as gate:
            children = gate._session._children
            assert children is not None
            seen = 0
            for child in children.all:
                folder = Path(f"/proc/{child.process.pid}/fd")
                try:
                    links = [os.readlink(folder / name) for name in os.listdir(folder)]
                except PermissionError:
                    continue  # undumpable: not even its own user may look
                seen += 1
                assert not [link for link in links if "lockgate-planted" in link], child.name
            assert seen
        control = subprocess.run(
            [sys.executable, "-c", f"import os; print(os.readlink('/proc/self/fd/{planted}'))"],
            close_fds=False,
            capture_output=True,
            check=True,
        )
        assert b"lockgate-planted" in control.stdout  # the negative control: without care it would go along
    finally:
        os.close(planted)

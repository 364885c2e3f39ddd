"""The wasm rung behind the Gate: calls, exports, bounds, package sets, refusals (X1, X3, X5 to X7, X10)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lockgate as lg
from gate_fixtures import CONFIG, gate_home, gate_scope
from lockgate.audit import reader
from lockgate.contract import wire
from lockgate.contract.errors import CannotIsolate, LockgateError
from lockgate.contract.run import RunSpec
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import Outcome
from lockgate.runtimes.wasm import artifacts, packages
from lockgate.runtimes.wasm.runtime import WasmRuntime
from lockgate.supervisor import engine as engines
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.settings import Settings
from wasm_guest_fixtures import built
from wasm_rung_fixtures import WasmStart, value

MiB = 1 << 20
HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"


# ---- one API ---------------------------------------------------------------------------------------------------------
def test_code_calls_operations_and_learns_what_there_is(wasm_gate_run: lg.sync.Run) -> None:
    """X1, C2: `host.call` and `host.operations` through the imported function, to the same edge as everywhere."""
    result = wasm_gate_run.code(
        "names = sorted(one['name'] for one in host.operations())\n[host.call('echo', text='hi'), names]"
    )
    assert result.value == [{"text": "hi"}, ["echo", "pay", "shout", "wait"]], result
    assert [(call.operation, call.verdict) for call in result.calls][-1] == ("echo", "allow")
    assert (result.rung, result.weakness, result.ok) == ("wasm", None, True)


def test_a_denial_has_its_reason_inside(wasm_gate: lg.sync.Gate) -> None:
    """C8: the reason and no more; nothing of the host is in the error's text."""
    with wasm_gate.run_scope(gate_scope(echo={})) as run:
        result = run.code(
            "try: host.call('pay', order='ord_1', amount=1)\nexcept host.Denied as d: x = [d.reason, str(d)]\nx"
        )
    assert result.value[0] == "not_available"
    assert "lockgate" not in result.value[1]
    assert [call.operation for call in result.denials] == ["pay"]


def test_files_come_out_through_the_broker(wasm_gate_run: lg.sync.Run, tmp_path: Path) -> None:
    """X7: in chunks that fit a frame, with the digest of what arrived."""
    data = "bytes(range(256)) * 8192"
    result = wasm_gate_run.code(f"host.export('big.bin', {data})\nhost.export('a.txt', 'é')", export_to=tmp_path)
    assert result.ok, result
    assert (tmp_path / "big.bin").read_bytes() == bytes(range(256)) * 8192
    assert (tmp_path / "a.txt").read_text() == "é"
    assert {one.name for one in result.exports} == {"big.bin", "a.txt"}


def test_output_streams_while_the_code_runs(wasm_gate_run: lg.sync.Run) -> None:
    seen: list[str] = []
    result = wasm_gate_run.code(
        "import time\nfor n in range(3): print(n, flush=True); time.sleep(0.05)", on_stdout=seen.append
    )
    assert "".join(seen) == result.stdout == "0\n1\n2\n"
    assert len(seen) >= 2


def test_many_runs_leave_nothing(wasm_gate: lg.sync.Gate, wasm_gate_run: lg.sync.Run) -> None:
    """X10: descriptors, groups and processes are as before after forty runs of every kind of end."""
    kinds = ["1", "1/0", "import os\nos.abort()", "import os\nos._exit(3)", "import _host\n_host.call(b'Z')"]
    for kind in kinds:
        wasm_gate_run.code(kind)
    before = _settled(wasm_gate)
    for n in range(40):
        wasm_gate_run.code(kinds[n % len(kinds)])
    after = _settled(wasm_gate)
    assert {name: after[name] for name in ("fds", "runs", "groups", "watched")} == {
        name: before[name] for name in ("fds", "runs", "groups", "watched")
    }


def _settled(gate: lg.sync.Gate) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        gate.prewarm(2)
        stats = gate.stats()
        if not (stats["dying"] or stats["growing"] or stats["runs"]) and stats["warm"] == 2:
            return stats
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)


# ---- bounds ----------------------------------------------------------------------------------------------------------
def test_a_hog_is_ended_for_its_memory(wasm_gate: lg.sync.Gate, wasm_gate_run: lg.sync.Run) -> None:
    """X6: by the kernel where there is a memory cgroup, reported as memory; else the engine refuses to grow."""
    result = wasm_gate_run.code(HOG, bounds={"memory": 160 * MiB, "wall": 20})
    if wasm_gate.facts["supervisor"]["memory_by"].startswith("cgroup"):
        assert (result.killed_by, result.exit_code) == ("memory", 137), result
        assert (result.usage.memory_peak or 0) < 200 * MiB  # the worker's own is beside it
    else:
        assert result.error is not None
        assert result.error.name == "MemoryError"


def test_under_the_bound_nothing_is_refused(wasm_gate_run: lg.sync.Run) -> None:
    """Negative control for X6."""
    assert wasm_gate_run.code("len(bytearray(96 << 20))", bounds={"memory": 160 * MiB}).value == 96 << 20


def test_files_count_as_memory_too(wasm_gate: lg.sync.Gate, wasm_gate_run: lg.sync.Run) -> None:
    """X6, X7: the run's directory is memory of its worker, so the cap cannot be doubled by files."""
    if not wasm_gate.facts["supervisor"]["memory_by"].startswith("cgroup"):
        pytest.skip("no memory cgroup can be made by this user: memory and disk are capped each by itself")
    source = (
        "open('f', 'wb').write(bytes(60 << 20))\nx = bytearray(60 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    )
    assert wasm_gate_run.code(source, bounds={"memory": 96 * MiB, "wall": 20}).killed_by == "memory"


def test_the_store_limit_holds_where_nothing_else_does(wasm_run: Callable[..., Outcome]) -> None:
    """X6: without a group the code sees MemoryError at its bound, not at the engine's four GiB."""
    outcome = wasm_run(f"{HOG.replace('while True', 'while len(x) < 999')}\nlen(x)", memory=128 * MiB)
    assert outcome.result is not None
    assert outcome.result.error is not None
    assert outcome.result.error.name == "MemoryError"


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)"])
def test_the_soft_stop_comes_before_the_kill(wasm_run: Callable[..., Outcome], source: str) -> None:
    """X5: the worker says that the time is over, a little early; what was written before has come through."""
    outcome = wasm_run(f"print('so far', flush=True)\n{source}", wall=1.0)
    assert outcome.killed
    assert outcome.result is None
    assert outcome.stdout == b"so far\n"
    assert outcome.run_seconds >= 0.9


def test_the_kill_needs_no_soft_stop(wasm_gate_run: lg.sync.Run) -> None:
    """X5: a worker that says nothing is ended all the same: here its code blocks in the broker."""
    result = wasm_gate_run.code("host.call('wait', ms=20000)", bounds={"wall": 1.0})
    assert (result.killed_by, result.exit_code) == ("wall", 124)


def test_bounds_are_those_of_the_run_though_the_worker_was_there_before(wasm_gate_run: lg.sync.Run) -> None:
    """X7: nothing is fixed at birth, so a narrow run takes a warm worker like any other."""
    source = "n = 0\ntry:\n    while n < 99: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nn"
    assert 0 < wasm_gate_run.code(source, bounds={"inodes": 16}).value < 16
    assert wasm_gate_run.code(source).value == 99


# ---- package sets ----------------------------------------------------------------------------------------------------
def test_numpy_and_pandas_are_there_at_once(wasm_gate_run: lg.sync.Run) -> None:
    """X11: the rung's own set by name, without a build of a package set, imported before the run."""
    built("numpy-pandas")
    result = wasm_gate_run.code(
        "import sys\nthere = 'pandas' in sys.modules\nimport pandas as pd\n[there, int(pd.Series([1, 2, 3]).sum())]",
        env="numpy-pandas",
    )
    assert result.value == [True, 6], result


LINKED = (("numpy", "2.5.2"), ("pandas", "3.0.6"), ("python-dateutil", "2.9.0"))


def test_a_package_set_is_served_whole_or_refused_by_name() -> None:
    """X11: what is not linked in, or is there in another version, is an error before anything runs."""

    def spec(*wanted: tuple[str, str]) -> TemplateSpec:
        return TemplateSpec(env="mine", tree="/nowhere", packages=wanted)

    packages.check(spec(("numpy", "2.5.2"), ("Python_DateUtil", "2.9.0")), LINKED)
    with pytest.raises(CannotIsolate, match="torch is not linked into its guest"):
        packages.check(spec(("numpy", "2.5.2"), ("torch", "2.0")), LINKED)
    with pytest.raises(CannotIsolate, match=r"asks for numpy 2\.4\.0, and the guest has 2\.5\.2"):
        packages.check(spec(("numpy", "2.4.0")), LINKED)
    assert packages.image_set(TemplateSpec()) == "stdlib"
    assert packages.image_set(spec(("six", "1"))) == "stdlib"
    assert packages.image_set(spec(("Pandas", "3.0.6"))) == "numpy-pandas"
    assert packages.image_set(TemplateSpec(env="numpy-pandas")) == "numpy-pandas"


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_a_guest_that_was_not_built_is_a_refusal_with_the_command(tmp_path: Path) -> None:
    """X3: nothing is compiled on a run's path, and nothing weaker takes the rung's place."""
    home = gate_home(tmp_path, "wasm")
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    home.write_text(home.read_text() + f'\n[execution.wasm]\nstore = "{empty}"\n')
    with (
        lg.sync.Gate(home) as gate,
        gate.run_scope(gate_scope(echo={})) as run,
        pytest.raises(lg.CannotIsolate) as refused,
    ):
        run.code("1")
    assert "wasm rung" in refused.value.message
    assert "lockgate wasm build" in refused.value.next_step


def test_an_engine_below_the_minimum_is_a_refusal_with_its_advisories(monkeypatch: pytest.MonkeyPatch) -> None:
    """X3: whatever was built before."""
    monkeypatch.setattr(artifacts, "engine_version", lambda: "49.0.0")
    missing = WasmRuntime().probe()
    assert missing is not None
    assert "GHSA-" in missing.missing
    assert "pip install" in missing.fix


class Host:
    """A supervisor's engine in this process, whose broker says yes."""

    def __init__(self, **settings: Any) -> None:
        self.reactor = Reactor()
        self.sent: list[Any] = []
        self.attached: list[wire.Attach] = []
        self.engine = engines.Engine(
            Settings(rung="wasm", memory="rlimit", acquire=30, pool=0, **settings),
            self.reactor,
            self._attach,
            lambda _message: None,
            self._send,
        )

    def _attach(self, message: wire.Attach, run: Any) -> None:
        self.attached.append(message)
        self.reactor.defer(lambda: run.attached(ok=True))

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.reactor.leave()

    def code(self, source: str, **options: Any) -> Any:
        self.engine.start(len(self.sent) + 1, RunSpec(ticket=f"t{len(self.sent)}", code=source, rung="wasm", **options))
        count = len(self.sent)
        if not self.sent[count:]:
            self.reactor.run(time.monotonic() + 60)
        return self.sent[-1]

    def close(self) -> None:
        self.engine.close()
        self.reactor.close()


@pytest.mark.parametrize("accepted", [False, True])
def test_a_missing_outer_wall_takes_code_only_if_that_is_accepted(
    monkeypatch: pytest.MonkeyPatch, wasm_start: WasmStart, accepted: bool
) -> None:
    """X3: by name; then the run's result and the broker, for its rows, are told."""
    monkeypatch.setattr(engines, "runtimes", lambda *_: {"wasm": WasmRuntime(("--skip=namespaces",))})
    host = Host()
    try:
        got = host.code("6*7", accept_weaker=("no outer wall",) if accepted else ("emulated",))
    finally:
        host.close()
    if not accepted:
        assert isinstance(got, wire.Refused)
        assert got.fault.code == CannotIsolate.code
        assert "user namespaces" in got.fault.message
        assert 'accept_weaker = ["no outer wall"]' in got.fault.next_step
        assert not host.attached, "the broker heard of code that must not run"
    else:
        assert isinstance(got, wire.Finished)
        assert (bytes(got.value), got.weakness) == (b"42", "no outer wall")
        assert host.attached[0].weakness == "no outer wall"


def test_a_worker_that_cannot_harden_is_a_typed_refusal(monkeypatch: pytest.MonkeyPatch, wasm_start: WasmStart) -> None:
    """X3: the step is named; no code was sent."""
    monkeypatch.setattr(engines, "runtimes", lambda *_: {"wasm": WasmRuntime(("--fail=caps",))})
    host = Host()
    try:
        got = host.code("1")
    finally:
        host.close()
    assert isinstance(got, wire.Refused)
    assert "caps" in got.fault.message
    assert not host.attached


def test_a_worker_that_dies_at_birth_takes_nobody_along(monkeypatch: pytest.MonkeyPatch, wasm_start: WasmStart) -> None:
    """X3: its pid is gone before it could get a group; each is a refusal, and the groups' keeper lives on."""
    monkeypatch.setattr(engines, "runtimes", lambda *_: {"wasm": WasmRuntime(("--fail=maps",))})
    host = Host()
    try:
        for _ in range(3):
            got = host.code("1")
            assert isinstance(got, wire.Refused)
            assert "keeper" not in got.fault.message
        assert host.engine.pool.fault is None
    finally:
        host.close()


# ---- hosts -----------------------------------------------------------------------------------------------------------
def test_a_plain_user_has_the_rung_too(wasm_start: WasmStart, open_folder: Path) -> None:
    """X1: in a user namespace of one id; when the tests run as a plain user all of these files are that test."""
    if os.getuid() != 0:
        with wasm_start() as template:
            assert template.facts["mode"] in {"rootless", "none"}
        return
    python = "/usr/bin/python3"
    ask = [python, "-c", "import sys; print(sys.version_info[:2])"]
    if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("no system interpreter of this version that a plain user can start")
    import wasmtime

    found = built("stdlib")
    source, store = open_folder / "src", open_folder / "store"
    package = Path(artifacts.__file__).parents[2]
    shutil.copytree(package, source / "lockgate", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(msgspec.__file__).parent, source / "msgspec")
    engine = Path(wasmtime.__file__).parent
    shutil.copytree(engine, source / "wasmtime")
    (data,) = engine.parent.glob("wasmtime-*.dist-info")
    shutil.copytree(data, source / data.name)
    shutil.copytree(package.parents[1] / "guest", open_folder / "guest")
    for path in (found.cwasm, found.stdlib, found.image):
        where = Path(path).parent
        shutil.copytree(where, store / where.name)
    subprocess.run(["chmod", "-R", "a+rX", str(open_folder)], check=True)
    subprocess.run(["chown", "-R", "12345:12345", str(store)], check=True)
    subprocess.run(["chmod", "-R", "go-rwx", str(store)], check=True)
    program = (
        f"import sys; sys.path[:0] = [{str(source)!r}]\nfrom pathlib import Path\n"
        "from lockgate.runtimes.wasm.runtime import WasmRuntime\n"
        "from lockgate.runtimes.protocol import TemplateSpec\n"
        "from lockgate.runtimes.single import run_once\n"
        f"t = WasmRuntime(store=Path({str(store)!r})).start(TemplateSpec())\n"
        "o = run_once(t, b'6*7')\n"
        "print(t.facts['mode'], t.weakness, o.facts['filter'] > 0, o.result and o.result.value)\nt.close()\n"
    )
    done = subprocess.run(
        [python, "-c", program], user=12345, group=12345, extra_groups=[], capture_output=True, text=True,
        timeout=90, check=False, env={}, cwd="/",
    )  # fmt: skip
    assert done.stdout in ("rootless None True b'42'\n", "none no outer wall True b'42'\n"), done


WITHOUT = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all "$0" "$@"'


@pytest.mark.parametrize("accepted", [False, True])
def test_a_host_without_user_namespaces(tmp_path: Path, wasm_start: WasmStart, accepted: bool) -> None:
    """X3: a real one, in a namespace that allows no other: refused with what is missing, or flagged in every row."""
    home = gate_home(tmp_path, "wasm")
    (tmp_path / "code.py").write_text("host.call('echo', text='a')")
    (tmp_path / "scope.toml").write_text(gate_scope(echo={}).to_toml())
    lockgate = [sys.executable, "-m", "lockgate", "run", "--config", str(home), "--scope", str(tmp_path / "scope.toml")]
    if accepted:
        lockgate += ["--accept-weaker", "no outer wall"]
    done = subprocess.run(
        ["unshare", "--map-current-user", "--keep-caps", "sh", "-c", WITHOUT, *lockgate, str(tmp_path / "code.py")],
        capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path,
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip(f"no user namespace can be made here to begin with: {done.stderr.strip()}")
    assert done.returncode == (0 if accepted else 3), done
    rows = list(reader.tail(tmp_path / "audit.db", 1000)) if accepted else []
    if not accepted:
        assert "missing: user namespaces" in done.stderr
        assert "accept_weaker" in done.stderr
    assert {row.weakness for row in rows if row.via == "code"} == ({"no outer wall"} if accepted else set())


def test_the_doctor_asks_the_rung_too(wasm_gate: lg.sync.Gate) -> None:
    """X2: available because the attack suite ran in it and reached nothing; its walls are rows with what was seen."""
    report = wasm_gate.doctor()
    (row,) = [one for one in report["rungs"] if one["rung"] == "wasm"]
    assert (row["available"], row["boundary"], row["reached"], row["weakness"]) == (True, "wasm", [], None), row
    assert row["probes"] >= 200
    held = {one["name"]: one for one in report["bounds"]}
    for name in ("wall", "memory", "cpu seconds", "disk", "inodes", "output", "outer wall", "guest"):
        assert held[name]["holds"], held[name]


def test_every_row_of_a_run_names_the_rung(tmp_path: Path, wasm_start: WasmStart) -> None:
    """X3, C5: and flags nothing where nothing is missing."""
    home = gate_home(tmp_path, "wasm")
    with lg.sync.Gate(home) as gate, gate.run_scope(gate_scope(echo={})) as run:
        assert run.code("host.call('echo', text='a')").ok
        ident = run.id
    rows = [row for row in reader.tail(tmp_path / "audit.db", 1000, run=ident) if row.via == "code"]
    assert {row.operation for row in rows} >= {"run.code", "echo"}
    assert {(row.rung, row.shared_kernel, row.weakness) for row in rows} == {("wasm", False, None)}


def test_the_shared_kernel_need_not_be_accepted(tmp_path: Path, wasm_start: WasmStart) -> None:
    """X3: this rung shares none with the code, so nobody has to say yes to that."""
    home = gate_home(tmp_path, "wasm")
    home.write_text(CONFIG.replace('rung = "container"', 'rung = "wasm"').replace("accept_shared_kernel = true\n", ""))
    with lg.sync.Gate(home) as gate, gate.run_scope(gate_scope(echo={})) as run:
        assert run.code("6*7").value == 42
        with pytest.raises(LockgateError, match="shares the host's kernel"):
            run.code("1", rung="container")


def test_a_result_of_a_worker_is_read_like_any_other(wasm_run: Callable[..., Outcome]) -> None:
    """X5: a value, its text, an error's traceback from the first line of the code."""
    assert value(wasm_run("[1, {'a': None}]")) == [1, {"a": None}]
    outcome = wasm_run("def f():\n    return 1 / 0\nf()")
    assert outcome.result is not None
    assert outcome.result.error is not None
    assert "line 2" in outcome.result.error.traceback

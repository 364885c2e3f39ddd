"""Only the edge reaches an operation's function, and nothing in it can tell tool from code (C2; reports 3 and 5)."""

from __future__ import annotations

import ast
import gc
import inspect
import time
from pathlib import Path
from typing import Annotated

import lockgate
from lockgate.audit import rows
from lockgate.broker import edge, work
from lockgate.broker.runs import Origin, Run
from lockgate.contract.bounds import Bounds
from lockgate.policy import Args, Ledger, Operation, Operations, Result, Scope, Text, Verdict

SOURCE = Path(inspect.getfile(lockgate)).parent


def attributes(path: Path, name: str) -> list[int]:
    return [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute) and n.attr == name]


def test_no_other_file_touches_a_function_of_the_registry() -> None:
    users = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if attributes(path, "fn")}
    assert users == {"broker/edge.py", "policy/registry.py"}
    assert (
        len(attributes(SOURCE / "broker/edge.py", "fn")) == 2
    )  # a function, a coroutine function; in `_begin`, `_drive`


def test_the_edge_calls_functions_in_two_methods_that_only_it_reaches() -> None:
    tree = ast.parse((SOURCE / "broker/edge.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for name, callers in (("_begin", {"_decide"}), ("_drive", {"_begin"}), ("_decide", {"call"})):
        found = {
            one.name
            for one in functions
            if any(isinstance(inner, ast.Attribute) and inner.attr == name for inner in ast.walk(one))
        }
        assert found == callers


class Say(Args):
    text: Annotated[str, Text(10)]


class Said(Result):
    text: str


ops = Operations()


@ops.operation(effect="read", max_result=100)
def say(call: object, args: Say) -> Said:
    raise AssertionError("entered without the edge")


@ops.operation(effect="write", idempotency=("text",), max_result=100)
async def write(call: object, args: Say) -> Said:
    raise AssertionError("entered without the edge")


ops.seal()


def test_walking_the_registry_enters_no_function() -> None:
    """Everything else that a registry and its operations offer can be used, and no function runs."""
    ops.describe()
    assert ops.digest
    for name in ops.names():
        operation = ops.get(name)
        assert operation is not None
        assert not callable(operation)
        operation.describe()
        operation.decode_args(b'{"text":"x"}')
        operation.safe_urls(operation.encode_result(Said(text="x")))
        own = {n for n in dir(operation) if not n.startswith("_") and callable(getattr(operation, n))}
        assert own == {"fn", "args_type", "result_type", "decode_args", "encode_result", "safe_urls", "describe"}
        holders = [one for one in gc.get_referrers(operation.fn) if isinstance(one, Operation | Operations)]
        assert holders == [operation]


def test_the_edge_reads_nothing_of_the_origin_but_for_rows() -> None:
    """`origin` appears where a row is made and where an approval wait learns that nobody waits any more."""
    tree = ast.parse(
        inspect.getsource(edge) + inspect.getsource(work).replace("from __future__ import annotations", "")
    )
    places: dict[str, set[str]] = {}
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in {"via", "rung", "shared_kernel", "over", "code"}:
                places.setdefault(node.attr, set()).add(function.name)
    assert places["via"] == {"row"}
    assert places["rung"] == {"row"}  # `Work.row`
    assert places["shared_kernel"] == {"row"}
    assert "code" not in places
    # `over` is the run's own end; the origin's is read by approvals alone.
    assert places["over"] == {"_decide"}
    compared = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and "via" in ast.dump(n)]
    assert compared == []


def test_prepared_rows_say_what_the_general_ones_say() -> None:
    """The two rows of an allowed read are put together from pieces; decoded they equal what `Work.row` makes."""
    scope = Scope(user="u1", agent="a1", tenant="t1", expires=60, allow={"say": {}}).compile(ops, time.monotonic())
    run = Run(scope, bounds=Bounds(), ledger=Ledger())
    origin = Origin("code", rung="container", shared_kernel=True)
    one = work.Work(run, origin, "say", lambda _: None, 0.0)
    one.operation, one.args_hash = ops.get("say"), "ab" * 32
    one.verdict = Verdict("allow", "say")
    intent, outcome = one.prepare()
    assert one.args_hash == "ab" * 32

    def read(body: bytes) -> rows.Row:
        return rows.unstored(rows.decode(rows.stamp(body, "x-1", 1.0, 1.0)))

    assert read(b'%b,"args_hash":"%b"}' % (intent, b"ab" * 32)) == one.row("intent")
    ended = b'%b,"args_hash":"%b","result_bytes":9,"duration":0.5,"ref":"x-0"}' % (outcome, b"ab" * 32)
    assert read(ended) == one.row("outcome", status="ok", result_bytes=9, duration=0.5, ref="x-0")

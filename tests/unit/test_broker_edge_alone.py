"""Only the edge reaches an operation's function, and nothing in it can tell tool from code (C2; reports 3 and 5)."""

from __future__ import annotations

import ast
import gc
import inspect
from pathlib import Path
from typing import Annotated

import lockgate
from lockgate.broker import edge, work
from lockgate.policy import Args, Operation, Operations, Result, Text

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
        operation.encode_result(Said(text="x"))
        own = {n for n in dir(operation) if not n.startswith("_") and callable(getattr(operation, n))}
        assert own == {"fn", "args_type", "result_type", "decode_args", "encode_result", "describe"}
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

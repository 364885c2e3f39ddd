"""Native code placed in a worker: what a defect of the engine would give its finder. For tests and controls alone.

Rule 1: it runs in the worker's own interpreter, with ctypes, behind the wall that runs of this rung have around them.
        A worker has it only if its zygote was started with `--native` or `--early-thread`; no configuration does that.
Rule 2: the answer of the code comes back as a run's result would, so that the same suites read it.
"""

from __future__ import annotations

import ast
import json
import threading
import traceback


def execute(source: bytes) -> bytes:
    """Run `source` here and return the body of a result frame; its last expression is the value."""
    names: dict[str, object] = {"__name__": "__main__"}
    value: object = None
    error = None
    try:
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<native>", "exec"), names)  # noqa: S102 - the job
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<native>", "eval"), names)  # noqa: S307 - the same
        encoded = json.dumps(value)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the answer
        encoded = "null"
        error = {"name": type(raised).__name__, "message": str(raised)[:1000], "traceback": traceback.format_exc()}
    head = json.dumps({"text": "", "error": error, "exit_code": int(error is not None), "truncated": {}})
    return f'{{"value":{encoded},{head[1:]}'.encode()


class Here:
    """Runs it in the thread that the guest would run in."""

    def run(self, source: bytes) -> bytes:
        """See `execute`."""
        return execute(source)


class Thread:
    """Runs it in a thread that is older than every step of the wall which binds one thread and those made later."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._source = b""
        self._answer = b""
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        self._asked.wait()
        self._answer = execute(self._source)
        self._answered.set()

    def run(self, source: bytes) -> bytes:
        """See `execute`."""
        self._source = source
        self._asked.set()
        self._answered.wait()
        return self._answer

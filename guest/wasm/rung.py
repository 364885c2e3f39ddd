"""The wasm rung's half of the guest: the door to the host, one run, its report.

Rule 1: it is planted when the image is made; the run's code can change all of it, as on every rung.
Rule 2: the door carries whole messages: one kind byte and a body out, the answer back. What they mean is written in
        runtimes/wasm/driver.py.
"""

import gc
import importlib
import os
import struct
import sys

import _host

host = host  # type: ignore[name-defined]  # noqa: F821, PLW0127 - placed here by the loader
runner = runner  # type: ignore[name-defined]  # noqa: F821, PLW0127 - the same
absent = absent  # type: ignore[name-defined]  # noqa: F821, PLW0127 - the same
loop = loop  # type: ignore[name-defined]  # noqa: F821, PLW0127 - the same
ints = ints  # type: ignore[name-defined]  # noqa: F821, PLW0127 - the same

_CAP = struct.Struct(">I")
_REHEARSALS = 16  # the interpreter adapts code after some calls, by writing to it: once here, not per run
_door = _host.call
_answers = []


def _write(data):
    """host.py's frames go out here: four bytes of length, then the body."""
    try:
        _answers.append(_door(b"Q" + data[4:]))
    except OSError:
        raise ConnectionError("the channel to the host is closed; this run is over") from None


def _frame(_channel):
    """host.py's answers come from here; each was there when its request had gone out."""
    return _answers.pop(0)


def _leave(code):
    """os._exit as the run sees it: its end with that code."""
    raise runner.Ended(code)


def _wait():
    _door(b"G")


def settle(preload, numbers):
    """Make the image's state: imports, streams, hooks; `numbers`: whether numpy's integers are put right."""
    os.chdir(runner.RUN_DIR)
    host._write = _write
    host._Channel.frame = _frame
    sys.modules["host"] = host
    for name in preload:
        importlib.import_module(name)
        if name == "numpy":
            ints.begin()
    os._exit, os.sysconf = _leave, runner.sysconf
    absent.settle()
    loop.settle()
    if numbers:
        ints.settle()
    sys.stdout = sys.__stdout__ = runner.stream(1)
    sys.stderr = sys.__stderr__ = runner.stream(2)
    sys.path[:] = ["", *sys.path]
    sys.argv[:] = [""]
    for _ in range(_REHEARSALS):
        runner.rehearse(runner.WARM_VALUE, runner.WARM_ERROR)
    gc.collect()
    gc.freeze()


def prepare():
    """What must not be shared between runs; once per restored image, before any run is known."""
    runner.prepare(cold=False)


def serve():
    """One run."""
    answer = _door(b"S")
    (cap,) = _CAP.unpack_from(answer)
    main = sys.modules["__main__"].__dict__
    _door(b"R" + runner.run(answer[4:], cap, main, _wait))

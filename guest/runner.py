"""The runner: executes one piece of code like a notebook cell, reports once, then waits for its end.

Rule 1: it runs after the last hardening step, with nothing to protect: the code can change every object here. What it
        sends is a claim, checked by whoever reads it.
Rule 2: one run. After the result nothing is done any more; the supervisor ends the process.

Wire on descriptor 4: "R" + JSON + newline goes out ("F" and the reason when the runner cannot work); then come 12
bytes (b"RUN2", u32 length of the source, u32 cap of the value), the source, and b"G" when it may run (until then it is
compiled and nothing of it runs); then one frame goes out, u32 length and
JSON {value, text, error, exit_code, truncated}.
"""

import ast
import builtins
import contextlib
import io
import json
import linecache
import os
import random
import struct
import sys
import threading
import time
import types

values = values  # type: ignore[name-defined]  # noqa: F821, PLW0127 - placed here by the loader
host = host  # type: ignore[name-defined]  # noqa: F821, PLW0127 - the same

CONTROL = 4
RUN_DIR = "/run"
HEADER = struct.Struct(">4sII")
WARM_VALUE = b"import math\nx = {'a': [1, 2.5, 'text', None, True], 'b': math.sqrt(2)}\ndef f():\n    return x\nf()\n"
WARM_ERROR = b"def f(n):\n    raise ValueError(n)\nf([1])\n"

_exit = os._exit


class Ended(BaseException):
    """os._exit() in the run's first process: the run's end with that code, not a death without a word."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code


def stream(fd):
    """Return a text stream on descriptor `fd`, a line at a time so that a caller can follow."""
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def fresh_main():
    """Return a new __main__ with `host` bound."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "host": host})
    sys.modules["__main__"] = main
    return main


def translate(source):
    """Return code objects for `source`: all but a last expression, and that expression; None where there is none."""
    text = source.decode("utf-8")
    lines = text.splitlines(True)
    linecache.cache[values.SOURCE_NAME] = (len(text), None, lines, values.SOURCE_NAME)
    tree = compile(text, values.SOURCE_NAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    body = last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), values.SOURCE_NAME, "eval", dont_inherit=True)
    if tree.body:
        body = compile(tree, values.SOURCE_NAME, "exec", dont_inherit=True)
    return body, last


def execute(source, namespace, wait):
    """Run `source`; return the value of its last expression, None if it does not end in one.

    `wait` returns when the host says go: compiling overlaps with the broker's answer, running does not.
    """
    try:
        body, last = translate(source)
    finally:
        wait()
    if body is not None:
        exec(body, namespace)
    return None if last is None else eval(last, namespace)  # noqa: S307 - the job


def exit_code(error):
    """Return the status that SystemExit or os._exit asks for, as sys.exit(3) documents it."""
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201 - what the interpreter does
    return 1


def wait_for_threads():
    """Let threads that are no daemons end, as the interpreter does at its own end."""
    if threading.active_count() > 1:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def flush():
    """Empty both streams, whatever the run did to them."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):  # closed, replaced or broken by the run: nothing is left to say
            stream.flush()


def run(source, cap, namespace, wait):
    """Execute `source` and return the body of the result frame."""
    result = {"text": "", "error": None, "exit_code": 0}
    value = None
    dropped = {}
    data = b"null"
    pid = os.getpid()
    try:
        value = execute(source, namespace, wait)
        wait_for_threads()
    except (SystemExit, Ended) as error:
        result["exit_code"] = exit_code(error)
    except BaseException as error:
        result["exit_code"] = 1
        result["error"] = values.as_error(error)
    if os.getpid() != pid:  # a child that the run forked and forgot comes out here too
        flush()
        _exit(result["exit_code"])
    if value is not None:
        try:
            encoded, dropped["value"] = values.as_json(value, cap)
            result["text"], dropped["text"] = values.as_text(value, cap)
            data = encoded or data
        except BaseException as error:  # KeyboardInterrupt, SystemExit from the run's own __repr__
            result["exit_code"] = 1
            result["error"] = values.as_error(error)
    flush()
    result["truncated"] = {name: count for name, count in dropped.items() if count}
    # The value is JSON already: it goes in as it is, first, so that a reader need not build it to check it.
    return b'{"value":' + data + b"," + values._encoder.encode(result).encode("utf-8", "replace")[1:]


def read_exactly(count):
    """Return `count` bytes of control; its end before code came is the end of an unused slot."""
    parts = []
    while count:
        part = os.read(CONTROL, min(count, 1 << 20))
        if not part:
            _exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def go():
    """Wait for the host's word that the run may begin."""
    if read_exactly(1) != b"G":
        _exit(98)


def write_all(data):
    """Write all of `data` to control."""
    view = memoryview(data)
    while view:
        view = view[os.write(CONTROL, view) :]


def leave(code):
    """os._exit as the run sees it."""
    if os.getpid() != 1 or threading.current_thread() is not threading.main_thread():
        _exit(code)
    raise Ended(code)


def sysconf(name):
    """os.sysconf without the host's memory: the kernel call behind it is refused and glibc would answer noise."""
    if name in (
        "SC_PHYS_PAGES",
        "SC_AVPHYS_PAGES",
        os.sysconf_names["SC_PHYS_PAGES"],
        os.sysconf_names["SC_AVPHYS_PAGES"],
    ):
        raise ValueError("the memory of the host is not visible here")
    return _sysconf(name)


_sysconf = os.sysconf


def rehearse(*codes):
    """Walk the paths of a run once.

    In the template it makes the lazy state that all slots then share; in a slot it copies the pages that a run is
    going to write, so that no caller waits for that.
    """
    for code in codes:
        run(code, 4096, fresh_main().__dict__, int)
    linecache.cache.pop(values.SOURCE_NAME, None)


def settle():
    """S17, the part that is the same for every slot; called once, in the template, before the first of them."""
    os.environ.clear()  # noqa: TID251 - the run's own, not a lockgate process's
    os.environ.update(HOME=RUN_DIR, TMPDIR=RUN_DIR)  # noqa: TID251
    os._exit, os.sysconf = leave, sysconf
    # Streams ask once what they stand on: it will be pipes.
    ends = os.pipe()
    for fd in (1, 2):
        os.dup2(ends[1], fd)
    sys.stdout = sys.__stdout__ = stream(1)
    sys.stderr = sys.__stderr__ = stream(2)
    os.dup2(0, 1)
    os.dup2(0, 2)
    for fd in ends:
        os.close(fd)
    for _ in range(16):  # the interpreter adapts code after some calls, by writing to it: once here, not per slot
        rehearse(WARM_VALUE, WARM_ERROR)


def prepare(cold):
    """S17, the part that must not be shared between slots, and the pages that a run would otherwise pay for."""
    host._start()
    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    if not cold:
        rehearse(WARM_VALUE)
    return fresh_main()


def serve(facts, since, cold):
    """Be the slot's last stage: prepare, say ready, take code, run it, report, wait for the end."""
    try:
        main = prepare(cold)
    except BaseException as error:
        report = {"step": "warmup", "errno": getattr(error, "errno", None) or 0, "detail": repr(error)[:500]}
        write_all(b"F" + json.dumps(report).encode() + b"\n")
        _exit(99)
    facts["stages_us"]["warmup"] = (time.perf_counter_ns() - since) // 1000
    write_all(b"R" + json.dumps(facts).encode() + b"\n")
    magic, length, cap = HEADER.unpack(read_exactly(HEADER.size))
    if magic != b"RUN2":
        _exit(98)
    body = run(read_exactly(length), cap, main.__dict__, go)
    write_all(struct.pack(">I", len(body)) + body)
    while os.read(CONTROL, 4096):
        pass
    _exit(0)

"""The worker: hardens itself step by step around one engine and one guest, parks, serves one run, waits for its end.

Rule 1: the order below is the outer wall of this rung; each step says why it stands where it does.
Rule 2: a step that fails ends the worker with status 99 before any code can arrive. There is no second try.
Rule 3: nothing of a run is known before the worker is parked, and it serves one.
Rule 4: what the guest asks for goes to the broker as it is: lengths are held to the cap before a byte is read. Who may
        do what is decided there (authorize), never here.
Rule 5: it never ends by itself after a run. The supervisor's SIGKILL is its end; EOF on control is the other.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from lockgate.contract.bounds import FRAME_BYTES
from lockgate.kernel import caps_unsafe as caps
from lockgate.kernel import landlock_unsafe as landlock
from lockgate.kernel import process_unsafe as process
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.runtimes import dialog
from lockgate.runtimes.nursery import NO_LIMITS, Child, Nursery, Stages, set_limits
from lockgate.runtimes.wasm import layout, native
from lockgate.runtimes.wasm.driver import Closed, Finished, GuestBroke, Instance, Limits

STEPS: Final = (
    "maps", "fds", "no_new_privs", "landlock", "engine", "ids", "deathsig", "rlimits", "caps", "dumpable", "prepare",
    "mdwe", "seccomp",
)  # fmt: skip
_FRAME: Final = struct.Struct(">I")
_REPLY_BYTES: Final = 4 * FRAME_BYTES  # from the broker, which holds results to a cap of its own
_MOST_AT_ONCE: Final = 64 * 1024
_NOFILE: Final = 64
_NPROC: Final = 64  # counts threads; one that cannot be made must be an error, not a wait


@dataclass
class Job:
    """What a worker knows when it is born: its descriptors, and what the zygote prepared."""

    nursery: Nursery
    child: Child
    mode: str
    proc: int
    null: int
    image: int
    stdlib: int
    engine_file: str
    landlock: int
    filter: Filter
    fail: str
    skip: frozenset[str]
    native: bool
    early_thread: bool


class Pipe:
    """A descriptor that is read and written to the last byte, waiting."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, count: int) -> bytes:
        """Return `count` bytes.

        Raises:
            EOFError: the other end is closed.

        """
        parts: list[bytes] = []
        while count:
            part = os.read(self._fd, min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


_channel: Final = Pipe(layout.FD_CHANNEL)
_control: Final = Pipe(layout.FD_CONTROL)
_streams: Final = {1: Pipe(1), 2: Pipe(2)}


def relay(body: bytes) -> bytes:
    """Give one request to the broker and return its answer.

    Raises:
        Closed: the broker took the channel back, or its answer is not as long as it says.

    """
    try:
        _channel.write(_FRAME.pack(len(body)) + body)
        data = os.read(layout.FD_CHANNEL, _MOST_AT_ONCE)  # nearly always all of the answer
        if len(data) < _FRAME.size:
            data += _channel.read(_FRAME.size - len(data))
        (length,) = _FRAME.unpack_from(data)
        missing = length - (len(data) - _FRAME.size)
        if not 0 < length <= _REPLY_BYTES or missing < 0:
            raise Closed
        return data[_FRAME.size :] + (_channel.read(missing) if missing else b"")
    except (EOFError, OSError):
        raise Closed from None


class Output:
    """Passes on what the guest writes: nothing is kept here, and who drains the pipe counts and caps.

    Attributes:
        live: whether there is a run; what our own rehearsal writes is thrown away.

    """

    live = False

    def __call__(self, fd: int, data: bytes) -> None:
        """Write all of it, waiting."""
        if self.live:
            _streams[fd].write(data)


# ---- hardening -------------------------------------------------------------------------------------------------------
def enter(job: Job) -> NoReturn:
    """Be the worker, to the end."""
    stages = Stages(job.fail)
    control = Pipe(job.child.fds[1])
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stages.next("maps")
        job.nursery.settle_child(job.child)
        stages.next("fds")
        _descriptors(job)
        control = _control
        hook = native.Thread() if job.early_thread else None  # a control: a thread that is older than the wall
        output = Output()
        instance, facts = _confine(job, stages, output)
        stages.next("ready")
    except BaseException as error:  # noqa: BLE001 - fail closed on anything
        _fail(control, stages.name, error)
    try:
        facts["stages_us"] = stages.microseconds
        _control.write(dialog.READY + json.dumps(facts).encode() + b"\n")
        _serve(instance, output, hook if hook is not None else native.Here() if job.native else None)
        while os.read(layout.FD_CONTROL, 4096):
            pass
    except EOFError:  # never used, or nobody waits for it any more
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nobody is there to hear it: its end says enough
        os._exit(dialog.STATUS_HARDENING_FAILED)
    os._exit(0)


def _descriptors(job: Job) -> None:
    """0 null, 1 stdout, 2 stderr, 3 channel, 4 control, 5 image, 6 library, and nothing else."""
    channel, control, stdout, stderr = job.child.fds
    sources = (job.null, stdout, stderr, channel, control, job.image, job.stdlib)
    lifted = [_lift(fd) for fd in sources]  # a target's number may be a source's
    for target, fd in enumerate(lifted):
        os.dup2(fd, target, inheritable=False)
    process.close_from(len(lifted))


def _lift(fd: int) -> int:
    lifted = os.dup(fd)
    while lifted <= layout.FD_STDLIB:
        lifted = os.dup(lifted)
    return lifted


def _confine(job: Job, stages: Stages, output: Output) -> tuple[Instance, dict[str, Any]]:
    """From here on each step locks the door that the one before it needed open."""
    skip = job.skip
    facts: dict[str, Any] = {
        "userns": job.mode,
        "landlock": 0,
        "mdwe": False,
        "filter": 0,
        "skipped": sorted(skip),
    }
    stages.next("no_new_privs")
    process.no_new_privileges()  # first: Landlock and seccomp demand it, and threads inherit it
    stages.next("landlock")
    # Before the engine: it binds this thread and the threads made later, and not one that is there already.
    if job.landlock and "landlock" not in skip:
        landlock.confine(job.landlock, (), (), readable=(), readable_files=(job.engine_file,))
        facts["landlock"] = job.landlock
    stages.next("engine")
    # Before the ids: the compiled module belongs to whom the zygote is, and nobody else may read it.
    instance = Instance(
        job.engine_file,
        layout.FD_STDLIB,
        layout.FD_IMAGE,
        Limits(memory=1 << 32, disk=1 << 30, inodes=1 << 20),  # of our own code; a run's come with it
        output=output,
        relay=relay,
    )
    process.close_from(layout.FD_IMAGE)  # both are mapped
    stages.next("ids")
    own = job.mode != "none" and "ids" not in skip
    if own:
        process.become(layout.NOBODY, layout.NOBODY)  # on this host: an id that no other live worker has
    stages.next("deathsig")
    process.die_with_parent()  # after the ids: a change of credentials clears it
    stages.next("rlimits")
    _limits(job.child.request["bounds"], tasks=_NPROC if own else None)
    stages.next("caps")
    if "caps" not in skip:
        (caps.drop_all if job.mode != "none" else caps.drop_sets)()
    stages.next("dumpable")
    process.set_dumpable(0)
    stages.next("prepare")
    instance.prepare()  # now the second thread is born, with no more rights than this one
    if not own:
        set_limits({resource.RLIMIT_NPROC: 0})
    stages.next("mdwe")
    if "mdwe" not in skip:
        facts["mdwe"] = process.refuse_exec_gain()  # the machine code is mapped: none is made from now on
    stages.next("seccomp")
    if "seccomp" not in skip:
        job.filter.install(every_thread=True)  # last: every step above uses calls that it ends the process for
        facts["filter"] = job.filter.length
    return instance, facts


def _limits(bounds: dict[str, Any], tasks: int | None) -> None:
    """Set every limit. `tasks` is None without an id of its own: whatever else the user runs would count, too."""
    limits = {
        resource.RLIMIT_NOFILE: _NOFILE,
        **NO_LIMITS,
        resource.RLIMIT_FSIZE: 0,  # there is no file to write
        resource.RLIMIT_CPU: max(1, -int(-bounds["cpu"] // 1)),
    }
    if tasks is not None:
        limits[resource.RLIMIT_NPROC] = tasks
    set_limits(limits)


def _fail(control: Pipe, step: str, error: BaseException) -> NoReturn:
    report = {
        "step": step,
        "errno": getattr(error, "errno", None) or 0,
        "detail": f"{type(error).__name__}: {error}"[:500],  # a line of at most READY_LINE_BYTES
    }
    try:
        control.write(dialog.FAILED + json.dumps(report).encode() + b"\n")
    finally:
        os._exit(dialog.STATUS_HARDENING_FAILED)


# ---- one run ---------------------------------------------------------------------------------------------------------
def _serve(instance: Instance, output: Output, hook: native.Here | native.Thread | None) -> None:
    """Take code, run it when the word comes, report."""
    header = _control.read(layout.CODE_HEADER.size)
    magic, length, cap, memory, disk, inodes, seconds = layout.CODE_HEADER.unpack(header)
    if magic != layout.CODE_MAGIC:
        raise EOFError
    source = _control.read(length)
    if hook is not None:
        _go()
        _report(hook.run(source))
        return
    instance.limit(Limits(memory=memory, disk=disk, inodes=inodes))
    output.live = True
    try:
        finished = instance.run(source, cap, _go, seconds or None)
    except GuestBroke:
        _report(layout.BROKE)
        return
    _report(_body(finished))


def _go() -> None:
    if _control.read(1) != dialog.GO:
        raise EOFError


def _body(finished: Finished) -> bytes:
    if finished.result is not None:
        return finished.result
    if finished.stopped == "time":
        return layout.STOPPED
    if finished.stopped == "exit":
        code = finished.exit_code or 1  # leaving without a result is no success
        return _no_result(code, f"the code ended its process with status {code}")
    return _no_result(128 + signal.SIGABRT, f"the code was ended by a fault of its own: {finished.detail or 'a trap'}")


def _no_result(code: int, message: str) -> bytes:
    error = {"name": "NoResult", "message": message, "traceback": ""}
    return json.dumps({"value": None, "text": "", "error": error, "exit_code": code, "truncated": {}}).encode()


def _report(body: bytes) -> None:
    _control.write(dialog.RESULT_HEADER.pack(len(body)) + body)

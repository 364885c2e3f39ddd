"""The two heavy steps, each a process of its own: `python -I -m lockgate.runtimes.wasm.workshop compile|image ...`.

Rule 1: one step, one process: its memory is gone with it, and a step that dies takes nothing along.
Rule 2: an image is made with a fixed stream of randomness and a clock that steps: the same recipe, the same bytes.
Rule 3: an image is taken between two turns, with no file open: then linear memory is the guest's whole state.

compile MODULE OUT                          compile a guest module; writes the machine code to OUT
image SET CODE STDLIB OUT                   make the memory image of SET; writes it to OUT
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Final

from lockgate.runtimes.wasm import engine_unsafe, image_recipe
from lockgate.runtimes.wasm.driver import Core, Limits

_EPOCH: Final = 1_700_000_000_000_000_000  # ns: what the clock of a build begins with
_STEP: Final = 1_000  # ns from one look at the clock to the next
_MEMORY: Final = 1 << 30
_SHOWN: Final = 4096


class _Stream:
    """Randomness that is the same in every build: SHA-256 of a counter."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, count: int) -> bytes:
        blocks: list[bytes] = []
        for _ in range(-(-count // 32)):
            blocks.append(hashlib.sha256(b"lockgate image %d" % self._count).digest())
            self._count += 1
        return b"".join(blocks)[:count]


class _Clock:
    """A clock that steps each time it is looked at."""

    def __init__(self) -> None:
        self._now = _EPOCH

    def __call__(self, _number: int) -> int:
        self._now += _STEP
        return self._now


def make_image(set_name: str, code: str, stdlib: Path) -> bytes:
    """Return the memory image of a set.

    Args:
        set_name: see image_recipe.SETS.
        code: path of the compiled guest.
        stdlib: the standard library's archive.

    Raises:
        EngineError: the guest could not be started, or what was planted failed; its words are in the message.

    """
    said = bytearray()

    def output(_fd: int, data: bytes) -> None:
        said[:] = (said + data)[-_SHOWN:]

    fd = os.open(stdlib, os.O_RDONLY | os.O_CLOEXEC)
    try:
        core = Core(
            code, fd, Limits(memory=_MEMORY, disk=0, inodes=1), output=output, clock=_Clock(), entropy=_Stream()
        )
    finally:
        os.close(fd)
    if status := core.turn(image_recipe.boot(set_name)):
        raise engine_unsafe.EngineError(f"planting ended with {status}: {said.decode('utf-8', 'replace')}")
    if said:
        raise engine_unsafe.EngineError(f"planting was not silent: {said.decode('utf-8', 'replace')}")
    if left := core.wasi.open_files():
        raise engine_unsafe.EngineError(f"planting left {left} files open")
    return core.guest.memory.read(0, core.guest.memory.size())


def main(arguments: list[str]) -> int:
    """Do one step; 0, or 1 with the reason on stderr."""
    try:
        if arguments[0] == "compile":
            module, out = arguments[1:]
            data = engine_unsafe.compile_module(engine_unsafe.new_engine(), Path(module))
        else:
            set_name, code, stdlib, out = arguments[1:]
            data = make_image(set_name, code, Path(stdlib))
    except engine_unsafe.EngineError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the parent process reads it
        return 1
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - with a mode
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Assembler for classic BPF, as seccomp(2) takes it. Pure: it makes bytes, it installs nothing.

Rule 1: jumps go forward only and land on an instruction that exists; `assemble` checks both.
Rule 2: numbers are grouped into segments of equal action and searched by a balanced tree: a chain of comparisons
        took three times as long to install and to walk.

Sources: linux/filter.h (struct sock_filter, 8 bytes: u16 code, u8 jt, u8 jf, u32 k), linux/seccomp.h (struct
seccomp_data: nr at 0, arch at 4, args at 16 + 8 i), Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

LD_W_ABS: Final = 0x20
JMP_JA: Final = 0x05
JMP_JEQ: Final = 0x15
JMP_JGE: Final = 0x35
JMP_JSET: Final = 0x45
ALU_AND: Final = 0x54
RET: Final = 0x06

KILL_PROCESS: Final = 0x80000000
ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000

NR: Final = 0
ARCH: Final = 4
MAX_INSTRUCTIONS: Final = 4096  # BPF_MAXINSNS
_FAR: Final = 255


def arg(index: int) -> int:
    """Offset of the low half of argument `index` (little-endian, enough for the 32-bit arguments tested here)."""
    return 16 + 8 * index


@dataclass(frozen=True)
class Instruction:
    """One instruction; `true` and `false` are labels, or None for the next instruction."""

    code: int
    k: int
    true: str | None = None
    false: str | None = None


@dataclass
class Program:
    """Instructions and the labels between them."""

    body: list[Instruction] = field(default_factory=list[Instruction])
    labels: dict[str, int] = field(default_factory=dict[str, int])

    def label(self, name: str) -> None:
        """Name the place of the next instruction."""
        if name in self.labels:
            raise ValueError(f"label {name!r} is set twice")
        self.labels[name] = len(self.body)

    def emit(self, code: int, k: int, true: str | None = None, false: str | None = None) -> None:
        """Append one instruction."""
        self.body.append(Instruction(code, k, true, false))

    def load(self, offset: int) -> None:
        """Load the word at `offset` of seccomp_data."""
        self.emit(LD_W_ABS, offset)

    def ret(self, action: int) -> None:
        """Answer with `action`."""
        self.emit(RET, action)

    def jump(self, label: str) -> None:
        """Go to `label`, at any distance."""
        self.emit(JMP_JA, 0, label)


def tree(program: Program, segments: list[tuple[int, int | str]], leaf: str) -> None:
    """Emit a balanced search over `segments`, sorted pairs of (first number, action or label of a routine).

    The first segment starts at 0 and the last has no end. `leaf` is a prefix for the labels made here.
    """
    if len(segments) == 1:
        action = segments[0][1]
        if isinstance(action, int):
            program.ret(action)
        else:
            program.jump(action)
        return
    middle = len(segments) // 2
    right = f"{leaf}r"
    program.emit(JMP_JGE, segments[middle][0], right)
    tree(program, segments[:middle], f"{leaf}l")
    program.label(right)
    tree(program, segments[middle:], f"{leaf}r")


def begin(audit: int, x32: int | None, segments: list[tuple[int, int | str]]) -> Program:
    """Return a program that ends what is of another architecture and decides the rest by its number.

    Args:
        audit: AUDIT_ARCH_* of the one architecture. x32: first number of a second ABI that it covers too, or None.
        segments: as in `tree`; the routines that they name are for the caller to add.

    """
    program = Program()
    program.load(ARCH)
    program.emit(JMP_JEQ, audit, None, "kill")
    program.load(NR)
    if x32 is not None:
        program.emit(JMP_JGE, x32, "kill", "search")
    else:
        program.jump("search")
    program.label("kill")
    program.ret(KILL_PROCESS)
    program.label("search")
    tree(program, segments, "t")
    return program


def joined(actions: list[int | str]) -> list[tuple[int, int | str]]:
    """Return the actions of the numbers 0, 1, 2, ... as segments; the last stands for all numbers above too."""
    return [(nr, action) for nr, action in enumerate(actions) if nr == 0 or action != actions[nr - 1]]


def _widened(program: Program) -> Program:
    """Give conditional jumps that reach too far an unconditional one of their own (8-bit against 32-bit offsets)."""
    while True:
        target = program.labels
        for index, one in enumerate(program.body):
            if one.code == JMP_JA or one.true is None:
                continue
            if target[one.true] - index - 1 > _FAR:
                near = f"far{len(program.body)}"
                body = list(program.body)
                # "if true goto far" becomes "if not true skip one; goto far".
                body[index] = Instruction(one.code, one.k, None, near)
                body.insert(index + 1, Instruction(JMP_JA, 0, one.true))
                labels = {name: at + (at > index) for name, at in target.items()}
                labels[near] = index + 2
                program = Program(body, labels)
                break
        else:
            return program


def assemble(program: Program) -> bytes:
    """Return the program as an array of struct sock_filter.

    Raises:
        ValueError: a label is missing, a jump goes backwards or too far, or the program is too long.

    """
    program = _widened(program)
    if not 0 < len(program.body) <= MAX_INSTRUCTIONS:
        raise ValueError(f"{len(program.body)} instructions, but a filter holds 1..{MAX_INSTRUCTIONS}")
    out = bytearray()
    for index, one in enumerate(program.body):
        true = 0 if one.true is None else program.labels[one.true] - index - 1
        false = 0 if one.false is None else program.labels[one.false] - index - 1
        if true < 0 or false < 0 or index + 1 + max(true, false) >= len(program.body) + (one.code == RET):
            raise ValueError(f"instruction {index} jumps outside the program")
        if one.code == JMP_JA:
            out += struct.pack("=HBBI", one.code, 0, 0, true)
        elif true > _FAR or false > _FAR:
            raise ValueError(f"instruction {index} jumps too far")
        else:
            out += struct.pack("=HBBI", one.code, true, false, one.k)
    return bytes(out)

"""QEMU's machine protocol, sans-I/O: lines of JSON, one answer for each command, events between them.

Rule 1: an answer is at most 64 KiB; a longer line, or one that is no JSON object, is the end of this VMM.
Rule 2: commands are asked one after another; an answer that nobody asked for is an error too.

Source: docs/interop/qmp-spec.rst of QEMU.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec

LINE_BYTES: Final = 64 * 1024


class _Error(msgspec.Struct):
    desc: str = ""


class _Line(msgspec.Struct):
    """One line of the VMM: a greeting, an event, or an answer."""

    greeting: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="QMP")
    event: str | msgspec.UnsetType = msgspec.UNSET
    answer: Any = msgspec.field(default=None, name="return")
    error: _Error | None = None


_lines: Final = msgspec.json.Decoder(_Line)


class QmpError(Exception):
    """The VMM broke the protocol, or refused a command."""


class Qmp:
    """One conversation.

    Attributes:
        greeted: whether the VMM has spoken; before that it takes no command.

    """

    def __init__(self) -> None:
        self._inbox = bytearray()
        self._asked: deque[str] = deque()
        self.greeted = False

    def ask(self, command: str, **arguments: object) -> bytes:
        """Return the bytes that ask for `command`."""
        self._asked.append(command)
        message: dict[str, object] = {"execute": command}
        if arguments:
            message["arguments"] = arguments
        return msgspec.json.encode(message) + b"\n"

    def feed(self, data: bytes) -> list[tuple[str, Any]]:
        """Take bytes; return (command, its answer) for each that was answered, and ("greeting", None) once.

        Raises:
            QmpError: the protocol was broken, or a command refused.

        """
        self._inbox += data
        answers: list[tuple[str, Any]] = []
        while (end := self._inbox.find(b"\n")) >= 0:
            line = bytes(self._inbox[:end])
            del self._inbox[: end + 1]
            if line.strip():
                answers += self._line(line)
        if len(self._inbox) > LINE_BYTES:
            raise QmpError("a line of the VMM has no end")
        return answers

    def _line(self, raw: bytes) -> list[tuple[str, Any]]:
        try:
            line = _lines.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise QmpError("a line of the VMM is not of its protocol") from None
        if line.greeting is not msgspec.UNSET:
            if self.greeted:
                raise QmpError("the VMM greeted twice")
            self.greeted = True
            return [("greeting", None)]
        if line.event is not msgspec.UNSET:
            return []
        if not self._asked:
            raise QmpError("the VMM answered what nobody asked")
        command = self._asked.popleft()
        if line.error is not None:
            raise QmpError(f"{command}: {line.error.desc[:300]}")
        return [(command, line.answer)]

"""Streaming: chunks in, safe text out, never a prefix that a later chunk turns live.

Rule 1: whole pieces only. A piece ends at a blank line outside a fence that is followed by a line which can continue no
        list; each piece is rebuilt alone, so a later reference definition finds nothing live to change.
Rule 2: where a piece ends depends on the characters alone, never on how they were chunked.
Rule 3: what is held back is bounded. A piece longer than the bound goes out as plain text, and so does the rest of it.
Rule 4: budgets and canaries run over the whole message, not over a piece.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Final

from lockgate.render.policy import Denial, Rendered

HELD: Final = 64 * 1024  # characters held back at most

_FENCE: Final = re.compile(r" {0,3}(`{3,}(?=[^`\n]*$)|~{3,})")
_CONTINUES: Final = re.compile(r"[ \t]|[-+*](?:[ \t]|$)|[0-9]{1,9}[.)](?:[ \t]|$)|\[\^")
_RAW: Final = re.compile(r"(?i)<(script|pre|style|textarea)\b|(<!--)|(<\?)|(<!\[CDATA\[)|(<![a-z])")

Piece = Callable[[str, bool], Rendered]  # (text, plain) -> what may be shown


class Stream:
    """Takes chunks of any size and returns what may be shown so far.

    Args:
        piece: renders one piece, rich or plain.
        blocks: whether pieces are blocks of Markdown; otherwise they are lines.
        watch: sees all text so far in a sliding window; True withholds the rest (a canary).

    Attributes:
        denials: of the whole message so far.

    """

    def __init__(self, piece: Piece, *, blocks: bool, watch: Callable[[str], bool]) -> None:
        self.denials: list[Denial] = []
        self.fell_back = False
        self.withheld = False
        self._piece = piece
        self._blocks = blocks
        self._watch = watch
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""  # the last, unfinished line
        self._held: list[str] = []  # finished lines of the open piece
        self._size = 0
        self._fence: tuple[str, int] | None = None
        self._raw: re.Pattern[str] | None = None
        self._blank = False
        self._plain = False
        self._emitted = False
        self._closed = False
        self._pending_cr = False

    def feed(self, chunk: str | bytes) -> str:
        """Take a chunk; return what may be shown now, often nothing."""
        if self._closed:
            raise ValueError("the stream is closed")
        text = self._decoder.decode(chunk) if isinstance(chunk, bytes) else chunk
        return self._feed(text)

    def close(self) -> str:
        """End the message: what is open is rendered as it stands."""
        if self._closed:
            return ""
        out = self._feed(self._decoder.decode(b"", True))
        self._closed = True
        if self._pending_cr:
            out += self._finish("\r")
            self._pending_cr = False
        if self._line:
            out += self._take(self._line)
            self._line = ""
        return out + self._flush()

    def _feed(self, text: str) -> str:
        out: list[str] = []
        if self._pending_cr and text:
            text = "\r" + text
            self._pending_cr = False
        if text.endswith("\r"):
            text = text[:-1]
            self._pending_cr = True
        text = text.replace("\r\n", "\n").replace("\r", "\n") if self._blocks else text.replace("\r\n", "\n")
        parts = (self._line + text).split("\n")
        self._line = parts.pop()
        out.extend(self._finish(part) for part in parts)
        while len(self._line) > HELD:
            out.append(self._long(self._line[:HELD]))
            self._line = self._line[HELD:]
        return "".join(out)

    def _finish(self, line: str) -> str:
        out = ""
        while len(line) > HELD:
            out += self._long(line[:HELD])
            line = line[HELD:]
        return out + self._take(line + "\n")

    def _long(self, part: str) -> str:
        """A line that alone is longer than the bound leaves in plain pieces of exactly the bound."""
        out = self._flush()
        self._plain = True
        return out + self._show(part)

    def _take(self, line: str) -> str:
        if not self._blocks:
            return self._show(line)
        out = ""
        bare = line.rstrip("\n")
        if self._blank and self._fence is None and self._raw is None and bare.strip() and not _CONTINUES.match(bare):
            out = self._flush()
        if self._size + len(line) > HELD:
            out += self._flush()
            self._plain = True
        self._held.append(line)
        self._size += len(line)
        self._follow(bare)
        return out

    def _follow(self, bare: str) -> None:
        """Track fences and raw HTML blocks, which blank lines do not end."""
        self._blank = not bare.strip()
        # A container's own marks come before a fence or a tag inside it.
        inner = re.sub(r"^(?:[ \t]*(?:>|[-+*](?=[ \t])|[0-9]{1,9}[.)](?=[ \t])))+[ \t]?", "", bare)
        if self._fence is not None:
            mark, length = self._fence
            run = inner.strip(" \t")
            if run and set(run) == {mark} and len(run) >= length:
                self._fence = None
            return
        if self._raw is not None:
            if self._raw.search(bare):
                self._raw = None
            return
        match = _FENCE.match(inner) or _FENCE.match(inner.lstrip(" \t"))
        if match:
            self._fence = (match[1][0], len(match[1]))
            return
        html = _RAW.search(bare)
        if html:
            ends = (f"(?i)</{html[1]}>", "-->", r"\?>", r"\]\]>", ">")
            end = re.compile(next(pattern for group, pattern in zip(html.groups(), ends, strict=True) if group))
            if not end.search(bare, html.end()):
                self._raw = end

    def _flush(self) -> str:
        if not self._held:
            self._plain = False
            return ""
        text = "".join(self._held)
        self._held.clear()
        self._size = 0
        plain, self._plain = self._plain, False
        return self._show(text, plain=plain)

    def _show(self, text: str, *, plain: bool | None = None) -> str:
        if self.withheld:
            return ""
        if self._watch(text):
            self.withheld = True
        made = self._piece(text, self._plain if plain is None else plain)
        self.denials.extend(made.denials)
        self.fell_back = self.fell_back or made.fell_back
        if self.withheld:
            return ""
        if self._blocks and made.text:
            lead = "\n" if self._emitted else ""
            self._emitted = True
            return lead + made.text
        return made.text

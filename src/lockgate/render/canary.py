"""Finds planted values in what is about to be shown, however they were written.

Rule 1: the needles are made once per policy; the haystack is read as it stands and in every normal form below.
Rule 2: a hit withholds the whole message: a part of it is as bad as all.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from lockgate.render.visible import INVISIBLE

_SEPARATORS: Final = re.compile(r"[\s.,:;_\-/\\|+*~`'\"()\[\]{}<>]+")
_LEAST: Final = 8


def needles(values: Iterable[str]) -> tuple[str, ...]:
    """Return the forms of each value that are looked for, lower-case where letter case carries nothing."""
    found: set[str] = set()
    for value in values:
        raw = value.encode()
        for form in (raw, raw[::-1]):
            text = form.decode("utf-8", "replace").casefold()
            found |= {text, form.hex(), base64.b32encode(form).decode().rstrip("=").casefold()}
            found.add(_SEPARATORS.sub("", text))
            for lead in range(3):
                # Characters at both edges depend on their neighbours, so they are dropped.
                body = base64.b64encode(b"\0" * lead + form).decode().rstrip("=")
                cut = body[(0, 2, 3)[lead] : len(body) - 1]
                found |= {cut.casefold(), cut.translate({43: 45, 47: 95}).casefold()}
    return tuple(sorted(one for one in found if len(one) >= _LEAST))


def hit(text: str, wanted: tuple[str, ...]) -> bool:
    """Whether one of the needles is in `text`, as written or normalised."""
    if not wanted:
        return False
    forms = {text.casefold()}
    decoded = INVISIBLE.sub("", text)
    for _ in range(3):
        decoded = html.unescape(unquote(decoded))
        forms.add(decoded.casefold())
    forms.add(_SEPARATORS.sub("", decoded).casefold())
    return any(needle in form for form in forms for needle in wanted)

"""The render guard against cmark-gfm's own parse of the same text, and its growth with size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import cmarkgfm

from common import emit, interleave, row
from lockgate.render import Guard, RenderPolicy

LINK = "https://wiki.partner.example/a/"
CMARK = "cmark-gfm parse and render, in process"
RULES = {"links": ["https://wiki.partner.example/*"], "images": ["https://img.partner.example/pub/*"]}
WORDS = "a lazy dog at 10:30 with setup.py and version 1.2 of snake_case jumps over the fox".split()  # noqa: SIM905


def answer(size: int, seed: int = 5) -> str:
    """An ordinary model answer of `size` characters."""
    rnd = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rnd.choice(WORDS) for _ in range(count))

    parts: list[str] = []
    total = 0
    while total < size:
        part = rnd.choice(
            [
                words(40) + ".",
                f"{words(12)} **{words(2)}** and [{words(2)}]({LINK}{rnd.randint(1, 5)}) {words(9)}.",
                "\n".join(f"- {words(8)}" for _ in range(4)),
                f"## {words(5)}",
                "```python\n" + "\n".join(f"x = f({n})" for n in range(6)) + "\n```",
                "| a | b |\n|---|---|\n" + "\n".join(f"| {words(2)} | `{n}` |" for n in range(4)),
                f"> {words(14)}",
            ]
        )
        parts.append(part)
        total += len(part) + 2
    return "\n\n".join(parts)[:size]


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Return a source of seconds."""

    def once() -> float:
        began = time.thread_time()  # CPU seconds: nothing here waits, and a busy machine should not count
        call()
        return time.thread_time() - began

    return once


def guard(check: int, size: int = 2**18) -> Guard:
    """A guard with or without its self-check."""
    return Guard(RenderPolicy.of(**RULES, max_urls=100, max_run_urls=10**9, check_every=check, max_bytes=size))


def cost() -> None:
    """4 KiB, with the self-check off and on."""
    text = answer(4096)
    off, on = guard(0), guard(1)
    reference, bare, checked, page = interleave(
        250,
        timed(lambda: cmarkgfm.github_flavored_markdown_to_html(text)),
        timed(lambda: off.markdown(text)),
        timed(lambda: on.markdown(text)),
        timed(lambda: on.html(text)),
    )
    made = on.markdown(text)
    if made.fell_back or made.denials:
        raise SystemExit("the bench text is not rendered as it should be")
    emit(
        row("render markdown, 4 KiB, self-check off", bare, unit="s", bar=12, reference=CMARK, against=reference),
        row("render markdown, 4 KiB, self-check on", checked, unit="s", bar=30, reference=CMARK, against=reference),
        row("render html, 4 KiB, self-check on", page, unit="s", bar=30, reference=CMARK, against=reference),
    )


def per_byte(text: str) -> float:
    """Seconds a byte of one message."""
    subject = guard(0, 2**21)
    return timed(lambda: subject.markdown(text))() / len(text)


def growth() -> None:
    """1 KiB to 1 MiB: time per byte at the large end over time per byte at 16 KiB."""
    shapes: dict[str, Callable[[int], str]] = {
        "ordinary answers": answer,
        "a flood of [": lambda n: "[" * n,
        "a flood of ![": lambda n: "![" * (n // 2),
        "a flood of [x](": lambda n: "[x](" * (n // 4),
        "a flood of *": lambda n: "*a " * (n // 3),
        "a flood of backticks": lambda n: " ".join("`" * (1 + k % 60) for k in range(n // 31))[:n],
        "a flood of <": lambda n: "<" * n,
        "a flood of <b>": lambda n: "<b>" * (n // 3),
        "nested quotes": lambda n: ("> " * 30 + "x\n") * (n // 62),
        "nested lists": lambda n: "".join("  " * (k % 30) + "- x\n" for k in range(n // 34)),
        "one line of words": lambda n: "word " * (n // 5),
        "URLs": lambda n: "https://attacker.example/a " * (n // 27),
        "invisible": lambda n: "a\u200b" * (n // 4),
        "table rows": lambda n: "|a|b|\n|-|-|\n" + "|x|y|\n" * (n // 6),
    }
    for name, make in shapes.items():
        small, large = 16 * 1024, 1024 * 1024
        fast = [per_byte(make(small)) for _ in range(5)]
        slow = [per_byte(make(large)) for _ in range(3)]
        emit(row(f"growth: {name}", slow, unit="s", bar=4, reference="per byte at 16 KiB", against=fast))


if __name__ == "__main__":
    cost()
    growth()

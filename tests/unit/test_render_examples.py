"""The programs of examples/render are true: each runs where its framework is installed (E5)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from lockgate.render import Guard

FOLDER = Path(__file__).parents[2] / "examples" / "render"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in [name for name in sys.modules if name.endswith("_app") or name == "guarding"]:
        monkeypatch.delitem(sys.modules, name)


def test_fastapi() -> None:
    pytest.importorskip("fastapi")
    import fastapi_app  # type: ignore[import-not-found]
    from fastapi.testclient import TestClient

    got = TestClient(fastapi_app.app).get("/ask", params={"message": "hi <b>"})
    assert "evil.example" not in got.text
    assert 'href="https://docs.example.com/start"' in got.text
    assert "img-src https://cdn.example.com/charts/" in got.headers["content-security-policy"]


def test_slack() -> None:
    pytest.importorskip("slack_sdk")
    import slack_app  # type: ignore[import-not-found]

    sent: list[dict[str, Any]] = []

    class Client:
        def chat_postMessage(self, **arguments: Any) -> None:  # noqa: N802
            sent.append(arguments)

    slack_app.answer(Client(), "C1", "hi")
    assert sent[0]["unfurl_links"] is False
    assert "evil.example" not in str(sent)


def test_gradio() -> None:
    pytest.importorskip("gradio")
    import gradio_app  # type: ignore[import-not-found]

    assert "evil.example" not in gradio_app.answer("hi", [])


def test_streamlit() -> None:
    testing = pytest.importorskip("streamlit.testing.v1")
    at = testing.AppTest.from_file(str(FOLDER / "streamlit_app.py")).run()
    at.chat_input[0].set_value("hi").run()
    assert not at.exception
    assert "evil.example" not in at.markdown[0].value


def test_every_program_calls_only_what_the_guard_has() -> None:
    """Without the frameworks, at least the names hold."""
    for file in FOLDER.glob("*_app.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Call)
                and "guard_for" in ast.dump(node.value.func)
            ):
                assert hasattr(Guard, node.attr), (file.name, node.attr)

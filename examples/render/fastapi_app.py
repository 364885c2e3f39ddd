"""FastAPI: the page gets rebuilt HTML, and headers as the second lock."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from guarding import audited, guard_for, model

app = FastAPI()


@app.get("/ask", response_class=HTMLResponse)
def ask(message: str) -> HTMLResponse:
    """Answer one message."""
    guard = guard_for(message)
    shown = audited(guard.html(model(message)))
    return HTMLResponse(f"<!doctype html><meta charset=utf-8>{shown.text}", headers=guard.headers())

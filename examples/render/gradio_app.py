"""Gradio: the chatbot draws Markdown, so it gets rebuilt Markdown; sanitize_html stays on."""

from __future__ import annotations

from typing import Any

import gradio as gr
from guarding import audited, guard_for, model


def answer(message: str, history: list[Any]) -> str:
    """Answer one message."""
    del history
    return audited(guard_for(message).markdown(model(message))).text


demo = gr.ChatInterface(answer, chatbot=gr.Chatbot(sanitize_html=True))

if __name__ == "__main__":
    demo.launch()

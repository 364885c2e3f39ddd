"""Chainlit: streamed, so that what is shown was rebuilt piece by piece; unsafe_allow_html stays false."""

from __future__ import annotations

import chainlit as cl
from guarding import guard_for, log, model


@cl.on_message
async def answer(message: cl.Message) -> None:
    """Answer one message."""
    stream = guard_for(message.content).stream("markdown")
    shown = cl.Message("")
    for chunk in model(message.content).split(" "):
        await shown.stream_token(stream.feed(chunk + " "))
    await shown.stream_token(stream.close())
    for denial in stream.denials:
        log.warning("denied %s: %s %s", denial.kind, denial.reason, denial.host)
    await shown.update()

"""Slack: rich_text blocks with unfurling off; nothing of the answer is parsed as mrkdwn."""

from __future__ import annotations

from guarding import audited, guard_for, model
from slack_sdk import WebClient


def answer(client: WebClient, channel: str, message: str) -> None:
    """Answer one message."""
    shown = audited(guard_for(message).slack(model(message)))
    client.chat_postMessage(channel=channel, **shown.data)

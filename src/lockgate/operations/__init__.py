"""Operations that come with lockgate: they are registered like your own, and entered by the same edge.

    import lockgate as lg
    from lockgate.operations import anthropic_messages, openai_chat

    ops = lg.Operations()
    anthropic_messages(ops, backend="anthropic")

Only the broker imports this package.
"""

from lockgate.operations.model import anthropic_messages, openai_chat

__all__ = ["anthropic_messages", "openai_chat"]

"""The model as an operation (E1): one generation path of a vendor, with our credential, and nothing else of it.

Rule 1: what may be asked is `policy.model_rules`, checked inside `authorize()`: a refusal is an ordinary denial with
        its row and its alert, before any connection.
Rule 2: model, limit (in tokens) and body are arguments of their own: a scope names models, a budget counts tokens.
Rule 3: the path is built here, the host is the backend's, the credential is the broker's. No redirect and no retry.
Rule 4: the credential stays on loan until the reply was searched for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec

from lockgate.broker.call import Call
from lockgate.broker.failures import BackendTooLarge, BackendUnclear
from lockgate.contract.errors import RegistrationError
from lockgate.operations.streams import STREAMS
from lockgate.policy import Args, Operations, Result
from lockgate.policy.host import Refusal
from lockgate.policy.model_grammar import Refused
from lockgate.policy.model_rules import BETAS, Api, compact, judge_parsed, parse
from lockgate.policy.types import Id, Int, ListOf, Stage, Text

BODY_CHARS: Final = 960_000
"""Of the request beside model and limit: it comes in one frame of 1 MiB."""
ANSWER_BYTES: Final = 900_000
STREAM_BYTES: Final = 32 * 1024 * 1024
MAX_RESULT: Final = 1024 * 1024 - 1024
VERSION: Final = "2023-06-01"
STREAM_OPERATION: Final = "model_stream"
_OWN: Final = ("model", "max_tokens", "max_completion_tokens", "stream")
_SCOPE: Final = ("generate",)

Beta = Literal[
    "context-1m-2025-08-07",
    "fine-grained-tool-streaming-2025-05-14",
    "interleaved-thinking-2025-05-14",
    "output-128k-2025-02-19",
    "prompt-caching-2024-07-31",
    "structured-outputs-2025-11-13",
    "token-efficient-tools-2025-02-19",
]
if frozenset(get_args(Beta)) != BETAS:
    raise RegistrationError("the declared betas are not those of the rules", next_step="make the two lists equal")


class BodyCheck(NamedTuple):
    """The body of a request, as `policy.model_rules` reads it."""

    api: Api
    kind: str = "model"
    stage: Stage = "authorize"

    def refuse(self, value: Any) -> str | None:
        """Return the reason class and where, or None."""
        try:
            body = parse(value.encode("utf-8", "surrogatepass"))
        except Refused as refused:
            return f"{refused.reason}: the body is not one plain JSON object"
        if any(name in body for name in _OWN):
            return "bad_request: model, limit and stream are arguments of their own"
        refusal = judge_parsed(self.api, body)
        return f"{refusal.reason}: {refusal.detail}" if isinstance(refusal, Refusal) else None


class ModelCheck(NamedTuple):
    """The name of a model: not one that searches the web by itself."""

    api: Api
    kind: str = "model"
    stage: Stage = "authorize"

    def refuse(self, value: Any) -> str | None:
        """Return the reason class and where, or None."""
        refusal = judge_parsed(self.api, {"model": value})
        return f"{refusal.reason}: {refusal.detail}" if isinstance(refusal, Refusal) else None


_BODY: Final = msgspec.Meta(min_length=2, max_length=BODY_CHARS, description="JSON of the request's other fields")


class AnthropicRequest(Args):
    """`limit` is `max_tokens`; `body` the JSON text of a Messages request without model, max_tokens and stream."""

    model: Annotated[str, Text(128, 1), ModelCheck("anthropic")]
    limit: Annotated[int, Int(1, 1_000_000)]
    body: Annotated[str, _BODY, BodyCheck("anthropic")]
    stream: bool = False
    version: Annotated[str, msgspec.Meta(pattern=r"\A20[0-9]{2}-[0-9]{2}-[0-9]{2}\Z", max_length=10)] = VERSION
    betas: Annotated[list[Beta], ListOf(8)] = msgspec.field(default_factory=list[Beta])


class OpenAIRequest(Args):
    """`limit` is in tokens; `body` the JSON text of a Chat Completions request without model, limit and stream."""

    model: Annotated[str, Text(128, 1), ModelCheck("openai")]
    limit: Annotated[int, Int(1, 1_000_000)]
    body: Annotated[str, _BODY, BodyCheck("openai")]
    stream: bool = False


class StreamRequest(Args):
    """`stream` is what an earlier answer named."""

    stream: Annotated[str, Id("ms")]


class Generated(Result):
    """What the vendor answered.

    Attributes:
        body: its JSON, whole; "" of a stream.
        stream: id of the stream, for `model_stream`; "" once it is done, or when there is none.
        events: server-sent events as they came, whole ones.
        done: nothing follows.

    """

    body: str = ""
    stream: str = ""
    events: str = ""
    done: bool = True


def anthropic_messages(ops: Operations, *, backend: str = "anthropic", timeout: float = 120.0) -> None:
    """Register `anthropic_messages` (POST /v1/messages) and `model_stream`.

    Args:
        ops: your registry. backend: of the configuration; its url is the vendor's, such as https://api.anthropic.com,
            with minter = "key" and header = "x-api-key".
        timeout: seconds for one answer, or for one piece of a stream.

    """

    def anthropic_messages(call: Call, args: AnthropicRequest) -> Generated:
        """Ask a model (Anthropic Messages API)."""
        fields = {"anthropic-version": args.version}
        if args.betas:
            fields["anthropic-beta"] = ",".join(args.betas)
        body = {**parse(args.body.encode()), "model": args.model, "max_tokens": args.limit}
        return _generate(call, backend, ("v1", "messages"), body, fields, stream=args.stream)

    _register(ops, anthropic_messages, timeout)


def openai_chat(
    ops: Operations,
    *,
    backend: str = "openai",
    path: tuple[str, ...] = ("v1", "chat", "completions"),
    limit_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens",
    timeout: float = 120.0,
) -> None:
    """Register `openai_chat` (POST /v1/chat/completions) and `model_stream`, for OpenAI and servers that speak like it.

    Args:
        ops: your registry. backend: of the configuration, with minter = "key".
        path: of the one generation path, where a compatible server has another.
        limit_field: what the server calls its limit.
        timeout: seconds for one answer, or for one piece of a stream.

    """

    def openai_chat(call: Call, args: OpenAIRequest) -> Generated:
        """Ask a model (OpenAI Chat Completions API)."""
        body = {**parse(args.body.encode()), "model": args.model, limit_field: args.limit}
        return _generate(call, backend, path, body, {}, stream=args.stream)

    _register(ops, openai_chat, timeout)


def _register(ops: Operations, generate: Callable[..., Any], timeout: float) -> None:
    def model_stream(call: Call, args: StreamRequest) -> Generated:
        """Return what came of a stream since the last call."""
        return _piece(call, args.stream)

    ops.operation(effect="read", timeout=timeout, max_result=MAX_RESULT)(generate)
    if ops.get(STREAM_OPERATION) is None:
        ops.operation(effect="read", timeout=timeout, max_result=MAX_RESULT)(model_stream)


def _generate(
    call: Call, backend: str, path: tuple[str, ...], body: dict[str, Any], fields: dict[str, str], *, stream: bool
) -> Generated:
    client = call.backend(backend)
    call.mint_now(backend, _SCOPE)
    if not stream:
        answer = client.request(
            "POST", path, scope=_SCOPE, json=msgspec.Raw(compact(body).encode()), cap=ANSWER_BYTES, fields=fields
        )
        return Generated(body=_text(answer.body))
    sent = msgspec.Raw(compact({**body, "stream": True}).encode())
    opened = client.open(*path, json=sent, scope=_SCOPE, fields=fields, cap=STREAM_BYTES)
    ident = STREAMS.begin(call.principal.run, backend, opened)
    return _piece(call, ident)


def _piece(call: Call, ident: str) -> Generated:
    backend = STREAMS.backend(call.principal.run, ident)
    if backend is not None:
        call.mint_now(backend, _SCOPE)
    piece = STREAMS.next(call.principal.run, ident)
    return Generated(stream="" if piece.done else ident, events=piece.events, done=piece.done)


def _text(body: bytes) -> str:
    """Return an answer that is one JSON object, as text.

    Raises:
        BackendUnclear: it is none. BackendTooLarge: escaped, it is.

    """
    try:
        text = body.decode("utf-8")
        found = msgspec.json.decode(body)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        found, text = None, ""
    if not isinstance(found, dict):
        raise BackendUnclear
    if len(msgspec.json.encode(text)) > MAX_RESULT - 512:
        raise BackendTooLarge
    return text

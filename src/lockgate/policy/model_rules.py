"""What may be asked of a model vendor: one generation call, with nothing in it that the vendor would fetch or run.

Rule 1: a host with a model behind it is many capabilities (files, batches, keys, tools that browse). One path is one
        capability, and only that path is allowed.
Rule 2: a credential of the caller's is refused and never replaced: with it the call would end in another account.
Rule 3: everything in a body is declared here: fields, kinds of content, kinds of tools, kinds of sources. What is not
        declared is refused, so what a vendor adds tomorrow is refused until somebody has read what it does.
Rule 4: pure. The gateway, the broker's operations and the corpus call the same function.

Sources: the vendors' API references and the request types of the released clients anthropic 2.14.0 and openai 3.57.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NoReturn, cast

from lockgate.policy.host import Refusal
from lockgate.policy.model_grammar import Judge, Refused
from lockgate.policy.model_shapes import ANTHROPIC, OPENAI
from lockgate.policy.url import canonical_path

Api = Literal["anthropic", "openai"]
APIS: Final[tuple[Api, ...]] = ("anthropic", "openai")
PATHS: Final[dict[Api, str]] = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
BODY_BYTES: Final = 8 * 1024 * 1024
MAX_DEPTH: Final = 64
BETAS: Final = frozenset(
    {
        "context-1m-2025-08-07",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        "output-128k-2025-02-19",
        "prompt-caching-2024-07-31",
        "structured-outputs-2025-11-13",
        "token-efficient-tools-2025-02-19",
    }
)
"""Values of `anthropic-beta` that change how an answer is made and give the vendor nothing to fetch, store or run."""
MAX_TOKENS: Final[dict[Api, tuple[str, ...]]] = {
    "anthropic": ("max_tokens",),
    "openai": ("max_completion_tokens", "max_tokens"),
}
DEFAULT_TOKENS: Final = 16_384
"""Of an OpenAI request that names no limit: what is not named cannot be counted against a budget."""
_SENTENCES: Final = {
    "path_not_allowed": "only the generation path of a model endpoint may be called",
    "path_not_canonical": "the path can be read in two ways",
    "foreign_credential": "a credential came with the request; ours is added outside",
    "forbidden_header": "a field selects an account or a feature that is not declared",
    "opaque_body": "an encoded body cannot be judged",
    "bad_request": "the body is not one plain JSON object",
    "server_side_tool": "a tool that runs at the vendor is not declared",
    "server_side_fetch": "the vendor would fetch what the request names",
    "foreign_file_id": "a stored file that this run did not make",
    "callback_denied": "the vendor would call back",
    "field_not_declared": "a field that is not declared",
}
# Words of a field's name, between hyphens, that say it carries a credential, and names that only sound so.
_CREDENTIAL: Final = re.compile(
    r"(?:\A|[-_])(?:api-?)?(?:key|apikey|token|auth|authorization|authentication|secret|credentials?|password|cookie|"
    r"session|signature)(?:\Z|[-_])"
)
_NOT_CREDENTIALS: Final = frozenset({"idempotency-key", "sec-websocket-key", "x-idempotency-key"})
_ACCOUNT: Final = re.compile(r"(?:anthropic|openai|x-goog|azureml|helicone|x-portkey|x-ms)-")
_OURS: Final = frozenset({"anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"})
# Models and model suffixes that search the web by themselves, with no tool in the request.
_SEARCHING: Final = re.compile(r"(?i)(?::online\Z)|(?:\A|[/:_-])(?:search|deep-research|sonar|compound)(?:\Z|[/:_-])")


def judge_model(
    api: Api,
    method: str,
    target: bytes,
    fields: Sequence[tuple[bytes, bytes]],
    body: bytes | None,
    *,
    files: frozenset[str] = frozenset(),
) -> Refusal | None:
    """Say why a request to a model endpoint is refused, or None.

    Args:
        api: whose wire format it is.
        method: as sent.
        target: the path and query, as sent.
        fields: names in lower case and raw values, all of them.
        body: the whole body; None = not there yet, then the head alone is judged. Empty and `{}` ask for nothing.
        files: ids of files that this run made.

    """
    path, mark, query = target.decode("latin-1").partition("?")
    if method != "POST" or path != PATHS[api] or (mark and not (api == "anthropic" and query == "beta=true")):
        return _refusal("path_not_allowed" if canonical_path(path) else "path_not_canonical")
    refusal = _judge_fields(fields)
    if refusal is not None or body is None or not body:
        return refusal
    return judge_body(api, body, files)


def judge_body(api: Api, body: bytes, files: frozenset[str] = frozenset()) -> Refusal | None:
    """Say why the body of a generation request is refused, or None; see `judge_model`."""
    if len(body) > BODY_BYTES:
        return _refusal("bad_request", f"the body is over {BODY_BYTES} bytes")
    try:
        return judge_parsed(api, parse(body), files)
    except Refused as refused:
        return _refusal(refused.reason, refused.where)


def judge_parsed(api: Api, body: dict[str, Any], files: frozenset[str] = frozenset()) -> Refusal | None:
    """Say why a parsed body is refused, or None."""
    try:
        model = body.get("model")
        if isinstance(model, str) and _SEARCHING.search(model):
            return _refusal("server_side_tool", "/model")
        judge = Judge(files)
        judge.top(body, ANTHROPIC if api == "anthropic" else OPENAI)
    except Refused as refused:
        return _refusal(refused.reason, refused.where)
    return None


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`, which every parser reads in one way.

    Raises:
        Refused: not UTF-8, not an object, a duplicate key, NaN, too deep.

    """
    try:
        found = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except (ValueError, RecursionError):
        raise Refused("bad_request", "") from None
    if not isinstance(found, dict):
        raise Refused("bad_request", "")
    _shallow(found)
    return cast("dict[str, Any]", found)


def call_args(api: Api, body: bytes, fields: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    """Return the arguments of the broker's operation for the request that a client sent to the vendor.

    Args:
        api: whose wire format it is. body: as sent.
        fields: as sent; only `anthropic-beta` and `anthropic-version` are looked at.

    Raises:
        Refused: the body is none, or lacks what a generation needs.

    """
    found = parse(body)
    model = found.pop("model", None)
    stream = found.pop("stream", None) or False
    most: object = None
    for name in MAX_TOKENS[api]:
        value = found.pop(name, None)
        most = value if most is None else most
    if most is None and api == "openai":
        most = DEFAULT_TOKENS
    if not isinstance(model, str) or not isinstance(stream, bool):
        raise Refused("bad_request", "/model")
    if isinstance(most, bool) or not isinstance(most, int):
        raise Refused("bad_request", "/max_tokens")
    made: dict[str, Any] = {"model": model, "limit": most, "body": compact(found), "stream": stream}
    if api == "anthropic":
        named = b",".join(value for name, value in fields if name.lower() == b"anthropic-beta")
        made["betas"] = [part.strip() for part in named.decode("latin-1").split(",") if part.strip()]
        version = next((value.decode("latin-1") for name, value in fields if name.lower() == b"anthropic-version"), "")
        if version:
            made["version"] = version
    return made


def compact(body: dict[str, Any]) -> str:
    """Return a parsed body as JSON in ASCII."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _judge_fields(fields: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    forbidden = opaque = False
    for raw_name, raw_value in fields:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1").strip()
        if not value:
            continue
        if name not in _NOT_CREDENTIALS and _CREDENTIAL.search(name):
            return _refusal("foreign_credential")
        if name == "anthropic-beta":
            forbidden |= not {part.strip() for part in value.split(",")} <= BETAS
        elif name not in _OURS:
            forbidden |= _ACCOUNT.match(name) is not None
        opaque |= name == "content-encoding" and value.lower() != "identity"
    if forbidden:
        return _refusal("forbidden_header")
    return _refusal("opaque_body") if opaque else None


def _refusal(reason: str, where: str = "") -> Refusal:
    sentence = _SENTENCES[reason]
    return Refusal(reason, f"{sentence} ({where})" if where else sentence)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a duplicate key")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def _whole(text: str) -> int:
    number = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= number < 2**63:
        raise ValueError(text)
    return number


def _shallow(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, Any]", one).values()
            elif isinstance(one, list):
                inner += one
        level = inner
        if not level:
            return
    raise Refused("bad_request", "")

"""The declared shape of a generation request, as data: what may stand where in a body.

Rule 1: an object has the fields that are named; another one is refused, and its name says as what.
Rule 2: content, sources and tools are chosen by their `type`. A type that is not named is refused, never looked into.
Rule 3: words are free: no vendor acts on text. What a vendor acts on is a field, and it is named here or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

_URL_WORD: Final = re.compile(r"(?i)(?:\A|[_-])(?:urls?|uris?|href|link|src|remote|fetch|domains?)(?:\Z|[_-])|url\Z")
_FILE_WORD: Final = re.compile(r"(?i)(?:\A|[_-])(?:file|upload|attachment|document|vector_store|container)_?ids?\Z")
_CALLBACK_WORD: Final = re.compile(r"(?i)webhook|callback|notif|postback|hook\Z")
_TOOL_WORD: Final = re.compile(
    r"(?i)tool|mcp|search|brows|container|sandbox|code_?(?:exec|interp)|computer|plugin|connector|skill|agent|retriev|"
    r"fallback|server"
)
_CREDENTIAL_WORD: Final = re.compile(
    r"(?i)(?:\A|[_-])(?:api_?key|key|token|authorization|auth|secret|credentials?|password|headers?)\Z|\Abearer"
)
_DATA_URL: Final = re.compile(r"data:[a-z]+/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=]*\Z")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=_-]*\Z")
_NAME_CHARS: Final = 64


class Refused(Exception):
    """Why a body is refused: a reason and a JSON pointer made of declared names only."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(reason, where)
        self.reason = reason
        self.where = where


def reason_of_name(name: str) -> str:
    """Return the reason for a field or type that nobody declared, from what its name says it does."""
    if _CREDENTIAL_WORD.search(name):
        return "foreign_credential"
    if _CALLBACK_WORD.search(name):
        return "callback_denied"
    if _FILE_WORD.search(name):
        return "foreign_file_id"
    if _TOOL_WORD.search(name):
        return "server_side_tool"
    if _URL_WORD.search(name):
        return "server_side_fetch"
    return "field_not_declared"


class Judge:
    """Walks one body.

    Args:
        files: ids of files that this run made.

    """

    __slots__ = ("files",)

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files

    def top(self, body: dict[str, Any], fields: Mapping[str, Rule]) -> None:
        """Judge a whole body.

        Raises:
            Refused: it holds what is not declared.

        """
        _fields(fields)(self, body, "")


Rule = Callable[[Judge, Any, str], None]


def _leaf(judge: Judge, value: Any, where: str) -> None:
    """A text, a number, a truth value or nothing."""
    del judge
    if isinstance(value, dict | list):
        raise Refused("field_not_declared", where)


def _free(judge: Judge, value: Any, where: str) -> None:
    """Any JSON: it goes to the model as words and to nobody else."""
    del judge, value, where


def _never(judge: Judge, value: Any, where: str) -> None:
    """Only what says nothing: null, false, an empty list."""
    del judge
    if value not in (None, False, [], {}):
        raise Refused(reason_of_name(where.rpartition("/")[2]), where)


def _fields(fields: Mapping[str, Rule]) -> Rule:
    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Refused("bad_request", where)
        table = cast("dict[str, Any]", value)
        for name, one in table.items():
            inner = fields.get(name)
            if inner is None:
                raise Refused(reason_of_name(name[:_NAME_CHARS]), where)
            if one is not None:
                inner(judge, one, f"{where}/{name}")

    return rule


def _list(inner: Rule) -> Rule:
    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise Refused("bad_request", where)
        for one in cast("list[Any]", value):
            inner(judge, one, f"{where}/-")

    return rule


def _words_or(inner: Rule) -> Rule:
    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, str):
            inner(judge, value, where)

    return rule


def _kinds(kinds: Mapping[str, Mapping[str, Rule]], otherwise: str | None = None, default: str | None = None) -> Rule:
    """An object whose `type` is one of `kinds`.

    Args:
        kinds: fields by type, `type` itself left out.
        otherwise: the reason for another type; None = what its name says.
        default: the type of an object that names none; None = it must.

    """
    rules = {name: _fields({"type": _leaf, **fields}) for name, fields in kinds.items()}

    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Refused("bad_request", where)
        kind = cast("dict[str, Any]", value).get("type", default)
        inner = rules.get(kind) if isinstance(kind, str) else rules.get(default or "") if kind is None else None
        if inner is None:
            raise Refused(otherwise or reason_of_name(kind[:_NAME_CHARS] if isinstance(kind, str) else ""), where)
        inner(judge, value, where)

    return rule


def _only(*allowed: object, reason: str) -> Rule:
    def rule(judge: Judge, value: Any, where: str) -> None:
        del judge
        values = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(one in allowed for one in values):
            raise Refused(reason, where)

    return rule


def _own_file(judge: Judge, value: Any, where: str) -> None:
    if not isinstance(value, str) or value not in judge.files:
        raise Refused("foreign_file_id", where)


def _inline_url(judge: Judge, value: Any, where: str) -> None:
    """A `data:` URL, which holds its content; any other is fetched by the vendor."""
    del judge
    if not isinstance(value, str) or not _DATA_URL.match(value):
        raise Refused("server_side_fetch", where)


def _inline(judge: Judge, value: Any, where: str) -> None:
    """Base64, or a `data:` URL."""
    del judge
    if not isinstance(value, str) or not (_BASE64.match(value) or _DATA_URL.match(value)):
        raise Refused("server_side_fetch", where)


def _schema(judge: Judge, value: Any, where: str) -> None:
    """A JSON Schema that refers to itself alone: a validator would fetch any other reference."""
    del judge
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for name, inner in cast("dict[str, Any]", one).items():
                if name in {"$ref", "$dynamicRef", "$recursiveRef"} and isinstance(inner, str) and inner[:1] != "#":
                    raise Refused("server_side_fetch", where)
                waiting.append(inner)
        elif isinstance(one, list):
            waiting += cast("list[Any]", one)


def _named(names: str, rule: Rule = _leaf) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


# ---- Anthropic, POST /v1/messages ------------------------------------------------------------------------------------
_CACHE: Final = {"cache_control": _fields(_named("type ttl"))}
_CITATIONS: Final = _list(
    _kinds(
        {
            "char_location": _named("cited_text document_index document_title start_char_index end_char_index file_id"),
            "page_location": _named(
                "cited_text document_index document_title start_page_number end_page_number file_id"
            ),
            "content_block_location": _named(
                "cited_text document_index document_title start_block_index end_block_index file_id"
            ),
            "search_result_location": _named(
                "cited_text search_result_index source title start_block_index end_block_index"
            ),
        },
        "server_side_tool",
    )
)
_TEXT: Final[dict[str, Rule]] = {"text": _leaf, "citations": _CITATIONS, **_CACHE}
_IMAGE: Final[dict[str, Rule]] = {
    "source": _kinds(
        {"base64": {**_named("media_type"), "data": _inline}, "file": {"file_id": _own_file}}, "server_side_fetch"
    ),
    **_CACHE,
}
_DOCUMENT: Final[dict[str, Rule]] = {
    "source": _kinds(
        {
            "base64": {**_named("media_type"), "data": _inline},
            "text": _named("media_type data"),
            "content": {"content": _words_or(_list(_kinds({"text": _TEXT, "image": _IMAGE})))},
            "file": {"file_id": _own_file},
        },
        "server_side_fetch",
    ),
    "citations": _fields(_named("enabled")),
    **_named("title context"),
    **_CACHE,
}
# `source` of a search result is the words of a citation; nobody fetches it.
_RESULT: Final[dict[str, Rule]] = {
    **_named("source title"),
    "content": _list(_kinds({"text": _TEXT})),
    "citations": _fields(_named("enabled")),
    **_CACHE,
}
_BLOCK: Final = _kinds(
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "search_result": _RESULT,
        "thinking": _named("thinking signature"),
        "redacted_thinking": _named("data"),
        "tool_use": {
            **_named("id name"),
            "input": _free,
            "caller": _kinds({"direct": {}}, "server_side_tool"),
            **_CACHE,
        },
        "tool_result": {
            **_named("tool_use_id is_error"),
            "content": _words_or(
                _list(_kinds({"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT, "search_result": _RESULT}))
            ),
            **_CACHE,
        },
    }
)
_TOOL: Final[dict[str, Rule]] = {
    **_named("name strict defer_loading"),
    "allowed_callers": _only("direct", reason="server_side_tool"),
    "input_examples": _free,
    **_CACHE,
}
_EDITOR: Final = {**_TOOL, **_named("max_characters")}
ANTHROPIC: Final[Mapping[str, Rule]] = {
    **_named("model max_tokens temperature top_p top_k stream service_tier speed"),
    "stop_sequences": _list(_leaf),
    "metadata": _fields(_named("user_id")),
    "system": _words_or(_list(_kinds({"text": _TEXT}))),
    "messages": _list(_fields({"role": _leaf, "content": _words_or(_list(_BLOCK))})),
    "tools": _list(
        _kinds(
            {
                "custom": {
                    **_TOOL,
                    **_named("description eager_input_streaming"),
                    "input_schema": _schema,
                },
                "bash_20241022": _TOOL,
                "bash_20250124": _TOOL,
                "memory_20250818": _TOOL,
                "text_editor_20241022": _EDITOR,
                "text_editor_20250124": _EDITOR,
                "text_editor_20250429": _EDITOR,
                "text_editor_20250728": _EDITOR,
            },
            "server_side_tool",
            default="custom",
        )
    ),
    "tool_choice": _fields(_named("type name disable_parallel_tool_use")),
    "thinking": _fields(_named("type budget_tokens display")),
    "output_config": _fields(
        {**_named("effort"), "format": _kinds({"json_schema": {"schema": _schema, **_named("name")}})}
    ),
    "output_format": _kinds({"json_schema": {"schema": _schema, **_named("name")}}),
    "mcp_servers": _never,
    "container": _never,
    **_CACHE,
}

# ---- OpenAI, POST /v1/chat/completions -------------------------------------------------------------------------------
_BREAK: Final = {"prompt_cache_breakpoint": _fields(_named("type ttl"))}


def _picture(judge: Judge, value: Any, where: str) -> None:
    if isinstance(value, dict):
        _PICTURE(judge, value, where)
    else:  # some compatible servers take the URL itself
        _inline_url(judge, value, where)


_PICTURE: Final = _fields({"url": _inline_url, "detail": _leaf})
_PART: Final = _kinds(
    {
        "text": {**_named("text"), **_BREAK},
        "refusal": _named("refusal"),
        "image_url": {"image_url": _picture, **_BREAK},
        "input_audio": {"input_audio": _fields({"data": _inline, "format": _leaf}), **_BREAK},
        "file": {
            "file": _fields({"file_data": _inline, "filename": _leaf, "file_id": _own_file}),
            **_BREAK,
        },
    }
)
_FUNCTION: Final = _fields({**_named("name description strict"), "parameters": _schema})
_CHOICE: Final[dict[str, Mapping[str, Rule]]] = {
    "function": {"function": _fields(_named("name"))},
    "custom": {"custom": _fields(_named("name"))},
}
OPENAI: Final[Mapping[str, Rule]] = {
    **_named(
        "model max_tokens max_completion_tokens temperature top_p n stream presence_penalty frequency_penalty logprobs "
        "top_logprobs user seed parallel_tool_calls reasoning_effort verbosity service_tier prompt_cache_key "
        "prompt_cache_retention safety_identifier"
    ),
    "stop": _words_or(_list(_leaf)),
    "stream_options": _fields(_named("include_usage include_obfuscation")),
    "logit_bias": _free,
    "modalities": _only("text", reason="field_not_declared"),
    "store": _never,  # a stored completion can be read back through another path
    "prediction": _kinds({"content": {"content": _words_or(_list(_kinds({"text": _named("text")})))}}),
    "response_format": _kinds(
        {
            "text": {},
            "json_object": {},
            "json_schema": {"json_schema": _fields({**_named("name description strict"), "schema": _schema})},
        }
    ),
    "messages": _list(
        _fields(
            {
                **_named("role name refusal tool_call_id"),
                "content": _words_or(_list(_PART)),
                "tool_calls": _list(
                    _kinds(
                        {
                            "function": {**_named("id index"), "function": _fields(_named("name arguments"))},
                            "custom": {**_named("id index"), "custom": _fields(_named("name input"))},
                        },
                        "server_side_tool",
                    )
                ),
                "function_call": _fields(_named("name arguments")),
            }
        )
    ),
    "tools": _list(
        _kinds(
            {
                "function": {"function": _FUNCTION},
                "custom": {"custom": _fields({**_named("name description"), "format": _free})},
            },
            "server_side_tool",
        )
    ),
    "tool_choice": _words_or(
        _kinds(
            {
                **_CHOICE,
                "allowed_tools": {
                    "allowed_tools": _fields({"mode": _leaf, "tools": _list(_kinds({**_CHOICE}, "server_side_tool"))})
                },
            },
            "server_side_tool",
        )
    ),
    "functions": _list(_FUNCTION),
    "function_call": _words_or(_fields(_named("name"))),
}

"""What an ordinary generation request of two vendors looks like, in the words of `model_grammar`.

Rule 1: what stands here was read for what the vendor does with it: words for the model, numbers for the sampler,
        content that is inside the request, tools that run at the caller's side. Nothing else.

Sources: the vendors' API references and the request types of the released clients anthropic 2.14.0 and openai 3.57.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lockgate.policy.model_grammar import (
    Judge,
    Rule,
    free,
    inline,
    inline_url,
    leaf,
    list_of,
    named,
    never,
    object_of,
    one_of_kinds,
    only_of,
    own_file,
    schema,
    words_or,
)

# ---- Anthropic, POST /v1/messages ------------------------------------------------------------------------------------
_CACHE: Final = {"cache_control": object_of(named("type ttl"))}
_CITATIONS: Final = list_of(
    one_of_kinds(
        {
            "char_location": named("cited_text document_index document_title start_char_index end_char_index file_id"),
            "page_location": named(
                "cited_text document_index document_title start_page_number end_page_number file_id"
            ),
            "content_block_location": named(
                "cited_text document_index document_title start_block_index end_block_index file_id"
            ),
            "search_result_location": named(
                "cited_text search_result_index source title start_block_index end_block_index"
            ),
        },
        "server_side_tool",
    )
)
_TEXT: Final[dict[str, Rule]] = {"text": leaf, "citations": _CITATIONS, **_CACHE}
_IMAGE: Final[dict[str, Rule]] = {
    "source": one_of_kinds(
        {"base64": {**named("media_type"), "data": inline}, "file": {"file_id": own_file}}, "server_side_fetch"
    ),
    **_CACHE,
}
_DOCUMENT: Final[dict[str, Rule]] = {
    "source": one_of_kinds(
        {
            "base64": {**named("media_type"), "data": inline},
            "text": named("media_type data"),
            "content": {"content": words_or(list_of(one_of_kinds({"text": _TEXT, "image": _IMAGE})))},
            "file": {"file_id": own_file},
        },
        "server_side_fetch",
    ),
    "citations": object_of(named("enabled")),
    **named("title context"),
    **_CACHE,
}
# `source` of a search result is the words of a citation; nobody fetches it.
_RESULT: Final[dict[str, Rule]] = {
    **named("source title"),
    "content": list_of(one_of_kinds({"text": _TEXT})),
    "citations": object_of(named("enabled")),
    **_CACHE,
}
_BLOCK: Final = one_of_kinds(
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "search_result": _RESULT,
        "thinking": named("thinking signature"),
        "redacted_thinking": named("data"),
        "tool_use": {
            **named("id name"),
            "input": free,
            "caller": one_of_kinds({"direct": {}}, "server_side_tool"),
            **_CACHE,
        },
        "tool_result": {
            **named("tool_use_id is_error"),
            "content": words_or(
                list_of(one_of_kinds({"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT, "search_result": _RESULT}))
            ),
            **_CACHE,
        },
    }
)
_TOOL: Final[dict[str, Rule]] = {
    **named("name strict defer_loading"),
    "allowed_callers": only_of("direct", reason="server_side_tool"),
    "input_examples": free,
    **_CACHE,
}
_EDITOR: Final = {**_TOOL, **named("max_characters")}
ANTHROPIC: Final[Mapping[str, Rule]] = {
    **named("model max_tokens temperature top_p top_k stream service_tier speed"),
    "stop_sequences": list_of(leaf),
    "metadata": object_of(named("user_id")),
    "system": words_or(list_of(one_of_kinds({"text": _TEXT}))),
    "messages": list_of(object_of({"role": leaf, "content": words_or(list_of(_BLOCK))})),
    "tools": list_of(
        one_of_kinds(
            {
                "custom": {
                    **_TOOL,
                    **named("description eager_input_streaming"),
                    "input_schema": schema,
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
    "tool_choice": object_of(named("type name disable_parallel_tool_use")),
    "thinking": object_of(named("type budget_tokens display")),
    "output_config": object_of(
        {**named("effort"), "format": one_of_kinds({"json_schema": {"schema": schema, **named("name")}})}
    ),
    "output_format": one_of_kinds({"json_schema": {"schema": schema, **named("name")}}),
    "mcp_servers": never,
    "container": never,
    **_CACHE,
}

# ---- OpenAI, POST /v1/chat/completions -------------------------------------------------------------------------------
_BREAK: Final = {"prompt_cache_breakpoint": object_of(named("type ttl"))}


def _picture(judge: Judge, value: Any, where: str) -> None:
    if isinstance(value, dict):
        _PICTURE(judge, value, where)
    else:  # some compatible servers take the URL itself
        inline_url(judge, value, where)


_PICTURE: Final = object_of({"url": inline_url, "detail": leaf})
_PART: Final = one_of_kinds(
    {
        "text": {**named("text"), **_BREAK},
        "refusal": named("refusal"),
        "image_url": {"image_url": _picture, **_BREAK},
        "input_audio": {"input_audio": object_of({"data": inline, "format": leaf}), **_BREAK},
        "file": {
            "file": object_of({"file_data": inline, "filename": leaf, "file_id": own_file}),
            **_BREAK,
        },
    }
)
_FUNCTION: Final = object_of({**named("name description strict"), "parameters": schema})
_CHOICE: Final[dict[str, Mapping[str, Rule]]] = {
    "function": {"function": object_of(named("name"))},
    "custom": {"custom": object_of(named("name"))},
}
OPENAI: Final[Mapping[str, Rule]] = {
    **named(
        "model max_tokens max_completion_tokens temperature top_p n stream presence_penalty frequency_penalty logprobs "
        "top_logprobs user seed parallel_tool_calls reasoning_effort verbosity service_tier prompt_cache_key "
        "prompt_cache_retention safety_identifier"
    ),
    "stop": words_or(list_of(leaf)),
    "stream_options": object_of(named("include_usage include_obfuscation")),
    "logit_bias": free,
    "modalities": only_of("text", reason="field_not_declared"),
    "store": never,  # a stored completion can be read back through another path
    "prediction": one_of_kinds({"content": {"content": words_or(list_of(one_of_kinds({"text": named("text")})))}}),
    "response_format": one_of_kinds(
        {
            "text": {},
            "json_object": {},
            "json_schema": {"json_schema": object_of({**named("name description strict"), "schema": schema})},
        }
    ),
    "messages": list_of(
        object_of(
            {
                **named("role name refusal tool_call_id"),
                "content": words_or(list_of(_PART)),
                "tool_calls": list_of(
                    one_of_kinds(
                        {
                            "function": {**named("id index"), "function": object_of(named("name arguments"))},
                            "custom": {**named("id index"), "custom": object_of(named("name input"))},
                        },
                        "server_side_tool",
                    )
                ),
                "function_call": object_of(named("name arguments")),
            }
        )
    ),
    "tools": list_of(
        one_of_kinds(
            {
                "function": {"function": _FUNCTION},
                "custom": {"custom": object_of({**named("name description"), "format": free})},
            },
            "server_side_tool",
        )
    ),
    "tool_choice": words_or(
        one_of_kinds(
            {
                **_CHOICE,
                "allowed_tools": {
                    "allowed_tools": object_of(
                        {"mode": leaf, "tools": list_of(one_of_kinds({**_CHOICE}, "server_side_tool"))}
                    )
                },
            },
            "server_side_tool",
        )
    ),
    "functions": list_of(_FUNCTION),
    "function_call": words_or(object_of(named("name"))),
}

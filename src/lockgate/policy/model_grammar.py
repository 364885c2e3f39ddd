"""A grammar for bodies: what may stand where, as data (`model_shapes`), and what is said of the rest.

Rule 1: an object has the fields that are named; another one is refused, and its name says as what.
Rule 2: content, sources and tools are chosen by their `type`. A type that is not named is refused, never looked into.
Rule 3: words are free: no vendor acts on text. What a vendor acts on is a field, and it is named here or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard, cast

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


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


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


def _reason(name: str, value: object) -> str:
    """Return the reason for what nobody declared, from its name and, where that says nothing, from what it holds."""
    found = reason_of_name(name[:_NAME_CHARS])
    return "server_side_fetch" if found == "field_not_declared" and _fetches(value) else found


def _fetches(value: object) -> bool:
    """Whether a URL stands somewhere inside, in a field that is named as one or beside the type `url`."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for name, inner in cast("dict[str, Any]", one).items():
                if isinstance(inner, str) and (_URL_WORD.search(name) or (name == "type" and _URL_WORD.search(inner))):
                    return True
                waiting.append(inner)
        elif _is_list(one):
            waiting += one
    return False


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
        object_of(fields)(self, body, "")


Rule = Callable[[Judge, Any, str], None]


def leaf(judge: Judge, value: Any, where: str) -> None:
    """A text, a number, a truth value or nothing."""
    del judge
    if isinstance(value, dict | list):
        raise Refused("field_not_declared", where)


def free(judge: Judge, value: Any, where: str) -> None:
    """Any JSON: it goes to the model as words and to nobody else."""
    del judge, value, where


def never(judge: Judge, value: Any, where: str) -> None:
    """Only what says nothing: null, false, an empty list."""
    del judge
    if value not in (None, False, [], {}):
        raise Refused(reason_of_name(where.rpartition("/")[2]), where)


def object_of(fields: Mapping[str, Rule]) -> Rule:
    """An object with these fields and no other; null says nothing in each."""

    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Refused("bad_request", where)
        table = cast("dict[str, Any]", value)
        for name, one in table.items():
            inner = fields.get(name)
            if inner is None:
                raise Refused(_reason(name, one), where)
            if one is not None:
                inner(judge, one, f"{where}/{name}")

    return rule


def list_of(inner: Rule) -> Rule:
    """A list of such values."""

    def rule(judge: Judge, value: Any, where: str) -> None:
        if not _is_list(value):
            raise Refused("bad_request", where)
        for one in value:
            inner(judge, one, f"{where}/-")

    return rule


def words_or(inner: Rule) -> Rule:
    """A text, or such a value."""

    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, str):
            inner(judge, value, where)

    return rule


def one_of_kinds(
    kinds: Mapping[str, Mapping[str, Rule]], otherwise: str | None = None, default: str | None = None
) -> Rule:
    """An object whose `type` is one of `kinds`.

    Args:
        kinds: fields by type, `type` itself left out.
        otherwise: the reason for another type; None = what its name says.
        default: the type of an object that names none; None = it must.

    """
    rules = {name: object_of({"type": leaf, **fields}) for name, fields in kinds.items()}

    def rule(judge: Judge, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Refused("bad_request", where)
        table = cast("dict[str, Any]", value)
        kind = table.get("type", default)
        inner = rules.get(kind) if isinstance(kind, str) else rules.get(default or "") if kind is None else None
        if inner is None:
            raise Refused(otherwise or _reason(kind if isinstance(kind, str) else "", table), where)
        inner(judge, table, where)

    return rule


def only_of(*allowed: object, reason: str) -> Rule:
    """One of these values, or a list of them."""

    def rule(judge: Judge, value: Any, where: str) -> None:
        del judge
        values = value if _is_list(value) else [value]
        if not all(one in allowed for one in values):
            raise Refused(reason, where)

    return rule


def own_file(judge: Judge, value: Any, where: str) -> None:
    """The id of a file that this run made."""
    if not isinstance(value, str) or value not in judge.files:
        raise Refused("foreign_file_id", where)


def inline_url(judge: Judge, value: Any, where: str) -> None:
    """A `data:` URL, which holds its content; any other is fetched by the vendor."""
    del judge
    if not isinstance(value, str) or not _DATA_URL.match(value):
        raise Refused("server_side_fetch", where)


def inline(judge: Judge, value: Any, where: str) -> None:
    """Base64, or a `data:` URL."""
    del judge
    if not isinstance(value, str) or not (_BASE64.match(value) or _DATA_URL.match(value)):
        raise Refused("server_side_fetch", where)


def schema(judge: Judge, value: Any, where: str) -> None:
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
        elif _is_list(one):
            waiting += one


def named(names: str, rule: Rule = leaf) -> dict[str, Rule]:
    """Fields of these names, each under the same rule."""
    return dict.fromkeys(names.split(), rule)

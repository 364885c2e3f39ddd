"""Operations as data: for `host.operations()`, `lockgate ops`, and any front that lists tools by JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

if TYPE_CHECKING:
    from lockgate.policy.registry import Operation


def describe(operation: Operation) -> dict[str, Any]:
    """Return name, effect, first line of the docstring, JSON Schemas (2020-12) of arguments and result, and limits."""
    return {
        "name": operation.name,
        "effect": operation.effect,
        "doc": operation.doc,
        "args": schema(operation.args_type),
        "result": schema(operation.result_type),
        "timeout": operation.timeout,
        "max_result": operation.max_result,
        "idempotency": None if operation.idempotency is None else list(operation.idempotency),
        "labels": list(operation.labels),
    }


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a model, with the model itself at the root instead of behind a reference."""
    whole = msgspec.json.schema(kind)
    definitions = cast("dict[str, dict[str, Any]]", whole.get("$defs", {}))
    root = str(whole.get("$ref", "")).rpartition("/")[2]
    if root not in definitions:
        return whole
    rest = {name: one for name, one in definitions.items() if name != root}
    # A model that refers to itself keeps its definition.
    if f'"#/$defs/{root}"'.encode() in msgspec.json.encode([definitions[root], *rest.values()]):
        rest = definitions
    return {**definitions[root], **({"$defs": rest} if rest else {})}

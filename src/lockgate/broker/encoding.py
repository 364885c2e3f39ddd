"""What an operation's arguments and result are as bytes.

Rule 1: a result leaves as the declared type has it, decoded again, at most as large as declared, and without a live
        lease.
Rule 2: the key of a write is made of the declared fields and the tenant, never chosen by the model.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from lockgate.broker.outcomes import Outcome
from lockgate.policy import Operation
from lockgate.secrets import leaks

canonical: Final = msgspec.json.Encoder().encode
OK: Final = Outcome("ok")


def encode(operation: Operation, result: Any, canary: str) -> tuple[bytes | None, Outcome]:
    """Return the encoded result, or why it does not leave: the function ran in any case."""
    try:
        if operation.decoys:
            result = msgspec.structs.replace(result, **dict.fromkeys(operation.decoys, canary))
        # Decoded again: a struct's fields are not checked when it is made, and a dict in the place of a declared
        # struct would take undeclared data along.
        encoded = canonical(msgspec.json.decode(operation.encode_result(result), type=operation.result_type))
    except Exception as error:  # noqa: BLE001 - not of the declared type; its text may quote the value
        return None, Outcome("result_blocked", {"error": type(error).__name__, "why": "not of the declared type"})
    if len(encoded) > operation.max_result:
        return None, Outcome("result_too_large", {"bytes": len(encoded)})
    if leaks.LIVE.leases and leaks.scan(encoded):
        return None, Outcome("result_blocked", {"why": "holds a live lease"})
    return encoded, OK


def key(tenant: str, operation: Operation, args: Any) -> str:
    """SHA-256 over tenant, operation and the declared fields: equal for each try, never chosen by the model."""
    fields = [[name, getattr(args, name)] for name in operation.idempotency or ()]
    return hashlib.sha256(b"lockgate/key/1\0" + canonical([tenant, operation.name, fields])).hexdigest()

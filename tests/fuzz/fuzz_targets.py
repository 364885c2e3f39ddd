"""What hostile bytes may do to the parsers: be refused with one typed error, or be read in one way.

Each target takes bytes and asserts. `test_fuzz.py` runs them for a few seconds; `guided.py` for as long as you like.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import lockgate.policy as lg
from lockgate.contract.errors import GuestProtocolError, ScopeError
from lockgate.contract.frames import Decoder, encode
from lockgate.contract.strictjson import check_unique_keys, decode_request

CORPUS = Path(__file__).parent / "corpus"
CAP = 4096


class Args(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents
    note: Annotated[str, lg.Text(50)] | None = None


class Done(lg.Result):
    ok: bool


def registry() -> lg.Operations:
    ops = lg.Operations()

    @ops.operation(effect="read", max_result=100)
    def refund(call: lg.Call, args: Args) -> Done:
        return Done(ok=bool(call and args))

    return ops.seal()


OPS = registry()
WHO = lg.Scope(user="u", agent="a", tenant="t", expires=9, allow={}).principal("run-1")
COMPILED = lg.Scope(
    user="u", agent="a", tenant="t", expires=9, allow={"refund": lg.where(amount=lg.at_most(5), note=lg.length(9))}
).compile(OPS, 0.0)


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("duplicate")
    return dict(pairs)


def frames(data: bytes) -> None:
    """However the bytes are cut, the same bodies and the same end come out, and nothing follows a violation."""
    cut = data[0] if data else 1
    stream = data[1:]
    outcomes = []
    for step in (len(stream) or 1, 1, cut or 1):
        decoder = Decoder(cap=CAP)
        bodies: list[bytes] = []
        dead = False
        for at in range(0, len(stream), step):
            try:
                got = decoder.feed(stream[at : at + step])
            except GuestProtocolError:
                dead = True
            else:
                assert not dead, "a dead decoder came back to life"
                bodies += got
        outcomes.append((bodies if not dead else None, dead))
        assert all(0 < len(body) <= CAP for body in bodies)
        if not dead:
            whole = b"".join(encode(body, cap=CAP) for body in bodies)
            assert stream.startswith(whole)
            assert decoder.pending == (len(whole) < len(stream))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def strictjson(data: bytes) -> None:
    """What is accepted has one reading, and the standard parser agrees on it."""
    try:
        number, op, raw = decode_request(data)
    except GuestProtocolError:
        pass
    else:
        whole = json.loads(data, object_pairs_hook=unique, parse_constant=int)
        assert list(whole) == ["id", "op", "args"]
        assert (whole["id"], whole["op"]) == (number, op)
        assert json.loads(raw, object_pairs_hook=unique) == whole["args"]
        verdict = lg.authorize(WHO, lg.request(COMPILED, op, raw, 1.0), COMPILED)
        if verdict.effect == "allow":
            assert op == "refund"
            assert 0 < whole["args"]["amount"] <= 5
            assert set(whole["args"]) <= {"order_id", "amount", "note"}
    try:
        check_unique_keys(data)
    except GuestProtocolError:
        return
    json.loads(data, object_pairs_hook=unique, parse_constant=int)


def scope(data: bytes) -> None:
    """A scope loads or is refused with a typed error; what loads is the same after writing and reading it again."""
    for read in (lg.Scope.from_json, lambda text: lg.Scope.from_toml(text.decode("utf-8", "replace"))):
        try:
            found = read(data)
        except ScopeError:
            continue
        assert lg.Scope.from_json(found.canonical()) == found
        try:
            assert lg.Scope.from_toml(found.to_toml()) == found
            compiled = found.compile(OPS, 0.0)
        except ScopeError:
            continue
        assert set(compiled.operations) <= set(found.allow) & {"refund"}


TARGETS: dict[str, Callable[[bytes], None]] = {"frames": frames, "strictjson": strictjson, "scope": scope}


def seeds(target: str) -> list[bytes]:
    """The committed corpus of one target; a frames seed is one line of JSON bodies, framed here."""
    found = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    if target == "frames":
        found += [b"\x03" + b"".join(struct.pack(">I", len(line)) + line for line in one.splitlines()) for one in found]
    return found

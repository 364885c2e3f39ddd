"""What hostile bytes may do to the parsers: be refused with one typed error, or be read in one way.

Each target takes bytes and asserts. `test_fuzz.py` runs them for a few seconds; `guided.py` for as long as you like.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import dns.message as dns_message

import lockgate.policy as lg
from lockgate.broker.exports import Refusal, Spool, bad_name, decode
from lockgate.config import Config, load_text
from lockgate.contract.errors import ConfigError, GuestProtocolError, ScopeError
from lockgate.contract.frames import Decoder, encode
from lockgate.contract.strictjson import check_unique_keys, decode_request
from lockgate.egress.client_hello import Hello, Reader
from lockgate.egress.dns import Responder
from lockgate.egress.dnswire import TYPE_A, decode_reply, encode_query
from lockgate.egress.http_front import Body, Front, Refused
from lockgate.gate.exports import plain_name
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Endpoint, Host

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


FRONT = EgressPolicy.load('[egress]\nallow = ["api.allowed.example:443", "plain.example:80"]')
HELLO_HOST = Endpoint.parse(b"api.allowed.example:443")
QUERY = encode_query(Host.parse(b"api.allowed.example"), TYPE_A, 7)  # type: ignore[arg-type]


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


def config(data: bytes) -> None:
    """A configuration loads or is refused as one; a refusal says a next step and shows no literal secret."""
    text = data.decode("utf-8", "replace")
    found: Config | ConfigError
    try:
        found = load_text(text, "/srv")
    except ConfigError as error:
        found = error
    if isinstance(found, ConfigError):
        assert found.message
        assert found.next_step
        assert not any(ord(char) < 32 and char != "\n" for char in found.message), found.message
        assert "sk-synthetic" not in found.message + found.next_step
        return
    assert found.audit.path.startswith("/")
    assert all(secret.ref for secret in found.secrets.values())


def exports(data: bytes) -> None:
    """Pieces of files: what is kept is within the bounds, has a plain name, and reads back as its facts say."""
    spool = Spool(max_bytes=CAP, max_files=3)
    sent: dict[str, bytes] = {}
    try:
        for raw in data.split(b"\n"):
            try:
                args = decode(raw)
            except Refusal:
                continue
            except GuestProtocolError:
                break
            try:
                info = spool.take(args)
            except Refusal as refusal:
                if refusal.too_large:
                    sent.pop(args.name, None)  # what was begun is dropped
                continue
            assert plain_name(args.name)
            sent[args.name] = sent.get(args.name, b"") + args.data
            if info is not None:
                assert info.sha256 == hashlib.sha256(sent[args.name]).hexdigest()
        assert len(spool.infos) <= 3
        assert sum(info.size for info in spool.infos) <= CAP
        for info in spool.infos:
            assert spool.read(info.name, 0, CAP) == (sent[info.name], True)
    finally:
        spool.close()


def names(data: bytes) -> None:
    """The broker's rule for names is never wider than the one of the program that writes the file."""
    for name in (
        data.decode("utf-8", "surrogateescape"),
        data.decode("utf-8", "replace"),
        data.decode("utf-16", "ignore"),
    ):
        wrong = bad_name(name)
        if wrong is None:
            assert plain_name(name)
            assert os.path.basename(name) == name
            assert not any(unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for char in name)


LIST = EgressPolicy.load('[egress]\nallow = ["api.allowed.example:443", "*.wild.example:443"]\nwildcard_dns = 4')


def dns(data: bytes) -> None:
    """A question is answered only where an independent parser reads a listed name; every reply is one it can read."""
    answered = Responder(LIST).answer(data)
    if answered.reply is not None:
        assert len(answered.reply) <= 512
        reply = dns_message.from_wire(answered.reply)
        assert reply.id == int.from_bytes(data[:2])
        assert len(reply.answer) == answered.allow
    if answered.allow:
        (question,) = dns_message.from_wire(data, ignore_trailing=True, question_only=True).question
        name = question.name.to_text(omit_final_dot=True).lower()
        assert name == "api.allowed.example" or (name.endswith(".wild.example") and name.count(".") == 2)
        assert (int(question.rdtype), int(question.rdclass)) in {(1, 1), (28, 1)}


def front(data: bytes) -> None:
    """However a request is cut, the same events come out, and nothing follows a refusal (E1)."""
    cut = max(1, data[0] if data else 1)
    stream = data[1:]
    outcomes = []
    for size in (len(stream) + 1, cut):
        reader = Front(FRONT.decide)
        events: list[object] = []
        for at in range(0, len(stream), size):
            events += reader.feed(stream[at : at + size])
        body = b"".join(event.data for event in events if isinstance(event, Body))
        rest = [event for event in events if not isinstance(event, Body)]
        assert not any(isinstance(event, Refused) for event in rest[:-1])
        if rest and isinstance(rest[-1], Refused):
            assert reader.feed(b"GET http://plain.example/ HTTP/1.1\r\nHost: plain.example\r\n\r\n") == []
            body = b""  # how much of a body stood before its own error depends on the cut
        outcomes.append(([one.verdict.reason if isinstance(one, Refused) else one for one in rest], body))
    assert outcomes[0] == outcomes[1]


def hello(data: bytes) -> None:
    """However a ClientHello is cut, one verdict; an accepted one names the host of the CONNECT (E2)."""
    cut = max(1, data[0] if data else 1)
    stream = data[1:]
    verdicts = []
    for size in (len(stream) + 1, cut):
        reader = Reader(HELLO_HOST, 0.0)
        found = None
        for at in range(0, len(stream), size):
            found = reader.feed(stream[at : at + size], 0.0)
            if found is not None:
                break
        verdicts.append(found)
    assert verdicts[0] == verdicts[1]
    if isinstance(verdicts[0], Hello):
        assert verdicts[0].sni == HELLO_HOST.host


def nameserver(data: bytes) -> None:
    """Whatever a nameserver sends: no address that does not stand in it, and at most what one message holds (E2)."""
    reply = decode_reply(QUERY, QUERY[:2] + data)
    for packed in () if reply is None else reply.addresses:
        assert len(packed) == 4
        assert packed in data


TARGETS: dict[str, Callable[[bytes], None]] = {
    "front": front,
    "hello": hello,
    "nameserver": nameserver,
    "frames": frames,
    "strictjson": strictjson,
    "scope": scope,
    "config": config,
    "exports": exports,
    "names": names,
    "dns": dns,
}


def seeds(target: str) -> list[bytes]:
    """The committed corpus of one target; a frames seed is one line of JSON bodies, framed here."""
    found = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    if target == "frames":
        found += [b"\x03" + b"".join(struct.pack(">I", len(line)) + line for line in one.splitlines()) for one in found]
    return found

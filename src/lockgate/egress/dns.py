"""Answers DNS questions of a confined process; asks nobody.

Rule 1: sans-I/O. There is no socket here and no upstream: bytes in, bytes and a verdict out, so that no name that the
        confined side chose can leave as a question (E3).
Rule 2: a name is answered only if the policy names it exactly, or if it falls under a wildcard and the operator gave
        wildcards a count; the answer is an address of ours that leads to nobody outside.
Rule 3: one question, class IN, opcode 0, no compression, at most 512 bytes. Everything behind the question is never
        read: no EDNS option, no additional and no authority record has a reader here.
Rule 4: an address stands for one name for as long as the run lasts, in both directions.

Sources: RFC 1035 sections 4.1 and 4.2, RFC 6891 (a server that ignores EDNS), RFC 2308 (no SOA: nothing is cached),
RFC 4193 (the pool for IPv6), RFC 2544 (198.18.0.0/15).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_reasons import EgressReason
from lockgate.policy.host import Host, Refusal

MESSAGE_BYTES: Final = 512
TTL_SECONDS: Final = 60
POOL_4: Final = 198 << 24 | 18 << 16  # 198.18.0.0/15
POOL_4_BITS: Final = 15
POOL_6: Final = 0xFD6C_6F63_6B67 << 80  # fd6c:6f63:6b67::/48
POOL_6_BITS: Final = 48
POOL_SIZE: Final = 65_534

QTYPE_A: Final = 1
QTYPE_AAAA: Final = 28
_IN: Final = 1
_HEADER: Final = struct.Struct("!HHHHHH")
_QUESTION: Final = struct.Struct("!HH")
_RECORD: Final = struct.Struct("!HHHIH")
_NAME_AT_12: Final = 0xC00C
_QR: Final = 0x8000
_OPCODE: Final = 0x7800
_AA: Final = 0x0400
_RD: Final = 0x0100
_RA: Final = 0x0080
_NOERROR: Final = 0
_FORMERR: Final = 1
_NXDOMAIN: Final = 3
_NOTIMP: Final = 4
_REFUSED: Final = 5
_WIRE_NAME_BYTES: Final = 255
_LABEL_BYTES: Final = 63


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One question judged.

    Attributes:
        reply: what goes back; None: nothing does (it was no question).
        allow: whether an address of the pool was given.
        reason: "synthetic_answer", or the class of the refusal.
        rule: the entry that decided, None when nothing matched.
        host: the canonical name; None when the bytes were none.
        qtype: the type asked for, 0 when that was not readable.
        reported: report mode let through what `reason` would have denied.
        name: the labels as they were sent, joined by dots; to look for planted values in.

    """

    reply: bytes | None
    allow: bool
    reason: EgressReason
    rule: str | None = None
    host: Host | None = None
    qtype: int = 0
    reported: bool = False
    name: bytes = b""


class Responder:
    """The names of one run.

    Args:
        policy: rules on names.
        ipv6: whether the run's namespace routes the IPv6 pool; if not, AAAA of an allowed name is an empty answer. It
            is known late, so it may be set later.

    """

    def __init__(self, policy: EgressPolicy, *, ipv6: bool = True) -> None:
        self._policy = policy
        self.ipv6 = ipv6
        self._numbers: dict[Host, int] = {}
        self._hosts: list[Host] = []
        self._wildcards = 0

    def answer(self, packet: bytes) -> Answered:
        """Judge one DNS message and say what goes back.

        Args:
            packet: the whole message, without the length that TCP puts before it.

        """
        if len(packet) < _HEADER.size:
            return Answered(reply=None, allow=False, reason="bad_query")
        ident, flags, questions, answers, _, _ = _HEADER.unpack_from(packet)
        if flags & _QR:
            return Answered(reply=None, allow=False, reason="bad_query")
        kept = ident, flags & (_OPCODE | _RD)
        if flags & _OPCODE:
            return Answered(reply=_reply(kept, _NOTIMP), allow=False, reason="bad_query")
        parsed = _question(packet) if questions == 1 and answers == 0 and len(packet) <= MESSAGE_BYTES else None
        if parsed is None:
            return Answered(reply=_reply(kept, _FORMERR), allow=False, reason="bad_query")
        labels, end = parsed
        qtype, qclass = _QUESTION.unpack_from(packet, end)
        question = packet[_HEADER.size : end + _QUESTION.size]
        if qclass != _IN:
            judged = Answered(reply=_reply(kept, _REFUSED, question), allow=False, reason="bad_query", qtype=qtype)
        else:
            judged = self._judge(_host(labels), qtype, kept, question)
        return msgspec.structs.replace(judged, name=b".".join(labels))

    def _judge(self, host: Host | Refusal, qtype: int, kept: tuple[int, int], question: bytes) -> Answered:
        if isinstance(host, Refusal):
            reason: EgressReason = "ip_literal_or_ambiguous" if host.reason == "ip_literal_or_ambiguous" else "bad_host"
            return Answered(reply=_reply(kept, _NXDOMAIN, question), allow=False, reason=reason, qtype=qtype)
        verdict = self._policy.dns(host)
        known = Answered(reply=None, allow=False, reason=verdict.reason, rule=verdict.rule, host=host, qtype=qtype)
        wildcard = not verdict.allow and verdict.reason == "wildcard_dns_budget" and self._within(host)
        if not verdict.allow and not wildcard:
            return _with(known, _reply(kept, _NXDOMAIN, question))
        if qtype not in (QTYPE_A, QTYPE_AAAA):
            return _with(known, _reply(kept, _NOERROR, question), reason="qtype_denied")
        address = self._give(host, qtype, wildcard=wildcard)
        if address is None:
            return _with(known, _reply(kept, _NXDOMAIN, question), reason="name_budget")
        record = b""
        if qtype == QTYPE_A or self.ipv6:
            record = _RECORD.pack(_NAME_AT_12, qtype, _IN, TTL_SECONDS, len(address)) + address
        return Answered(
            reply=_reply(kept, _NOERROR, question, record),
            allow=True,
            reason=verdict.reason if verdict.reported else "synthetic_answer",
            rule=verdict.rule,
            host=host,
            qtype=qtype,
            reported=verdict.reported,
        )

    def reverse(self, packed: bytes) -> Host | None:
        """Return the name that an address of ours stands for.

        Args:
            packed: 4 or 16 bytes.

        """
        pool = {4: POOL_4, 16: POOL_6}.get(len(packed))
        number = int.from_bytes(packed) - pool - 1 if pool is not None else -1
        return self._hosts[number] if 0 <= number < len(self._hosts) else None

    def give(self, hosts: Iterable[Host]) -> list[tuple[Host, bytes, bytes]]:
        """Give names their addresses before anybody asks; returns (name, IPv4, IPv6) for each that fits the pool."""
        given: list[tuple[Host, bytes, bytes]] = []
        for host in hosts:
            four, six = self._give(host, QTYPE_A), self._give(host, QTYPE_AAAA)
            if four is not None and six is not None:
                given.append((host, four, six))
        return given

    def _within(self, host: Host) -> bool:
        """Whether a name under a wildcard may be answered: it was before, or the run's count is not used up."""
        return host in self._numbers or self._wildcards < self._policy.wildcard_dns

    def _give(self, host: Host, qtype: int, *, wildcard: bool = False) -> bytes | None:
        number = self._numbers.get(host)
        if number is None:
            if len(self._hosts) >= POOL_SIZE:
                return None
            number = len(self._hosts)
            self._numbers[host] = number
            self._hosts.append(host)
            self._wildcards += wildcard
        # Number 0 would be the pool's own address.
        return (POOL_4 + number + 1).to_bytes(4) if qtype == QTYPE_A else (POOL_6 + number + 1).to_bytes(16)


def _question(packet: bytes) -> tuple[list[bytes], int] | None:
    """Return the labels of the one question and where its type begins; None when it is not well formed."""
    labels: list[bytes] = []
    at = _HEADER.size
    while at < len(packet):
        length = packet[at]
        at += 1
        if length == 0:
            return (labels, at) if at + _QUESTION.size <= len(packet) else None
        # Above 63 are compression pointers and label types that nobody uses (RFC 6891 section 5).
        if length > _LABEL_BYTES or at + length - _HEADER.size > _WIRE_NAME_BYTES - 1:
            return None
        labels.append(packet[at : at + length])
        at += length
    return None


def _host(labels: list[bytes]) -> Host | Refusal:
    if any(b"." in label for label in labels):
        # On the wire one label, as text two: only one of the two readings would be judged.
        return Refusal("bad_host", "a label holds a dot")
    return Host.parse(b".".join(labels))


def _with(known: Answered, reply: bytes, *, reason: EgressReason | None = None) -> Answered:
    return msgspec.structs.replace(known, reply=reply, reason=reason or known.reason)


def _reply(kept: tuple[int, int], code: int, question: bytes = b"", record: bytes = b"") -> bytes:
    ident, flags = kept
    head = _HEADER.pack(ident, _QR | flags | _AA | _RA | code, bool(question), bool(record), 0, 0)
    return head + question + record

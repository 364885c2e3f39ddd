"""Cases about names that are asked for and packets that are sent inside a namespace.

Rule 1: the responder and the layout are those that `lockgate egress run` builds; only the packets are made here.
"""

from __future__ import annotations

import re
from typing import Any, Final

from lockgate.corpus.case import Got, bytes_of, got, raw_of, unescaped, unrunnable
from lockgate.egress import confine, dns
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Host, Refusal

_TYPES: Final = {
    "A": 1, "NS": 2, "MD": 3, "MF": 4, "CNAME": 5, "SOA": 6, "MB": 7, "MG": 8, "MR": 9, "NULL": 10, "WKS": 11,
    "PTR": 12, "HINFO": 13, "MINFO": 14, "MX": 15, "TXT": 16, "RP": 17, "AFSDB": 18, "X25": 19, "ISDN": 20, "RT": 21,
    "NSAP": 22, "SIG": 24, "KEY": 25, "PX": 26, "GPOS": 27, "AAAA": 28, "LOC": 29, "NXT": 30, "SRV": 33, "ATMA": 34,
    "NAPTR": 35, "KX": 36, "CERT": 37, "A6": 38, "DNAME": 39, "SINK": 40, "OPT": 41, "APL": 42, "DS": 43, "SSHFP": 44,
    "IPSECKEY": 45, "RRSIG": 46, "NSEC": 47, "DNSKEY": 48, "DHCID": 49, "NSEC3": 50, "NSEC3PARAM": 51, "TLSA": 52,
    "SMIMEA": 53, "HIP": 55, "CDS": 59, "CDNSKEY": 60, "OPENPGPKEY": 61, "CSYNC": 62, "ZONEMD": 63, "SVCB": 64,
    "HTTPS": 65, "SPF": 99, "NID": 104, "L32": 105, "L64": 106, "LP": 107, "EUI48": 108, "EUI64": 109, "TKEY": 249,
    "TSIG": 250, "IXFR": 251, "AXFR": 252, "MAILB": 253, "MAILA": 254, "ANY": 255, "*": 255, "URI": 256, "CAA": 257,
    "AVC": 258, "DOA": 259, "AMTRELAY": 260, "TA": 32768, "DLV": 32769,
}  # fmt: skip
_ASKED: Final = frozenset(
    ("qname", "qname_hex", "name", "name_hex", "query", "qtype", "type", "qclass", "class", "extra", "dst", "note")
)
_OPCODES: Final = {"iquery": 1, "status": 2, "notify": 4, "update": 5}
_CLASSES: Final = {"IN": 1, "CH": 3, "CHAOS": 3, "HS": 4, "ANY": 255, "NONE": 254}


def dns_query(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """One question to the responder of the namespace."""
    if "dst" in given and not _is_ours(str(given["dst"])):
        return Got("deny", "no_route", {"forwarded": False})
    packet = raw_of(given, "packet", "bytes", "raw", "wire")
    if packet is None:
        name = raw_of(given, "qname", "name", "query")
        if name is None:
            unrunnable("input.qname is no text")
        name = name if any(f"{one}_hex" in given for one in ("qname", "name", "query")) else _bytes(name)
        plain = name.removesuffix(b".")
        refused = Host.parse(name) if plain and b"" in plain.split(b".") else None
        if isinstance(refused, Refusal):
            return got(refused)  # on the wire an empty label is the end: there is no such question
        packet = _packet(name, given)
    answered = dns.Responder(policy).answer(packet)
    facts: dict[str, Any] = {"forwarded": False}
    if answered.reply is not None:
        facts["rcode"] = {0: "NOERROR", 1: "FORMERR", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}.get(
            answered.reply[3] & 15, ""
        )
    return Got("allow" if answered.allow else "deny", answered.reason, facts)


def _is_ours(dst: str) -> bool:
    address, _, port = dst.rpartition(":")
    return port.isdigit() and confine.route("udp", address, int(port)) == "dns"


def _bytes(name: bytes) -> bytes:
    """Return a name in which what is written out is the bytes it names."""
    return bytes_of(unescaped(name.decode("latin-1")))


def _packet(name: bytes, given: dict[str, Any]) -> bytes:
    # Further fields say what a sentence would: "opcode": 5.
    extra = ", ".join([str(given.get("extra", "")), *(f"{k}={v}" for k, v in given.items() if k not in _ASKED)])
    lower = extra.lower()
    labels = [one for one in name.split(b".") if one] if name.strip(b".") else []
    wire = b"".join(bytes((len(one) & 0xFF,)) + one for one in labels) + b"\0"
    if "compress" in lower or "pointer" in lower:
        wire = wire[:-1] + b"\xc0\x0c"
    if re.search(r"label type|0x40|0x80", lower):
        wire = (b"\x80" if "0x80" in lower else b"\x41") + wire
    kind = _number(given.get("qtype", given.get("type", "A")), _TYPES)
    family = _number(given.get("qclass", given.get("class", _word(extra, _CLASSES, r"class\s*=?\s*(\w+)"))), _CLASSES)
    question = wire + kind.to_bytes(2) + family.to_bytes(2)
    count = 2 if re.search(r"two questions|2 questions|qdcount\s*=?\s*2|second question", lower) else 1
    if re.search(r"no question|qdcount\s*=?\s*0", lower):
        count, question = 0, b""
    opcode = next((number for word, number in _OPCODES.items() if word in lower), 0)
    found = re.search(r"opcode\s*=?\s*(\d+)", lower)
    flags = (
        0x0100
        | (int(found[1]) & 15 if found else opcode) << 11
        | (0x8000 if re.search(r"\bqr\b|response", lower) else 0)
    )
    more, records = _additional(extra)
    answers = len(re.findall(r"answer record|ancount\s*=?\s*[1-9]", lower))
    authority = len(re.findall(r"authority record|nscount\s*=?\s*[1-9]", lower))
    plain = b"\0\0\x10\0\1\0\0\0\0\0\1\0"
    head = b"\x13\x37" + flags.to_bytes(2) + b"".join(n.to_bytes(2) for n in (count, answers, authority, records))
    made = head + question * max(count, 1 if count else 0) + plain * (answers + authority) + more
    if re.search(r"truncated (?:packet|message|query|question)|cut short|cut off|too short|incomplete", lower):
        return made[: len(made) - 3 if not more else len(head) + len(question) - 3]
    if re.search(r"(?:over|more than|larger than|above|>)\s*512|oversize|too (?:large|long)", lower):
        return made.ljust(dns.MESSAGE_BYTES + 1, b"\0")
    return made


def _additional(extra: str) -> tuple[bytes, int]:
    """Return what stands behind the question, and how many records that are."""
    made, count = b"", 0
    if re.search(r"(?i)edns|\bopt\b|option", extra):
        option = re.search(r"(?i)option\s+(\d+)", extra)
        size = re.search(r"(?i)(\d+)\s*bytes", extra)
        data = b"s" * (int(size[1]) if size else 16)
        body = (int(option[1]) if option else 65001).to_bytes(2) + len(data).to_bytes(2) + data
        made += b"\0\0\x29\x10\0\0\0\0\0" + len(body).to_bytes(2) + body
        count += 1
    if re.search(r"(?i)additional record|additional \w+ record|txt", extra):
        made += b"\0\0\x10\0\1\0\0\0\0\0\x07\x06secret"
        count += 1
    return made, count


def _word(text: str, known: dict[str, int], pattern: str) -> Any:
    found = re.search(pattern, text, re.IGNORECASE)
    return found[1] if found and (found[1].upper() in known or found[1].isdigit()) else 1


def _number(value: Any, known: dict[str, int]) -> int:
    if isinstance(value, int):
        return value & 0xFFFF
    text = str(value).upper().strip()
    if text in known:
        return known[text]
    found = re.fullmatch(r"\D*?(\d+)\D*", text)
    if found is None:
        unrunnable("input.qtype is no type")
    return int(found[1]) & 0xFFFF


def packet(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """One packet of the confined process: what answers it."""
    proto, dst = str(given.get("proto", "")).lower(), str(given.get("dst", ""))
    address, port = dst, None
    found = re.fullmatch(r"(.*):(\d+)", dst)
    if found is not None and (found[1].endswith("]") or ":" not in found[1]):
        address, port = found[1], int(found[2])
    routed: list[tuple[bytes, int]] = []
    host = Host.parse(bytes_of(address, "input.dst")) if address else Refusal("bad_host", "none")
    if isinstance(host, Host) and host.kind == "name":
        # Its address is whatever the responder of the namespace says.
        responder = dns.Responder(policy)
        if not policy.dns(host).allow:
            return Got("deny", "no_route")
        for _, four, _ in responder.give([host]):
            address = ".".join(str(one) for one in four)
            routed = [(four, number) for number in policy.ports(host)]
    answer = confine.route("udp" if proto in {"quic", "udp", "ntp", "http3"} else proto, address, port, routed=routed)
    return Got("deny", "no_route") if answer == "no_route" else Got("allow", "ok")


def env(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """Proxy variables that the confined process changed: what is left to a client that obeys them."""
    del policy
    wanted = {name: str(value) for name, value in given.items()}
    made = confine.child_env(wanted, {})
    kept = [
        name
        for name in wanted
        if re.fullmatch(r"(?i)(?:https?|all|no|ftp)_proxy", name) and made.get(name) == wanted[name]
    ]
    if kept:
        return Got("allow", "ok", {"kept": kept})
    # Inside, a process may set what it likes: then it dials, or asks another proxy.
    for address in ("93.184.216.34", "127.0.0.1", "10.0.0.1"):
        for port in (80, 443, 8080):
            if confine.route("tcp", address, port) != "no_route":
                return Got("allow", "ok")
    return Got("deny", "no_route")

"""Turns what report mode let through into a list that a person can read and shorten.

Rule 1: the log holds what a confined program asked for, so a hostile one can write anything there. The result is a
        proposal; nothing loads it by itself.
Rule 2: an entry is proposed live only if it would load without a warning; else it stands as a comment with the reason.
Rule 3: no wildcard is proposed live: it would let out more than was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_entry import EgressConfigError
from lockgate.policy.host import Endpoint, Refusal
from lockgate.policy.suffixes import suffix_section

_MANY: Final = 4
_LISTED: Final = 1000


class Candidate(msgspec.Struct, frozen=True):
    """One destination that was asked for.

    Attributes:
        entry: canonical `host:port`.
        count: how often.
        live: whether it can be taken over as it is.
        why: the reason it is not, of the load checks; None when it is live.

    """

    entry: str
    count: int
    live: bool
    why: str | None = None


class Proposal(msgspec.Struct, frozen=True):
    """A proposed list, most used first.

    Attributes:
        candidates: live ones first.
        parents: names one label above several candidates on one port, with how many: a wildcard would take them in.
        skipped: how many destinations in the log were none.

    """

    candidates: tuple[Candidate, ...]
    parents: tuple[tuple[str, int], ...]
    skipped: int

    def to_toml(self) -> str:
        """Return it as an `[egress]` table to look through."""
        lines = ["[egress]", 'mode = "report"  # "enforce" once the list is complete', "allow = ["]
        lines += [f'  "{one.entry}",  # {one.count} times' for one in self.candidates if one.live]
        held = [one for one in self.candidates if not one.live]
        if held:
            lines.append("  # Not taken over; each needs a decision:")
            lines += [f'  # "{one.entry}",  # {one.count} times: {one.why}' for one in held]
        if self.parents:
            lines.append("  # Several names of one owner; a wildcard lets out one label of data each:")
            lines += [f'  # "*.{parent}",  # {count} names' for parent, count in self.parents]
        return "\n".join([*lines, "]", ""])


def propose(destinations: Iterable[str]) -> Proposal:
    """Return a proposal for the destinations of a log, each as often as it was asked for."""
    counts: Counter[str] = Counter()
    skipped = 0
    for text in destinations:
        endpoint = Endpoint.parse(text.encode("utf-8", "replace"))
        if isinstance(endpoint, Refusal):
            skipped += 1
        else:
            counts[str(endpoint)] += 1
    found = [_candidate(entry, count) for entry, count in counts.most_common(_LISTED)]
    skipped += sum(counts.values()) - sum(one.count for one in found)
    parents: Counter[str] = Counter()
    for entry in counts:
        host, _, port = entry.rpartition(":")
        parent = host.partition(".")[2]
        if parent and not parent[-1].isdigit() and suffix_section(parent) is None:
            parents[f"{parent}:{port}"] += 1
    many = tuple(sorted((name, count) for name, count in parents.items() if count >= _MANY))
    found.sort(key=lambda one: not one.live)
    return Proposal(tuple(found), many, skipped)


def _candidate(entry: str, count: int) -> Candidate:
    try:
        policy = EgressPolicy.from_data({"allow": [entry]})
    except EgressConfigError as error:
        return Candidate(entry, count, live=False, why=error.reason)
    if policy.warnings:
        return Candidate(entry, count, live=False, why=policy.warnings[0].reason)
    return Candidate(entry, count, live=True)

"""Plaintext cannot be printed, compared, walked, copied or serialised (C6)."""

from __future__ import annotations

import copy
import json
import operator
import pickle  # noqa: TID251 - to see that it is refused
import traceback
from collections.abc import Callable

import msgspec
import pytest

from lockgate.secrets import Hazmat, Lease
from lockgate.secrets.leaks import LIVE

SECRET = "sk-synthetic-4f1c9e7a2b"

WAYS: dict[str, Callable[[Hazmat[str]], object]] = {
    "str": str,
    "format": lambda h: f"{h}",
    "percent": lambda h: "%s" % h,  # noqa: UP031 - that is the way under test
    "bytes": bytes,
    "eq": lambda h: h == SECRET,
    "ne": lambda h: h != SECRET,
    "hash": hash,
    "set": lambda h: {h},
    "bool": bool,
    "not": operator.not_,
    "len": len,
    "iter": list,
    "in": lambda h: "sk" in h,
    "index": lambda h: h[0],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "json": json.dumps,
    "msgspec": msgspec.json.encode,
    "vars": vars,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_in_but_reveal(way: str) -> None:
    with pytest.raises(TypeError) as caught:
        WAYS[way](Hazmat(SECRET))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_repr_says_nothing_and_reveal_says_all() -> None:
    hazmat = Hazmat(SECRET)
    assert repr(hazmat) == repr([hazmat])[1:-1] == "<hazmat>"
    assert hazmat.reveal() == SECRET
    hazmat.drop()
    with pytest.raises(ValueError, match="dropped"):
        hazmat.reveal()


def test_a_lease_is_looked_for_until_it_ends() -> None:
    with Lease(SECRET, purpose="test", ttl=30) as lease:
        assert lease in LIVE.leases
        assert lease.alive
        assert SECRET not in f"{lease!r} {lease.id}"
    assert lease not in LIVE.leases
    assert not lease.alive
    with pytest.raises(ValueError, match="dropped"):
        lease.value.reveal()


def test_a_lease_ends_when_its_block_fails() -> None:
    with pytest.raises(KeyError), Lease(SECRET, purpose="test", ttl=30) as lease:
        raise KeyError
    assert lease not in LIVE.leases

"""Fields of a result that vouch for their URL: found wherever they stand, and nothing else is (E5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import pytest

import lockgate.policy as lg
from lockgate.policy import results
from lockgate.policy.registry import Operations


class Empty(lg.Args):
    pass


class Leaf(lg.Result):
    url: lg.SafeUrl
    other: str = "https://other.example/"


class Written(lg.Result):
    url: Annotated[str, lg.SafeUrl]


class Chain(lg.Result):
    url: lg.SafeUrl
    then: Chain | None = None


class Branch(lg.Result):
    plain: str = "https://plain.example/"
    maybe: lg.SafeUrl | None = None
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    urls: Sequence[lg.SafeUrl] = ()
    pair: tuple[str, lg.SafeUrl] = ("https://first.example/", "https://second.example/")
    named: dict[str, lg.SafeUrl] | None = None
    state: Literal["https://literal.example/"] = "https://literal.example/"
    either: Leaf | int = 0


class Plain(lg.Result):
    url: str = "https://plain.example/"


def operation(kind: type[Any]) -> Any:
    ops = Operations()

    def get(call: lg.Call, args: Empty) -> Any:
        raise AssertionError

    get.__annotations__["return"] = kind
    get.__annotations__.update(call=lg.Call, args=Empty)
    ops.operation(effect="read", max_result=100_000)(get)
    return ops.get("get")


def found(value: msgspec.Struct) -> tuple[str, ...]:
    one = operation(type(value))
    return one.safe_urls(one.encode_result(value))


def url(n: int) -> str:
    return f"https://files.example/{n}"


def test_declared_fields_are_found_in_every_container() -> None:
    value = Branch(
        maybe=url(1),
        leaf=Leaf(url=url(2)),
        leaves=(Leaf(url=url(3)), Leaf(url=url(4))),
        urls=[url(5), url(5)],
        pair=("https://first.example/", url(6)),
        named={"https://key.example/": url(7)},
        either=Leaf(url=url(8)),
    )
    assert found(value) == tuple(url(n) for n in range(1, 9))
    assert found(Chain(url=url(1), then=Chain(url=url(2)))) == (url(1), url(2))
    assert found(Written(url=url(1))) == (url(1),)


def test_a_result_without_a_declared_field_vouches_for_nothing() -> None:
    one = operation(Plain)
    assert not one.vouches
    assert one.safe_urls(one.encode_result(Plain())) == ()
    assert operation(Branch).vouches


def test_the_number_and_the_length_are_bounded() -> None:
    many = Branch(urls=[url(n) for n in range(results.MAX_URLS * 2)])
    assert len(found(many)) == results.MAX_URLS
    long = "https://files.example/" + "a" * results.MAX_URL_CHARS
    assert found(Written(url=long)) == ()


@pytest.mark.parametrize("stored", [b"", b"null", b'{"url":7}', b"{"])
def test_bytes_that_are_no_such_result_vouch_for_nothing(stored: bytes) -> None:
    assert operation(Leaf).safe_urls(stored) == ()


def test_a_model_sees_which_fields_are_urls_that_may_be_shown() -> None:
    assert "may be shown" in str(operation(Leaf).describe()["result"])


def test_an_argument_is_not_vouched_for() -> None:
    """What the model chose is no source: such an argument has no bound either, so it is refused."""

    class Bad(lg.Args):
        url: lg.SafeUrl

    ops = Operations()

    def get(call: lg.Call, args: Any) -> Plain:
        return Plain()

    get.__annotations__.update(call=lg.Call, args=Bad, **{"return": Plain})
    with pytest.raises(Exception, match="get"):
        ops.operation(effect="read", max_result=100)(get)

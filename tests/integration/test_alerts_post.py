"""One delivery: which addresses, which certificates, how long (E4, E6)."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from alerts_receiver import Receiver
from lockgate.alerts.post import PostFailed, post
from lockgate.config import AlertSink
from lockgate.policy.url import Url


def url(text: str) -> Url:
    found = Url.parse(text.encode(), ("https", "http"))
    assert isinstance(found, Url)
    return found


def sink(**options: Any) -> AlertSink:
    return AlertSink(**{"kind": "webhook", "loopback_http": True, **options})


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def test_tls_is_checked_against_the_named_authority_and_the_name(tmp_path: Path, authority: trustme.CA) -> None:
    """E4: an alert goes to who can prove the name, and to nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    other_name = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("other.example").configure_cert(other_name)
    ca, strangers = tmp_path / "ca.pem", tmp_path / "strangers.pem"
    authority.cert_pem.write_to_path(ca)
    trustme.CA().cert_pem.write_to_path(strangers)
    good, wrong = Receiver(context), Receiver(other_name)
    try:
        ours = sink(ca=str(ca))
        assert post(url(good.url()), b"{}", {}, sink=ours, timeout=30).status == 200
        for receiver, table in ((wrong, ours), (good, sink(ca=str(strangers))), (good, sink())):
            with pytest.raises(PostFailed, match="certificate"):
                post(url(receiver.url()), b"{}", {}, sink=table, timeout=30)
        assert (len(good.requests), len(wrong.requests)) == (1, 0)
    finally:
        good.close()
        wrong.close()


def test_a_name_that_leads_to_this_machine_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """E6: every answer is vetted, and the vetted address is dialled: no second look-up can change it."""
    receiver = Receiver()
    asked: list[str] = []

    def resolve(name: str, port: int, **_: Any) -> list[Any]:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[name], port))]

    answers = {"rebound.example": "127.0.0.1", "meta.example": "169.254.169.254", "inner.example": "10.255.255.1"}
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        for name in answers:
            with pytest.raises(PostFailed, match="may not be dialled"):
                post(url(f"http://{name}:{receiver.port}/x"), b"", {}, sink=AlertSink(kind="webhook"), timeout=10)
        assert receiver.requests == []
        with pytest.raises(PostFailed, match="may not be dialled"):
            post(url("https://meta.example/x"), b"", {}, sink=sink(private=True), timeout=10)
        # The control: the same name, where the operator says that it may be loopback.
        assert post(url(f"http://rebound.example:{receiver.port}/x"), b"", {}, sink=sink(), timeout=30).status == 200
        assert asked.count("rebound.example") == 2  # once for each delivery
    finally:
        receiver.close()


@pytest.fixture
def dripping() -> Iterator[int]:
    """A server that answers a byte at a time, for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 10_000:
                if over.wait(0.05):
                    return
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    over.set()
    listener.close()
    thread.join(30)


def test_one_deadline_for_a_server_that_drips(dripping: int) -> None:
    started = time.monotonic()
    with pytest.raises(PostFailed):
        post(url(f"http://127.0.0.1:{dripping}/x"), b"{}", {}, sink=sink(), timeout=1.0)
    assert time.monotonic() - started < 60  # it would take eight minutes


def test_an_answer_is_read_to_a_cap_and_retry_after_is_kept() -> None:
    receiver = Receiver()
    try:
        receiver.answer = lambda _: (429, b"a" * 1_000_000, {"Retry-After": "7"})
        answer = post(url(receiver.url()), b"{}", {}, sink=sink(), timeout=60)
        assert (answer.status, len(answer.body), answer.retry_after) == (429, 64 * 1024, 7.0)
        receiver.answer = lambda _: (503, b"", {"Retry-After": "999999999"})
        assert post(url(receiver.url()), b"{}", {}, sink=sink(), timeout=60).retry_after is None
    finally:
        receiver.close()


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(PostFailed, match="no connection"):
        post(url(f"http://127.0.0.1:{port}/x"), b"", {}, sink=sink(), timeout=30)

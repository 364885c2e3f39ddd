"""The launcher's end of the control socket; blocking, for programs that start confined processes.

Rule 1: the run lives as long as the connection. Closing it, or dying, ends the run at the gateway.
Rule 2: every wait has a deadline.
Rule 3: what the gateway says unasked is kept for `poll`, whichever answer it arrived before.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from lockgate.contract.errors import HostFault

_LINE_BYTES: Final = 1024 * 1024


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is told.

    Attributes:
        token: names the run on the data socket; see `preface.preface`. Not for the confined process.
        data: path of the data socket.
        policy: the `[egress]` table in force, JSON of `policy.egress_spec.EgressSpec`.
        policy_hash: SHA-256 of the policy, hexadecimal. mode: "enforce" or "report".
        ca_pem: the certificate that the confined process must trust; None when nothing is intercepted.

    """

    token: str
    data: str
    policy: str
    policy_hash: str
    mode: str
    ca_pem: str | None = None


class Control:
    """One run at a gateway.

    Args:
        gateway: path of the control socket, or a connected one.
        timeout: seconds that any answer may take.
        broker: the gateway's end of a `bridge.Bridge`, for model endpoints; handed over by `open`, closed here.

    """

    def __init__(
        self, gateway: str | socket.socket, *, timeout: float = 15.0, broker: socket.socket | None = None
    ) -> None:
        self._timeout = timeout
        self._broker = broker
        self._buffer = bytearray()
        self._events: deque[Mapping[str, str]] = deque()
        if isinstance(gateway, socket.socket):
            self._sock = gateway
        else:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                self._sock.settimeout(timeout)
                self._sock.connect(gateway)
            except OSError as error:
                self._sock.close()
                raise HostFault(
                    f"there is no egress gateway at {gateway!r} ({error.strerror})",
                    next_step="start one: lockgate egress serve --directory DIR",
                ) from None
        self._sock.setblocking(True)

    def open(
        self,
        *,
        user: str,
        agent: str,
        run: str,
        tool: str = "",
        tenant: str = "",
        canaries: Sequence[str] = (),
    ) -> Opened:
        """Begin the run.

        Args:
            user: on whose behalf. agent: which agent. run: its name in rows. tool: what is started. tenant: whose data.
            canaries: planted values; when one of them is about to leave, the run is killed.

        Raises:
            HostFault: the gateway is gone or refuses.

        """
        answer = self._ask(
            {"op": "open", "user": user, "agent": agent, "run": run, "tool": tool, "tenant": tenant,
             "canaries": list(canaries)},
            self._broker,
        )  # fmt: skip
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        return msgspec.convert({key: value for key, value in answer.items() if key != "ok"}, Opened)

    def denied(
        self,
        *,
        kind: str,
        reason: str,
        rule: str | None = None,
        destination: str | None = None,
        raw: bytes = b"",
        report: bool = False,
        **more: str,
    ) -> str:
        """Record what was refused on this side; returns its audit id once it is durable.

        Args:
            kind: of `lockgate.audit.denials.Kind`. reason: of `egress_reasons`. rule: that decided.
            destination: canonical. raw: the offending bytes, 256 of them are kept.
            report: it was let through, since the policy is in report mode.
            more: further facts, small.

        Raises:
            HostFault: it is not durable: answer nothing.

        """
        answer = self._ask(
            {"op": "denied", "kind": kind, "reason": reason, "rule": rule, "destination": destination,
             "raw_hex": raw[:256].hex(), "report": report, "more": more}
        )  # fmt: skip
        return str(answer["audit_id"])

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll` has something to say."""
        return self._sock.fileno()

    def poll(self) -> Mapping[str, str] | None:
        """Return what the gateway said unasked ({"event": "kill", "reason": ...}), or None; never waits.

        Raises:
            HostFault: the gateway is gone.

        """
        while not self._events and select.select([self._sock], [], [], 0)[0]:
            answer = self._read(time.monotonic() + self._timeout)
            if "event" not in answer:
                raise _gone("it answered what was not asked")
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """End the run; idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], passed: socket.socket | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        try:
            self._sock.settimeout(self._timeout)
            line = msgspec.json.encode(request) + b"\n"
            if passed is not None:
                sent = socket.send_fds(self._sock, [line], [passed.fileno()])
                line = line[sent:]
            self._sock.sendall(line)
        except OSError as error:
            raise _gone(type(error).__name__) from None
        answer = self._read(deadline)
        while "event" in answer:
            answer = self._read(deadline)
        if answer.get("ok") is not True:
            raise HostFault(str(answer.get("error", "")), next_step=str(answer.get("next_step", "")))
        return answer

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next line; an event is also kept for `poll`."""
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                answer: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
                if "event" in answer:
                    self._events.append({key: str(value) for key, value in answer.items()})
                return answer
            left = deadline - time.monotonic()
            if left <= 0 or len(self._buffer) > _LINE_BYTES:
                raise _gone("it did not answer in time")
            try:
                self._sock.settimeout(left)
                data = self._sock.recv(65536)
            except OSError as error:
                raise _gone(type(error).__name__) from None
            if not data:
                raise _gone("it closed the connection")
            self._buffer += data


def _gone(why: str) -> HostFault:
    return HostFault(f"the egress gateway is gone ({why})", next_step="nothing can leave; start the run again")

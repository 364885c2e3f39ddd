"""The one exit: typed operations over the channel to the broker.

    import host
    order = host.call("get_order", order_id="ord_4417")
    host.export("report.csv", data)
    host.operations()

A refusal is `host.Denied` with `.reason` and `.operation`. There is no call that returns a credential.

Rule 1: ids rise strictly, in the order in which the requests are written.
Rule 2: any thread may call; a forked child may not, since two writers would break the order and the run with it.
Rule 3: nothing here protects anything: the broker decides, this file only speaks its language.
"""

import base64 as _base64
import json as _json
import os as _os
import struct as _struct
import threading as _threading

__all__ = ["CallFailed", "Denied", "HostError", "OutcomeUnknown", "call", "export", "operations"]

_CHANNEL = 3
_FRAME_BYTES = 1024 * 1024
_WAITING = 8  # requests that may wait for their answers at once
_EXPORT_CHUNK = 512 * 1024
_READ = 64 * 1024
_FAILED = ("result_too_large", "result_blocked", "backend_failed", "backend_timeout", "unavailable")


class HostError(Exception):
    """A call that gave no result. `reason` is a short stable name, `operation` what was asked."""

    def __init__(self, message, reason, operation):
        super().__init__(message)
        self.reason = reason
        self.operation = operation


class Denied(HostError):
    """This run has no right to the call, or not with these arguments, or not any more."""


class CallFailed(HostError):
    """The call was allowed and did not succeed; it had no effect."""


class OutcomeUnknown(CallFailed):
    """It is unknown whether the call took effect. Do not repeat it."""


class _Channel:
    def __init__(self):
        self.owner = _os.getpid()
        self.last_id = 0
        self.received = 0
        self.writing = _threading.Lock()
        self.reading = _threading.Lock()
        self.replies = {}
        self.buffer = b""

    def request(self, operation, args):
        if not isinstance(operation, str):
            raise TypeError("the name of an operation is a str")
        if _os.getpid() != self.owner:
            raise RuntimeError("only the process that was started with this run may call the host")
        name, body = _encode(operation), _encode(args)
        with self.writing:
            while self.last_id - self.received >= _WAITING:
                self.take()  # the host takes more requests without a read answer for an attack
            number = self.last_id + 1
            frame = b'{"id":%d,"op":%s,"args":%s}' % (number, name, body)
            if len(frame) > _FRAME_BYTES:
                raise ValueError("the arguments of %s take %d bytes, above %d" % (operation, len(frame), _FRAME_BYTES))
            self.last_id = number
            _write(_struct.pack(">I", len(frame)) + frame)
        return self.wait(number)

    def wait(self, number):
        while True:
            with self.reading:
                if number in self.replies:
                    return self.replies.pop(number)
                reply = self.read()
                if reply["id"] == number:
                    return reply
                self.replies[reply["id"]] = reply

    def take(self):
        """Read one answer for whoever waits for it, unless all that were asked for have come."""
        with self.reading:
            if self.received < self.last_id:
                reply = self.read()
                self.replies[reply["id"]] = reply

    def read(self):
        reply = _json.loads(self.frame())
        self.received += 1
        return reply

    def frame(self):
        """One body; called with `reading` held. Usually a single read brings all of it."""
        data = self.buffer
        while len(data) < 4 or len(data) < 4 + _struct.unpack(">I", data[:4])[0]:
            more = _os.read(_CHANNEL, _READ)
            if not more:
                raise ConnectionError("the channel to the host is closed; this run is over")
            data += more
        end = 4 + _struct.unpack(">I", data[:4])[0]
        self.buffer = data[end:]
        return data[4:end]


_encode_text = _json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _encode(value):
    return _encode_text(value).encode("utf-8")


def _write(data):
    view = memoryview(data)
    while view:
        view = view[_os.write(_CHANNEL, view) :]


def _request(operation, args):
    reply = _channel.request(operation, args)
    error = reply.get("error")
    if error is None:
        return reply["ok"]
    reason = error["reason"]
    kind = OutcomeUnknown if reason == "outcome_unknown" else CallFailed if reason in _FAILED else Denied
    raise kind(error["message"], reason, error["operation"])


def call(operation, /, **args):
    """Call an operation by name and return its result.

    Raises:
        Denied: the run has no right to it. CallFailed: it failed and had no effect. OutcomeUnknown: it may have.

    """
    return _request(operation, args)


def operations():
    """Return the operations that this run may call, with the types of their arguments."""
    return _request("host.operations", {})


def export(name, data):
    """Hand a file to the caller: `name` without directories, `data` as bytes (or str, which becomes UTF-8)."""
    if isinstance(data, str):
        data = data.encode("utf-8")
    data = memoryview(data).cast("B")
    result = None
    for start in range(0, max(len(data), 1), _EXPORT_CHUNK):
        chunk = data[start : start + _EXPORT_CHUNK]
        last = start + _EXPORT_CHUNK >= len(data)
        text = _base64.b64encode(chunk).decode("ascii")
        result = _request("host.export", {"name": name, "data": text, "last": last})
    return result


def _start():
    """Begin anew in this process; the runner calls it once per slot."""
    global _channel  # noqa: PLW0603 - one channel per process, as the descriptor is
    _channel = _Channel()


_start()

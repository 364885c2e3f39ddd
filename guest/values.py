"""What a run says of itself: its value as JSON and as text, its error. Everything is capped here and again outside.

Rule 1: the objects are the run's own and may do anything when they are looked at: raise, lie, never end. A look that
        raises becomes a text that says so; one that never ends is ended by the wall clock.
Rule 2: JSON means JSON: no NaN, no keys but text, no lone surrogates, at most DEPTH levels. Tuples become arrays and
        numpy scalars their Python number. Whatever else there is has a text only.
"""

import json
import sys
import traceback

DEPTH = 64
INT_BITS = 8192  # readers refuse longer numbers
NAME_BYTES = 256
MESSAGE_BYTES = 8 * 1024
TRACEBACK_BYTES = 32 * 1024
SOURCE_NAME = "<run>"

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_SCALARS = (str, int, float, bool, type(None))


def cut(text, cap):
    """Return (text of at most `cap` bytes of UTF-8, bytes dropped); lone surrogates become escapes."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= cap:
        return data.decode("utf-8"), 0
    kept = data[:cap].decode("utf-8", "ignore")
    return kept, len(data) - len(kept.encode("utf-8"))


def _plain(value):
    """Return a numpy scalar as the Python number it holds, anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value


def _holds_only_json(value):
    """Whether the containers of `value` have text keys only and are at most DEPTH deep."""
    level = [value]
    for _ in range(DEPTH):
        below = []
        for one in level:
            if isinstance(one, dict):
                for key in one:
                    if not isinstance(key, str):
                        return False
                below.extend(item for item in one.values() if not isinstance(item, _SCALARS))
            elif isinstance(one, (list, tuple)):
                below.extend(item for item in one if not isinstance(item, _SCALARS))
            elif not isinstance(one, _SCALARS):
                return False
        if not below:
            return True
        level = below
    return False


def as_json(value, cap):
    """Return (JSON as bytes or None, bytes dropped because it was above `cap`)."""
    try:
        value = _plain(value)
        if isinstance(value, int) and value.bit_length() > INT_BITS:
            return None, 0
        data = _encoder.encode(value).encode("utf-8")
        # After the encoder: it has refused cycles, so this walk ends.
        if not isinstance(value, _SCALARS) and not _holds_only_json(value):
            return None, 0
    except Exception:  # it is the run's own object: TypeError, ValueError, RecursionError, anything
        return None, 0
    if len(data) > cap:
        return None, len(data)
    return data, 0


def as_text(value, cap):
    """Return (repr of at most `cap` bytes, bytes dropped)."""
    try:
        text = repr(value)
    except Exception as error:
        text = "<repr of %s failed: %s>" % (_type_name(value), _type_name(error))
    return cut(text, cap)


def _type_name(value):
    name = type.__dict__["__name__"].__get__(type(value))  # past a metaclass that lies
    return cut(name, NAME_BYTES)[0]


def _from_first_guest_frame(error):
    """Drop the runner's own frames from the traceback of `error`."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != SOURCE_NAME:
        step = step.tb_next
    return step


def as_error(error):
    """Return {name, message, traceback} of an exception, each capped."""
    name = _type_name(error)
    try:
        message = str(error)
    except BaseException as worse:
        message = "<str of %s failed: %s>" % (name, _type_name(worse))
    try:
        lines = traceback.TracebackException(type(error), error, _from_first_guest_frame(error)).format()
        shown = "".join(lines)
    except BaseException as worse:
        shown = "%s: <traceback failed: %s>\n" % (name, _type_name(worse))
    return {"name": name, "message": cut(message, MESSAGE_BYTES)[0], "traceback": _middle_out(shown)}


def _middle_out(text):
    """Keep the ends of a long traceback: where it began and where it broke."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= TRACEBACK_BYTES:
        return data.decode("utf-8")
    head, tail = data[: TRACEBACK_BYTES // 4], data[-TRACEBACK_BYTES * 3 // 4 :]
    dropped = len(data) - len(head) - len(tail)
    middle = "\n  [%d bytes dropped]\n" % dropped
    return head.decode("utf-8", "ignore") + middle + tail.decode("utf-8", "ignore")

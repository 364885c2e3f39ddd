"""Names and numbers that the supervisor's side, the launcher, the template and the slot agree on. Stdlib only."""

from __future__ import annotations

import struct
from typing import Final

# Inside the sealed tree.
PYTHON: Final = "/usr/bin/python3"
STDLIB: Final = "/usr/lib"  # pythonX.Y below it
PACKAGES: Final = "/packages"
RUN_DIR: Final = "/run"
BOOT: Final = "/boot"  # our own modules; removed before the first slot
HOSTNAME: Final = "sandbox"
DEVICES: Final = ("null", "zero", "random", "urandom")

# Ids inside a slot, and the first id of the template's range that slots map to.
NOBODY: Final = 65534
FIRST_SLOT_ID: Final = 1000
SLOT_IDS: Final = 64_000

# Descriptors of a slot.
FD_CHANNEL: Final = 3
FD_CONTROL: Final = 4
FIRST_UNUSED_FD: Final = 5
# Descriptors of a template, above the slot's, so that a received one never lands on a slot's number.
FD_CTL: Final = 5
FD_PROC: Final = 6

STATUS_HARDENING_FAILED: Final = 99

# Control, supervisor -> slot: one header, then the source. `value` caps the JSON of the value and its text, each.
CODE_HEADER: Final = struct.Struct(">4sII")  # magic, bytes of source, bytes of value
CODE_MAGIC: Final = b"RUN2"
GO: Final = b"G"  # follows when the broker knows the run: until then the source is compiled, and nothing of it runs
# Control, slot -> supervisor: before code "R" or "F" + JSON + newline; after it one frame, u32 + JSON.
RESULT_HEADER: Final = struct.Struct(">I")
READY: Final = b"R"
FAILED: Final = b"F"
READY_LINE_BYTES: Final = 4096

# What the code says of its error, in bytes of UTF-8.
ERROR_NAME_BYTES: Final = 256
ERROR_MESSAGE_BYTES: Final = 8 * 1024
ERROR_TRACEBACK_BYTES: Final = 32 * 1024

CTL_BYTES: Final = 64 * 1024  # one message between supervisor and template
SLOT_DESCRIPTORS: Final = 4  # channel, control, stdout, stderr

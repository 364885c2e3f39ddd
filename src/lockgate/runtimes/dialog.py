"""What a machine and the supervisor's side of it say to each other on the control socket. Stdlib only.

Supervisor to machine: one header, the source, then GO once the broker knows the run: until then the source is compiled
and nothing of it runs. Machine to supervisor: before code one line, READY or FAILED and JSON; after it one frame, u32
and JSON.
"""

from __future__ import annotations

import struct
from typing import Final

CODE_HEADER: Final = struct.Struct(">4sII")  # magic, bytes of source, bytes of value
CODE_MAGIC: Final = b"RUN2"  # the value's bytes cap its JSON and its text, each
GO: Final = b"G"
RESULT_HEADER: Final = struct.Struct(">I")
READY: Final = b"R"
FAILED: Final = b"F"
READY_LINE_BYTES: Final = 4096

# What the code says of its error, in bytes of UTF-8.
ERROR_NAME_BYTES: Final = 256
ERROR_MESSAGE_BYTES: Final = 8 * 1024
ERROR_TRACEBACK_BYTES: Final = 32 * 1024

# Supervisor and template: one message, and the descriptors of a request (channel, control, stdout, stderr).
CTL_BYTES: Final = 64 * 1024
MACHINE_DESCRIPTORS: Final = 4

STATUS_HARDENING_FAILED: Final = 99

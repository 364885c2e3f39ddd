"""Names and numbers that the supervisor's side, the zygote and the worker agree on."""

from __future__ import annotations

import struct
from typing import Final

# In the empty root of a worker.
ENGINE_FILE: Final = "/engine"  # the compiled module: the one file there is, and it may be read only
HOSTNAME: Final = "sandbox"

# Ids inside a worker, and the first id of the zygote's range that workers map to.
NOBODY: Final = 65534
FIRST_ID: Final = 1000
IDS_A_BLOCK: Final = 65_536

# Descriptors of a worker; the last two are closed once they are mapped.
FD_CHANNEL: Final = 3
FD_CONTROL: Final = 4
FD_IMAGE: Final = 5
FD_STDLIB: Final = 6

# Control, supervisor to worker: what dialog.CODE_HEADER says, and the bounds that are held inside.
CODE_HEADER: Final = struct.Struct(">4sIIQQQd")  # magic, source, value, memory, disk, inodes, seconds to the soft stop
CODE_MAGIC: Final = b"WAS1"

# Worker to supervisor, in the place of a result: how a run ended that gave none.
STOPPED: Final = b'{"stopped":"time"}'
BROKE: Final = b'{"stopped":"protocol"}'

# What a worker is beside the memory of its run: its interpreter and engine; and room for the kernel's own pages.
OVERHEAD_BYTES: Final = 32 << 20
WORKER_TASKS: Final = 2  # the guest's thread, and the alarm of the soft stop
SOFT_STOP_SECONDS: Final = 0.02  # before the wall clock

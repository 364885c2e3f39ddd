"""Names and numbers that the build, the loader and the guest's agent agree on."""

from __future__ import annotations

import struct
from typing import Final

# Where tools are looked for: no process of ours reads its environment.
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Lease, host -> guest (guest/microvm/agent.py has the other half): magic, wall clock in ns, bytes of JSON, entropy.
LEASE: Final = struct.Struct(">4sQI64s")
LEASE_MAGIC: Final = b"LSE1"
ENTROPY_BYTES: Final = 64
# Guest -> host after the lease: kind, length of the payload.
FRAME: Final = struct.Struct(">BI")
FRAME_BYTES: Final = 64 * 1024
WORKER: Final = ord("c")
STATUS: Final = ord("s")
KINDS: Final = frozenset({ord("o"), ord("e"), WORKER, STATUS})
# Supervisor -> loader, the first byte on control: the machine stands in its control group.
PLACED: Final = b"P"
# Loader -> supervisor, lines: the handshake is done; what the agent saw of the worker.
ACK: Final = b"A"
SEEN: Final = b"S"

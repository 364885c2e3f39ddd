"""Names and numbers that the supervisor's side, the launcher, a box's keeper and the guest agree on. Stdlib only."""

from __future__ import annotations

import struct
from typing import Final

# Inside the image: the run's tree is a directory of it, entered by pivot_root, so that what the sentry mounts around it
# (proc, sys, dev) is out of sight.
BOX: Final = "/box"
MOUNT_POINTS: Final = ("proc", "sys", "dev", "etc", "tmp")
# Inside the run's tree.
PYTHON: Final = "/usr/bin/python3"
STDLIB: Final = "/usr/lib"  # pythonX.Y below it
PACKAGES: Final = "/packages"
RUN_DIR: Final = "/run"
HOSTNAME: Final = "sandbox"
DEVICES: Final = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9)}  # major, minor
NOBODY: Final = 65534

# The birth socket is the guest's stdin: the host sends the guest's own modules and, once, what the machine is for.
BIRTH_HEADER: Final = struct.Struct(">I")
BIRTH_BYTES: Final = 4 << 20
FD_BIRTH: Final = 5
FD_CHANNEL: Final = 3
FD_CONTROL: Final = 4
FIRST_UNUSED_FD: Final = 5
MACHINE_DESCRIPTORS: Final = 4  # channel, control, stdout, stderr

# The leash, supervisor to keeper: one byte each.
GO: Final = b"G"  # the group stands: start the sentry
FREEZE: Final = b"F"
THAW: Final = b"T"
DISK: Final = b"D"  # back: the run had too many files

# Exit statuses of the guest's init, which the code of a run cannot choose.
STATUS_DISK: Final = 73
STATUS_LOST: Final = 99
EXIT_MOST: Final = 72  # the code's own exit status of its process is capped to this

SENTRY_FD: Final = 300  # see box.py
NOISE_BYTES: Final = 2048  # of what runsc prints when it fails

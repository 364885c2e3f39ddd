"""Names and numbers that the supervisor's side, the launcher, the template and the slot agree on. Stdlib only."""

from __future__ import annotations

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

# Descriptors of a slot.
FD_CHANNEL: Final = 3
FD_CONTROL: Final = 4
FIRST_UNUSED_FD: Final = 5
# Descriptors of a template, above the slot's, so that a received one never lands on a slot's number.
FD_CTL: Final = 5
FD_PROC: Final = 6

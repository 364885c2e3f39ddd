"""Where a user's built things lie: package sets, images, guests. Found without reading the environment."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Final

SYSTEM: Final = Path("/var/lib/lockgate")
"""Root's stores are below this, since others (a sandbox's mapped id) must be able to walk to them."""


def of_this_user(name: str) -> Path | None:
    """Return this user's store of that name, or None where the user has no home in the password database."""
    uid = os.getuid()
    if uid == 0:
        return SYSTEM / name
    try:
        return Path(pwd.getpwuid(uid).pw_dir, ".local", "share", "lockgate", name)
    except KeyError:
        return None

"""What tells a file from every other: rungs and package sets know what they use by it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal; holes are read as zeros."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

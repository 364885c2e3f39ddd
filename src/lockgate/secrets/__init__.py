"""The only package that may hold plaintext; importable by broker/ alone."""

from __future__ import annotations

from lockgate.secrets.hazmat import Hazmat
from lockgate.secrets.lease import Lease
from lockgate.secrets.store import FileStore, SecretUnavailable, Store, open_store

__all__ = ["FileStore", "Hazmat", "Lease", "SecretUnavailable", "Store", "open_store"]

"""Where a run's planted value stands, so that whoever goes looking finds it (E7).

Rule 1: a decoy looks like what a thief looks for and is good for nothing; no code of ours ever reads one.
Rule 2: names differ from run to run, so that a list of decoy names is no defence.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

_VARIABLES: Final = (
    "BILLING_API_KEY", "STORAGE_SECRET_KEY", "DEPLOY_TOKEN", "WAREHOUSE_PASSWORD", "SIGNING_SECRET",
    "BACKUP_ACCESS_KEY", "QUEUE_AUTH_TOKEN", "SEARCH_ADMIN_KEY",
)  # fmt: skip
_FILES: Final = (
    ("credentials", "[default]\naccess_key_id = {name}\nsecret_access_key = {value}\n"),
    (".netrc", "machine storage.internal.example\n  login {name}\n  password {value}\n"),
    ("service-account.json", '{{"type": "service_account", "client": "{name}", "private_key": "{value}"}}\n'),
    (".env.production", "STORAGE_USER={name}\nSTORAGE_SECRET={value}\n"),
)


class Decoys(msgspec.Struct, frozen=True):
    """One run's decoys.

    Attributes:
        value: the planted value; give it to whatever looks for it.
        variable: name and value of an environment variable.
        file: name and text of a file.

    """

    value: str
    variable: tuple[str, str]
    file: tuple[str, str]

    @classmethod
    def of(cls, canary: str) -> Decoys:
        """Return the decoys that hold `canary`, which `canary.mint` made."""
        pick = hashlib.sha256(b"lockgate/decoys\0" + canary.encode()).digest()
        name, form = _FILES[pick[1] % len(_FILES)]
        text = form.format(name=f"svc-{pick[2:6].hex()}", value=canary)
        return cls(canary, (_VARIABLES[pick[0] % len(_VARIABLES)], canary), (name, text))

"""What was seen of a VMM on this host, kept so that not every start has to boot a machine to know.

Rule 1: a verdict is bound to everything that could change it: VMM, kernel, host kernel, processor and microcode.
Rule 2: only a good verdict saves a boot. A bad one is shown, and looked at anew.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

import msgspec

from lockgate.contract.errors import LockgateError
from lockgate.runtimes.microvm import build
from lockgate.runtimes.microvm.store import Choice, Store, digest_of
from lockgate.runtimes.microvm.vmm import Verdict
from lockgate.runtimes.protocol import Unavailable

_MOST: Final = 64
_NAME: Final = "verdicts.json"


class _Kept(msgspec.Struct, frozen=True):
    verdict: Verdict
    seen: float


def key_of(choice: Choice) -> str:
    """Return the name of everything that a verdict depends on."""
    return digest_of(
        choice.vmm,
        choice.accel,
        choice.sha256,
        choice.kernel.key,
        choice.append,
        os.uname().release,
        build.cpu_identity(),
    )[:32]


def _read(store: Store) -> dict[str, _Kept]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((store.root / _NAME).read_bytes(), type=dict[str, _Kept])
    return {}


def look(store: Store, choice: Choice) -> Verdict | None:
    """Return what was seen with exactly these parts, or None."""
    kept = _read(store).get(key_of(choice))
    return kept.verdict if kept is not None else None


def keep(store: Store, choice: Choice, missing: Unavailable | None) -> Verdict:
    """Keep what a probe saw; a store that cannot be written keeps nothing, which costs a boot and is no error."""
    verdict = Verdict(
        usable=missing is None,
        boundary=missing is None and choice.accel == "kvm",
        reason="a machine booted and answered" if missing is None else missing.missing,
        fix="" if missing is None else missing.fix,
        vmm=choice.vmm,
        accel=choice.accel,
        provenance=f"{choice.binary} {choice.version} sha256:{choice.sha256}",
    )
    with contextlib.suppress(LockgateError, OSError), store.building(5.0) as work:
        kept = {**_read(store), key_of(choice): _Kept(verdict, time.time())}
        newest = sorted(kept.items(), key=lambda one: one[1].seen)[-_MOST:]
        store.write(_NAME, dict(newest), work)
    return verdict

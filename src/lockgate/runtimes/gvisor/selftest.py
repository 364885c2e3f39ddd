"""The boots that a runsc must pass on this host before it is trusted with anything.

Rule 1: real flags, a real image, the real channel: cold boots, each of which must answer a call and end.
Rule 2: one failure refuses the binary. Broken builds boot most of the time.
Rule 3: twenty boots are for one binary on one kernel release; every image on it takes three more, which a package set
        that the sentry cannot read does not pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.gvisor.binary import Runsc
from lockgate.runtimes.gvisor.bundle import flags
from lockgate.runtimes.gvisor.image import FORMAT, Image
from lockgate.runtimes.protocol import Template
from lockgate.runtimes.single import run_once

BOOTS: Final = 20
BOOTS_OF_AN_IMAGE: Final = 3
_VERSION: Final = 2
_PATIENCE: Final = 30.0  # seconds for one boot: a busy machine is no broken runsc, a hung sentry is one
_CODE: Final = b"41 + host.call('one')"


def _place(store: Path, runsc: Runsc, packed: Image | None) -> Path:
    image = packed.key if packed is not None else FORMAT
    about = [_VERSION, runsc.sha256, image, os.uname().release, list(flags(rootless=os.getuid() != 0))]
    return store / "verdicts" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"


def cached(store: Path, runsc: Runsc, packed: Image) -> dict[str, Any] | None:
    """Return the verdict on this runsc here, None when it has not been tested on this kernel or with this image."""
    of_image = _read(_place(store, runsc, packed))
    whole = _read(_place(store, runsc, None))
    return whole if of_image and whole.get("boots", 0) >= BOOTS else None


def _read(place: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def run(
    store: Path, runsc: Runsc, packed: Image, start: Callable[[], Template], *, again: bool = False
) -> dict[str, Any]:
    """Boot it as often as is not known yet, and keep the verdict.

    Args:
        start: starts a template whose machines boot cold.
        again: all boots, whatever is known.

    Raises:
        CannotIsolate: a boot failed; the binary must not be used.

    """
    known = {} if again else _read(_place(store, runsc, None))
    boots = BOOTS_OF_AN_IMAGE if known.get("boots", 0) >= BOOTS else BOOTS
    since = time.monotonic()
    template = start()
    try:
        for number in range(1, boots + 1):
            outcome = run_once(template, _CODE, Bounds(wall=_PATIENCE), broker=_answer, patience=_PATIENCE)
            if outcome.result is None or outcome.result.value != b"42":
                saw = outcome.failed.detail if outcome.failed is not None else "no answer in time"
                raise CannotIsolate(
                    f"this runsc ({runsc.version} {runsc.go}) is not used: boot {number} of {boots} failed ({saw})",
                    next_step="use another build of runsc and name it with [execution.gvisor] runsc",
                )
    finally:
        template.close()
    verdict = {
        "boots": boots,
        "seconds": round(time.monotonic() - since, 1),
        "runsc": runsc.version,
        "go": runsc.go,
        "sha256": runsc.sha256,
        "old": runsc.old,
        "image": packed.key,
        "kernel": os.uname().release,
    }
    _write(_place(store, runsc, packed), verdict)
    if boots < BOOTS:
        return known
    _write(_place(store, runsc, None), verdict)
    return verdict


def _write(place: Path, verdict: dict[str, Any]) -> None:
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    written = place.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    written.write_text(json.dumps(verdict, indent=1) + "\n")
    written.replace(place)


def _answer(body: bytes) -> bytes:
    """Be the broker: one for every call."""
    return json.dumps({"id": json.loads(body)["id"], "ok": 1}).encode()

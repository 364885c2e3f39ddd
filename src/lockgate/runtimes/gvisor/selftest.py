"""The boots that a runsc must pass on this host before it is trusted with anything.

Rule 1: real flags, the real image, the real channel: twenty cold boots, each of which must answer a call and end.
Rule 2: one failure refuses the binary. Broken builds boot most of the time.
Rule 3: a verdict holds for one binary, one image, one kernel release, and for this version of the test.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.gvisor.binary import Runsc
from lockgate.runtimes.gvisor.bundle import FLAGS
from lockgate.runtimes.gvisor.image import Image
from lockgate.runtimes.protocol import Template
from lockgate.runtimes.single import run_once

BOOTS: Final = 20
_VERSION: Final = 1
_PATIENCE: Final = 30.0  # seconds for one boot: a busy machine is no broken runsc, a hung sentry is one
_CODE: Final = b"41 + host.call('one')"


def _place(store: Path, runsc: Runsc, packed: Image) -> Path:
    about = [_VERSION, runsc.sha256, packed.key, os.uname().release, list(FLAGS)]
    return store / "verdicts" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"


def cached(store: Path, runsc: Runsc, packed: Image) -> dict[str, Any] | None:
    """Return the verdict on this runsc here, None when it has not been tested with this image on this kernel."""
    try:
        verdict: dict[str, Any] = json.loads(_place(store, runsc, packed).read_bytes())
    except (OSError, ValueError):
        return None
    return verdict if verdict.get("boots", 0) >= BOOTS else None


def run(store: Path, runsc: Runsc, packed: Image, start: Callable[[], Template]) -> dict[str, Any]:
    """Boot it twenty times and keep the verdict.

    Args:
        start: starts a template whose machines boot cold.

    Raises:
        CannotIsolate: a boot failed; the binary must not be used.

    """
    since = time.monotonic()
    template = start()
    try:
        for number in range(1, BOOTS + 1):
            outcome = run_once(template, _CODE, Bounds(wall=_PATIENCE), broker=_answer, patience=_PATIENCE)
            if outcome.result is None or outcome.result.value != b"42":
                saw = outcome.failed.detail if outcome.failed is not None else "no answer in time"
                raise CannotIsolate(
                    f"this runsc ({runsc.version} {runsc.go}) is not used: boot {number} of {BOOTS} failed ({saw})",
                    next_step="use another build of runsc and name it with [execution.gvisor] runsc",
                )
    finally:
        template.close()
    verdict = {
        "boots": BOOTS,
        "seconds": round(time.monotonic() - since, 1),
        "runsc": runsc.version,
        "go": runsc.go,
        "sha256": runsc.sha256,
        "old": runsc.old,
        "image": packed.key,
        "kernel": os.uname().release,
    }
    place = _place(store, runsc, packed)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    written = place.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(verdict, indent=1) + "\n")
    written.replace(place)
    return verdict


def _answer(body: bytes) -> bytes:
    """Be the broker: one for every call."""
    return json.dumps({"id": json.loads(body)["id"], "ok": 1}).encode()

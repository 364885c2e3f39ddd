"""A few seconds of fuzzing of what hostile bytes reach first: frames, requests, scopes (X4, C3).

Guided by coverage where atheris can be imported, else by mutations of the same corpus; bounded in time either way.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 2
ALPHABET = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\u0061",
    b"\\ud800",
    b"\0",
    b"\xff",
    b" ",
    b"1e9",
    b"NaN",
    b"amount",
    b"id",
    b"-",
]

spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "fuzz_targets.py")
assert spec is not None
assert spec.loader is not None
fuzz_targets = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fuzz_targets  # annotations are resolved in their module
spec.loader.exec_module(fuzz_targets)

NAMES = sorted(fuzz_targets.TARGETS)


def mutate(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Cut, copy, insert, flip and splice a seed a few times."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(data))
        match chance.randint(0, 4):
            case 0:
                del data[at : at + chance.randint(1, 8)]
            case 1:
                data[at:at] = chance.choice(ALPHABET)
            case 2 if data:
                data[at % len(data)] ^= 1 << chance.randint(0, 7)
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 30)]
            case _:
                data[at:] = other[chance.randint(0, len(other)) :]
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_passes(name: str) -> None:
    found = fuzz_targets.seeds(name)
    assert len(found) >= 3
    for seed in found:
        fuzz_targets.TARGETS[name](seed)


@pytest.mark.parametrize("name", NAMES)
def test_mutations_of_the_corpus_pass(name: str) -> None:
    chance = random.Random(20_250_101)
    target, found = fuzz_targets.TARGETS[name], fuzz_targets.seeds(name)
    end = time.monotonic() + SECONDS
    count = 0
    while count < 20_000 and (time.monotonic() < end or count < 200):
        target(mutate(chance, chance.choice(found), chance.choice(found)))
        count += 1


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_coverage_guided_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "guided.py"), name, str(tmp_path)]
    command += [f"-max_total_time={SECONDS}", "-max_len=600", f"-artifact_prefix={tmp_path}/", "-verbosity=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_the_targets_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the accounting switched off, the same corpus fails at the duplicate key."""
    with monkeypatch.context() as broken:
        broken.setattr("lockgate.contract.strictjson._account", lambda raw, depth: None)
        seed = (fuzz_targets.CORPUS / "strictjson" / "duplicate.json").read_bytes()
        with pytest.raises(ValueError, match="duplicate"):
            fuzz_targets.TARGETS["strictjson"](seed)

"""Fuzz every target for a share of the time: `python tests/fuzz/campaign.py --seconds 600`, or `make fuzz`.

A finding ends it with exit code 1; the input that made it lies in `.cache/fuzz/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "fuzz"


def main() -> int:
    """Return 1 when any target found something, 3 when there is nothing to fuzz with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("error: atheris is not installed\nnext step: pip install atheris (CPython 3.11 to 3.13)", file=sys.stderr)
        return 3
    names = sorted(path.name for path in (HERE / "corpus").iterdir())
    failed: list[str] = []
    for name in names:
        found = CACHE / name
        found.mkdir(parents=True, exist_ok=True)  # new inputs go here, not among the committed seeds
        command = [sys.executable, str(HERE / "guided.py"), name, str(found), "-max_len=4096", "-print_final_stats=1"]
        command += [f"-max_total_time={max(1, options.seconds // len(names))}", f"-artifact_prefix={found}/"]
        print(f"== {name}", flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    print(f"{len(names)} targets, found something in: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check SPECIFICATION.md: every promise has a test that exists, or says why not.

Rule 1: each row of a table names at least one `tests/...::test_name` or `bench/...` that is there, or `[test pending]`
        with a reason behind it.
Rule 2: each requirement that this version takes on (`REQUIRED`) has a row.
Rule 3: ids are unique.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = [f"X{number}" for number in range(1, 12)] + ["C1", "C2", "C3", "C4", "C5", "C6", "C8"]
REQUIRED += [f"E{number}" for number in range(1, 8)]
ROW = re.compile(r"^\|\s*(?P<id>[A-Z]+[0-9]+(?:\.[0-9]+)?)\s*\|(?P<rest>.*)\|\s*$")
LINK = re.compile(r"`((?:tests|bench)/[^`\s]+)`")
PENDING = re.compile(r"\[test pending\][:,]?\s*(\S.{9,})")


def tests_in(path: Path) -> set[str]:
    """Return the tests of a file as pytest names them, without parameters."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                names.add(prefix + node.name)

    collect(ast.parse(path.read_text()).body, "")
    return names


def missing(link: str, known: dict[str, set[str]]) -> bool:
    """Whether a link leads nowhere."""
    file, _, name = link.partition("::")
    path = ROOT / file
    if not path.is_file():
        return True
    if file.startswith("bench/"):
        return False
    if file not in known:
        known[file] = tests_in(path)
    return not name or name.partition("[")[0] not in known[file]


def main() -> int:
    """Return 1 when a promise stands on nothing."""
    problems: list[str] = []
    seen: set[str] = set()
    known: dict[str, set[str]] = {}
    linked = pending = 0
    for number, line in enumerate((ROOT / "SPECIFICATION.md").read_text().splitlines(), 1):
        row = ROW.match(line)
        if row is None:
            continue
        if row["id"] in seen:
            problems.append(f"line {number}: {row['id']} stands twice")
        seen.add(row["id"])
        links = LINK.findall(row["rest"])
        linked += len(links)
        problems += [f"line {number}: {row['id']}: there is no {link}" for link in links if missing(link, known)]
        if "[test pending]" in row["rest"]:
            pending += 1
            if not PENDING.search(row["rest"]):
                problems.append(f"line {number}: {row['id']} is pending without a reason")
        elif not links:
            problems.append(f"line {number}: {row['id']} names no test")
    covered = {name.partition(".")[0] for name in seen}
    problems += [f"{name} has no row" for name in REQUIRED if name not in covered]
    for problem in problems:
        print(f"SPECIFICATION.md {problem}", file=sys.stderr)
    print(f"{len(seen)} promises, {linked} links to tests, {pending} pending, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

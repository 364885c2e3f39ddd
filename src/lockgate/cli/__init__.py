"""The command line: thin. Each verb parses, asks the package that knows, and shows the answer.

Rule 1: what a verb finds goes to stdout: a table for people, or one JSON document with `--json`. Progress, notes and
        errors go to stderr.
Rule 2: exit codes: the program's own for `run` (124 wall clock, 137 any other kill); 1 findings or a failure, 2 usage,
        3 isolation that cannot be had, 130 interrupted.
Rule 3: text from a run, a service or an audit row is escaped before a terminal sees it.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the package."""
    from lockgate.cli.app import run_app  # noqa: PLC0415 - `import lockgate.cli` stays light

    run_app()


__all__ = ["main"]

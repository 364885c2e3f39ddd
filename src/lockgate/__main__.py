"""`python -m lockgate`."""

from __future__ import annotations

from lockgate.cli import main

main()

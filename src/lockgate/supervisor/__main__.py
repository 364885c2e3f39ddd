"""`python -I -m lockgate.supervisor --agent-fd N --broker-fd M --settings JSON`: started by the gate, never by hand."""

from __future__ import annotations

from lockgate.supervisor.process import main

main()

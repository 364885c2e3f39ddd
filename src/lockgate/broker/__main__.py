"""`python -I -m lockgate.broker --agent-fd N --supervisor-fd M --audit-fd K --config PATH`."""

from __future__ import annotations

import os
import sys

from lockgate.broker.process import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Threads that hang in a backend are daemons; the interpreter's own end would wait for their loops and locks.
os._exit(status)

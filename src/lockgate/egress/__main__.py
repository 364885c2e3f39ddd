"""`python -I -m lockgate.egress --settings-fd N ...`."""

from __future__ import annotations

import sys

from lockgate.egress.process import main

sys.exit(main())

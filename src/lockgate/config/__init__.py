"""`lockgate.toml`: what an operator decides, as one typed value.

Rule 1: an unknown key is an error that names the nearest valid key and the line.
Rule 2: a literal secret is an error that names the key. No error of this file ever carries a value.
Rule 3: bounds are checked against the ceilings; callers can only narrow what stands here.
Rule 4: relative paths are relative to the file, so the same file means the same thing from every directory.
Rule 5: `load_text` is pure. `to_json` holds what was validated, and `load` reads it back: that is how the broker
        gets exactly the configuration that the agent process checked.
"""

from __future__ import annotations

from lockgate.config.loading import FILE_NAME, MAX_BYTES, find, from_dict, load, load_text
from lockgate.config.places import line_of, nearest
from lockgate.config.tables import RUNGS, Alerts, AlertSink, Audit, Backend, Broker, Config, Execution, Render, Secret

__all__ = [
    "FILE_NAME",
    "MAX_BYTES",
    "RUNGS",
    "AlertSink",
    "Alerts",
    "Audit",
    "Backend",
    "Broker",
    "Config",
    "Execution",
    "Render",
    "Secret",
    "find",
    "from_dict",
    "line_of",
    "load",
    "load_text",
    "nearest",
]

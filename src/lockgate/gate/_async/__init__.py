"""The written, asynchronous Gate. `gate/_sync` is generated from this directory (scripts/unasync.py)."""

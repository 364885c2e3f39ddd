# Generated from gate/_async/__init__.py by scripts/unasync.py. Edit that file, then run the script.
"""The written, asynchronous Gate. `gate/_sync` is generated from this directory (scripts/unasync.py)."""

"""Imports the operator's operations.

Rule 1: of an import that fails, the kind of the error and the place in the operator's file are told, never its text:
        a module may hold what a text would quote.
"""

from __future__ import annotations

import importlib
import sys
import traceback

from lockgate.contract.errors import ConfigError, LockgateError
from lockgate.policy import Operations


def load(target: str | None, base: str) -> Operations:
    """Return the sealed registry that `target` (`module:attribute`) names, imported from the directory `base`.

    Raises:
        ConfigError: there is no such module or attribute, or importing it failed.
        RegistrationError: an operation is declared in a way that could not be held.

    """
    if target is None:
        operations = Operations()
        operations.seal()
        return operations
    name, _, attribute = target.partition(":")
    sys.dont_write_bytecode = True  # the operator's directory is not ours to write into
    sys.path.insert(0, base)
    trouble: ConfigError | None = None
    found: object = None
    try:
        found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part, None)
    except LockgateError:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything while it is imported
        trouble = ConfigError(f"importing {name!r} failed: {_what(error, name)}", next_step="correct that place")
    if trouble is not None:
        raise trouble  # outside the handler: no cause, whose frames hold the module's values
    if not isinstance(found, Operations):
        raise ConfigError(
            f"{target!r} is not a lockgate.Operations",
            next_step='write operations = "module:attribute" for one that is',
        )
    found.seal()
    return found


def _what(error: BaseException, module: str) -> str:
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name == module.partition(".")[0]:
            return f"there is no module {error.name!r} beside the configuration"
        kind = f"{kind} {error.name!r}"
    if isinstance(error, SyntaxError):
        return f"{kind} at {_short(error.filename or module)} line {error.lineno}"
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    own = [one for one in frames if not one.filename.startswith("<frozen") and one.filename != __file__]
    own = [one for one in own if "importlib" not in one.filename] or own
    return f"{kind} at {_short(own[-1].filename)} line {own[-1].lineno}" if own else kind


def _short(path: str) -> str:
    return path.rpartition("/")[2]

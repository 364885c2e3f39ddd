"""Let agents act without being able to leak.

Rule 1: importing this package imports nothing heavy: each public name is loaded at its first use.
Rule 2: no name that an agent process uses brings plaintext or the operations' code into it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lockgate.broker.call import Call as Call
    from lockgate.broker.failures import BackendRefused as BackendRefused
    from lockgate.broker.failures import BackendUnreachable as BackendUnreachable
    from lockgate.config import Config as Config
    from lockgate.contract.bounds import Bounds as Bounds
    from lockgate.contract.bounds import KiB as KiB
    from lockgate.contract.bounds import MiB as MiB
    from lockgate.contract.errors import AuditUnavailable as AuditUnavailable
    from lockgate.contract.errors import BadScript as BadScript
    from lockgate.contract.errors import CallFailed as CallFailed
    from lockgate.contract.errors import CannotIsolate as CannotIsolate
    from lockgate.contract.errors import ConfigError as ConfigError
    from lockgate.contract.errors import Denied as Denied
    from lockgate.contract.errors import EnvBuildFailed as EnvBuildFailed
    from lockgate.contract.errors import ExportRefused as ExportRefused
    from lockgate.contract.errors import HostFault as HostFault
    from lockgate.contract.errors import LockgateError as LockgateError
    from lockgate.contract.errors import OutcomeUnknown as OutcomeUnknown
    from lockgate.contract.errors import ProcessDied as ProcessDied
    from lockgate.contract.errors import RegistrationError as RegistrationError
    from lockgate.contract.errors import ResultWithheld as ResultWithheld
    from lockgate.contract.errors import ScopeError as ScopeError
    from lockgate.contract.errors import UnknownEnv as UnknownEnv
    from lockgate.contract.errors import UnknownRung as UnknownRung
    from lockgate.contract.run import CallRecord as CallRecord
    from lockgate.contract.run import ErrorInfo as ErrorInfo
    from lockgate.contract.run import ExportInfo as ExportInfo
    from lockgate.contract.run import Principal as Principal
    from lockgate.contract.run import RunResult as RunResult
    from lockgate.contract.run import Usage as Usage
    from lockgate.gate import Approval as Approval
    from lockgate.gate import CallOutcome as CallOutcome
    from lockgate.gate import Decision as Decision
    from lockgate.gate import Gate as Gate
    from lockgate.gate import Run as Run
    from lockgate.gate import sync as sync
    from lockgate.policy import Args as Args
    from lockgate.policy import Cents as Cents
    from lockgate.policy import Decoy as Decoy
    from lockgate.policy import Id as Id
    from lockgate.policy import Int as Int
    from lockgate.policy import ListOf as ListOf
    from lockgate.policy import Operations as Operations
    from lockgate.policy import PathBeneath as PathBeneath
    from lockgate.policy import Result as Result
    from lockgate.policy import SafeUrl as SafeUrl
    from lockgate.policy import Scope as Scope
    from lockgate.policy import Text as Text
    from lockgate.policy import Url as Url
    from lockgate.policy import at_least as at_least
    from lockgate.policy import at_most as at_most
    from lockgate.policy import budget as budget
    from lockgate.policy import length as length
    from lockgate.policy import less_than as less_than
    from lockgate.policy import matches as matches
    from lockgate.policy import minutes as minutes
    from lockgate.policy import more_than as more_than
    from lockgate.policy import one_of as one_of
    from lockgate.policy import when as when
    from lockgate.policy import where as where
    from lockgate.policy.choose import Choice as Choice
    from lockgate.policy.choose import ThreatModel as ThreatModel
    from lockgate.policy.choose import choose as choose

_HOME: Final[dict[str, str]] = {
    "BackendRefused": "lockgate.broker.failures",
    "BackendUnreachable": "lockgate.broker.failures",
    "Call": "lockgate.broker.call",
    "Config": "lockgate.config",
    "Bounds": "lockgate.contract.bounds",
    "KiB": "lockgate.contract.bounds",
    "MiB": "lockgate.contract.bounds",
    "AuditUnavailable": "lockgate.contract.errors",
    "BadScript": "lockgate.contract.errors",
    "CallFailed": "lockgate.contract.errors",
    "CannotIsolate": "lockgate.contract.errors",
    "ConfigError": "lockgate.contract.errors",
    "Denied": "lockgate.contract.errors",
    "EnvBuildFailed": "lockgate.contract.errors",
    "ExportRefused": "lockgate.contract.errors",
    "HostFault": "lockgate.contract.errors",
    "LockgateError": "lockgate.contract.errors",
    "OutcomeUnknown": "lockgate.contract.errors",
    "ProcessDied": "lockgate.contract.errors",
    "RegistrationError": "lockgate.contract.errors",
    "ResultWithheld": "lockgate.contract.errors",
    "ScopeError": "lockgate.contract.errors",
    "UnknownEnv": "lockgate.contract.errors",
    "UnknownRung": "lockgate.contract.errors",
    "CallRecord": "lockgate.contract.run",
    "ErrorInfo": "lockgate.contract.run",
    "ExportInfo": "lockgate.contract.run",
    "Principal": "lockgate.contract.run",
    "RunResult": "lockgate.contract.run",
    "Usage": "lockgate.contract.run",
    "Approval": "lockgate.gate",
    "CallOutcome": "lockgate.gate",
    "Decision": "lockgate.gate",
    "Gate": "lockgate.gate",
    "Run": "lockgate.gate",
    "sync": "lockgate.gate",
    "Args": "lockgate.policy",
    "Cents": "lockgate.policy",
    "Decoy": "lockgate.policy",
    "Id": "lockgate.policy",
    "Int": "lockgate.policy",
    "ListOf": "lockgate.policy",
    "Operations": "lockgate.policy",
    "PathBeneath": "lockgate.policy",
    "Result": "lockgate.policy",
    "SafeUrl": "lockgate.policy",
    "Scope": "lockgate.policy",
    "Text": "lockgate.policy",
    "Url": "lockgate.policy",
    "Choice": "lockgate.policy.choose",
    "ThreatModel": "lockgate.policy.choose",
    "choose": "lockgate.policy.choose",
    "at_least": "lockgate.policy",
    "at_most": "lockgate.policy",
    "budget": "lockgate.policy",
    "length": "lockgate.policy",
    "less_than": "lockgate.policy",
    "matches": "lockgate.policy",
    "minutes": "lockgate.policy",
    "more_than": "lockgate.policy",
    "one_of": "lockgate.policy",
    "when": "lockgate.policy",
    "where": "lockgate.policy",
}

if not TYPE_CHECKING:  # a checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module 'lockgate' has no attribute {name!r}")
        value = (
            importlib.import_module("lockgate.gate.sync")
            if name == "sync"
            else getattr(importlib.import_module(module), name)
        )
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(_HOME)

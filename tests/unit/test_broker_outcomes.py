""" "Nothing was changed" is said only where it is certain (C5, reports 40 to 42)."""

from __future__ import annotations

import pytest

from lockgate.broker import failures
from lockgate.broker.outcomes import REASON_OF, SURELY_NOT, Outcome, of_deadline, of_exception
from lockgate.contract.errors import ConfigError
from lockgate.contract.reasons import SENTENCES
from lockgate.secrets import SecretUnavailable
from lockgate.secrets.minters import MintFailed

SECRET = "sk-synthetic-outcome-0001"


def ended(error: BaseException, **more: bool) -> Outcome:
    try:
        raise error  # noqa: TRY301 - so that it has a traceback
    except BaseException as caught:
        return of_exception(caught, **{"write": True, "sent": False, "changed": False, **more})


WRITES = [
    (failures.BackendRefused(402), {}, "refused"),
    (failures.BackendRefused(402), {"sent": True}, "refused"),
    (failures.BackendRefused(402), {"sent": True, "changed": True}, "unknown"),
    (failures.BackendUnreachable(), {}, "not_sent"),
    (failures.BackendUnreachable(), {"sent": True}, "unknown"),
    (failures.BackendTimedOut(), {}, "unknown"),
    (failures.BackendUnclear(503), {}, "unknown"),
    (failures.BackendTooLarge(200), {}, "result_too_large"),
    (MintFailed("x", next_step="y"), {}, "not_sent"),
    (SecretUnavailable("x", next_step="y"), {}, "not_sent"),
    (ConfigError("x", next_step="y"), {}, "not_sent"),
    (MintFailed("x", next_step="y"), {"sent": True}, "unknown"),
    (RuntimeError(SECRET), {}, "unknown"),
    (ConnectionResetError(), {}, "unknown"),
    (TimeoutError(), {}, "unknown"),
    (SystemExit(1), {}, "unknown"),
    (KeyboardInterrupt(), {}, "unknown"),
]


@pytest.mark.parametrize(("error", "state", "status"), WRITES)
def test_a_write(error: BaseException, state: dict[str, bool], status: str) -> None:
    outcome = ended(error, **state)
    assert outcome.status == status
    assert SECRET not in str(outcome.detail)
    if status in SURELY_NOT:
        assert REASON_OF[status] == "backend_failed"
        assert "nothing was changed" in SENTENCES["backend_failed"][0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (failures.BackendRefused(404), "refused"),
        (failures.BackendUnreachable(), "not_sent"),
        (failures.BackendTimedOut(), "timeout"),
        (failures.BackendUnclear(500), "failed"),
        (TimeoutError(), "timeout"),
        (RuntimeError(SECRET), "failed"),
    ],
)
def test_a_read_never_ends_unknown(error: BaseException, status: str) -> None:
    assert ended(error, write=False, sent=True).status == status


def test_a_deadline() -> None:
    assert of_deadline(write=True).status == "unknown"
    assert of_deadline(write=False).status == "timeout"


def test_only_kind_status_and_place_are_kept() -> None:
    class Provider(Exception):
        pass

    outcome = ended(Provider(SECRET), write=False)
    assert outcome.detail["error"] == "foreign"
    assert str(outcome.detail["at"]).startswith("test_broker_outcomes.py:")
    assert ended(failures.BackendRefused(402)).detail["http_status"] == 402

"""C5, a full disk under the audit file: no audit, no write; and everything that was not stored is stated."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from audit_fixtures import AuditLink, audit_intent, audit_row
from lockgate.audit import reader
from lockgate.audit.client import AuditClient
from lockgate.contract.errors import AuditUnavailable

Start = Callable[..., AuditLink]


def fill(client: AuditClient, limit: int = 4000) -> tuple[int, AuditUnavailable]:
    """Commit denials until the disk takes no more."""
    for number in range(limit):
        try:
            client.commit(audit_row("denied", reason="x" * 3000))
        except AuditUnavailable as error:
            return number, error
    raise AssertionError("the disk never filled up")


def is_closed(client: AuditClient) -> None:
    """Check that nothing is acknowledged."""
    with pytest.raises(AuditUnavailable, match="Next step: "):
        client.intent(audit_intent(detail={"big": "x" * 9000}), "key")
    with pytest.raises(AuditUnavailable):
        client.commit(audit_row("denied", reason="x" * 9000))
    with pytest.raises(AuditUnavailable):
        client.append(audit_row())
    assert not client.available


def opens_again(client: AuditClient) -> None:
    """Check that rows are taken again without anybody asking for it."""
    deadline = time.monotonic() + 15
    while True:
        try:
            client.append(audit_row(detail={"after": True}))
        except AuditUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            break
    intent = client.intent(audit_intent(), "key-after")
    assert isinstance(intent, str)
    client.outcome(audit_row(status="ok"), intent, b"1")
    assert client.available


def whole(path: Path, acknowledged: int) -> None:
    """Check that the chain is whole and that it states what is missing."""
    report = reader.verify(path)
    assert report.findings == ()
    assert report.gaps
    rows = list(reader.tail(path, 100_000))
    assert sum(row.phase == "denied" for row in rows) == acknowledged
    assert not any(row.phase == "intent" and row.idempotency_key == "key" for row in rows)


def test_at_a_file_size_limit_nothing_is_acknowledged_and_afterwards_all_goes_on(audit_link: Start) -> None:
    """As any user: the file-size limit of the process stands for the full disk."""
    gate = audit_link(fsize=600_000)
    stored, error = fill(gate.client)
    assert stored > 10
    assert "cannot be written" in error.message
    is_closed(gate.client)
    assert gate.process.poll() is None
    resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    opens_again(gate.client)
    assert gate.close() == 0
    whole(gate.path, stored)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount; the file-size limit above stands for it")
def test_on_a_full_file_system_nothing_is_acknowledged_and_afterwards_all_goes_on(
    tmp_path: Path, audit_link: Start
) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size=2m,mode=0700 lockgate-test {disk} && exec "$@"'
    gate = audit_link(disk / "audit.db", prefix=(unshare, "-m", "sh", "-c", mount, "sh"))
    gate.client.ready()
    inside = Path(f"/proc/{gate.process.pid}/root{disk}")
    ballast = inside / "ballast"
    ballast.write_bytes(b"x" * 1024 * 1024)
    stored, error = fill(gate.client)
    assert stored > 10
    assert "full" in error.message
    is_closed(gate.client)
    ballast.unlink()
    opens_again(gate.client)
    gate.client.flush()
    for name in ("audit.db", "audit.db-wal"):  # SQLite would follow the /proc link back to our own root
        shutil.copy(inside / name, tmp_path / name)
    whole(tmp_path / "audit.db", stored)
    assert gate.close() == 0
    assert list(disk.iterdir()) == [], "the mount was private to the writer"


def test_rows_nobody_waited_for_are_kept_until_the_disk_takes_them(audit_link: Start) -> None:
    """A read was already answered when its row meets the full disk: the row must not be lost."""
    gate = audit_link(fsize=300_000)
    gate.client.ready()
    appended = []
    deadline = time.monotonic() + 15
    try:
        while time.monotonic() < deadline:
            appended.append(gate.client.append(audit_row(operation="get_order", effect="read", reason="x" * 500)))
            time.sleep(0.0005)
    except AuditUnavailable:
        pass
    assert 20 < len(appended) < 5000
    resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    opens_again(gate.client)
    assert gate.close() == 0
    stored = {row.id for row in reader.tail(gate.path, 100_000)}
    assert set(appended) <= stored
    report = reader.verify(gate.path)
    assert (report.findings, report.gaps) == ((), ())


def test_a_writer_whose_disk_stays_full_ends_all_the_same(audit_link: Start) -> None:
    gate = audit_link(fsize=300_000, timeout=2.0)
    fill(gate.client)
    started = time.monotonic()
    gate.client.close()
    assert gate.process.wait(20) == 1
    assert time.monotonic() - started < 15


def test_a_disk_that_is_full_from_the_start_is_a_typed_error(audit_link: Start) -> None:
    gate = audit_link(fsize=4096)
    with pytest.raises(AuditUnavailable, match="cannot be written"):
        gate.client.ready()
    assert gate.process.wait(10) == 1


def test_a_removed_file_is_noticed(audit_link: Start) -> None:
    gate = audit_link()
    gate.client.commit(audit_row("denied"))
    gate.path.unlink()
    with pytest.raises(AuditUnavailable, match="removed"):
        gate.client.commit(audit_row("denied"))
    with pytest.raises(AuditUnavailable, match="removed"):
        gate.client.append(audit_row())

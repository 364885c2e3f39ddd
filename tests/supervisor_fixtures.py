"""A supervisor shared by the tests of one worker, and one of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from supervisor_client import Client


@pytest.fixture(scope="session")
def supervisor() -> Iterator[Client]:
    """A supervisor with warm machines; where no cgroup can be made it works under the accepted fallback."""
    with Client(pool=2, memory="rlimit") as client:
        yield client


@pytest.fixture
def own_supervisor() -> Iterator[Callable[..., Client]]:
    """Make supervisors that end with the test."""
    clients: list[Client] = []

    def make(**settings: Any) -> Client:
        clients.append(Client(**{"memory": "rlimit", **settings}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def forking_supervisor(supervisor: Client) -> Client:
    """The shared supervisor, where runs may have more than one process."""
    if supervisor.ready.facts["memory_by"] == "rlimit":
        pytest.skip("no memory cgroup can be made by this user: a run has one process")
    return supervisor

"""A template that grew old is replaced, and what is warm of it with it (X10)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from lockgate.supervisor.engine import Engine
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.settings import Settings
from lockgate.supervisor.slot import Slot

SECONDS = 60.0


def drive(reactor: Reactor, true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not true() and time.monotonic() < deadline:
        reactor.turn(time.monotonic() + 0.05)
    return bool(true())


def nothing(*_: object) -> None:
    return


def test_machines_of_a_template_past_its_life_are_replaced_by_younger_ones() -> None:
    reactor = Reactor()
    engine = Engine(Settings(pool=0, memory="rlimit"), reactor, nothing, nothing, nothing)
    try:
        runtime = engine.runtimes["container"]
        runtime.nature = msgspec.structs.replace(runtime.nature, life=0.2)
        key = engine.key("container", None, accept_rlimit=True)
        engine.pool.target(key, 2)
        line = engine.pool._lines[key]
        assert drive(reactor, lambda: engine.pool.warm(key) == 2), engine.pool.error(key)
        first, born = line.home, {slot for shelf in line.shelves.values() for slot in shelf.warm}
        assert first is not None
        time.sleep(0.3)
        got: list[Slot] = []
        engine.pool.acquire(key, engine.settings.bounds, got.append, nothing, seconds=SECONDS)
        assert drive(reactor, lambda: got and line.home not in (first, None))
        # Old enough for this test: from here on the line keeps what it has.
        line.key = line.key._replace(nature=msgspec.structs.replace(runtime.nature, life=None))
        assert drive(reactor, lambda: engine.pool.warm(key) == 2)
        assert got[0] in born, "what was warm is served, the successor is made behind it"
        warm = [slot for shelf in line.shelves.values() for slot in shelf.warm]
        assert not born & set(warm)
        assert all(slot.home is not first for slot in warm)
        engine.pool.done(got[0], hard=False)
        assert drive(reactor, lambda: first not in engine.pool._homes), "the old template is closed once nothing lives"
    finally:
        engine.close()
        reactor.close()

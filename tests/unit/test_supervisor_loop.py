"""The reactor's rules: timers before floods, no event for a removed descriptor, no wait that was asked to end."""

from __future__ import annotations

import os
import time

import pytest

from lockgate.supervisor.loop import Reactor


@pytest.fixture
def reactor():
    loop = Reactor()
    yield loop
    loop.close()


def test_timers_fire_in_order_and_cancelled_ones_never(reactor):
    seen = []
    now = time.monotonic()
    reactor.at(now + 0.02, lambda: seen.append("late"))
    reactor.at(now + 0.01, lambda: seen.append("early"))
    reactor.at(now + 0.015, lambda: seen.append("cancelled")).cancel()
    reactor.run(now + 0.05)
    assert seen == ["early", "late"]


def test_a_timer_that_asks_to_leave_does_not_wait_for_the_next_event(reactor):
    """A wait for something that a timer reports must end with it (Rule: never hang)."""
    reactor.after(0.001, reactor.leave)
    begun = time.monotonic()
    reactor.run(begun + 5)
    assert time.monotonic() - begun < 4


def test_stop_is_final_even_before_run(reactor):
    reactor.stop()
    begun = time.monotonic()
    reactor.run(begun + 5)
    assert time.monotonic() - begun < 4


def test_a_flood_does_not_hold_back_a_timer(reactor):
    """X5: the wall clock fires although a descriptor is readable all the time."""
    read, write = os.pipe()
    os.write(write, b"x")
    turns = []
    reactor.add(read, lambda _mask: turns.append(1))
    fired = []
    reactor.after(0.05, lambda: (fired.append(time.monotonic()), reactor.leave()))
    begun = time.monotonic()
    reactor.run(begun + 5)
    assert fired
    assert fired[0] - begun < 1
    assert len(turns) > 10
    os.close(read)
    os.close(write)


def test_a_descriptor_removed_in_a_batch_gets_no_event_of_it_even_if_reused(reactor):
    first, second = os.pipe(), os.pipe()
    for _, write in (first, second):
        os.write(write, b"x")
    seen = []

    def one(mine, other):
        def callback(_mask):
            seen.append(mine)
            reactor.remove(other)
            os.close(other)
            fresh = os.open("/dev/null", os.O_RDONLY)
            assert fresh == other  # the number is in use again, by something else
            reactor_fds.append(fresh)

        return callback

    reactor_fds = []
    reactor.add(first[0], one(first[0], second[0]))
    reactor.add(second[0], one(second[0], first[0]))
    reactor.turn(time.monotonic() + 1)
    assert len(seen) == 1
    for fd in (seen[0], first[1], second[1], *reactor_fds):
        os.close(fd)


def test_deferred_calls_run_after_the_batch_and_keep_the_loop_awake(reactor):
    seen = []
    reactor.after(0, lambda: reactor.defer(lambda: seen.append(1)))
    begun = time.monotonic()
    reactor.turn(begun + 5)
    assert seen == [1]
    assert time.monotonic() - begun < 4


def test_the_heap_stays_small_when_clocks_are_cancelled(reactor):
    """Ten thousand short runs with a wall clock of an hour leave no ten thousand timers behind."""
    for _ in range(10_000):
        reactor.after(3600, lambda: None).cancel()
        reactor._fire()
    assert len(reactor._heap) < 200

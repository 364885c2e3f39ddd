"""A call ends once: by its thread or by the watchdog. Deadlines are kept without a hand-off."""

from __future__ import annotations

import threading
import time

import pytest

from lockgate.broker.threads import Claim, Threads


@pytest.fixture(scope="module")
def threads() -> Threads:
    return Threads()


def on(threads: Threads, work: object) -> threading.Event:
    done = threading.Event()

    def run() -> None:
        work()  # type: ignore[operator]
        done.set()

    threads.run(run)
    return done


def test_a_claim_is_taken_once() -> None:
    claim = Claim()
    winners = [0]
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        if claim.take():
            winners[0] += 1

    racers = [threading.Thread(target=race) for _ in range(8)]
    for one in racers:
        one.start()
    for one in racers:
        one.join()
    assert winners == [1]


@pytest.mark.parametrize("seconds", [0.05, 0.8])
def test_a_deadline_is_kept_and_the_stuck_thread_is_counted(threads: Threads, seconds: float) -> None:
    late = threading.Event()
    go_on = threading.Event()
    mine: list[bool] = []
    began = time.monotonic()

    def stuck() -> None:
        claim = Claim()
        threads.arm(began + seconds, claim, late.set)
        go_on.wait(10)
        threads.disarm()
        mine.append(claim.take())
        threads.came_back()

    done = on(threads, stuck)
    assert late.wait(5)
    assert 0 <= time.monotonic() - began - seconds < 5
    assert threads.stuck == 1
    go_on.set()
    assert done.wait(5)
    assert mine == [False]
    assert threads.stuck == 0


def test_a_call_in_time_is_left_alone(threads: Threads) -> None:
    late = threading.Event()
    mine: list[bool] = []

    def quick() -> None:
        for _ in range(200):
            claim = Claim()
            threads.arm(time.monotonic() + 0.2, claim, late.set)
            threads.disarm()
            mine.append(claim.take())

    assert on(threads, quick).wait(5)
    assert mine == [True] * 200
    assert not late.wait(0.5)


def test_many_deadlines_pass_once_each(threads: Threads) -> None:
    """Near and far deadlines on many threads, half of them met: every call ends exactly once."""
    ended: list[int] = []
    lock = threading.Lock()

    def end(number: int) -> None:
        with lock:
            ended.append(number)

    def one(number: int) -> None:
        claim = Claim()
        threads.arm(time.monotonic() + 0.05 + number % 7 * 0.03, claim, lambda: end(number))
        time.sleep(0.3 if number % 2 else 0.0)
        threads.disarm()
        if claim.take():
            end(number)
        else:
            threads.came_back()

    waits = [on(threads, lambda number=number: one(number)) for number in range(60)]
    assert all(one.wait(10) for one in waits)
    assert sorted(ended) == list(range(60))
    assert threads.stuck == 0


def test_threads_are_used_again_and_do_not_pile_up(threads: Threads) -> None:
    for _ in range(50):
        assert on(threads, lambda: None).wait(5)
    before = threading.active_count()
    for _ in range(50):
        assert on(threads, lambda: None).wait(5)
    assert threading.active_count() <= before + 1

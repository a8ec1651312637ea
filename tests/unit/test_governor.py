"""The governor: turns are kept, errors pass, a share caps, records travel, a hedge wins, nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_goodput.core.request_rate import RequestFate, RequestLimits
from ray_goodput.storage.governor import RequestCounts, RequestGovernor

TWO = RequestLimits(first=2, smallest=1, largest=2)


def refused(_: Exception) -> RequestFate:
    return RequestFate.REFUSED


class Gauge:
    """Requests under way, which go on when told."""

    def __init__(self) -> None:
        self.most = 0
        self.running = 0
        self.go_on = threading.Event()
        self.entered = threading.Semaphore(0)
        self._mutex = threading.Lock()

    def request(self, answered: Callable[[], None]) -> int:
        with self._mutex:
            self.running += 1
            self.most = max(self.most, self.running)
        self.entered.release()
        answered()
        self.go_on.wait(30)
        with self._mutex:
            self.running -= 1
        return self.most


def test_no_more_requests_run_at_a_time_than_are_allowed_and_all_get_their_turn() -> None:
    governor, gauge = RequestGovernor(TWO), Gauge()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(governor.request, gauge.request, refused) for _ in range(8)]
        for _ in range(2):
            assert gauge.entered.acquire(timeout=30)
        gauge.go_on.set()
        assert [job.result(30) for job in jobs]
    assert gauge.most == 2
    assert governor.counts.requests == 8


def test_an_error_is_the_callers_and_its_turn_is_free_again() -> None:
    governor = RequestGovernor(RequestLimits(first=1, largest=1))

    def fail(_: object) -> None:
        raise OSError("503")

    for _ in range(3):
        with pytest.raises(OSError, match="503"):
            governor.request(fail, refused)
    assert governor.counts.refused == 3
    assert governor.request(lambda _: 7, refused) == 7


def test_a_share_caps_what_the_rate_allows_and_its_records_go_to_who_keeps_the_nodes_rate() -> None:
    keeper, governor = RequestGovernor(), RequestGovernor()
    governor.request(lambda _: None, refused)
    assert governor.take_records() == []  # nobody asked for them yet
    governor.set_share(3)
    assert governor.concurrency == 3

    def fail(_: object) -> None:
        raise OSError

    for _ in range(4):
        with pytest.raises(OSError):
            governor.request(fail, refused)
    records = governor.take_records()
    assert RequestCounts.of(records) == RequestCounts(requests=4, refused=4)
    assert governor.take_records() == []
    before = keeper.concurrency
    for record in records:
        keeper.note(record)
    assert keeper.concurrency <= before // 2


def test_a_request_whose_answer_does_not_begin_is_sent_again_and_the_first_answer_counts() -> None:
    governor = RequestGovernor(hedge_after_s=0.01)
    release, calls = threading.Event(), []

    def attempt(answered: Callable[[], None]) -> int:
        calls.append(len(calls))
        number = calls[-1]
        if number == 0:
            release.wait(30)
        answered()
        return number

    assert governor.request(attempt, refused) == 1
    release.set()
    assert governor.counts.hedged == 1


def test_of_a_request_and_its_hedge_the_one_that_works_counts_and_two_failures_are_a_failure() -> None:
    governor = RequestGovernor(hedge_after_s=0.01)
    second_began, calls = threading.Event(), []

    def attempt(answered: Callable[[], None]) -> str:
        calls.append(0)
        if len(calls) % 2:  # the first of each pair waits for the second, then fails
            second_began.wait(30)
            raise OSError("gone")
        second_began.set()
        if len(calls) == 4:
            raise OSError("gone too")
        return "second"

    assert governor.request(attempt, refused) == "second"
    second_began.clear()
    with pytest.raises(OSError, match="gone"):
        governor.request(attempt, refused)


def test_a_hedge_is_not_sent_where_the_rate_has_no_room() -> None:
    governor = RequestGovernor(RequestLimits(first=1, largest=1), hedge_after_s=0.001)
    began = threading.Event()

    def attempt(_: Callable[[], None]) -> str:
        began.wait(0.05)
        return "alone"

    assert governor.request(attempt, refused) == "alone"
    assert governor.counts == RequestCounts(requests=1, waited_s=governor.counts.waited_s)

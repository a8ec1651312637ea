"""The rule for concurrent requests: refusals halve it once a burst, answers bring it back, latency eases it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ray_goodput.core.request_rate import (
    RequestFate,
    RequestLimits,
    RequestRate,
    RequestRecord,
    after_request,
    starting_rate,
)

LIMITS = RequestLimits(first=32, smallest=1, largest=64)


def seen(fate: RequestFate, began: float, ended: float, first_byte_s: float | None = 0.02) -> RequestRecord:
    return RequestRecord(fate=fate, began_mono_s=began, ended_mono_s=ended, first_byte_s=first_byte_s)


def test_a_burst_of_refusals_of_requests_that_were_under_way_together_halves_the_rate_once() -> None:
    rate = starting_rate(LIMITS)
    reasons = []
    for i in range(32):
        decision = after_request(rate, seen(RequestFate.REFUSED, 10.0, 10.1 + i / 1000), LIMITS)
        rate = decision.rate
        reasons.append(decision.reason)
    assert rate.concurrency == 16
    assert reasons[0] == "The store refused a request: 16 requests at a time instead of 32."
    assert not any(reasons[1:])


def test_refusals_that_go_on_take_it_to_the_smallest_and_no_further() -> None:
    rate = starting_rate(LIMITS)
    for i in range(20):
        rate = after_request(rate, seen(RequestFate.LOST, 10.0 + i, 10.5 + i), LIMITS).rate
    assert rate.concurrency == 1


def test_after_a_burst_the_full_rate_is_back_within_the_rounds_it_takes_to_add_one_each() -> None:
    rate = RequestRate(allowed=1.0, cut_at_mono_s=0.0)
    answers = 0
    while rate.concurrency < 32:
        rate = after_request(rate, seen(RequestFate.ANSWERED, 1.0, 1.02), LIMITS).rate
        answers += 1
    assert answers <= sum(range(1, 33))
    for _ in range(10_000):
        rate = after_request(rate, seen(RequestFate.ANSWERED, 1.0, 1.02), LIMITS).rate
    assert rate.concurrency == 64


def test_rising_latency_eases_the_rate_once_a_second_but_never_below_four() -> None:
    rate = starting_rate(LIMITS)
    for i in range(50):
        rate = after_request(rate, seen(RequestFate.ANSWERED, i / 100, i / 100 + 0.02), LIMITS).rate
    at_first = rate.concurrency
    allowed = []
    for i in range(400):
        decision = after_request(rate, seen(RequestFate.ANSWERED, 1 + i / 10, 2 + i / 10, 1.0), LIMITS)
        rate = decision.rate
        allowed.append(rate.concurrency)
        assert not decision.reason or "where 0.0" in decision.reason
    assert allowed[0] <= at_first + 1
    assert min(allowed) == 4
    assert all(after >= int(0.8 * before) - 1 for before, after in pairwise(allowed))


def test_a_path_that_is_slow_for_good_becomes_the_new_calm() -> None:
    rate = starting_rate(LIMITS)
    rate = after_request(rate, seen(RequestFate.ANSWERED, 0.0, 0.02), LIMITS).rate
    for i in range(5000):
        rate = after_request(rate, seen(RequestFate.ANSWERED, 1 + i / 10, 1.3 + i / 10, 0.3), LIMITS).rate
    assert rate.concurrency == 64


@pytest.mark.parametrize("fate", list(RequestFate))
def test_the_rate_stays_within_its_limits_whatever_happens(fate: RequestFate) -> None:
    rate = starting_rate(LIMITS)
    for i in range(500):
        rate = after_request(rate, seen(fate, float(i), i + 0.5, 0.01 * (i % 90)), LIMITS).rate
        assert LIMITS.smallest <= rate.concurrency <= LIMITS.largest

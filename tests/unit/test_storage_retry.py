"""The retry budget, on a clock that moves only when told."""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from ray_goodput.clock import ManualClock
from ray_goodput.errors import ConfigError, ObjectChangedError, UploadError
from ray_goodput.storage.retry import CallFailed, Fault, Retrier, RetryPolicy, classify, classify_status


class Flaky:
    """Fails `failures` times with `error`, then returns "done"; each call takes `call_s`."""

    def __init__(self, clock: ManualClock, failures: int, error: Exception, call_s: float = 0.0) -> None:
        self.clock, self.failures, self.error, self.call_s = clock, failures, error, call_s
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        self.clock.advance(self.call_s)
        if self.calls <= self.failures:
            raise self.error
        return "done"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def retrier(clock: ManualClock, **policy: Any) -> Retrier:
    return Retrier(RetryPolicy(**policy), clock=clock, sleep=clock.advance, rng=random.Random(0))


def test_a_transient_error_is_tried_again_until_it_succeeds(clock: ManualClock) -> None:
    flaky = Flaky(clock, 5, ConnectionResetError())
    assert retrier(clock).call("x", flaky, classify) == "done"
    assert flaky.calls == 6


@pytest.mark.parametrize("error", [PermissionError(), FileNotFoundError(), OSError(errno.ENOSPC, "full"), ValueError()])
def test_an_error_that_cannot_get_better_is_not_tried_again(clock: ManualClock, error: Exception) -> None:
    flaky = Flaky(clock, 1, error)
    with pytest.raises(CallFailed) as caught:
        retrier(clock).call("x", flaky, classify)
    assert (flaky.calls, caught.value.attempts, clock.mono_s()) == (1, 1, 0.0)
    assert caught.value.error is error


def test_a_verdict_of_our_own_passes_through_and_only_a_failed_upload_is_tried_again(clock: ManualClock) -> None:
    with pytest.raises(ObjectChangedError):
        retrier(clock).call("x", Flaky(clock, 1, ObjectChangedError("k")), classify)
    upload = Flaky(clock, 2, UploadError("k"))
    assert retrier(clock).call("x", upload, classify) == "done"


@pytest.mark.parametrize("call_s", [0.0, 0.5, 7.0])
def test_the_budget_of_seconds_is_never_slept_past(clock: ManualClock, call_s: float) -> None:
    flaky = Flaky(clock, 10**9, TimeoutError(), call_s)
    with pytest.raises(CallFailed) as caught:
        retrier(clock, attempts=10**6, total_s=30.0).call("x", flaky, classify)
    assert clock.mono_s() <= 30.0 + call_s
    assert clock.mono_s() > 20.0
    assert caught.value.attempts == flaky.calls
    assert caught.value.elapsed_s == clock.mono_s()


def test_the_budget_of_attempts_ends_it_too(clock: ManualClock) -> None:
    flaky = Flaky(clock, 10**9, TimeoutError())
    with pytest.raises(CallFailed):
        retrier(clock, attempts=4, total_s=1e9).call("x", flaky, classify)
    assert flaky.calls == 4


def test_waits_grow_are_capped_and_fully_jittered() -> None:
    policy, rng = RetryPolicy(first_wait_s=0.1, max_wait_s=4.0), random.Random(1)
    for retry, cap_s in [(0, 0.1), (3, 0.8), (6, 4.0), (10_000, 4.0)]:
        waits = [policy.wait_s(retry, rng) for _ in range(500)]
        assert 0.0 <= min(waits) < 0.1 * cap_s
        assert 0.9 * cap_s < max(waits) <= cap_s


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"total_s": -1.0}, {"first_wait_s": -1.0}])
def test_a_policy_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RetryPolicy(**bad)


def test_each_http_status_has_one_kind() -> None:
    kinds = {
        Fault.TRANSIENT: [408, 429, 500, 502, 503, 504],
        Fault.ACCESS: [301, 307, 401, 403],
        Fault.MISSING: [404],
        Fault.CHANGED: [412],
        Fault.FATAL: [400, 405, 411, 416],
    }
    assert {fault: [classify_status(status) for status in kinds[fault]] for fault in kinds} == {
        fault: [fault] * len(kinds[fault]) for fault in kinds
    }


def test_errors_of_network_clients_are_sorted_by_what_they_tell() -> None:
    server_disconnected = type("ServerDisconnectedError", (Exception,), {})
    no_credentials = type("NoCredentialsError", (Exception,), {})
    http = type("HttpError", (Exception,), {"code": 503})
    kinds = [classify(make()) for make in (server_disconnected, no_credentials, http)]
    assert kinds == [Fault.TRANSIENT, Fault.ACCESS, Fault.TRANSIENT]
    assert classify(OSError(errno.ESTALE, "stale handle")) is Fault.TRANSIENT
    assert classify(OSError(errno.EROFS, "read-only")) is Fault.ACCESS

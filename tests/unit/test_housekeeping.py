"""Laws of the coordinator's errands: done soon after they are asked for, whatever failed before."""

from __future__ import annotations

import threading

import pytest

from ray_goodput.actors.housekeeping import Errand
from ray_goodput.errors import StorageError


@pytest.mark.parametrize("error", [StorageError("503"), KeyError("a mistake of ours")])
def test_an_errand_is_run_when_asked_for_also_after_a_failure_and_not_once_it_is_stopped(error: Exception) -> None:
    ran, rounds = threading.Semaphore(0), [0]

    def work() -> None:
        rounds[0] += 1
        ran.release()
        if rounds[0] == 1:
            raise error

    errand = Errand("test", work)
    errand.start()
    for _ in range(2):
        errand.soon()
        assert ran.acquire(timeout=10)
    errand.stop()
    errand.soon()
    assert not ran.acquire(timeout=0.2) and rounds[0] == 2


def test_an_errand_with_an_interval_needs_nobody_to_ask() -> None:
    ran = threading.Event()
    errand = Errand("test", ran.set, every_s=0.01)
    errand.start()
    assert ran.wait(10)
    errand.stop()

"""Laws of a run's end: what went wrong comes out as it is, also when the coordinator is gone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from ray_goodput.train import trainer as trainer_module
from ray_goodput.train.trainer import _why_given_up


def coordinator(answer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    def get(ref: Callable[[], Any], *, timeout: float) -> Any:
        assert 0 < timeout <= 60
        return ref()

    monkeypatch.setattr(trainer_module.ray, "get", get)
    return SimpleNamespace(gave_up=SimpleNamespace(remote=lambda: answer))


@pytest.mark.parametrize("error", [ActorDiedError(), GetTimeoutError("60 s")])
def test_a_dead_coordinator_does_not_take_the_failures_place(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def dead() -> str:
        raise error

    assert _why_given_up(coordinator(dead, monkeypatch)) is None


def test_the_policys_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _why_given_up(coordinator(lambda: "Crash loop: 3 failures", monkeypatch)) == "Crash loop: 3 failures"

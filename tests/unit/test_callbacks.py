"""Laws of the hooks in Ray Train's controller that need no Ray: who holds the node actors' handles."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.train import callbacks
from ray_goodput.train.callbacks import GoodputCallback


@dataclass(frozen=True)
class Handle:
    """Like Ray's: two of one actor are equal, and only the one that made it keeps it alive."""

    actor: str
    owns: bool = field(compare=False)


class Actors:
    """Starts an actor of a name, or finds the one that lives, as `get_if_exists` does."""

    def __init__(self) -> None:
        self.living: dict[str, int] = {}
        self._num_started = 0

    def start(self, name: str) -> Handle:
        owns = name not in self.living
        if owns:
            self._num_started += 1
            self.living[name] = self._num_started
        return Handle(f"{name}-{self.living[name]}", owns)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors()
    monkeypatch.setattr(callbacks, "start_vault", lambda spec, node: actors.start(f"vault:{node}"))
    monkeypatch.setattr(callbacks, "shard_cache_actor", lambda key, node: actors.start(f"cache:{node}"))
    monkeypatch.setattr(callbacks, "worker_infos", lambda workers: workers)
    remote = SimpleNamespace(remote=lambda workers: None)
    monkeypatch.setattr(GoodputCallback, "_coordinator", lambda self: SimpleNamespace(group_allocated=remote))
    return actors


def test_the_handles_that_keep_living_actors_are_kept_and_those_of_dead_ones_replaced(actors: Actors) -> None:
    spec: Any = SimpleNamespace(key="run")
    hooks = GoodputCallback(spec)
    workers = [WorkerInfo(world_rank=0, pid=1, node_id="n", node_ip="10.0.0.1")]
    hooks.before_init_train_context(workers)
    hooks.before_init_train_context(workers)
    assert hooks._node_actors["n"] == [Handle("vault:n-1", True), Handle("cache:n-2", True)]
    assert all(handle.owns for handle in hooks._node_actors["n"])
    del actors.living["vault:n"]  # dead for good
    hooks.before_init_train_context(workers)
    assert hooks._node_actors["n"] == [Handle("vault:n-3", True), Handle("cache:n-2", True)]
    assert all(handle.owns for handle in hooks._node_actors["n"])


def test_a_coordinator_that_was_restarted_hears_within_two_seconds_who_trains(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    told: list[Any] = []
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now))
    calls = {name: SimpleNamespace(remote=lambda *args: None) for name in ("group_allocated", "train_run")}
    calls["group_lives"] = SimpleNamespace(remote=told.append)
    monkeypatch.setattr(GoodputCallback, "_coordinator", lambda self: SimpleNamespace(**calls))
    spec: Any = SimpleNamespace(key="run")
    hooks, workers = GoodputCallback(spec), [WorkerInfo(world_rank=0, pid=1, node_id="n", node_ip="10.0.0.1")]
    hooks.before_init_train_context(workers)
    hooks.after_worker_group_poll_status(None)
    told.clear()  # by a life of the coordinator that has just ended
    now += 2.0
    hooks.after_worker_group_poll_status(None)
    assert told == [workers]

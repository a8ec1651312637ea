"""Pings: an actor that answers is left alone, one that is silent on a living node is killed, what is gone is let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_goodput.train import actor_watch
from ray_goodput.train.actor_watch import ActorWatch


class Call:
    """An actor's method, as Ray has it."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self.remote = send

    def options(self, concurrency_group: str) -> Call:
        assert concurrency_group == "control"
        return self


class Actor:
    """Its pings are answered while `answers`; what `error` says is the answer."""

    def __init__(self) -> None:
        self.answers = True
        self.error: Exception | None = None
        self.num_pings = 0
        self.kills: list[bool] = []
        self.ping = Call(self._ping)

    def _ping(self) -> Actor:
        self.num_pings += 1
        return self


class Ray:
    """The four calls of Ray that the watch makes; `alive` are nodes, `stuck` what the coordinator says."""

    def __init__(self) -> None:
        self.alive = {"node"}
        self.stuck: tuple[int, ...] = ()
        self.coordinator = Actor()
        self.coordinator.stuck_ranks = Call(lambda: "stuck")  # type: ignore[attr-defined] (a stand-in's)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (refs, []) if refs[0].answers else ([], refs)

    def get(self, ref: Any, timeout: float) -> Any:
        if ref == "stuck":
            return self.stuck
        if ref.error is not None:
            raise ref.error
        return "a sign of life"

    def kill(self, actor: Actor, no_restart: bool = True) -> None:
        actor.kills.append(no_restart)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": node in self.alive} for node in ("node", "other")]


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent_after_s: float | None = 30.0) -> None:
        self.now_s = 0.0
        self.ray = Ray()
        monkeypatch.setattr(actor_watch, "ray", self.ray)
        monkeypatch.setattr(actor_watch.time, "monotonic", lambda: self.now_s)
        self.watch = ActorWatch(silent_after_s=silent_after_s, coordinator=lambda: self.ray.coordinator)

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 2.0
            self.watch.check()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_an_actor_that_stops_answering_is_killed_so_that_ray_starts_it_again(world: World) -> None:
    actor = Actor()
    world.watch.watch("vault", actor, "node")
    world.pass_s(300)
    assert actor.kills == [] and actor.num_pings > 100
    actor.answers = False
    world.pass_s(28)
    assert actor.kills == []
    world.pass_s(8)
    assert actor.kills == [False], "with no_restart=True it would be gone for good"
    actor.answers = True
    world.pass_s(300)
    assert len(actor.kills) == 1


def test_an_error_is_an_answer_and_an_actor_that_is_gone_is_no_longer_asked(world: World) -> None:
    actor = Actor()
    actor.error = RuntimeError("the storage is away")
    world.watch.watch("coordinator", actor, "node")
    world.pass_s(100)
    assert actor.kills == [] and actor.num_pings > 40
    actor.error = RayActorError()
    world.pass_s(4)
    asked = actor.num_pings
    world.pass_s(100)
    assert actor.num_pings == asked and actor.kills == []
    actor.error = None
    world.watch.watch("coordinator", actor, "node")
    world.pass_s(10)
    assert actor.num_pings > asked


def test_actors_of_a_node_that_is_gone_are_not_ours_to_kill(world: World) -> None:
    actor = Actor()
    world.watch.watch("vault", actor, "node")
    world.pass_s(10)
    actor.answers, world.ray.alive = False, set()
    world.pass_s(500)
    assert actor.kills == []


def test_none_switches_pings_off_and_stuck_ranks_are_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, silent_after_s=None)
    actor, workers = Actor(), {0: Actor(), 1: Actor()}
    actor.answers = False
    world.watch.watch("vault", actor, "node")
    world.watch.workers(workers)
    world.pass_s(500)
    assert actor.kills == [] and actor.num_pings == 0
    world.ray.stuck = (1,)
    world.pass_s(2)
    assert workers[1].kills == [], "its node has a moment to do it"
    world.pass_s(2)
    assert workers[1].kills == [True] and workers[0].kills == []
    world.watch.workers({})
    world.pass_s(20)
    assert workers[1].kills == [True]


def test_a_watch_that_stood_still_itself_takes_nobody_for_silent(world: World) -> None:
    actor = Actor()
    world.watch.watch("vault", actor, "node")
    world.pass_s(10)
    actor.answers = False  # the answer is on its way, but not read yet
    world.now_s += 500
    world.watch.check()
    actor.answers = True
    world.pass_s(100)
    assert actor.kills == []

"""Finds actors of a run that are stopped rather than dead, and has Ray start them again while training goes on.

Ray restarts an actor whose process is gone; one whose process is stopped (SIGSTOP) or blocked it takes for busy. A
thread of the controller's process, which owns the node actors, pings them and the coordinator. It also ends training
processes that the watchdog found hanging and that the vault of their node could not kill.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ray_goodput.actors.remote import CONTROL
from ray_goodput.core.silence import Silence, answered, decide_kill, started

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_PAUSED_S = 4 * _EVERY_S


@dataclass(slots=True)
class _Watched:
    actor: Any
    node_id: str
    silence: Silence
    ping: Any = None
    gone: bool = False


class ActorWatch:
    """`watch(...)` says whom to ping; `start()` begins. Thread-safe.

    coordinator: how to find the run's coordinator; raises ValueError when there is none.
    """

    def __init__(self, *, silent_after_s: float | None, coordinator: Callable[[], Any]) -> None:
        self._silent_after_s = silent_after_s
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._workers: dict[int, Any] = {}
        self._told: tuple[int, ...] = ()
        self._checked_mono_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="goodput-actor-watch", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def watch(self, name: str, actor: Any, node_id: str) -> None:
        """Ping `actor` from now on; under a name that is known, in place of the one before."""
        with self._lock:
            known = self._watched.get(name)
            if known is None or known.actor != actor or known.gone:
                self._watched[name] = _Watched(actor, node_id, started(time.monotonic()))

    def workers(self, actors: Mapping[int, Any]) -> None:
        """The training processes of the current group, by world rank; none between two groups."""
        with self._lock:
            self._workers, self._told = dict(actors), ()

    def check(self) -> None:
        """One round: collect answers, send pings, kill who has been silent for too long."""
        with self._lock:
            watched = dict(self._watched)
        now_s, before_s = time.monotonic(), self._checked_mono_s
        self._checked_mono_s = now_s
        if now_s - before_s > _PAUSED_S:  # this process stood still itself: answers may be lying here unread
            for one in watched.values():
                one.silence = answered(now_s)
        for name, one in watched.items():
            self._check(name, one)
        self._end_stuck_ranks()

    def _check(self, name: str, one: _Watched) -> None:
        if one.gone or self._silent_after_s is None:
            return
        now_s = time.monotonic()
        if one.ping is not None and ray.wait([one.ping], timeout=0)[0]:
            one.gone, one.ping = _is_dead(one.ping), None
            one.silence = answered(now_s)
        if one.ping is None:
            one.ping = one.actor.ping.options(concurrency_group=CONTROL).remote()
            return
        kill, silence = decide_kill(one.silence, now_s, silent_after_s=self._silent_after_s)
        if not kill:
            return
        if not _node_lives(one.node_id):  # Ray's business, and the scaling policy's
            one.silence = answered(now_s)
            return
        logger.error(
            "The actor %s has not answered for %.0f s: its process is stopped or blocked. It is killed, and Ray starts "
            "it again; training goes on.",
            name,
            now_s - one.silence.since_mono_s,
        )
        one.silence = silence
        ray.kill(one.actor, no_restart=False)

    def _end_stuck_ranks(self) -> None:
        """Ranks that still hang a round after they were to be killed on their node: Ray ends them."""
        with self._lock:
            workers = self._workers
        if not workers:
            return
        stuck: tuple[int, ...] = ray.get(self._coordinator().stuck_ranks.remote(), timeout=_EVERY_S)
        for rank in stuck:
            if rank in self._told and rank in workers:
                logger.warning("Rank %d hangs and is still there: Ray is asked to end it.", rank)
                ray.kill(workers[rank])
        self._told = stuck

    def _loop(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.check()
            except (RayError, ValueError, TimeoutError) as error:  # an actor between two lives
                logger.debug("The run's actors could not be looked at now: %r", error)
            except Exception:  # whatever is wrong with one look, the others must be watched on
                logger.exception("The run's actors could not be looked at; tried again.")


def _is_dead(ping: Any) -> bool:
    """Whether the answer to a ping was that the actor is gone for good. An error of its own is a sign of life."""
    try:
        ray.get(ping, timeout=0)
    except RayActorError:
        return True
    except Exception:  # whatever the actor raises (its storage is away), it lives
        return False
    return False


def _node_lives(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())

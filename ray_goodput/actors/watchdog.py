"""The watchdog of a run: has hanging ranks looked at on their nodes, keeps the stacks of all, and has them killed.

A thread of the coordinator's process. Heartbeats raise the suspicion, `core/hang.py` decides, and the vault of a node
looks and kills. Nothing else is done: that a process is gone, Ray Train notices, and starts the group again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from ray_goodput.actors.process_look import RankLook
from ray_goodput.actors.progress_watch import ProgressWatch
from ray_goodput.clock import Clock
from ray_goodput.core.hang import HangVerdict, RankSight, judge, worth_a_look
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.core.stacks import who_waits
from ray_goodput.errors import GoodputError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

FOLDER = "stacks"
_EVERY_S = 1.0
_LOOK_AGAIN_S = 15.0
_MAX_NODES_AT_ONCE = 32


class VaultPort(Protocol):
    """What the watchdog asks of the vault of a node. Each call is bounded, and raises if the vault does not answer."""

    def look(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]: ...

    def kill(self, ranks: Sequence[tuple[int, int]]) -> list[int]: ...


class Watchdog:
    """`start()` begins the thread; `check()` is one round of it.

    found: told of a hang before anybody is killed.
    """

    def __init__(
        self,
        watch: ProgressWatch,
        *,
        vault: Callable[[str], VaultPort],
        store: ObjectStore,
        clock: Clock,
        found: Callable[[int], None],
    ) -> None:
        self._watch = watch
        self._vault = vault
        self._store = store
        self._clock = clock
        self._found = found
        self._look_at_mono_s = 0.0
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._loop, name="goodput-watchdog", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def check(self) -> HangVerdict | None:
        """Look once; what hangs has been killed afterwards, as far as its node answers."""
        observed = self._watch.observed()
        if observed is None:
            return None
        attempt, sights, limits = observed
        now_s = self._clock.mono_s()
        if now_s < self._look_at_mono_s or not worth_a_look(sights, limits):
            return None
        self._look_at_mono_s = now_s + min(_LOOK_AGAIN_S, limits.stopped_s / 4)
        workers = self._watch.workers()
        looks = self._look(attempt, workers)
        # Anew: the look took a while, and if this process had stood still, the heartbeats that lay here are taken now.
        observed = self._watch.observed()
        if observed is None or observed[0] != attempt:
            return None
        _, sights, limits = observed
        verdict = judge(seen_closer(sights, looks), limits)
        step = self._watch.found(attempt, verdict) if verdict is not None else None
        if verdict is None or step is None:
            return None
        logger.error("%s. Killing %s; the run goes on.", verdict.reason, list(verdict.culprits))
        self._found(attempt)
        self._kill([w for w in workers if w.world_rank in verdict.culprits])
        # Not in this thread: the storage may be away, and the next attempt has to be watched.
        threading.Thread(target=self._keep, args=(attempt, step, looks, verdict), daemon=True).start()
        return verdict

    def _look(self, attempt: int, workers: Sequence[WorkerInfo]) -> dict[int, RankLook]:
        def of_node(node: str, ranks: list[tuple[int, int]]) -> list[RankLook]:
            try:
                return self._vault(node).look(attempt, ranks)
            except (GoodputError, ValueError) as error:  # the vault is gone or silent
                logger.warning("The vault of node %s does not say what its ranks do: %s", node[:8], error)
                return []

        nodes = _by_node(workers)
        with ThreadPoolExecutor(max_workers=min(_MAX_NODES_AT_ONCE, max(1, len(nodes)))) as pool:
            found = [look for looks in pool.map(of_node, nodes.keys(), nodes.values()) for look in looks]
        return {look.world_rank: look for look in found}

    def _kill(self, workers: Sequence[WorkerInfo]) -> None:
        for node, ranks in _by_node(workers).items():
            try:
                killed = self._vault(node).kill(ranks)
                logger.info("Killed ranks %s on node %s.", killed, node[:8])
            except (GoodputError, ValueError) as error:
                logger.error("The vault of node %s cannot kill what hangs there, Ray is asked to: %s", node[:8], error)

    def _keep(self, attempt: int, step: int, looks: Mapping[int, RankLook], verdict: HangVerdict) -> None:
        folder = f"{FOLDER}/attempt-{attempt:04d}-step-{max(step, 0):010d}"
        try:
            self._store.put(f"{folder}/verdict.txt", f"{verdict.reason}\n".encode())
            for rank, look in sorted(looks.items()):
                self._store.put(f"{folder}/rank-{rank:05d}.txt", look.text.encode())
        except GoodputError as error:
            logger.warning("The stacks of attempt %d could not be stored: %s", attempt, error)

    def _loop(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.check()
            except Exception:  # whatever is wrong with one look, the run must stay watched
                logger.exception("The watchdog could not look at the ranks; it tries again.")


def seen_closer(sights: Sequence[RankSight], looks: Mapping[int, RankLook]) -> list[RankSight]:
    """What heartbeats said, corrected by what was seen on the ranks' own nodes. Pure."""
    waits = who_waits({rank: look.text for rank, look in looks.items()})
    closer: list[RankSight] = []
    for sight in sights:
        look = looks.get(sight.world_rank)
        if look is None:
            closer.append(sight)
        elif look.gone:  # Ray notices that by itself
            closer.append(replace(sight, closed=True))
        else:
            closer.append(
                replace(
                    sight,
                    silent_s=sight.silent_s if look.silent_s is None else look.silent_s,
                    still_s=sight.still_s if look.still_s is None else look.still_s,
                    bucket=sight.bucket if look.bucket is None else look.bucket,
                    step=max(sight.step, look.step),
                    stepped=sight.stepped or look.stepped,
                    state=look.state,
                    waiting=waits[sight.world_rank],
                )
            )
    return closer


def _by_node(workers: Sequence[WorkerInfo]) -> dict[str, list[tuple[int, int]]]:
    nodes: dict[str, list[tuple[int, int]]] = {}
    for worker in workers:
        nodes.setdefault(worker.node_id, []).append((worker.world_rank, worker.pid))
    return nodes

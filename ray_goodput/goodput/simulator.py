"""A seeded event simulation of a job that fails: what the exact formula cannot say (tiers, spares, nodes, a trace).

Many independent runs are simulated side by side, one numpy step for the next failure of each. Failures of all
accelerators together are one Poisson process, so 100,000 of them cost no more than the failures they have.

The model. After a failure nothing is done for the restart time of its class, and until every lost node but `spares` has
come back. Then work goes on; tier j saves each time its interval of work is done, which takes its stall, and the save
counts once its latency has passed. A failure of class i destroys tiers below i: the freshest of the others is restored,
which may be older than what the failure before had restored. Failures also strike during restarts and waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ray_goodput.core.reliability import YEAR_S, Tier
from ray_goodput.goodput.bounds import Bounded, mean_count, ratio_of_sums, share
from ray_goodput.goodput.simulation import DAY_S, Simulation, SimulationResult


def simulate(sim: Simulation) -> SimulationResult:
    """Simulate; the same answer for the same `Simulation`, seed included."""
    horizon = sim.days * DAY_S
    draw = _Draw(sim)
    num_tiers = len(sim.tiers)
    restart = np.array([t.restart_s for t in sim.tiers])
    state = _State.begin(sim, restart[draw.classes(sim.runs)])
    lost_nodes = np.full((sim.runs, (sim.spares or 0) + 1), -math.inf)  # when, newest last
    # Until the first failure after the horizon: its number is a stopping time, so ratios over whole cycles are those of
    # the long run (Wald's identity), however short the run.
    while len(active := np.flatnonzero(state.at < horizon)):
        gap, failure_class, node = draw.next(active, state.failures[active])
        start, base, saved, ready = (x[active] for x in (state.at, state.base, state.saved, state.ready))
        over = np.isinf(gap)  # a replayed trace has an end
        fail = np.where(over, horizon, start + gap)
        ended = fail >= horizon
        if ended.any():
            at_end = _held(sim.tiers, (horizon - ready)[ended], base[ended], saved[ended])
            state.kept_at_end[active[ended]] = at_end.max(axis=1)
        up = state.restart_until[active]
        state.restarting[active] += np.minimum(fail, up) - start
        state.waiting[active] += np.maximum(0.0, np.minimum(fail, ready) - up)
        held = _held(sim.tiers, fail - ready, base, saved)
        survives = np.arange(num_tiers) >= failure_class[:, None]
        base = np.where(survives, held, -math.inf).max(axis=1)
        state.base[active] = base
        state.saved[active] = np.where(survives, held, base[:, None])
        state.at[active] = fail
        state.failures[active] += ~over
        up = fail + restart[failure_class]
        state.restart_until[active] = state.ready[active] = up
        if sim.spares is not None:
            hit = active[node]
            lost_nodes[hit] = np.column_stack([lost_nodes[hit, 1:], fail[node]])
            state.ready[active] = np.maximum(up, lost_nodes[active, 0] + sim.repair_s)
    return _result(sim, horizon, state)


@dataclass(slots=True)
class _State:
    """All runs, one element each: at, of the last failure; ready, when work goes on from `base`; saved by each tier."""

    at: np.ndarray
    restart_until: np.ndarray
    ready: np.ndarray
    base: np.ndarray
    saved: np.ndarray
    failures: np.ndarray
    restarting: np.ndarray
    waiting: np.ndarray
    kept_at_end: np.ndarray

    @classmethod
    def begin(cls, sim: Simulation, restart_s: np.ndarray) -> _State:
        """As after a failure, with nothing done yet."""

        def zeros() -> np.ndarray:
            return np.zeros(sim.runs)

        return cls(
            at=zeros(),
            restart_until=restart_s.copy(),
            ready=restart_s.copy(),
            base=zeros(),
            saved=np.zeros((sim.runs, len(sim.tiers))),
            failures=np.zeros(sim.runs, dtype=np.int64),
            restarting=zeros(),
            waiting=zeros(),
            kept_at_end=zeros(),
        )


class _Draw:
    """The next failure of each run: gap in seconds, class, whether it took a node."""

    def __init__(self, sim: Simulation) -> None:
        self._trace = bool(sim.trace)
        self._rng = np.random.default_rng(sim.seed)
        self._cumulative = np.cumsum([t.share for t in sim.tiers])[:-1]
        if sim.trace:
            self._gaps = np.diff(
                [0.0, *(e.at_s for e in sim.trace), sim.days * DAY_S]
            )  # the last ends without a failure
            self._classes = np.array([e.failure_class for e in sim.trace])
            self._nodes = np.array([e.node for e in sim.trace])
        else:
            self._mean_s = YEAR_S / sim.failures_a_year
            self._node_share = sim.nodes * sim.failures_per_node_year / sim.failures_a_year

    def classes(self, size: int) -> np.ndarray:
        return np.searchsorted(self._cumulative, self._rng.random(size), side="right")

    def next(self, runs: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For `runs`, of which each has had `number` failures; an infinite gap ends a replay."""
        size = len(runs)
        if self._trace:
            # Drawn gaps are drawn from all, the last one too: else runs would fail more often than the trace did.
            length, replay = len(self._classes), runs == 0
            gap = self._gaps[np.where(replay, np.minimum(number, length), self._rng.integers(0, length + 1, size))]
            gap = np.where(replay & (number == length), math.inf, gap)
            event = np.where(replay, np.minimum(number, length - 1), self._rng.integers(0, length, size))
            return gap, self._classes[event], self._nodes[event] & np.isfinite(gap)
        gap = self._rng.exponential(self._mean_s, size)
        failure_class = self.classes(size)
        node = self._rng.random(size) < self._node_share
        if len(self._cumulative):
            failure_class = np.where(node, np.maximum(failure_class, 1), failure_class)
        return gap, failure_class, node


def _held(tiers: Sequence[Tier], worked_s: np.ndarray, base: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Work each tier holds (runs, tiers) after `worked_s` seconds since work went on from `base`.

    After w seconds of work the clock shows w + sum_j floor(w / tau_j) delta_j, which lies between w (1 + sum_j
    delta_j / tau_j) and the same less sum_j delta_j: the newest save in time is sought between these bounds.
    """
    held = saved.copy()
    slowdown = 1.0 + sum(t.stall_s / t.interval_s for t in tiers)
    stalls = sum(t.stall_s for t in tiers)
    for j, tier in enumerate(tiers):
        room = worked_s - tier.latency_s
        low = np.maximum(np.floor(room / (tier.interval_s * slowdown)), 0.0)
        high = np.maximum(np.floor((room + stalls) / (tier.interval_s * slowdown)), 0.0) + 1.0
        for _ in range(64):  # enough for any double, also where neighbouring ones are more than 1 apart
            if (high - low).max(initial=0.0) <= 1.0:
                break
            middle = np.floor((low + high) / 2.0)
            in_time = (_clock_at_save(tiers, j, middle) <= room) | (middle == low)
            low, high = np.where(in_time, middle, low), np.where(in_time, high, middle)
        held[:, j] = np.where(low > 0, base + low * tier.interval_s, held[:, j])
    return held


def _clock_at_save(tiers: Sequence[Tier], j: int, k: np.ndarray) -> np.ndarray:
    work = k * tiers[j].interval_s
    clock = work + k * tiers[j].stall_s
    for i, other in enumerate(tiers):
        if i != j and other.stall_s:
            clock = clock + np.floor(work / other.interval_s + 1e-9) * other.stall_s
    return clock


def _result(sim: Simulation, horizon: float, state: _State) -> SimulationResult:
    z = NormalDist().inv_cdf(0.5 + sim.confidence / 2.0)
    of_run = state.kept_at_end / horizon
    inside = state.failures - (state.at > horizon)  # the last one came after the horizon
    if sim.trace:
        tail = (1.0 - sim.confidence) / 2.0
        low, high = (float(q) for q in np.quantile(of_run[1:], [tail, 1.0 - tail]))
        replay = float(of_run[0])
        goodput = Bounded(value=replay, low=min(low, replay), high=max(high, replay))
        hit, number = float(inside[0] > 0), float(inside[0])
        interrupted = Bounded(value=hit, low=hit, high=hit)
        interruptions = Bounded(value=number, low=number, high=number)
        counted = slice(0, 1)
    else:
        goodput = ratio_of_sums(state.base, state.at, z)
        interrupted = share(int((inside > 0).sum()), sim.runs, z)
        interruptions = mean_count(inside, z)
        counted = slice(None)
    total, failures = float(state.at[counted].sum()), int(state.failures[counted].sum())
    restarting, waiting = (float(s[counted].sum()) / total for s in (state.restarting, state.waiting))
    p5, p50, p95 = (float(q) for q in np.quantile(of_run, [0.05, 0.5, 0.95]))
    return SimulationResult(
        goodput=goodput,
        run_goodput_p5=p5,
        run_goodput_p50=p50,
        run_goodput_p95=p95,
        interrupted=interrupted,
        interruptions=interruptions,
        mtbf_s=total / failures,
        restarting=restarting,
        waiting=waiting,
        stalls_and_lost=max(0.0, 1.0 - goodput.value - restarting - waiting),
        runs=sim.runs,
        failures=failures,
        seed=sim.seed,
        confidence=sim.confidence,
    )

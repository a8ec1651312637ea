"""What rank 0 knows about its saves when it decides about the next one: per tier, when, at what cost, how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ray_goodput.clock import Clock
from ray_goodput.core.cadence import CadenceState
from ray_goodput.core.tier_cadence import TierCadence, TierDecision
from ray_goodput.core.tiers import SaveTier


class TierTimes:
    """Not thread-safe: used by the training thread only."""

    def __init__(self, cadence: TierCadence, clock: Clock, world_size: int) -> None:
        self._cadence = cadence
        self._clock = clock
        self._world_size = world_size
        now = clock.mono_s()
        self._last: dict[SaveTier, tuple[int, float]] = {tier: (0, now) for tier in cadence.rules}
        self._stall_s: dict[SaveTier, float] = {}
        self._latency_s: dict[SaveTier, float] = {}
        self._begun_mono_s = now
        self._failures, self._exposure_s = 0, 0.0
        self._shares = cadence.shares({})
        self._quiet: tuple[tuple[SaveTier, ...], TierDecision] | None = None

    def begin(
        self, step: int, failures: int = 0, exposure_s: float = 0.0, restores: Mapping[str, int] | None = None
    ) -> None:
        """The attempt goes on after `step`. The rest is the run's history, see `CadenceState`, `TierCadence.shares`."""
        self._begun_mono_s = now = self._clock.mono_s()
        self._last = dict.fromkeys(self._last, (step, now))
        self._failures, self._exposure_s = failures, exposure_s
        self._shares = self._cadence.shares(restores or {})
        self._quiet = None

    def begun(self, tier: SaveTier, step: int, stall_s: float | None) -> None:
        """A save of `step` that goes as far as `tier` was begun, or skipped (None)."""
        self._quiet = None
        for reached in self._last:
            if reached <= tier:
                self._last[reached] = (step, self._clock.mono_s())
                if stall_s is not None:
                    self._stall_s[reached] = stall_s

    def arrived(self, tier: SaveTier, latency_s: float) -> None:
        """A save has reached `tier`, this long after its stall."""
        self._latency_s[tier] = latency_s
        self._quiet = None

    def decide(self, step: int, in_flight: Collection[SaveTier]) -> TierDecision:
        """How far to save after `step`. `in_flight`: how far each save under way is to go.

        Cheap at most steps: what was decided before is said again while nothing can change it.
        """
        now, under_way = self._clock.mono_s(), tuple(in_flight)
        if self._quiet is not None and self._quiet[0] == under_way and self._quiet[1].holds(step, now):
            return self._quiet[1]
        decision = self._decide(step, now, Counter(under_way))
        self._quiet = under_way, decision
        return decision

    def _decide(self, step: int, now: float, in_flight: Mapping[SaveTier, int]) -> TierDecision:
        common: dict[str, Any] = {
            "step": step,
            "now_mono_s": now,
            "failures": self._failures,
            "exposure_s": self._exposure_s + (now - self._begun_mono_s) * self._world_size,
        }
        return self._cadence.decide(
            {
                tier: CadenceState(
                    last_save_step=last_step,
                    last_save_mono_s=last_mono_s,
                    saves_in_flight=in_flight.get(tier, 0),
                    stall_s=self._stall_s.get(tier),
                    latency_s=self._latency_s.get(tier),
                    share=self._shares[tier],
                    **common,
                )
                for tier, (last_step, last_mono_s) in self._last.items()
            }
        )

"""What rank 0 knows about its saves when it decides about the next one: per tier, when, at what cost, how long."""

from __future__ import annotations

from collections.abc import Mapping
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

    def begin(
        self, step: int, failures: int = 0, exposure_s: float = 0.0, restores: Mapping[str, int] | None = None
    ) -> None:
        """The attempt goes on after `step`. The rest is the run's history, see `CadenceState`, `TierCadence.shares`."""
        self._begun_mono_s = now = self._clock.mono_s()
        self._last = dict.fromkeys(self._last, (step, now))
        self._failures, self._exposure_s = failures, exposure_s
        self._shares = self._cadence.shares(restores or {})

    def begun(self, tier: SaveTier, step: int, stall_s: float | None) -> None:
        """A save of `step` that goes as far as `tier` was begun, or skipped (None)."""
        for reached in self._last:
            if reached <= tier:
                self._last[reached] = (step, self._clock.mono_s())
                if stall_s is not None:
                    self._stall_s[reached] = stall_s

    def arrived(self, tier: SaveTier, latency_s: float) -> None:
        """A save has reached `tier`, this long after its stall."""
        self._latency_s[tier] = latency_s

    def decide(self, step: int, in_flight: Mapping[SaveTier, int]) -> TierDecision:
        """How far to save after `step`. `in_flight`: saves under way, by how far they are to go."""
        now = self._clock.mono_s()
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

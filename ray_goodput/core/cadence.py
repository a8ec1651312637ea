"""When to save: a pure rule from an observed state to a decision and the sentence why."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ray_goodput.config import parse_duration_s
from ray_goodput.core.reliability import YEAR_S, optimal_interval_s, rate_posterior_mean
from ray_goodput.errors import ConfigError

PRIOR_FAILURES_PER_ACCELERATOR_YEAR = 0.173
"""Where "auto" starts before the run has failures of its own: unplanned interruptions of Llama 3's pre-training (419 in
54 days on 16,384 accelerators, arXiv 2407.21783). Published rates differ by orders of magnitude, so this is a prior
that the run's own failures outweigh, not a fact."""

MAX_STALL_SHARE = 0.05
MAX_INTERVAL_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceState:
    """What is known after `step` steps. All times are of one monotonic clock.

    last_save_step, last_save_mono_s: newest save that was started, or, without one, the step and moment at which the
        attempt went on (0 and its start for a fresh run).
    saves_in_flight: saves started but not yet durable.
    stall_s: measured seconds training stands still for a save; None before the first.
    latency_s: measured seconds from the end of the stall until the save is durable; None before the first.
    failures, exposure_s: failures so far, over all attempts, in this many accelerator-seconds.
    share: of failures, those that need what these saves make: all, unless other saves cover the rest.
    """

    step: int
    now_mono_s: float
    last_save_step: int
    last_save_mono_s: float
    saves_in_flight: int = 0
    stall_s: float | None = None
    latency_s: float | None = None
    failures: int = 0
    exposure_s: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """Whether to save now, and one sentence why.

    not_before_step, not_before_mono_s: a "no" stays one until both the step and the moment have come, as long as no
        save begins or ends: nobody needs to ask again before.
    """

    save: bool
    reason: str
    not_before_step: int = 0
    not_before_mono_s: float = 0.0


class SaveCadence(ABC):
    """A rule for when to save; immutable, picklable, the same answer for the same state."""

    @staticmethod
    def steps(every: int) -> SaveCadence:
        """Save whenever a multiple of `every` steps has been reached, so that save points outlive a restart."""
        return _EverySteps(every)

    @staticmethod
    def seconds(every: float) -> SaveCadence:
        """Save at the first step that ends at least `every` seconds after the last save."""
        return _EverySeconds(every)

    @staticmethod
    def auto(
        *,
        world: int,
        failures_per_accelerator_year: float = PRIOR_FAILURES_PER_ACCELERATOR_YEAR,
        max_interval_s: float = MAX_INTERVAL_S,
    ) -> AutoCadence:
        """Save at the interval that loses least; see `AutoCadence`."""
        return AutoCadence(
            world=world,
            failures_per_accelerator_year=failures_per_accelerator_year,
            max_interval_s=max_interval_s,
        )

    @staticmethod
    def parse(every: int | str, *, world: int) -> SaveCadence:
        """The rule that `CheckpointConfig.every` names: steps, a duration such as "10min", or "auto"."""
        if isinstance(every, int):
            return SaveCadence.steps(every)
        return SaveCadence.auto(world=world) if every == "auto" else SaveCadence.seconds(parse_duration_s(every))

    @abstractmethod
    def decide(self, state: CadenceState) -> SaveDecision:
        """Whether to save after `state.step`; never twice for one step."""


@dataclass(frozen=True, slots=True)
class _EverySteps(SaveCadence):
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"Saving every {self.every} steps makes no sense: give at least 1.")

    def decide(self, state: CadenceState) -> SaveDecision:
        if state.step <= state.last_save_step:
            return _nothing_new(state)
        due = (state.last_save_step // self.every + 1) * self.every
        if state.step < due:
            return SaveDecision(False, f"the next save is due at step {due}", not_before_step=due)
        return SaveDecision(True, f"step {state.step} has reached {due}, a multiple of {self.every}")


@dataclass(frozen=True, slots=True)
class _EverySeconds(SaveCadence):
    every_s: float

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ConfigError(f"Saving every {self.every_s} s makes no sense: give a duration above 0.")

    def decide(self, state: CadenceState) -> SaveDecision:
        if state.step <= state.last_save_step:
            return _nothing_new(state)
        return _due(state, self.every_s, "as configured")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCadence(SaveCadence):
    """The interval that maximises goodput for the measured stall and the estimated failure rate, within bounds.

    Failure rate: posterior mean of the rate an accelerator, from the prior and the failures seen, times `world`. Never
    below the measured latency (one save in flight), nor so short that stalls take more than 5 % of the time; these
    lower bounds beat `max_interval_s`. The first step of an attempt without measurements is saved at once: it gives
    both the measurements and an early proof that saving works.
    """

    world: int
    failures_per_accelerator_year: float = PRIOR_FAILURES_PER_ACCELERATOR_YEAR
    max_interval_s: float = MAX_INTERVAL_S

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ConfigError(f"A world of {self.world} ranks cannot save: it must have at least 1.")
        if not self.failures_per_accelerator_year > 0 or not self.max_interval_s > 0:
            raise ConfigError(
                f"Automatic saving needs a failure rate and a longest interval above 0, not "
                f"{self.failures_per_accelerator_year} a year and {self.max_interval_s} s."
            )

    def decide(self, state: CadenceState) -> SaveDecision:
        if state.step <= state.last_save_step:
            return _nothing_new(state)
        if state.saves_in_flight > 0:
            return SaveDecision(False, f"{state.saves_in_flight} save(s) not durable yet", not_before_mono_s=math.inf)
        if state.stall_s is None:
            return SaveDecision(True, "no save has been measured yet")
        interval_s, why = self.interval(state)
        return _due(state, interval_s, why)

    def mtbf_s(self, state: CadenceState) -> float:
        """Estimated mean seconds between the failures of this job that need these saves."""
        prior = self.failures_per_accelerator_year / YEAR_S
        return 1.0 / (rate_posterior_mean(state.failures, state.exposure_s, prior) * self.world * state.share)

    def interval(self, state: CadenceState) -> tuple[float, str]:
        """Seconds of work between saves, and which rule set them."""
        stall_s, latency_s = state.stall_s or 0.0, state.latency_s or 0.0
        mtbf_s = self.mtbf_s(state)
        best_s = optimal_interval_s(stall_s, mtbf_s)
        interval_s, why = best_s, f"best for a stall of {stall_s:.3g} s and a failure every {mtbf_s:.3g} s"
        if interval_s > self.max_interval_s:
            interval_s, why = self.max_interval_s, f"the longest allowed, {best_s:.3g} s would be best"
        share_s = stall_s * (1.0 - MAX_STALL_SHARE) / MAX_STALL_SHARE
        if interval_s < share_s:
            interval_s, why = share_s, f"stalls of {stall_s:.3g} s may take {MAX_STALL_SHARE:.0%} of the time"
        if interval_s < latency_s:
            interval_s, why = latency_s, "a save takes this long to become durable"
        return interval_s, why


def _nothing_new(state: CadenceState) -> SaveDecision:
    last = state.last_save_step
    return SaveDecision(False, f"step {state.step} is not beyond the last save, step {last}", not_before_step=last + 1)


def _due(state: CadenceState, interval_s: float, why: str) -> SaveDecision:
    elapsed_s = state.now_mono_s - state.last_save_mono_s
    if elapsed_s < interval_s:
        # With the time without failures intervals grow, so this moment is early if anything.
        due_mono_s = state.last_save_mono_s + interval_s
        return SaveDecision(
            False, f"less than {interval_s:.3g} s since the last save ({why})", not_before_mono_s=due_mono_s
        )
    return SaveDecision(True, f"{elapsed_s:.3g} s since the last save, interval {interval_s:.3g} s ({why})")

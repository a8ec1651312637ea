"""How old the newest durable checkpoint may get while the storage fails. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgeDecision:
    """Whether the limit is passed, and the sentence that says so, with the numbers and the way out."""

    too_old: bool
    reason: str


def judge_age(*, age_s: float, limit_s: float, committed_step: int, step: int) -> AgeDecision:
    """`age_s`: of the newest commit, or since training began if none was made since then. `step`: where training is;
    `committed_step`: of the newest commit, -1 for none."""
    have = f"of step {committed_step}" if committed_step >= 0 else "none so far"
    lost = max(0, step - max(0, committed_step))
    if age_s <= limit_s:
        return AgeDecision(False, f"the newest commit ({have}) is {age_s:.0f} s old, {limit_s:.0f} s are allowed")
    return AgeDecision(
        True,
        f"No checkpoint became durable for {age_s:.0f} s (newest: {have}; training is at step {step}): more than "
        f"max_durable_age={limit_s:.0f} s allows. Losing the nodes now would cost {lost} steps. The vaults' and the "
        "coordinator's logs say what the storage answers; uploads go on as soon as it works.",
    )


class AgeWatch:
    """Judges once a moment; says "too old" once for each time the limit is passed. Not thread-safe: its owner locks."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since_mono_s: float | None = None
        self._told = False

    def begin(self, now_mono_s: float) -> None:
        """Training begins: from now on a commit is owed. Later calls change nothing."""
        if self._since_mono_s is None:
            self._since_mono_s = now_mono_s

    def committed(self, now_mono_s: float) -> None:
        self._since_mono_s, self._told = now_mono_s, False

    def passed(self, now_mono_s: float, *, committed_step: int, step: int) -> str | None:
        """Why the limit is passed, the first time it is found so."""
        if self._limit_s is None or self._since_mono_s is None or self._told:
            return None
        decision = judge_age(
            age_s=now_mono_s - self._since_mono_s, limit_s=self._limit_s, committed_step=committed_step, step=step
        )
        self._told = decision.too_old
        return decision.reason if decision.too_old else None

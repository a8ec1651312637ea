"""When to save, and how far: each tier has an interval of its own. Pure.

A save that goes farther is in the nearer tiers, too, so it counts for them. With costs delta_j and shares q_j of the
failures that need tier j, overhead is least at tau_j = sqrt(2 delta_j M / q_j) (M: time between failures; see
`reliability`), which is what "auto" aims at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_goodput.core.cadence import AutoCadence, CadenceState, SaveCadence
from ray_goodput.core.tiers import SaveTier

PRIOR_SHARES = {SaveTier.LOCAL: 0.70, SaveTier.PEER: 0.25, SaveTier.STORAGE: 0.05}
"""Which tier a restart reads from, before the run has restarts of its own: most failures are of processes, some of one
node, few of all. A prior of ten restarts, which the run's own outweigh."""
_PRIOR_WEIGHT = 10.0

MAX_NEAR_INTERVAL_S = 300.0
"""A near save costs a stall and nothing else, and the failure rate is an estimate: "auto" never leaves more than this
between two, unless stalls would take too long."""


@dataclass(frozen=True, slots=True)
class TierDecision:
    """How far to save now (NONE: not at all), and one sentence why.

    not_before: of each tier, when its rule can first say yes; see `SaveDecision`.
    """

    tier: SaveTier
    reason: str
    not_before: tuple[tuple[int, float], ...] = ()

    def holds(self, step: int, now_mono_s: float) -> bool:
        """Whether it is a "no" that is still one, unless a save has begun or ended since."""
        if self.tier is not SaveTier.NONE:
            return False
        for not_before_step, not_before_mono_s in self.not_before:
            if step >= not_before_step and now_mono_s >= not_before_mono_s:
                return False
        return True


@dataclass(frozen=True, slots=True)
class TierCadence:
    """The rules of the tiers that are in use. STORAGE always is."""

    rules: Mapping[SaveTier, SaveCadence]

    @classmethod
    def parse(cls, *, every: int | str, every_local: int | str | None, peers: bool, world: int) -> TierCadence:
        """The rules that `CheckpointConfig` names.

        every_local: None: "auto" if `every` is, else no saves but those to storage.
        peers: each near save goes to peers as well; under "auto" at an interval of its own.
        """
        rules: dict[SaveTier, SaveCadence] = {SaveTier.STORAGE: SaveCadence.parse(every, world=world)}
        if every_local is None:
            every_local = "auto" if every == "auto" else None
        if every_local == "auto":
            near = AutoCadence(world=world, max_interval_s=MAX_NEAR_INTERVAL_S)
            rules[SaveTier.LOCAL] = near
            if peers:
                rules[SaveTier.PEER] = near
        elif every_local is not None:
            rules[SaveTier.PEER if peers else SaveTier.LOCAL] = SaveCadence.parse(every_local, world=world)
        return cls(rules)

    @property
    def near(self) -> bool:
        """Whether there are saves that do not go to storage."""
        return len(self.rules) > 1

    def decide(self, states: Mapping[SaveTier, CadenceState]) -> TierDecision:
        """The farthest tier whose rule says so. `states`: of each tier in use, its own last save and measurements."""
        reasons: list[str] = []
        not_before: list[tuple[int, float]] = []
        for tier in sorted(self.rules, reverse=True):
            decision = self.rules[tier].decide(states[tier])
            if decision.save:
                return TierDecision(tier, f"{tier.label}: {decision.reason}")
            reasons.append(f"{tier.label}: {decision.reason}")
            not_before.append((decision.not_before_step, decision.not_before_mono_s))
        return TierDecision(SaveTier.NONE, "; ".join(reasons), tuple(not_before))

    def shares(self, restores: Mapping[str, int]) -> dict[SaveTier, float]:
        """Share of failures that each tier in use must cover; a tier that is not in use leaves its own to the next
        farther one.

        restores: label of a tier -> restarts that had to read from it.
        """
        seen = {tier: restores.get(tier.label, 0) for tier in PRIOR_SHARES}
        total = _PRIOR_WEIGHT + sum(seen.values())
        shares, left = dict.fromkeys(self.rules, 0.0), 0.0
        for tier in sorted(PRIOR_SHARES):
            left += (PRIOR_SHARES[tier] * _PRIOR_WEIGHT + seen[tier]) / total
            if tier in shares:
                shares[tier], left = left, 0.0
        return shares

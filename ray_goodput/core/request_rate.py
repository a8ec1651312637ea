"""How many requests may be under way to one store at a time: a pure rule, additive up and multiplicative down.

As TCP does it (V. Jacobson, "Congestion Avoidance and Control", 1988): a refusal halves what is allowed, once for all
requests that were under way together; every answer in time adds a little, one more request for each round of them. So a
burst of refusals costs a second or two and not the rest of the run. Latency counts too: a store that answers ever later
is asked by fewer at once before it has to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

_HALVED = 0.5
_EASED = 0.8
_SMOOTH = 0.1  # weight of the newest latency
_FORGET = 1.002  # by which the calm latency grows with each answer, so that a slower path becomes the new calm
_SLOW_FACTOR = 4.0
_SLOW_ABOVE_S = 0.2
_SLOW_FLOOR = 4.0  # latency alone never takes it below: it may be the path, not the load
_EASE_EVERY_S = 1.0


class RequestFate(Enum):
    """What became of a request, as far as the store's load goes."""

    ANSWERED = "answered"  # also with "no such object": the store had time for it
    REFUSED = "refused"  # 429, 503, SlowDown
    LOST = "lost"  # timed out, connection broken


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Where the number of concurrent requests starts, and between which it stays."""

    first: int = 32
    smallest: int = 1
    largest: int = 64

    def __post_init__(self) -> None:
        assert 1 <= self.smallest <= self.first <= self.largest, self


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that is over. first_byte_s: from sending until the answer began; None if none came."""

    fate: RequestFate
    began_mono_s: float
    ended_mono_s: float
    first_byte_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRate:
    """What is allowed now, and what that rests on. allowed: whole requests of it count.

    calm_s: the first byte's latency when nothing is in the way; latency_s: the present one, smoothed.
    """

    allowed: float
    calm_s: float | None = None
    latency_s: float | None = None
    cut_at_mono_s: float = float("-inf")

    @property
    def concurrency(self) -> int:
        return int(self.allowed)


@dataclass(frozen=True, slots=True)
class RateDecision:
    """The rate from now on; `reason` is a sentence when fewer requests are allowed than before, else empty."""

    rate: RequestRate
    reason: str = ""


def starting_rate(limits: RequestLimits) -> RequestRate:
    """The rate before the first request."""
    return RequestRate(allowed=float(limits.first))


def after_request(rate: RequestRate, seen: RequestRecord, limits: RequestLimits) -> RateDecision:
    """The rate once `seen` is over. Pure: the clock is in the record."""
    if seen.fate is not RequestFate.ANSWERED:
        return _refused(rate, seen, limits)
    calm_s, latency_s = rate.calm_s, rate.latency_s
    if seen.first_byte_s is not None:
        first_s = seen.first_byte_s
        calm_s = first_s if calm_s is None else min(first_s, calm_s * _FORGET)
        latency_s = first_s if latency_s is None else latency_s + _SMOOTH * (first_s - latency_s)
    rate = replace(rate, calm_s=calm_s, latency_s=latency_s)
    if calm_s is not None and latency_s is not None and latency_s > max(_SLOW_FACTOR * calm_s, calm_s + _SLOW_ABOVE_S):
        return _slow(rate, seen, limits, calm_s, latency_s)
    return RateDecision(replace(rate, allowed=min(float(limits.largest), rate.allowed + 1.0 / rate.allowed)))


def _refused(rate: RequestRate, seen: RequestRecord, limits: RequestLimits) -> RateDecision:
    if seen.began_mono_s < rate.cut_at_mono_s:  # it was under way when an earlier refusal was answered
        return RateDecision(rate)
    allowed = max(float(limits.smallest), rate.allowed * _HALVED)
    after = replace(rate, allowed=allowed, cut_at_mono_s=seen.ended_mono_s)
    if after.concurrency == rate.concurrency:
        return RateDecision(after)
    what = "refused a request" if seen.fate is RequestFate.REFUSED else "lost a request"
    return RateDecision(
        after, f"The store {what}: {after.concurrency} requests at a time instead of {rate.concurrency}."
    )


def _slow(
    rate: RequestRate, seen: RequestRecord, limits: RequestLimits, calm_s: float, latency_s: float
) -> RateDecision:
    """Neither up nor, more often than once a second, down."""
    floor = max(float(limits.smallest), min(_SLOW_FLOOR, rate.allowed))
    if seen.ended_mono_s - rate.cut_at_mono_s < _EASE_EVERY_S or rate.allowed <= floor:
        return RateDecision(rate)
    after = replace(rate, allowed=max(floor, rate.allowed * _EASED), cut_at_mono_s=seen.ended_mono_s)
    if after.concurrency == rate.concurrency:
        return RateDecision(after)
    return RateDecision(
        after,
        f"The store answers after {latency_s:.2f} s where {calm_s:.2f} s is calm: {after.concurrency} requests at a "
        f"time instead of {rate.concurrency}.",
    )

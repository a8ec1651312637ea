"""Estimates with their bounds: of simulated runs, and of how often a job will be interrupted. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ray_goodput.core.reliability import gamma_quantile

_EXACT_UP_TO = 1e5
_FEW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """An estimate with its confidence bounds."""

    value: float
    low: float
    high: float


def ratio_of_sums(top: np.ndarray, bottom: np.ndarray, z: float) -> Bounded:
    """sum(top) / sum(bottom) over independent runs, a share; bounds by the delta method, z standard errors wide."""
    ratio = float(top.sum() / bottom.sum())
    error = z * float(np.std(top - ratio * bottom, ddof=1)) / math.sqrt(len(top)) / float(bottom.mean())
    return Bounded(value=ratio, low=max(0.0, ratio - error), high=min(1.0, ratio + error))


def mean_count(counts: np.ndarray, z: float) -> Bounded:
    """Mean of non-negative counts, bounds z standard errors wide."""
    mean = float(counts.mean())
    error = z * float(np.std(counts, ddof=1)) / math.sqrt(len(counts))
    return Bounded(value=mean, low=max(0.0, mean - error), high=mean + error)


def share(hits: int, total: int, z: float) -> Bounded:
    """hits / total with Wilson's interval (JASA 22, 1927), which is sound at 0 and 1 too."""
    value, weight = hits / total, z * z / total
    centre = (value + weight / 2.0) / (1.0 + weight)
    half = z / (1.0 + weight) * math.sqrt(value * (1.0 - value) / total + weight / (4.0 * total))
    return Bounded(value=value, low=max(0.0, centre - half), high=min(1.0, centre + half))


def future_count(mean: float, *, shape: float = math.inf, confidence: float = 0.95) -> Bounded:
    """How many events to expect when `mean` is: central quantiles of the count.

    shape: how well the rate is known. inf: exactly, the count is Poisson. Else the rate's posterior is a Gamma of this
    shape, 1 + the events seen, and the count is negative binomial: wider, as it should be.
    """
    tail = (1.0 - confidence) / 2.0
    if mean <= 0:
        return Bounded(value=0.0, low=0.0, high=0.0)
    if mean > _EXACT_UP_TO:  # the count's own spread no longer shows beside the rate's; the normal law fits a Poisson
        if shape <= _FEW:
            low, high = (gamma_quantile(round(shape), p) / shape * mean for p in (tail, 1.0 - tail))
        else:
            spread = NormalDist().inv_cdf(1.0 - tail) * math.sqrt(
                mean + (mean * mean / shape if math.isfinite(shape) else 0.0)
            )
            low, high = mean - spread, mean + spread
        return Bounded(value=mean, low=low, high=high)
    variance = mean + (mean * mean / shape if math.isfinite(shape) else 0.0)
    size = int(mean + 40.0 * math.sqrt(variance) + 50.0)
    k = np.arange(size, dtype=np.float64)
    if math.isfinite(shape):
        first = shape * -math.log1p(mean / shape)
        ratios = (k[:-1] + shape) / (k[:-1] + 1.0) * (mean / (mean + shape))
    else:
        first, ratios = -mean, mean / (k[:-1] + 1.0)
    below = np.cumsum(np.exp(first + np.concatenate([[0.0], np.cumsum(np.log(ratios))])))
    low, high = (float(min(size - 1, np.searchsorted(below, p))) for p in (tail, 1.0 - tail))
    return Bounded(value=mean, low=low, high=high)

"""Whether a window of the order mixes data well enough, given how much the data are sorted by data shard. Pure.

At any moment, batches are drawn from M = lanes x window of the S data shards (the live set). Let the *sortedness* rho
of a column be the share of its variance that lies between shards: 0 if shards are alike, 1 if each holds a single
value. The mean of the live set then strays from that of all data by a variance of rho/M * (S - M)/(S - 1), in units of
the column's own, and stays astray for a whole window; the mean of one batch of G random samples by 1/G, and every batch
anew. `bias` is the square root of the one over the other. Up to 1, being drawn from a window shows less than being
drawn by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_BIAS = 1.0
_FEW = 0.25  # values are kinds, not numbers, if they are fewer than this share of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleVerdict:
    """`bias` as in the module's text; `why` is a sentence with the numbers, and the way out if it is `too_small`."""

    bias: float
    too_small: bool
    why: str


def judge(
    *, num_shards: int, lanes: int, window: int, batch: int, sortedness: float, column: str | None = None
) -> ShuffleVerdict:
    """The verdict on an order. column: what `sortedness` was measured of; None: it is supposed, not measured."""
    live = min(num_shards, lanes * window)
    bias = _bias(num_shards, live, batch, sortedness)
    drawn = f"batches of {batch} are drawn from {live} of {num_shards} data shards at a time ({lanes} lanes x {window})"
    if live >= num_shards:
        return ShuffleVerdict(bias=0.0, too_small=False, why=f"Shuffling: {drawn}, which is all of them.")
    if column is None:
        sorted_by = "should the data be sorted by shard"
    else:
        sorted_by = f"{sortedness:.0%} of the variance of {column!r} lies between shards"
    strays = f"{drawn}; {sorted_by}, a window strays {bias:.2g} times as far from the whole as a random batch would"
    if bias <= _MAX_BIAS:
        return ShuffleVerdict(bias=bias, too_small=False, why=f"Shuffling: {strays}.")
    needed = _needed_window(num_shards, lanes, batch, sortedness)
    way_out = f"window={needed} (with a cache that holds it), or data shards that are mixed when they are written"
    return ShuffleVerdict(bias=bias, too_small=True, why=f"Shuffling: {strays}: use {way_out}.")


def sortedness_of(values: Sequence[NDArray[np.generic]]) -> float:
    """The share of a column's variance between shards: intraclass correlation by one-way analysis of variance.

    values: the column in each of some shards, or in a sample of their rows. Numbers, or, if there are few different
    ones, kinds; texts are kinds. 0 if there is nothing to tell: fewer than two shards with rows, or a single value.
    """
    shards = [part for part in values if len(part)]
    if len(shards) < 2:
        return 0.0
    joined = np.concatenate(shards)
    kinds, codes = np.unique(joined, return_inverse=True)
    sizes = np.array([len(part) for part in shards], dtype=np.float64)
    if len(kinds) < 2 or len(joined) <= len(shards):
        return 0.0
    if len(kinds) <= _FEW * len(joined) or joined.dtype.kind not in "biuf":
        counts = np.zeros((len(shards), len(kinds)))
        np.add.at(counts, (np.repeat(np.arange(len(shards)), sizes.astype(np.int64)), codes), 1)
        means = counts / sizes[:, None]
        inner = float((sizes * (1 - (means**2).sum(axis=1))).sum())  # of one-hot vectors, summed over the kinds
    else:
        numbers = [part.astype(np.float64) for part in shards]
        means = np.array([[part.mean()] for part in numbers])
        inner = float(sum(((part - part.mean()) ** 2).sum() for part in numbers))
    whole = (sizes[:, None] * means).sum(axis=0) / sizes.sum()
    outer = float((sizes * ((means - whole) ** 2).sum(axis=1)).sum())
    between = outer / (len(shards) - 1)
    within = inner / (len(joined) - len(shards))
    typical = float((sizes.sum() - (sizes**2).sum() / sizes.sum()) / (len(shards) - 1))
    total = between + (typical - 1) * within
    return 0.0 if total <= 0 else min(1.0, max(0.0, (between - within) / total))


def _bias(num_shards: int, live: int, batch: int, sortedness: float) -> float:
    if live >= num_shards:
        return 0.0
    return math.sqrt(sortedness * batch / live * (num_shards - live) / (num_shards - 1))


def _needed_window(num_shards: int, lanes: int, batch: int, sortedness: float) -> int:
    """The least window whose bias is no larger than 1: solve rho G (S - M) = M (S - 1) for M."""
    strength = sortedness * batch
    return min(-(-num_shards // lanes), math.ceil(strength * num_shards / (num_shards - 1 + strength) / lanes))

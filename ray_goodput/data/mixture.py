"""Several datasets in one stream, by weight: still one cursor, still the same samples at every world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_goodput.core.mixture import BLOCK, MixtureOrder, block_counts
from ray_goodput.core.order import MAX_SEED
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.inspection import InspectAll
from ray_goodput.data.local_loader import BatchSettings, StreamedDataset
from ray_goodput.data.mixture_feed import MixtureFetchSpec
from ray_goodput.data.mixture_manifest import AnyManifest, MixtureManifest, mixture_title
from ray_goodput.errors import ConfigError

# What there is one of for a batch, whichever datasets its samples are from.
_SHARED = ("global_batch_size", "num_lanes", "collate", "workers", "worker_kind", "on_error", "cache_limit_bytes")


@dataclass(frozen=True, slots=True)
class Mixture(StreamedDataset):
    """Datasets by name, drawn from by weight. Goes wherever a `ShardedDataset` goes, but for evaluation.

    datasets: their files, formats, columns, transforms, seeds and windows are their own. What a batch has one of must
        be the same in all: global_batch_size, lanes, collate, workers, worker_kind, on_error, cache_limit_bytes.
        Without transform or collate, so must the columns.
    weights: how often each is drawn from, in any unit; kept to a thousandth. Default: all alike.
    seed: which of them when.

    An epoch of a mixture is as many samples as its datasets have together: one with more than its share comes round
    again meanwhile, and of one with less, some samples wait for the next epoch. `batch.members` says which dataset each
    sample is from, as an index into `names`; `of_samples` does so for sample ids.
    """

    datasets: Mapping[str, ShardedDataset]
    _: KW_ONLY
    weights: Mapping[str, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, dataset in self.datasets.items():
            if not isinstance(dataset, ShardedDataset):
                raise ConfigError(f"Mixture: {name!r} is a {type(dataset).__name__}: give ShardedDataset values.")
        weights = dict.fromkeys(self.datasets, 1.0) if self.weights is None else dict(self.weights)
        if set(weights) != set(self.datasets):
            raise ConfigError(
                f"Mixture: the datasets are {sorted(self.datasets)} and the weights are for {sorted(weights)}: "
                "give one of each."
            )
        object.__setattr__(self, "datasets", dict(self.datasets))
        object.__setattr__(self, "weights", {name: weights[name] for name in self.datasets})
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"Mixture(seed={self.seed!r}): give an integer from 0 to 2**64 - 1.")
        self._counts()
        for shared in _SHARED:
            values = {name: getattr(dataset, shared) for name, dataset in self.datasets.items()}
            if any(value != self.shared(shared) for value in values.values()):
                told = ", ".join(f"{value!r} for {name}" for name, value in values.items())
                raise ConfigError(f"Mixture: there is one {shared} for a batch, and the datasets have {told}.")
        dropping = [name for name, dataset in self.datasets.items() if dataset.drop_last]
        if dropping:
            raise ConfigError(
                f"Mixture: {dropping[0]!r} has drop_last=True, but a mixture's batches hold no end of a dataset to "
                "drop: leave it out."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets' names; `batch.members` counts through them."""
        return tuple(self.datasets)

    @property
    def global_batch_size(self) -> int:
        return self.shared("global_batch_size")

    @property
    def num_lanes(self) -> int:
        return self.shared("num_lanes")

    @property
    def drop_last(self) -> bool:
        return False

    @property
    def manifest_uri(self) -> str:
        return mixture_title({name: dataset.manifest_uri for name, dataset in self.datasets.items()})

    @property
    def title(self) -> str:
        """What people call it: its datasets and how often each is drawn from."""
        parts = zip(self.datasets.items(), self._counts(), strict=True)
        return ", ".join(f"{count / BLOCK:.1%} {name} ({dataset.uri_glob})" for (name, dataset), count in parts)

    @property
    def format_id(self) -> str:
        return mixture_title({name: dataset.format_id for name, dataset in self.datasets.items()})

    def shared(self, name: str) -> Any:
        """What all datasets have in common."""
        return getattr(next(iter(self.datasets.values())), name)

    def check_world(self, dp_world: int) -> None:
        """Raises ConfigError if `dp_world` data-parallel ranks cannot share a batch."""
        next(iter(self.datasets.values())).check_world(dp_world)

    def manifest(self, *, max_workers: int = 16, inspect: InspectAll | None = None) -> MixtureManifest:
        """List the files of all datasets and count their rows. Raises what `ShardedDataset.manifest` raises."""
        return MixtureManifest(
            {
                name: dataset.manifest(max_workers=max_workers, inspect=inspect)
                for name, dataset in self.datasets.items()
            }
        )

    def order(self, manifest: AnyManifest) -> MixtureOrder:
        """The order of the samples of `manifest`."""
        parts = self._members(manifest)
        orders = {name: dataset.order(parts[name]) for name, dataset in self.datasets.items()}
        return MixtureOrder(orders, self._counts(), seed=self.seed)

    def of_samples(self, manifest: AnyManifest, sample_ids: NDArray[np.int64]) -> list[tuple[str, int]]:
        """For each of a batch's sample ids, the dataset and the id that the sample has there alone."""
        parts = self._members(manifest)
        first_ids = np.concatenate([[0], np.cumsum([parts[name].num_samples for name in self.names])])
        members = np.searchsorted(first_ids, sample_ids, side="right") - 1
        own = np.asarray(sample_ids) - first_ids[members]
        return [(self.names[m], i) for m, i in zip(members.tolist(), own.tolist(), strict=True)]

    def fetch_spec(self, manifest: AnyManifest) -> MixtureFetchSpec:
        """What any process needs to fetch the data shards."""
        parts = self._members(manifest)
        return MixtureFetchSpec(
            names=self.names,
            members=tuple(dataset.fetch_spec(parts[name]) for name, dataset in self.datasets.items()),
            counts=self._counts(),
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            prefetch_shards=sum(dataset.prefetch_shards for dataset in self.datasets.values()),
            cache_limit_bytes=self.shared("cache_limit_bytes"),
        )

    def batch_settings(self) -> BatchSettings:
        """How batches are made of the rows: all columns, since the cached shards have no others."""
        transforms = [dataset.transform for dataset in self.datasets.values()]
        return replace(
            next(iter(self.datasets.values())).batch_settings(),
            columns=None,
            transform=MemberTransform(tuple(transforms)) if any(transforms) else None,
        )

    def check_columns(self, manifest: AnyManifest) -> None:
        """Raises ConfigError if rows of the datasets cannot lie in one batch as they are."""
        if self.shared("collate") is not None or any(dataset.transform for dataset in self.datasets.values()):
            return
        first: tuple[str, dict[str, str]] | None = None
        for name, part in self._members(manifest).items():
            if part.schema is None or self.datasets[name].transform_shard is not None:
                continue
            kept = self.datasets[name].columns or part.schema.names
            columns = {column: str(part.schema.field(column).type) for column in kept}
            if first is None:
                first = name, columns
            elif columns != first[1]:
                differ = sorted(c for c in {*columns, *first[1]} if columns.get(c) != first[1].get(c))
                raise ConfigError(
                    f"Mixture: the rows of {first[0]!r} and {name!r} cannot lie in one batch, since they differ in "
                    f"{', '.join(map(repr, differ))}: make them alike with columns= or transform=."
                )

    def _counts(self) -> tuple[int, ...]:
        assert self.weights is not None
        return block_counts(self.weights)

    def _members(self, manifest: AnyManifest) -> dict[str, Any]:
        if not isinstance(manifest, MixtureManifest) or tuple(manifest.members) != self.names:
            raise ConfigError(f"This is no manifest of a mixture of {', '.join(self.names)}: {manifest!r}.")
        return manifest.members


@dataclass(frozen=True, slots=True)
class MemberTransform:
    """The transforms of a mixture's datasets as one, for samples that come as (member, sample)."""

    transforms: tuple[Callable[..., Mapping[str, Any]] | None, ...]

    def __call__(self, sample: tuple[int, Mapping[str, Any]], rng: np.random.Generator) -> Mapping[str, Any]:
        member, columns = sample
        transform = self.transforms[member]
        return columns if transform is None else transform(columns, rng)


AnyDataset = ShardedDataset | Mixture

"""The driver's part of the data plane: one manifest a run, checked against the newest commit's cursor."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ray_goodput.actors.manifest_job import inspect_in_cluster
from ray_goodput.core.cursor import DataCursor, check
from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import AnyOrder
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.mixture import AnyDataset, Mixture
from ray_goodput.data.mixture_manifest import AnyManifest, MixtureManifest, read_manifest
from ray_goodput.data.shuffle_report import supposed
from ray_goodput.errors import ObjectNotFoundError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)


def manifest_key(name: str) -> str:
    return f"data/{name}/manifest"


def order_key(name: str) -> str:
    return f"data/{name}/order.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDataset:
    """What `write_dataset` puts into the run's storage, once the run is this driver's alone."""

    name: str
    manifest: AnyManifest
    is_stored: bool
    order: Mapping[str, object]


def check_dataset(
    store: ObjectStore, name: str, dataset: AnyDataset, committed: Mapping[str, Mapping[str, object]] | None
) -> CheckedDataset:
    """The run's manifest of `dataset`: the one in its storage, or a new one on the first start. Writes nothing.

    committed: the cursors of the newest commit, None for a fresh run.

    Raises:
        EmptyDatasetError: nothing to train on.
        DatasetMismatchError: the run has trained on other data, or in another order, so far.
    """
    stored = _stored_manifest(store, name)
    same_place = stored is not None and stored.uri == dataset.manifest_uri and stored.format_name == dataset.format_id
    manifest = stored if stored is not None and same_place else dataset.manifest(inspect=inspect_in_cluster)
    if not same_place and isinstance(dataset, ShardedDataset):
        num_shards = int(np.count_nonzero(manifest.rows))
        logger.info("Dataset %r: %s", name, supposed(dataset, num_shards).why)
    dataset.check_columns(manifest)
    if committed is not None and name in committed:
        check(DataCursor.from_dict(committed[name]), dataset.cursor(manifest))
    order: dict[str, object] = {
        "version": 1,
        "uri": dataset.manifest_uri,
        "manifest_digest": manifest.digest,
        "seed": dataset.seed,
        "lanes": dataset.num_lanes,
        "global_batch_size": dataset.global_batch_size,
    }
    if isinstance(dataset, Mixture):
        mixed = dataset.order(manifest)
        order["mixture"] = [
            {"name": member, "count": num, "seed": own.seed, "window": own.window}
            for member, num, own in zip(mixed.names, mixed.counts, mixed.members, strict=True)
        ]
    else:
        order["window"] = dataset.window
    return CheckedDataset(name=name, manifest=manifest, is_stored=same_place, order=order)


def write_dataset(store: ObjectStore, checked: CheckedDataset) -> None:
    """Manifest and order lie in the run's storage, kept ever after. Only for the driver that holds the run's name:
    under a living run they would change what its next attempt trains on."""
    if not checked.is_stored:
        store.put(manifest_key(checked.name), checked.manifest.to_bytes())
    store.put(order_key(checked.name), json.dumps(checked.order, indent=1, sort_keys=True).encode())


def load_manifest(store: ObjectStore, name: str) -> AnyManifest:
    """The run's manifest of dataset `name`, as `write_dataset` stored it."""
    return read_manifest(store.get(manifest_key(name)))


def load_order(store: ObjectStore, name: str) -> AnyOrder:
    """The run's sample order of dataset `name`, from storage alone."""
    spec = json.loads(store.get(order_key(name)))
    manifest = load_manifest(store, name)
    lanes = spec["lanes"]
    if not isinstance(manifest, MixtureManifest):
        return SampleOrder(manifest.rows, seed=spec["seed"], lanes=lanes, window=spec["window"])
    members: dict[str, SampleOrder] = {}
    for own in spec["mixture"]:
        rows = manifest.members[own["name"]].rows
        members[own["name"]] = SampleOrder(rows, seed=own["seed"], lanes=lanes, window=own["window"])
    return MixtureOrder(members, [own["count"] for own in spec["mixture"]], seed=spec["seed"])


def _stored_manifest(store: ObjectStore, name: str) -> AnyManifest | None:
    try:
        return load_manifest(store, name)
    except ObjectNotFoundError:
        return None

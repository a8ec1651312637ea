"""The driver's part of the data plane: one manifest a run, checked against the newest commit's cursor."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ray_goodput.core.cursor import DataCursor, check
from ray_goodput.core.order import SampleOrder
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.manifest import Manifest
from ray_goodput.errors import ObjectNotFoundError
from ray_goodput.storage.protocol import ObjectStore


def manifest_key(name: str) -> str:
    return f"data/{name}/manifest"


def order_key(name: str) -> str:
    return f"data/{name}/order.json"


def prepare_dataset(
    store: ObjectStore, name: str, dataset: ShardedDataset, committed: Mapping[str, Mapping[str, object]] | None
) -> Manifest:
    """The manifest of `dataset` lies in the run's storage afterwards: built on the first start, kept ever after.

    committed: the cursors of the newest commit, None for a fresh run.

    Raises:
        EmptyDatasetError: nothing to train on.
        DatasetMismatchError: the run has trained on other data, or in another order, so far.
    """
    stored = _stored_manifest(store, name)
    same_place = stored is not None and stored.uri == dataset.manifest_uri and stored.format_name == dataset.format_id
    manifest = stored if stored is not None and same_place else dataset.manifest()
    if committed is not None and name in committed:
        check(DataCursor.from_dict(committed[name]), dataset.cursor(manifest))
    if not same_place:
        store.put(manifest_key(name), manifest.to_bytes())
    order = {
        "version": 1,
        "uri": dataset.manifest_uri,
        "manifest_digest": manifest.digest,
        "seed": dataset.seed,
        "lanes": dataset.num_lanes,
        "window": dataset.window,
        "global_batch_size": dataset.global_batch_size,
    }
    store.put(order_key(name), json.dumps(order, indent=1, sort_keys=True).encode())
    return manifest


def load_manifest(store: ObjectStore, name: str) -> Manifest:
    """The run's manifest of dataset `name`, as `prepare_dataset` stored it."""
    return Manifest.from_bytes(store.get(manifest_key(name)))


def load_order(store: ObjectStore, name: str) -> SampleOrder:
    """The run's sample order of dataset `name`, from storage alone."""
    spec = json.loads(store.get(order_key(name)))
    manifest = load_manifest(store, name)
    return SampleOrder(manifest.rows, seed=spec["seed"], lanes=spec["lanes"], window=spec["window"])


def _stored_manifest(store: ObjectStore, name: str) -> Manifest | None:
    try:
        return load_manifest(store, name)
    except ObjectNotFoundError:
        return None

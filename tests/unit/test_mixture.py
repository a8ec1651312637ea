"""A mixture of datasets from files to batches, without Ray."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.actors.shard_cache import ShardCache
from ray_goodput.config import StoreSpec
from ray_goodput.core.placement import shard_visits
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.feed import FeedSpec
from ray_goodput.data.mixture_feed import MixtureFetcher
from ray_goodput.data.mixture_manifest import MixtureManifest, read_manifest
from ray_goodput.errors import ConfigError, DataError, DatasetMismatchError, ObjectChangedError
from ray_goodput.storage import open_store
from ray_goodput.train.datasets import check_dataset, load_manifest, load_order, write_dataset


def write_web(folder: Path) -> None:
    folder.mkdir()
    start = 0
    for i, n in enumerate([30, 0, 1, 25, 44]):
        pq.write_table(pa.table({"id": np.arange(start, start + n)}), folder / f"{i:02d}.parquet")
        start += n


def write_code(folder: Path) -> None:
    folder.mkdir()
    for i in range(3):
        lines = [json.dumps({"id": 1000 + 10 * i + k, "text": "x" * k}) for k in range(10)]
        (folder / f"{i}.jsonl").write_text("\n".join(lines))


def tag(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "noise": rng.random()}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    write_web(tmp_path / "web")
    write_code(tmp_path / "code")
    return tmp_path


def mixture(folders: Path, *, weights: Mapping[str, float] | None = None, seed: int = 0, **changed: Any) -> rg.Mixture:
    both: dict[str, Any] = {"global_batch_size": 8, "lanes": 4, **changed}
    return rg.Mixture(
        {
            "web": rg.ShardedDataset(str(folders / "web"), transform=tag, **both),
            "code": rg.ShardedDataset(str(folders / "code" / "*.jsonl"), transform=tag, seed=5, window=2, **both),
        },
        weights=weights or {"web": 3, "code": 1},
        seed=seed,
    )


def read(mixed: rg.Mixture, folders: Path, **changed: Any) -> list[rg.Batch]:
    values: dict[str, Any] = {"epochs": 2, "cache_dir": folders / "cache", **changed}
    with mixed.loader(**values) as loader:
        return list(loader)


def pairs(batch: rg.Batch) -> list[tuple[int, float]]:
    return list(zip(batch["id"].tolist(), batch["noise"].tolist(), strict=True))


def test_batches_come_from_both_datasets_by_weight_and_say_from_which(folders: Path) -> None:
    mixed = mixture(folders)
    manifest = mixed.manifest()
    assert (manifest.num_samples, manifest.num_shards) == (130, 8)
    batches = read(mixed, folders, manifest=manifest)
    ids = np.concatenate([batch["id"].numpy() for batch in batches])
    members = np.concatenate([batch.members.numpy() for batch in batches if batch.members is not None])
    sample_ids = np.concatenate([batch.sample_ids.numpy() for batch in batches])
    assert len(ids) == 260
    assert (members == (ids >= 1000)).all()
    assert abs(members.mean() - 0.25) < 0.02
    own = mixed.of_samples(manifest, sample_ids)
    assert own == [("code", i - 1000) if i >= 1000 else ("web", i) for i in ids.tolist()]
    web = ids[ids < 1000]
    assert len(set(web[:90].tolist())) == 90  # no sample again while others of its lane wait
    noise = np.concatenate([batch["noise"].numpy() for batch in batches])
    assert len(set(noise.tolist())) == 260  # a second pass draws other numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_goes_on_at_its_cursor_and_at_any_world_size(folders: Path, workers: int) -> None:
    mixed = mixture(folders, workers=workers)
    manifest = mixed.manifest()
    whole = read(mixed, folders, manifest=manifest)
    cursor = mixed.cursor(manifest).moved_to(whole[4].samples_end)
    rests = [read(mixed, folders, manifest=manifest, cursor=cursor, dp_rank=r, dp_world=3) for r in range(3)]
    for batch, *parts in zip(whole[5:], *rests, strict=True):
        together = [pair for part in parts if part.weight for pair in pairs(part)]
        assert sorted(together) == sorted(pairs(batch))
        assert {p.index for p in parts} == {batch.index}


def test_the_cursor_belongs_to_the_weights_and_the_datasets(folders: Path) -> None:
    mixed = mixture(folders)
    cursor = mixed.cursor(mixed.manifest())
    assert len(json.dumps(cursor.to_dict())) < 1024
    with pytest.raises(DatasetMismatchError, match=r"web.count was 750 and is 600, code.count was 250 and is 400"):
        mixture(folders, weights={"web": 6, "code": 4}).loader(cursor=cursor, cache_dir=folders / "cache")
    with pytest.raises(DatasetMismatchError, match="seed was 0 and is 1"):
        mixture(folders, seed=1).loader(cursor=cursor, cache_dir=folders / "cache")
    (folders / "code" / "3.jsonl").write_text('{"id": 7, "text": "new"}\n')
    with pytest.raises(DatasetMismatchError, match="other data"):
        mixed.loader(cursor=cursor, cache_dir=folders / "cache")


def test_a_mixtures_manifest_survives_storage_and_says_when_it_is_damaged(folders: Path) -> None:
    manifest = mixture(folders).manifest()
    data = manifest.to_bytes()
    back = read_manifest(data)
    assert isinstance(back, MixtureManifest)
    assert (back.digest, back.uri, back.format_name) == (manifest.digest, manifest.uri, manifest.format_name)
    assert [back.shard(i) for i in range(8)] == [manifest.shard(i) for i in range(8)]
    assert (back.size_bytes, list(back.rows)) == (manifest.size_bytes, list(manifest.rows))
    for broken in (data[:-1], data[:40] + b"?" + data[41:], b""):
        with pytest.raises(DataError, match="damaged"):
            MixtureManifest.from_bytes(broken)
    with pytest.raises(IndexError):
        back.shard(8)
    alone = read_manifest(manifest.members["web"].to_bytes())
    assert alone.digest == manifest.members["web"].digest
    with pytest.raises(ConfigError, match="no manifest of a mixture of web, code"):
        mixture(folders).order(alone)


def test_a_run_keeps_the_mixture_and_its_order_with_it(folders: Path) -> None:
    mixed = pickle.loads(pickle.dumps(mixture(folders)))
    store = open_store(StoreSpec(uri=str(folders / "run")))
    checked = check_dataset(store, "train", mixed, None)
    write_dataset(store, checked)
    assert load_manifest(store, "train").digest == checked.manifest.digest
    order = load_order(store, "train")
    indices = np.arange(500)
    expected = mixed.order(checked.manifest).locate(indices)
    assert [part.tolist() for part in order.locate(indices)] == [part.tolist() for part in expected]
    again = check_dataset(store, "train", mixed, {"train": mixed.cursor(checked.manifest).to_dict()})
    assert again.is_stored


def test_rows_without_a_transform_must_have_the_same_columns(folders: Path) -> None:
    both: dict[str, Any] = {"global_batch_size": 8, "lanes": 4}
    web = rg.ShardedDataset(str(folders / "web"), **both)
    code = rg.ShardedDataset(str(folders / "code" / "*.jsonl"), **both)
    with pytest.raises(ConfigError, match=r"'web' and 'code' cannot lie in one batch, since they differ in 'text'"):
        rg.Mixture({"web": web, "code": code}).loader(cache_dir=folders / "cache")
    alike = rg.Mixture({"web": web, "code": rg.ShardedDataset(code.uri_glob, columns=["id"], **both)})
    with alike.loader(cache_dir=folders / "cache") as loader:
        assert sum(len(batch["id"]) for batch in loader) == 130


def test_the_nodes_cache_actor_prefetches_a_mixture_in_the_order_of_need(folders: Path) -> None:
    mixed = mixture(folders)
    manifest = mixed.manifest()
    spec = pickle.loads(pickle.dumps(mixed.fetch_spec(manifest)))
    cache = ShardCache(folders / "cache")
    feed = FeedSpec(start=0, dp_ranks=(0, 1), dp_world=2, epochs=1)
    assert cache.begin("train", spec, feed, attempt=1) == 1
    fetcher = spec.fetcher(NodeCache(folders / "cache"))
    order = mixed.order(manifest)
    for start in range(0, order.num_samples, 8):
        shards, rows = order.locate(np.arange(start, min(start + 8, order.num_samples)))
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            while not fetcher.cache.contains(fetcher.name(shard)):  # the test's timeout bounds it
                time.sleep(0.01)
            [(name, own)] = mixed.of_samples(manifest, order.sample_ids(np.array([shard]), np.array([row])))
            assert fetcher.table(shard)["id"][row].as_py() == own + (1000 if name == "code" else 0)
        assert cache.advance("train", start + 8, 1)
    assert cache.stats().counts.fetched_shards == 7  # the eighth has no rows
    assert cache.close()


def test_an_object_that_changed_is_named(folders: Path) -> None:
    mixed = mixture(folders)
    manifest = mixed.manifest()
    (folders / "code" / "1.jsonl").write_text("{}\n")
    with pytest.raises(ObjectChangedError, match=r"code/1\.jsonl"):
        read(mixed, folders, manifest=manifest)


@pytest.mark.parametrize(
    ("datasets", "weights", "message"),
    [
        ({}, None, "at least one dataset"),
        ({"a": 3}, None, "'a' is a int"),
        ({"a": {}}, {"b": 1}, r"datasets are \['a'\] and the weights are for \['b'\]"),
        (
            {"a": {}, "b": {"global_batch_size": 16}},
            None,
            "one global_batch_size for a batch, and the datasets have 8 for a",
        ),
        ({"a": {}, "b": {"lanes": 2}}, None, "one num_lanes for a batch"),
        ({"a": {"drop_last": True}}, None, "'a' has drop_last=True"),
        ({"a": {}, "b": {"workers": 2}}, None, "one workers for a batch"),
    ],
)
def test_senseless_mixtures_are_refused_when_they_are_made(
    datasets: dict[str, Any], weights: dict[str, float] | None, message: str
) -> None:
    made = {
        name: rg.ShardedDataset("s3://b/t", **{"global_batch_size": 8, **given}) if isinstance(given, dict) else given
        for name, given in datasets.items()
    }
    with pytest.raises(ConfigError, match=message):
        rg.Mixture(made, weights=weights)


@pytest.mark.parametrize("weights", [{"web": 60, "code": 1}, {"web": 1, "code": 40}, {"web": 1, "code": 1}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_data_shard_is_fetched_once_a_pass_however_seldom_its_dataset_is_read_from_a_cache_that_holds_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, int], rank: int
) -> None:
    """D2 for each dataset of a mixture, by its own passes: 40 data shards, of which the cache holds half."""
    for name, num in (("web", 32), ("code", 8)):
        (tmp_path / name).mkdir()
        for i in range(num):
            pq.write_table(pa.table({"id": np.arange(32) + 1000 * i}), tmp_path / name / f"{i:02d}.parquet")
    same: dict[str, Any] = {"global_batch_size": 8, "lanes": 4, "window": 2}
    probe = rg.ShardedDataset(str(tmp_path / "web"), **same)
    with probe.loader(cache_dir=tmp_path / "probe") as loader:
        list(loader)
    limit = 20 * (NodeCache(tmp_path / "probe").usage_bytes() // 32 + 1)
    web, code = (rg.ShardedDataset(str(tmp_path / name), cache_limit_bytes=limit, **same) for name in ("web", "code"))
    mixed = rg.Mixture({"web": web, "code": code}, weights=weights)
    loaded: Counter[int] = Counter()
    load = MixtureFetcher.table

    def counted(self: MixtureFetcher, data_shard: int) -> pa.Table:
        loaded[data_shard] += 1
        return load(self, data_shard)

    monkeypatch.setattr(MixtureFetcher, "table", counted)
    manifest = mixed.manifest()
    order = mixed.order(manifest)
    with mixed.loader(cache_dir=tmp_path / "cache", epochs=3, dp_rank=rank, dp_world=2, manifest=manifest) as loader:
        read = np.concatenate([batch.sample_ids.numpy() for batch in loader])
        fetched = loader.counts().misses
    visits = {visit[1:] for visit in shard_visits(order, 0, 3 * order.num_samples, 8, [rank], 2)}
    opens = Counter(shard for _, shard in visits)
    assert len(read) == 3 * order.num_samples // 2
    assert not {shard: num for shard, num in loaded.items() if num > opens[shard]}, "opened more than once a pass"
    assert fetched <= len(visits)

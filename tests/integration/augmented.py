"""What each step of the small job trained on, tensors and all, and what it had to: by the order alone, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ray_goodput.core.order import TAG_TRANSFORM, philox
from ray_goodput.data.mixture import AnyDataset
from small_job import GLOBAL_BATCH, augment, augmented_name, digest_of

Steps = dict[int, list[tuple[int, str]]]
"""Step -> sample id and digest of its tensors, of all ranks' samples, sorted."""


def trained_on(folder: Path, resumes: Sequence[Sequence[Any]]) -> Steps:
    """From the logs that the ranks left in `folder`: steps that survived. An attempt's end where the next resumed.

    resumes: [attempt, step, tier] of each attempt, as in `Result.resumes`.
    """
    steps: Steps = {}
    for attempt, resumed in sorted((attempt, step) for attempt, step, _ in resumes):
        steps = {step: samples for step, samples in steps.items() if step <= resumed}
        for log in sorted(folder.glob(augmented_name(attempt, "*"))):
            for step, samples in _lines(log):
                steps.setdefault(step, []).extend((sample, digest) for sample, digest in samples)
    return {step: sorted(samples) for step, samples in steps.items()}


def _lines(log: Path) -> Iterable[tuple[int, list[tuple[int, str]]]]:
    for line in log.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else its writer was killed over it, and the step is not done
            yield json.loads(line)


def unbroken(dataset: AnyDataset, data: Path, *, epochs: int) -> Steps:
    """What a run without failures trains on, at any world size: batch k is the samples at [kG, (k+1)G)."""
    manifest = dataset.manifest()
    order = dataset.order(manifest)
    positions = np.arange(epochs * order.num_samples)
    shards, rows = order.locate(positions)
    ids, passes = order.sample_ids(shards, rows).tolist(), order.passes(positions).tolist()
    tables: dict[int, Mapping[str, Any]] = {i: _columns(data / manifest.shard(i).key) for i in np.unique(shards)}
    steps: Steps = {}
    for t, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
        sample = {name: column[row] for name, column in tables[shard].items()}
        rng = np.random.Generator(philox(TAG_TRANSFORM, dataset.seed, passes[t], ids[t]))
        steps.setdefault(t // GLOBAL_BATCH + 1, []).append((ids[t], digest_of(**augment(sample, rng))))
    return {step: sorted(samples) for step, samples in steps.items()}


def _columns(file: Path) -> Mapping[str, Any]:
    table = pq.read_table(file)
    x = table["x"].combine_chunks().flatten().to_numpy()
    return {"x": x.reshape(len(table), -1), "y": table["y"].to_numpy()}

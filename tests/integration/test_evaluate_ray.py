"""Training and evaluation in one run on a real Ray, on files in formats of their own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ray_goodput.data.dataset import ShardedDataset

SCRIPT = Path(__file__).with_name("eval_job.py")
NUM_TRAIN = 13  # in batches of 4, over two epochs: the last batch has 2 samples
NUM_VAL = 25  # in batches of 6: the last has one


@pytest.mark.timeout(240)
def test_a_run_trains_on_json_lines_and_evaluates_on_every_raw_file_once(tmp_path: Path) -> None:
    rows = [
        {"a": float(a), "b": float(b), "y": float(a - b)} for a, b in np.random.default_rng(0).random((NUM_TRAIN, 2))
    ]
    (tmp_path / "train").mkdir()
    for i, part in enumerate((rows[:5], rows[5:])):
        lines = "".join(json.dumps(row) + "\n" for row in part).encode()
        (tmp_path / "train" / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines))
    for i in range(NUM_VAL):
        path = tmp_path / "val" / ("even", "odd")[i % 2] / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]))
    log = tmp_path / "log"
    environment = {**os.environ, "RAY_GOODPUT_LOCAL_DIR": str(tmp_path / "local")}
    with log.open("wb") as out:
        code = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path)], stdout=out, stderr=out, env=environment, timeout=200
        ).returncode
    assert code == 0, log.read_text(errors="replace")[-6000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["loop"]["evaluations"]) == 2
    for ranks in found["loop"]["evaluations"]:
        assert sorted(i for ids, _ in ranks for i in ids) == list(range(NUM_VAL))
        values, samples, batches, odd = np.sum([sums for _, sums in ranks], axis=0)
        assert (values, samples, odd) == (sum(range(NUM_VAL)), NUM_VAL, NUM_VAL // 2)
        assert batches == 2 * -(-NUM_VAL // 6)
    assert found["buckets_s"]["eval"] > 0
    for mine, alone in zip(found["loop"]["weights"], weights_of_one_process(tmp_path), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-9)


def weights_of_one_process(folder: Path) -> list[list[float]]:
    """What the same batches make of the same network without Ray."""
    torch.manual_seed(1)
    net = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = ShardedDataset(f"{folder}/train/*.jsonl.gz", global_batch_size=4, seed=2)
    for epoch, cursor_at in ((1, 0), (2, NUM_TRAIN)):
        manifest = data.manifest()
        cursor = data.cursor(manifest).moved_to(cursor_at)
        with data.loader(epochs=epoch, cursor=cursor, manifest=manifest, cache_dir=folder / "alone") as batches:
            for batch in batches:
                x = torch.stack([batch["a"], batch["b"]], dim=1)
                nn.functional.mse_loss(net(x).squeeze(-1), batch["y"]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in net.parameters()]

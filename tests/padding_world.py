"""Ranks for `test_padding_world.py`: in the last batch of a DDP world two ranks have no sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.order import SampleOrder
from ray_goodput.data.loader import BatchLoader
from ray_goodput.train.batch_weight import BatchWeight

WORLD = 3
ROWS = [5, 1, 7]  # 13 samples in batches of 6: the last has one


class Source:
    def counts(self) -> DataCounts:
        return DataCounts()

    def describe(self, data_shard: int) -> str:
        return f"Data shard {data_shard}"

    def table(self, data_shard: int) -> pa.Table:
        generator = np.random.default_rng(data_shard)
        x = generator.standard_normal((ROWS[data_shard], 4))
        return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), "y": x[:, 0] - x[:, 3]})

    def advance(self, samples_consumed: int) -> None: ...

    def close(self, timeout_s: float = 5.0) -> None: ...


def train(rank: int, world: int) -> tuple[list[torch.Tensor], list[int]]:
    """Final weights and the sizes of this rank's batches."""
    torch.manual_seed(5)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = DistributedDataParallel(net) if world > 1 else net
    weight = BatchWeight(enabled=True)
    weight.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    order = SampleOrder(ROWS, seed=1, lanes=2, window=2)
    sizes = []
    loader = BatchLoader(order=order, global_batch_size=6, source=Source(), dp_rank=rank, dp_world=world)
    for batch in loader:
        weight.set(batch.weight)
        nn.functional.mse_loss(model(batch["x"]).squeeze(-1), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(batch.num_samples)
    return [parameter.detach() for parameter in net.parameters()], sizes


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    torch.save(train(rank, WORLD), Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()

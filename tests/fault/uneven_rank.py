"""One of the ranks of `test_uneven_ranks.py`: reads its batches in step with the others, at its own speed."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

import torch.distributed as dist

import ray_goodput as rg
from ray_goodput.train.world import ControlWord, Decisions, World


def run(
    rank: int, world_size: int, root: str, data: str, slow_s: float, dies_after: int | None, parent: Connection
) -> None:
    """Sends ("done", [(batch index, weight, sample ids), ...]), or ("lost", step, time) if a peer was missed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world_size)
    control = ControlWord(World.join(rank, world_size))
    dataset = rg.ShardedDataset(data, global_batch_size=8, lanes=4, window=2)
    seen: list[tuple[int, float, list[int]]] = []
    with dataset.loader(dp_rank=rank, dp_world=world_size, epochs=2, cache_dir=f"{root}/cache") as batches:
        for step, batch in enumerate(batches, 1):
            seen.append((batch.index, batch.weight, batch.sample_ids.tolist()))
            time.sleep(slow_s)
            if step == dies_after:
                parent.send(("dies", step, time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                control.read()
                control.post(Decisions())
            except RuntimeError:
                parent.send(("lost", step, time.monotonic()))
                return
    try:
        control.read()
    except RuntimeError:
        parent.send(("lost", len(seen), time.monotonic()))
        return
    parent.send(("done", seen))
    dist.destroy_process_group()

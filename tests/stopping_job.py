"""A training process of two whose storage goes away for good, as far as it can tell: it is to stop then.

    python stopping_job.py URI OPTIONS_JSON LOG FOLDER RANK

Trains until a file `LOG.stop` appears; each step, and the weights after it, are one number. `LOG` says where it
started, which step it did last, and with what error it left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ray_goodput as rg
from ray_goodput.errors import DurableAgeError

STEP_S = 0.02
EVERY = 20


def main() -> None:
    uri, options, log_path, folder, rank = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{log_path}.meet", rank=int(rank), world_size=2)
    model = torch.nn.Linear(64, 64)
    config = rg.CheckpointConfig(every=EVERY, max_durable_age="3s", on_durable_age="stop")
    saves = rg.Checkpointer(uri, config=config, storage_options=json.loads(options), local_dir=f"{folder}/node")
    step = saves.restore(model=model)
    if step:
        assert all(torch.equal(value, torch.full_like(value, step)) for value in model.state_dict().values())
    start, error = step, ""
    try:
        with saves:
            while not stopped(log_path):
                time.sleep(STEP_S)  # the device works
                step += 1
                for parameter in model.parameters():
                    parameter.data.fill_(step)
                saves.step(step)
    except DurableAgeError as raised:
        error = str(raised)
    Path(f"{log_path}-{rank}").write_text(json.dumps({"start": start, "step": step, "error": error}))
    dist.destroy_process_group()


def stopped(log_path: str) -> bool:
    """Whether the run is to end, as rank 0 sees it, so that both leave at one step."""
    word = torch.tensor([int(Path(f"{log_path}.stop").exists())])
    dist.broadcast(word, 0)
    return bool(word.item())


if __name__ == "__main__":
    main()

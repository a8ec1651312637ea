"""A training process whose storage fails: it trains, saves by `rg.Checkpointer`, notes step times and its memory.

    python outage_job.py URI OPTIONS_JSON LOG LOCAL_DIR

Ends when a file `LOG.stop` appears; waits for the last commit then, and notes which step it is of.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import torch

import ray_goodput as rg

STEP_S = 0.02
EVERY = 10
WIDTH = 1024  # four layers and their momentum: 32 MiB a save


def main() -> None:
    uri, options, log_path, local_dir = sys.argv[1:]
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    process = psutil.Process()
    config = rg.CheckpointConfig(every=EVERY)
    saves = rg.Checkpointer(uri, config=config, storage_options=json.loads(options), local_dir=local_dir)
    saves.restore(model=model, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    step = 0
    with open(log_path, "w", buffering=1) as log:
        while not Path(f"{log_path}.stop").exists():
            started = time.monotonic()
            time.sleep(STEP_S)  # the device works; this process has little to do meanwhile
            optimizer.step()
            step += 1
            saves.step(step)
            took_s = time.monotonic() - started
            note = {"step": step, "at_s": time.monotonic(), "took_s": took_s, "rss_bytes": process.memory_info().rss}
            log.write(json.dumps({**note, "skipped": saves.skipped}) + "\n")
        saves.save(step)
        log.write(json.dumps({"committed": saves.wait(120.0), "step": step}) + "\n")
        saves.close()


if __name__ == "__main__":
    main()

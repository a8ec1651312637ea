"""Saves of unusual states, one process, no storage: 20,000 small tensors, one tensor larger than all else, 0 bytes.

Times are of the processor (`time.thread_time`): what a save costs the training thread, whatever else the machine does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results_file import Budget, parser, report, spread

from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import CheckpointId

REPEATS = 7
SMALL_LIMIT_S = 2e-5  # a tensor: 20,000 of them stall a save by 0.4 s at most


def main() -> None:
    chosen = parser("shapes").parse_args()
    torch.set_num_threads(1)
    many = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64)) for _ in range(20_000)])
    few = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64)) for _ in range(100)])
    huge = torch.nn.ModuleList([few, torch.nn.Embedding(200_000, 256)])
    arms = {
        "20,000 tensors of 256 bytes": measure(many),
        "one of 195 MiB, 100 small": measure(huge),
        "0 bytes": measure(torch.nn.Identity()),
    }
    small, large, empty = (arms[name] for name in arms)
    report(
        "shapes",
        arms,
        [
            Budget(name="stall a small tensor, s", limit=SMALL_LIMIT_S, value=small["stall, s"]["median"] / 20_000),
            Budget(
                name="stall / memcpy, one huge tensor",
                limit=1.5,
                value=large["stall, s"]["median"] / large["memcpy, s"]["median"],
            ),
            Budget(name="stall of 0 bytes, s", limit=0.005, value=empty["stall, s"]["median"]),
        ],
        as_json=chosen.json,
    )


def measure(model: torch.nn.Module) -> dict[str, dict[str, float]]:
    """Planning for the first time, and then each save's stall, beside a warm memcpy of the same bytes."""
    planner = Planner(world_rank=0, world_size=1)
    tree = collect_state(model=model)
    first_s = timed(lambda: planner.plan_for(tree))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        stager = Stager(planner.plan_for(tree), Path(folder))
        stager.open()
        stalls = [timed(lambda step=step: save(model, planner, stager, step)) for step in range(REPEATS)]
        stager.close()
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    copies = [timed(lambda: target.copy_(source)) for _ in range(REPEATS)]
    return {"first plan, s": spread([first_s]), "stall, s": spread(stalls), "memcpy, s": spread(copies)}


def save(model: torch.nn.Module, planner: Planner, stager: Stager, step: int) -> None:
    """What the training thread does for a save."""
    tree = collect_state(model=model)
    planner.plan_for(tree)
    staged = stager.stage(tree, CheckpointId(step, 1), rank_state=capture_rng())
    assert staged is not None
    stager.release(staged.slot_path)


def timed(action: Callable[[], object]) -> float:
    started = time.thread_time()
    action()
    return time.thread_time() - started


if __name__ == "__main__":
    main()

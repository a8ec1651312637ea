"""A global batch with fewer samples than ranks trains like any other: padding samples count nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from padding_world import WORLD, run, train


def test_three_ranks_and_one_leftover_sample_train_to_the_weights_of_a_single_process(tmp_path: Path) -> None:
    spawn(run, args=(str(tmp_path),), nprocs=WORLD)
    alone, sizes = train(0, 1)
    assert sizes == [6, 6, 1]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(WORLD)]
    assert sorted(sizes[-1] for _, sizes in ranks) == [0, 0, 1]
    for weights, _ in ranks:
        for mine, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)

"""D4: no rank waits for another at the end of an epoch, and nobody hangs if one is gone."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fault.uneven_rank import run

WORLD = 3
ROWS = [17, 0, 1, 23, 40, 2]  # uneven data shards, and batches of 8 that three ranks cannot share evenly
BOUND_S = 20.0  # a peer's death closes its connections: it takes milliseconds, but for a machine that is busy
SERVER = mp.get_context("forkserver")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i, n in enumerate(ROWS):
        pq.write_table(pa.table({"x": np.arange(n)}), folder / f"{i}.parquet")
    return folder


def start(tmp_path: Path, data: Path, *, slow: int, dies: int | None) -> tuple[list[Any], list[Connection]]:
    """The processes, and where each one's last words arrive."""
    ranks, ears = [], []
    for rank in range(WORLD):
        ear, mouth = SERVER.Pipe(duplex=False)
        dies_after = 5 if rank == dies else None
        slow_s = 0.03 if rank == slow else 0.0
        arguments = (rank, WORLD, str(tmp_path), str(data), slow_s, dies_after, mouth)
        ranks.append(SERVER.Process(target=run, args=arguments, daemon=True))
        ranks[-1].start()
        mouth.close()
        ears.append(ear)
    return ranks, ears


def test_a_slow_rank_and_uneven_shards_end_the_epochs_together(tmp_path: Path, data: Path) -> None:
    ranks, ears = start(tmp_path, data, slow=1, dies=None)
    words = [ear.recv() for ear in ears]  # bounded by the test's timeout
    assert [kind for kind, _ in words] == ["done"] * WORLD
    seen = [batches for _, batches in words]
    assert len({len(batches) for batches in seen}) == 1, "a rank with fewer batches would leave the others waiting"
    for parts in zip(*seen, strict=True):
        assert len({index for index, _, _ in parts}) == 1
        assert sum(weight for _, weight, _ in parts) == pytest.approx(WORLD)
    ids = [sample for batches in seen for _, _, samples in batches for sample in samples]
    assert sorted(ids) == sorted([*range(sum(ROWS))] * 2)
    for process in ranks:
        process.join()


def test_the_death_of_a_rank_is_known_to_all_others_within_a_bound(tmp_path: Path, data: Path) -> None:
    ranks, ears = start(tmp_path, data, slow=0, dies=2)
    _, died_at_step, died_mono_s = ears[2].recv()
    for ear in ears[:2]:
        kind, step, mono_s = ear.recv()
        assert kind == "lost"
        assert step <= died_at_step + 1, "a survivor cannot get further than the next agreement"
        assert mono_s - died_mono_s < BOUND_S
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks[:2]] == [0, 0]

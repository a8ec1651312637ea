"""Containers often have 64 MB of /dev/shm: slots that do not fit there are files on NVMe, said once, and saves work."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

import ray_goodput as rg
from ray_goodput.checkpoint.plan import SavePlan
from ray_goodput.checkpoint.rank_stager import RankStager
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from thread_ranks import ThreadRanks, in_ranks


@pytest.fixture
def small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real tmpfs of 64 MB in the place of /dev/shm; skipped where it cannot be mounted."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a tmpfs needs root")
    monkeypatch.setattr("ray_goodput.actors.names.SHARED_MEMORY", folder)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def save(tmp_path: Path, model: nn.Module, step: int) -> list[Path]:
    """Save `model` as `step`; the slots there were."""
    node = tmp_path / "node"
    with rg.Checkpointer(tmp_path / "run", config=rg.CheckpointConfig(every=1000), local_dir=node) as saves:
        assert saves.restore(model=model) == step - 1
        assert saves.save(step) and saves.wait()
        return [*node.rglob("*.slot"), *(tmp_path / "shm").rglob("*.slot")]


def test_slots_too_large_for_shared_memory_are_files_on_nvme_and_it_is_said_once(
    small_shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(1024, 10_000)  # 39 MiB: one slot would fit, two do not
    with caplog.at_level(logging.WARNING, logger="ray_goodput"):
        for step in (1, 2):
            slots = save(tmp_path, model, step)
            assert slots and all(path.is_relative_to(tmp_path / "node") for path in slots)
            said = [r.getMessage() for r in caplog.records if "Staging slots need 80 MiB" in r.getMessage()]
            assert len(said) == step and f"{small_shm}/ray_goodput" in said[0] and "64 MiB free" in said[0]
    again = nn.Linear(1024, 10_000)
    with rg.Checkpointer(tmp_path / "run", local_dir=tmp_path / "elsewhere") as saves:
        assert saves.restore(model=again) == 2
    assert torch.equal(again.weight, model.weight)


def test_slots_that_fit_stay_in_shared_memory(
    small_shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slots = save(tmp_path, nn.Linear(1024, 5_000), 1)
    assert slots and all(path.is_relative_to(small_shm) for path in slots)
    assert "Staging slots" not in caplog.text


def test_no_rank_takes_room_before_all_have_looked_how_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Event()
    really_open = Stager.open

    def noted(self: Stager) -> None:
        opened.set()
        really_open(self)

    monkeypatch.setattr(Stager, "open", noted)

    def rank(ranks: ThreadRanks) -> bool:
        taken = False

        def look(plan: SavePlan) -> Path:
            nonlocal taken
            taken = ranks.world_rank == 1 and opened.wait(0.3)  # rank 0 has time to run ahead
            return tmp_path

        stager = RankStager(ranks, look)
        stager.prepare(collect_state(model=nn.Linear(3, 3)))
        stager.close()
        return taken

    assert in_ranks(2, rank) == [False, False]

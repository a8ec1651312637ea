"""Laws of the sample log under a storage that fails: nothing noted is lost, and no rank leaves for it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ray_goodput.errors import StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from ray_goodput.train.sample_log import SampleLog, surviving_steps


def test_what_the_storage_refused_is_written_with_the_next_save_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = True

    def strike(op: str, key: str, n: int) -> None:
        if away and op == "put":
            raise StorageError("503 Slow down")

    store = FaultyStore(LocalStore(tmp_path), strike)
    log = SampleLog(store, attempt=2, world_rank=0)
    with caplog.at_level(logging.WARNING):
        log.begin(0)
        for step in (1, 2, 3):
            log.note(step, "train", [10 * step, 10 * step + 1])
            log.flush()
    assert len(caplog.records) == 1 and "503" in caplog.text
    assert list(store.list("samples")) == []
    away = False
    log.note(4, "train", [40])
    log.flush()
    assert json.loads(store.get("samples/attempt-0002/resume.json")) == {"step": 0}
    steps = surviving_steps(store, "train", last_step=4)
    assert steps == {1: (10, 11), 2: (20, 21), 3: (30, 31), 4: (40,)}
    puts = store.count("put")
    log.flush()
    assert store.count("put") == puts

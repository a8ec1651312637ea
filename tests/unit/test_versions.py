"""A driver and a worker of different versions: one sentence, before the worker reads what the other one packed."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import ray_goodput
from ray_goodput.actors.spec import RunSpec
from ray_goodput.config import CheckpointConfig, StoreSpec
from ray_goodput.errors import ConfigError
from ray_goodput.train import entry
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.trainer import _in_session


def test_a_worker_of_another_version_says_so_before_it_reads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "ray_compat", SimpleNamespace(node_ip=lambda: "10.0.0.7"))
    with pytest.raises(ConfigError) as raised:
        entry.run_packed("0.0.7", b"no pickle at all", lambda: None)
    message = str(raised.value)
    assert "\n" not in message
    assert all(part in message for part in ("0.0.7", ray_goodput.__version__, "10.0.0.7", "every node"))


def test_the_spec_travels_packed_with_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(entry, "run_in_session", lambda spec, loop: entered.append((spec, loop())))
    spec = TrainSpec(
        run=RunSpec(run="r", store=StoreSpec(uri=str(tmp_path)), checkpoint=CheckpointConfig(), target_world=1),
        datasets={},
    )
    pickle.loads(cloudpickle.dumps(_in_session(lambda config: config["x"], spec)))({"x": 5})
    pickle.loads(cloudpickle.dumps(_in_session(lambda: 7, spec)))()
    assert entered == [(spec, 5), (spec, 7)]

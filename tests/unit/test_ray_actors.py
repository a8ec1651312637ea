"""What our trainer asks of Ray Train's controller: no actor that nobody needs, and to look after the workers often."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.constants import HEALTH_CHECK_INTERVAL_S_ENV_VAR, get_env_vars_to_propagate
from ray.train.v2._internal.data_integration.interfaces import DatasetShardMetadata

from ray_goodput.train.ray_compat import polling_often
from ray_goodput.train.trainer import GoodputTrainer

MakeTrainer = Callable[..., GoodputTrainer]


@pytest.fixture
def trainer(tmp_path: Path) -> MakeTrainer:
    def make(**datasets: Any) -> GoodputTrainer:
        return GoodputTrainer(
            lambda: None,
            datasets=datasets,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="r", storage_path=str(tmp_path)),
        )

    return make


def test_without_ray_datasets_no_actor_manages_them_and_asking_for_one_says_what_ray_says(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_actor(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an actor was started")

    monkeypatch.setattr(ray, "remote", no_actor)
    [callback] = [c for c in trainer()._create_default_callbacks() if isinstance(c, DatasetsCallback)]
    workers: Any = [SimpleNamespace(), SimpleNamespace()]
    providers = callback.before_init_train_context(workers)["dataset_shard_provider"]
    assert len(providers) == len(workers)
    for provider in providers:
        with pytest.raises(KeyError, match="Dataset shard for 'train' not found"):
            provider.get_dataset_shard(DatasetShardMetadata(dataset_name="train", world_rank=0))
    shut: Any = SimpleNamespace()
    callback.after_worker_group_shutdown(shut)
    callback.after_worker_group_abort(shut)


def test_ray_datasets_are_managed_by_rays_own_callback(trainer: MakeTrainer) -> None:
    given = trainer(train=lambda: None)
    assert DatasetsCallback in {type(callback) for callback in given._create_default_callbacks()}


@pytest.mark.parametrize(("num_workers", "interval_s"), [(1, 0.5), (250, 0.5), (500, 1.0), (1000, 2.0), (9000, 2.0)])
def test_a_controller_polls_its_workers_every_half_second_and_many_of_them_as_seldom_as_rays_own(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, interval_s: float
) -> None:
    monkeypatch.delenv(HEALTH_CHECK_INTERVAL_S_ENV_VAR, raising=False)
    with polling_often(num_workers):
        assert float(get_env_vars_to_propagate()[HEALTH_CHECK_INTERVAL_S_ENV_VAR]) == interval_s
    assert HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ


def test_how_often_the_user_wants_workers_polled_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEALTH_CHECK_INTERVAL_S_ENV_VAR, "7")
    with polling_often(2):
        assert get_env_vars_to_propagate()[HEALTH_CHECK_INTERVAL_S_ENV_VAR] == "7"
    assert os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR] == "7"

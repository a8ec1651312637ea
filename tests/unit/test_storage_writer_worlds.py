from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.multiprocessing.spawn import spawn

import dcp_worlds
import ray_goodput as rg
from servers import JuiceFSGateway


@pytest.mark.timeout(120)
def test_sharded_ranks_save_one_checkpoint_that_any_world_loads(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "node"))
    uri, options = f"{juicefs_gateway.uri}/dcp-worlds/step-1", juicefs_gateway.storage_options
    spawn(dcp_worlds.run, args=(str(tmp_path), uri, options), nprocs=dcp_worlds.WORLD, daemon=True)
    assert sorted(path.name for path in tmp_path.glob("*.passed")) == ["0.passed", "1.passed"]
    assert [path for path in (tmp_path / "node").rglob("*") if path.is_file()] == []

    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load({"model": model.state_dict()}, storage_reader=rg.StorageReader(uri, storage_options=options))
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.state_dict().values(), strict=True))

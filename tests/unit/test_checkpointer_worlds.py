from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

import checkpointer_worlds
import ray_goodput as rg
from servers import JuiceFSGateway


@pytest.mark.timeout(120)
def test_ranks_without_ray_save_one_checkpoint_together_and_any_world_goes_on_from_it(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "one process"))
    uri, options = f"{juicefs_gateway.uri}/checkpointer-worlds", juicefs_gateway.storage_options
    spawn(checkpointer_worlds.run, args=(str(tmp_path), uri, options), nprocs=checkpointer_worlds.WORLD, daemon=True)
    for rank in range(checkpointer_worlds.WORLD):
        told = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert told["at"] == 4
        assert all(torch.equal(a, b) for a, b in zip(told["whole"], told["parts"], strict=True))

    model, _, saves, at = checkpointer_worlds.start(f"{uri}/parts", options)
    assert at == 6
    assert all(torch.equal(a, b) for a, b in zip(told["parts"], model.state_dict().values(), strict=True))
    saves.close()
    newest = rg.latest_complete(f"{uri}/parts", storage_options=options, verify=True)
    assert newest == f"{uri}/parts/checkpoints/step-0000000006-2"

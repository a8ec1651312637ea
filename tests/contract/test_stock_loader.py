"""C4: stock PyTorch reads our checkpoints in a process where this package cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from committing import commit, put_slice
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import CheckpointId

STOCK = """
import importlib.abc, sys, warnings
warnings.simplefilter("ignore")

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray_goodput", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
folder, out = sys.argv[1:]
try:
    import ray_goodput
except ModuleNotFoundError:
    pass
else:
    sys.exit("the package could be imported")

import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

model = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5))
optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
load(state, checkpoint_id=folder)
model.load_state_dict(state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
dcp_to_torch_save(folder, out + ".whole")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
"""


@pytest.mark.timeout(120)
def test_stock_torch_loads_model_and_optimizer_where_the_package_cannot_be_imported(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 9)).sum().backward()
    optimizer.step()
    tree = collect_state(model=model, optimizer=optimizer)
    plan = Planner(world_rank=0, world_size=1).plan_for(tree)
    staged = Stager(plan, tmp_path / "slots").stage(tree, CheckpointId(1, 1), rank_state=capture_rng())
    assert staged is not None
    commit(tmp_path / "folder", [staged], put_slice(tmp_path / "folder", staged))

    arguments = [sys.executable, "-I", "-c", STOCK, str(tmp_path / "folder"), str(tmp_path / "out.pt")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.25
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(found["optimizer"]["state"][index][key], value), (index, key)
    whole = torch.load(tmp_path / "out.pt.whole", weights_only=True)
    assert torch.equal(whole["model"]["0.weight"], model.state_dict()["0.weight"])

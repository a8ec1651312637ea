"""C1: whatever storage call of a save the vault, the coordinator or a worker dies at, what is left is a resume point,
the run goes on, and the next save works. Every point of local storage's vault and coordinator, samples of the rest;
`make crash-points` tries all."""

from pathlib import Path

import pytest

from fault.crash_points import NEVER, all_points, strike
from fault.crash_points_dcp import dcp_points
from fault.crash_points_near import near_points
from fault.crash_points_worker import run_worker, strike_worker
from ray_goodput.config import StoreSpec
from servers import JuiceFSGateway


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["vault", "coordinator"])
def test_killed_before_any_of_its_storage_calls_it_leaves_a_resume_point_and_is_replaced(
    tmp_path: Path, victim: str
) -> None:
    tried = list(all_points(victim, lambda name: StoreSpec(uri=str(tmp_path / "storage" / name)), tmp_path))
    print(f"crash points of the {victim} tried: {len(tried)}")
    assert len(tried) >= {"vault": 5, "coordinator": 10}[victim]


@pytest.mark.timeout(120)
def test_a_worker_that_saves_by_itself_is_killed_at_some_of_its_storage_calls_and_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for life in range(2):
        told = run_worker(StoreSpec(uri=str(whole / "storage")), whole / "node", NEVER, whole / f"{life}.json")
        assert told is not None and told["at"] == life
    resumed = set()
    weights: dict[int, str] = {}
    for call in range(2, told["calls"], 5):
        root = tmp_path / str(call)
        root.mkdir()
        resumed.add(strike_worker(StoreSpec(uri=str(root / "storage")), root, call, weights))
    print(f"resumed from {resumed}, calls of a life: {told['calls']}")
    assert resumed - {None} == {1, 2}


@pytest.mark.timeout(120)
def test_a_vault_that_keeps_copies_is_killed_at_each_call_and_message_and_what_was_staged_is_gone_on_from(
    tmp_path: Path,
) -> None:
    tried = list(near_points(lambda name: StoreSpec(uri=str(tmp_path / "storage" / name)), tmp_path))
    print(f"crash points of the vault with copies tried: {len(tried)}")
    assert len(tried) >= 9, "5 uploads, 2 copies told, 2 slices landed"


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_save_killed_at_any_of_its_storage_calls_leaves_the_old_save_or_the_new_one(tmp_path: Path) -> None:
    tried = list(dcp_points(lambda name: StoreSpec(uri=str(tmp_path / "storage" / name)), tmp_path))
    print(f"crash points of dcp.save tried: {len(tried)}")
    assert len(tried) >= 11, "4 into a new folder, 7 over a checkpoint"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "calls"), [("vault", [1]), ("coordinator", [3, 4, 5])])
def test_killed_at_some_calls_to_s3_it_leaves_a_resume_point_and_is_replaced(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway, victim: str, calls: list[int]
) -> None:
    for call in calls:
        uri = f"{juicefs_gateway.uri}/crash-{victim}-{call}"
        spec = StoreSpec(uri=uri, options=juicefs_gateway.storage_options)
        assert strike(victim, call, spec, tmp_path / str(call))

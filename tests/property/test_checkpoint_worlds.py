"""C3 and C4 over worlds of 1 to 4 ranks: DDP, FSDP2 and HSDP, saved at W and loaded at W', by us and by stock DCP."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

from checkpoint_worlds import LOADS, SAVES, WORLD, run

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("worlds")
    spawn(run, args=(str(root),), nprocs=WORLD)
    return root


def _passed_on_all_ranks(results: Path, case: str, world: int) -> bool:
    failures = [path.read_text() for path in sorted(results.glob(f"{case}.*.failed"))]
    assert not failures, failures[0]
    return len(list(results.glob(f"{case}.*.passed"))) == world


@pytest.mark.parametrize(("kind", "world"), SAVES)
def test_saved_bytes_are_even_over_the_ranks_and_the_plan_is_kept(kind: str, world: int, results: Path) -> None:
    assert _passed_on_all_ranks(results, f"save-{kind}-{world}", world)


@pytest.mark.parametrize(("to", "to_world"), LOADS)
@pytest.mark.parametrize(("kind", "world"), SAVES)
def test_a_checkpoint_loads_bit_identically_at_any_world_size(
    kind: str, world: int, to: str, to_world: int, results: Path
) -> None:
    assert _passed_on_all_ranks(results, f"{kind}-{world}-to-{to}-{to_world}", to_world)


def test_a_rank_with_another_model_is_named_on_every_rank(results: Path) -> None:
    assert _passed_on_all_ranks(results, "mismatch", WORLD)

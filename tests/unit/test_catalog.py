"""Laws of the catalogue: what is offered for a resume, and what retention may delete."""

import pytest

from ray_goodput.core.catalog import Catalog, abandoned_folders
from ray_goodput.core.commit import CheckpointId, CommitRecord


def record(step: int, attempt: int = 1) -> CommitRecord:
    return CommitRecord(
        run="r",
        checkpoint=CheckpointId(step, attempt),
        world_size=1,
        structure_digest="",
        cursors={},
        objects=(),
        committed_at_s=0.0,
    )


def catalog(*steps: int) -> Catalog:
    result = Catalog()
    for step in steps:
        result.add(record(step))
    return result


def test_the_newest_is_the_largest_step_and_of_one_step_the_latest_attempt() -> None:
    c = catalog(10, 30, 20)
    c.add(record(30, attempt=2))
    assert [r.checkpoint for r in c.newest_first()][:2] == [CheckpointId(30, 2), CheckpointId(30, 1)]


def test_a_damaged_checkpoint_is_never_offered_again() -> None:
    c = catalog(10, 20)
    c.mark_bad(CheckpointId(20, 1), "flipped")
    newest = c.newest()
    assert newest is not None and newest.checkpoint.step == 10


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_retention_keeps_the_newest_good_ones(keep_last: int) -> None:
    c = catalog(*range(10, 60, 10))
    gone = {i.step for i in c.prunable(keep_last=keep_last, keep_every=None)}
    assert gone == set(range(10, 60, 10)) - set(sorted(range(10, 60, 10))[-keep_last:])


def test_multiples_of_keep_every_stay_for_ever() -> None:
    gone = [i.step for i in catalog(10, 20, 30, 40, 50).prunable(keep_last=1, keep_every=20)]
    assert gone == [10, 30]


def test_with_the_newest_damaged_the_newest_good_one_stays_and_the_evidence_too() -> None:
    c = catalog(10, 20, 30)
    c.mark_bad(CheckpointId(30, 1), "flipped")
    assert [i.step for i in c.prunable(keep_last=1, keep_every=None)] == [10]


def test_only_fenced_folders_without_a_commit_are_abandoned() -> None:
    folders = [CheckpointId(10, 1), CheckpointId(20, 1), CheckpointId(20, 2), CheckpointId(30, 3)]
    assert abandoned_folders(folders, committed=[CheckpointId(10, 1)], fenced_below_attempt=3) == [
        CheckpointId(20, 1),
        CheckpointId(20, 2),
    ]


@pytest.mark.parametrize(
    "name", ["step-10-1", "step-0000000010", "step-0000000010-x", "COMMIT.json", "", "step-0000000010-1/"]
)
def test_other_names_are_no_checkpoint_folders(name: str) -> None:
    assert CheckpointId.parse(name) is None


def test_a_folder_name_is_read_back() -> None:
    assert CheckpointId.parse(CheckpointId(10**11, 12).folder) == CheckpointId(10**11, 12)

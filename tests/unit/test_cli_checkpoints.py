from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.cli.checkpoint_verify import verify_checkpoints
from ray_goodput.cli.checkpoints import human_age, human_bytes, list_checkpoints, render
from ray_goodput.clock import ManualClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, CommitRecord, ObjectRecord
from ray_goodput.errors import ObjectNotFoundError
from ray_goodput.storage.checksum import xxh3_128_hex

NOW = 1.7e9


def write_checkpoint(root: Path, step: int, attempt: int = 0, *, committed_at_s: float = NOW - 125) -> Path:
    folder = root / "checkpoints" / CheckpointId(step, attempt).folder
    folder.mkdir(parents=True)
    objects = []
    for name in (".metadata", "__0_0.distcp"):
        data = name.encode() * 10
        (folder / name).write_bytes(data)
        objects.append(ObjectRecord(name=name, size_bytes=len(data), xxh3_128=xxh3_128_hex(data)))
    record = CommitRecord(
        run="r",
        checkpoint=CheckpointId(step, attempt),
        world_size=2,
        structure_digest="d",
        cursors={},
        objects=tuple(objects),
        committed_at_s=committed_at_s,
    )
    (folder / COMMIT_NAME).write_bytes(record.to_json(xxh3_128_hex))
    return folder


def listed(root: Path) -> list[tuple[int, int, str]]:
    rows = list_checkpoints(StoreSpec(uri=str(root)), clock=ManualClock(at_s=NOW))
    return [(row.step, row.attempt, row.state) for row in rows]


def test_checkpoints_are_listed_newest_first_with_step_attempt_world_size_and_age(tmp_path: Path) -> None:
    for step, attempt in ((20, 0), (40, 0), (40, 1)):
        write_checkpoint(tmp_path, step, attempt)
    assert listed(tmp_path) == [(40, 1, "complete"), (40, 0, "complete"), (20, 0, "complete")]
    row = list_checkpoints(StoreSpec(uri=str(tmp_path)), clock=ManualClock(at_s=NOW))[0]
    assert (row.world_size, row.age_s, row.reason) == (2, 125.0, "")
    (verified, *_) = verify_checkpoints(StoreSpec(uri=str(tmp_path))).checkpoints
    objects = [path for path in (tmp_path / row.folder).iterdir() if path.name != COMMIT_NAME]
    assert row.size_bytes == verified.size_bytes == sum(path.stat().st_size for path in objects)
    assert "2 min" in render([row])


def test_the_folder_of_the_checkpoints_may_be_given_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20)
    assert listed(tmp_path / "checkpoints") == listed(tmp_path) == [(20, 0, "complete")]


def test_a_folder_without_a_record_is_incomplete(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 20) / COMMIT_NAME).unlink()
    assert listed(tmp_path) == [(20, 0, "incomplete")]


@pytest.mark.parametrize("damage", ["record", "missing", "short"])
def test_a_record_that_lies_or_cannot_be_read_is_damage_with_a_reason(tmp_path: Path, damage: str) -> None:
    folder = write_checkpoint(tmp_path, 20)
    if damage == "record":
        data = (folder / COMMIT_NAME).read_bytes()
        (folder / COMMIT_NAME).write_bytes(data.replace(b'"world_size": 2', b'"world_size": 3'))
    elif damage == "missing":
        (folder / "__0_0.distcp").unlink()
    else:
        (folder / "__0_0.distcp").write_bytes(b"half")
    (row,) = list_checkpoints(StoreSpec(uri=str(tmp_path)))
    assert row.state == "corrupt"
    assert (COMMIT_NAME if damage == "record" else "__0_0.distcp") in row.reason


def test_other_folders_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20)
    (tmp_path / "checkpoints" / "step-30").mkdir()
    (tmp_path / "samples").mkdir()
    assert listed(tmp_path) == [(20, 0, "complete")]


def test_folders_that_a_user_named_are_listed_by_name_the_last_one_committed_first(tmp_path: Path) -> None:
    for step, name in ((1, "epoch-1"), (2, "best [so far]")):
        write_checkpoint(tmp_path / "old", step, committed_at_s=NOW - 100 / step).rename(tmp_path / name)
    (tmp_path / "best [so far]" / "__0_0.distcp").unlink()
    (tmp_path / "half written").mkdir()
    rows = list_checkpoints(StoreSpec(uri=str(tmp_path)), clock=ManualClock(at_s=NOW))
    assert [(row.folder, row.step, row.state) for row in rows] == [
        ("best [so far]", 2, "corrupt"),
        ("epoch-1", 1, "complete"),
    ]
    assert "epoch-1" in render(rows) and "best [so far]" in render(rows)


def test_a_place_without_checkpoints_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="STORAGE_PATH/RUN"):
        list_checkpoints(StoreSpec(uri=str(tmp_path / "nowhere")))


def test_json_is_one_object_with_the_promised_keys(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20)
    result = CliRunner().invoke(app, ["checkpoints", "ls", str(tmp_path), "--json"])
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert set(body) == {"uri", "checkpoints"}
    assert set(body["checkpoints"][0]) == {
        "step", "attempt", "world_size", "size_bytes", "age_s", "state", "reason", "folder",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_printed_in_the_largest_unit_below_them(size: int, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(("age", "text"), [(0.4, "0 s"), (59.9, "59 s"), (125, "2 min"), (7200, "2 h"), (2e5, "2 d")])
def test_ages_are_rounded_down_to_a_whole_unit(age: float, text: str) -> None:
    assert human_age(age) == text

from __future__ import annotations

import json
import pickle

import pytest

from ray_goodput.core.cursor import DataCursor, check
from ray_goodput.core.order import SampleOrder
from ray_goodput.errors import DatasetMismatchError


def cursor(samples: int = 0, manifest: str = "a" * 32, **order: int) -> DataCursor:
    return DataCursor(samples, manifest, SampleOrder([9], **{"seed": 0, "lanes": 4, "window": 8, **order}).digest)


def test_a_cursor_survives_json_and_pickle_and_is_small() -> None:
    saved = cursor(2**63, seed=2**64 - 1)
    text = json.dumps(saved.to_dict())
    assert len(text) < 1024
    assert DataCursor.from_dict(json.loads(text)) == saved == pickle.loads(pickle.dumps(saved))


def test_advancing_counts_samples() -> None:
    assert cursor(5).advance(7) == cursor(5).moved_to(12) == cursor(12)
    with pytest.raises(ValueError, match="before the first"):
        cursor(5).advance(-6)


def test_an_equal_data_set_and_order_pass() -> None:
    assert check(cursor(100), cursor(0)) is None


def test_other_data_is_named_as_such() -> None:
    with pytest.raises(
        DatasetMismatchError, match=r"sample 7 of other data.*aaaaaaaaaaaa, now bbbbbbbbbbbb.*new run name"
    ):
        check(cursor(7), cursor(manifest="b" * 32))


def test_only_what_differs_in_the_order_is_named() -> None:
    with pytest.raises(DatasetMismatchError, match="lanes was 4 and is 8") as caught:
        check(cursor(7), cursor(lanes=8))
    assert "seed was" not in str(caught.value)
    with pytest.raises(DatasetMismatchError, match=r"seed was 0 and is 1, lanes was 4 and is 2, window was 8 and is 9"):
        check(cursor(7), cursor(seed=1, lanes=2, window=9))


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"format": "x"}, {"samples_consumed": -1}, {"samples_consumed": "5"}, {"samples_consumed": True}],
)
def test_a_damaged_or_newer_cursor_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(DatasetMismatchError):
        DataCursor.from_dict({**cursor().to_dict(), **change})


@pytest.mark.parametrize("name", ["samples_consumed", "manifest_digest", "order_digest"])
def test_a_cursor_with_a_missing_field_is_refused(name: str) -> None:
    data = cursor().to_dict()
    del data[name]
    with pytest.raises(DatasetMismatchError, match="damaged"):
        DataCursor.from_dict(data)

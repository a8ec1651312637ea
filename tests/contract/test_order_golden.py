"""Order version 1, mixture version 1 and cursor version 1 are formats: these vectors may be added to, never changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ray_goodput.core.cursor import DataCursor
from ray_goodput.core.mixture import MixtureOrder, block_counts
from ray_goodput.core.order import SampleOrder, StreamOrder

MIXTURES = json.loads((Path(__file__).parent / "golden" / "mixture_v1.json").read_text())
GOLDEN = json.loads((Path(__file__).parent / "golden" / "order_v1.json").read_text())


def fingerprint(order: StreamOrder, start: int, stop: int) -> str:
    ids = order.sample_ids(*order.locate(np.arange(start, stop, dtype=np.int64)))
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("case", GOLDEN["orders"], ids=lambda case: case["name"])
def test_order_version_1_never_changes(case: dict) -> None:
    order = SampleOrder(case["shard_rows"], seed=case["seed"], lanes=case["lanes"], window=case["window"])
    head = order.sample_ids(*order.locate(np.arange(case["start"], case["start"] + len(case["sample_ids"]))))
    assert order.digest == case["digest"]
    assert head.tolist() == case["sample_ids"]
    assert fingerprint(order, case["start"], case["start"] + case["count"]) == case["sha256"]


def test_cursor_version_1_never_changes() -> None:
    text = (Path(__file__).parent / "golden" / "cursor_v1.json").read_text()
    cursor = DataCursor(123456, "0123456789abcdef0123456789abcdef", "version=1 seed=7 lanes=64 window=8")
    assert DataCursor.from_dict(json.loads(text)) == cursor
    assert json.dumps(cursor.to_dict(), indent=1) + "\n" == text


@pytest.mark.parametrize("case", MIXTURES["orders"], ids=lambda case: case["name"])
def test_mixture_version_1_never_changes(case: dict) -> None:
    members = {
        name: SampleOrder(rows, seed=case["member_seeds"][name], lanes=case["lanes"], window=case["window"])
        for name, rows in case["shard_rows"].items()
    }
    counts = block_counts(case["weights"])
    order = MixtureOrder(members, counts, seed=case["seed"])
    head = order.sample_ids(*order.locate(np.arange(case["start"], case["start"] + len(case["sample_ids"]))))
    assert list(counts) == case["counts"]
    assert order.digest == case["digest"]
    assert head.tolist() == case["sample_ids"]
    assert fingerprint(order, case["start"], case["start"] + case["count"]) == case["sha256"]

"""Random streams go on exactly, start afresh differently for each rank and step, and damage is told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ray_goodput.checkpoint.rng import capture_rng, derive_rng, restore_rng
from ray_goodput.errors import CorruptCheckpointError


@pytest.fixture(autouse=True)
def _leave_the_streams_alone() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def _draw() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), *torch.randn(3).tolist()]
    return [*numbers, *torch.rand(20).tolist()]


def test_every_stream_goes_on_where_it_was_captured_also_between_two_gaussians() -> None:
    derive_rng(1, 2, 3)
    _draw()
    state = capture_rng()
    expected = [_draw(), _draw()]
    derive_rng(9, 9, 9)
    restore_rng(state)
    assert [_draw(), _draw()] == expected
    assert json.loads(state)["version"] == 1


def test_derived_streams_depend_on_seed_step_and_rank_only() -> None:
    def drawn(*key: int) -> tuple[float, ...]:
        derive_rng(*key)
        return tuple(_draw())

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**63, 10**9, 10**5)]
    streams = [drawn(*key) for key in keys]
    assert len(set(streams)) == len(keys)
    assert [drawn(*key) for key in keys] == streams


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"format": "other"}', "numpy", "torch", "python", "version"])
def test_a_damaged_state_is_refused_and_touches_nothing(damage: str) -> None:
    good = capture_rng()
    body = json.loads(good)
    broken = {"numpy": {"key": "AAAA"}, "torch": "AAAA", "python": [3, [1, 2], None], "version": 99}
    data = json.dumps(body | {damage: broken[damage]}).encode() if damage in broken else damage.encode()
    with pytest.raises(CorruptCheckpointError, match="random number state"):
        restore_rng(data)
    assert capture_rng() == good

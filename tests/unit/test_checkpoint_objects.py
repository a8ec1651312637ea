"""Object leaves come back equal without running code; what could not come back is refused when saved."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_goodput.checkpoint.metadata_file import read_metadata
from ray_goodput.checkpoint.objects import ObjectSerializer, load_object
from ray_goodput.errors import CheckpointError, CorruptCheckpointError

PLAIN: list[Any] = [
    None, True, 1, 1.5, float("inf"), "text", b"raw", (0.9, 0.999), [1, [2, (3,)]], {"a": {1: 2}}, {}, [],
    Counter({2: 1}), OrderedDict(a=1), {1, 2}, 2**80, 1 + 2j,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_equal_with_their_type(value: Any) -> None:
    loaded = load_object("x", ObjectSerializer().dump("x", value))
    assert loaded == value
    assert type(loaded) is type(value)


def test_numpy_numbers_become_python_numbers() -> None:
    loaded = load_object("x", ObjectSerializer().dump("x", {"best": np.float64(0.1), "n": [np.int32(3)]}))
    assert loaded == {"best": 0.1, "n": [3]}
    assert type(loaded["best"]) is float and type(loaded["n"][0]) is int


def test_an_unchanged_leaf_is_not_serialised_again_but_a_changed_one_is() -> None:
    serializer = ObjectSerializer()
    value = {"lr": 0.1}
    first = serializer.dump("x", value)
    assert serializer.dump("x", {"lr": 0.1}) is first
    value["lr"] = 0.2
    assert load_object("x", serializer.dump("x", value)) == {"lr": 0.2}
    assert load_object("x", serializer.dump("x", {"lr": True})) == {"lr": True}


@pytest.mark.parametrize("value", [lambda: None, Path("x"), np.zeros(3)], ids=["function", "class", "array"])
def test_what_cannot_be_loaded_safely_is_refused_by_name_when_saved(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\.hook .* cannot be saved"):
        ObjectSerializer().dump("scheduler.hook", value)


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the checkpoint was run",))


@pytest.mark.parametrize("data", [pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"\x80\x04garbage", b"K\x01."])
def test_metadata_that_is_foreign_or_damaged_is_refused_without_running_it(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        read_metadata(data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_prefix_of_real_metadata_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.ones(2, 3), "b": {"c": 1}}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert set(read_metadata(data).state_dict_metadata) == {"a", "b.c"}
    for end in range(0, len(data) - 1, 7):
        with pytest.raises(CorruptCheckpointError):
            read_metadata(data[:end])


def test_an_object_that_names_code_is_refused_without_running_it(tmp_path: Path) -> None:
    torch.save(Evil(), tmp_path / "evil")
    with pytest.raises(CorruptCheckpointError, match="'x'"):
        load_object("x", (tmp_path / "evil").read_bytes())

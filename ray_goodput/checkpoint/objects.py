"""Object leaves: everything in the state that is not a tensor, as the bytes `torch.save` writes.

They are read back with `weights_only=True`, so what that refuses is refused when saved, not when the run must resume.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from ray_goodput.errors import CheckpointError, CorruptCheckpointError


class ObjectSerializer:
    """Serialises object leaves; a leaf made of plain values that did not change is not serialised again.

    Not thread-safe: used by the training thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes]] = {}

    def dump(self, name: str, value: Any) -> bytes:
        """Bytes of `torch.save(value)`. numpy numbers become Python's.

        Raises:
            CheckpointError: `torch.load(weights_only=True)` would refuse them.
        """
        value = _without_numpy_numbers(value)
        if not _is_plain(value):
            return _dump_checked(name, value)
        key = pickle.dumps(value)
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = key, _dump(value)
        return kept[1]


def load_object(name: str, data: bytes | memoryview) -> Any:
    """The value of an object leaf; no code from the checkpoint runs.

    Raises:
        CorruptCheckpointError: the bytes are not a leaf, or hold something other than plain values and tensors.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, AttributeError, OSError) as error:
        raise CorruptCheckpointError(f"The object {name!r} of the checkpoint cannot be read ({error}).") from error


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _dump_checked(name: str, value: Any) -> bytes:
    way_out = "Let state_dict() return numbers, strings, lists, dictionaries and tensors."
    try:
        data = _dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} ({type(value).__name__}) cannot be saved: {error}. {way_out}") from error
    try:
        load_object(name, data)
    except CorruptCheckpointError as error:
        raise CheckpointError(
            f"{name} ({type(value).__name__}) cannot be saved: it could not be loaded again without running code from "
            f"the checkpoint. {way_out}"
        ) from error
    return data


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes, complex)


def _without_numpy_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_without_numpy_numbers(item) for item in value)
    if type(value) is dict:
        return {_without_numpy_numbers(key): _without_numpy_numbers(item) for key, item in value.items()}
    return value

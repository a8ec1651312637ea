from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_goodput.data.columns import ShardColumns, dense_values
from ray_goodput.errors import ShardReadError


def columns(**arrays: pa.Array | pa.ChunkedArray) -> ShardColumns:
    return ShardColumns(pa.table(arrays), None, title="Data shard 4")


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
def test_numbers_are_dense_without_a_copy(dtype: str) -> None:
    array = pa.array(np.arange(5, dtype=dtype))
    values = columns(x=array).dense["x"]
    assert values.dtype == dtype
    assert values.ctypes.data == array.buffers()[1].address


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([True, False, True]), [True, False, True]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.large_list(pa.int32())), [[1, 2], [3, 4]]),
        (pa.array([[], []], pa.list_(pa.int32())), [[], []]),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.int8(), 1), 2)), [[[1], [2]], [[3], [4]]]),
        (pa.array([[[1], [2]], [[3], [4]]]), [[[1], [2]], [[3], [4]]]),
    ],
    ids=str,
)
def test_lists_of_equal_length_are_dense(array: pa.Array, expected: list[Any]) -> None:
    assert dense_values(array).tolist() == expected  # pyright: ignore[reportOptionalMemberAccess] (None fails the test)
    padded = pa.concat_arrays([array, array, array])
    sliced = padded.slice(len(array), len(array))
    assert dense_values(sliced).tolist() == expected  # pyright: ignore[reportOptionalMemberAccess] (None fails the test)


def test_fixed_shape_tensors_are_dense() -> None:
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    assert (columns(x=array).dense["x"] == images).all()
    assert (columns(x=array.slice(1)).dense["x"] == images[1:]).all()


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", "b", None, "d"]),
        pa.array([b"a", b"b", b"", b"d"]),
        pa.array([[1, 2], [], [3], [4]]),
        pa.array([["a"], ["b", "c"], None, []]),
        pa.array([[1], None, [2], [3]]),
        pa.array([{"a": 1}, {"a": 2}, None, {"a": 3}]),
        pa.array(["a", "b", "a", "c"]).dictionary_encode(),
        pa.array([[[1, 2]], [[3], []], [], [[4]]]),
        pa.nulls(4),
    ],
    ids=lambda array: str(array.type),
)
def test_all_else_is_taken_as_a_list_in_the_order_asked_for(array: pa.Array) -> None:
    made = columns(x=pa.chunked_array([array.slice(0, 1), array.slice(1)]))
    taken = made.take_list("x", np.array([3, 0, 2, 0, 1]))
    plain = [value.tolist() if isinstance(value, np.ndarray) else value for value in taken]
    assert plain == [array[i].as_py() for i in (3, 0, 2, 0, 1)]


def test_ragged_numbers_come_as_arrays() -> None:
    taken = columns(x=pa.array([[1, 2], [3]], pa.list_(pa.int16()))).take_list("x", np.array([1, 0]))
    assert [(v.dtype.name, v.tolist()) for v in taken] == [("int16", [3]), ("int16", [1, 2])]


def test_a_missing_float_is_nan() -> None:
    values = columns(x=pa.array([1.0, None], pa.float32())).dense["x"]
    assert values.dtype == np.float32
    assert np.isnan(values).tolist() == [False, True]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array([True, None]),
        pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
        pa.array([[1, 2], [3, None]], pa.list_(pa.int32(), 2)),
        pa.array([[1, 2], [3, None]]),
    ],
    ids=str,
)
def test_a_missing_integer_is_an_error_that_names_the_column(array: pa.Array) -> None:
    with pytest.raises(ShardReadError, match=r"Column 'x' of data shard 4 has 1 rows without a"):
        columns(x=array)


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(ShardReadError, match="no column 'y'; it has x"):
        ShardColumns(pa.table({"x": [1]}), ["y"], title="Data shard 0")

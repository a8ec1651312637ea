"""The image is what torch.save writes, for every dtype and odd shape."""

from __future__ import annotations

import io
import math

import pytest
import torch

from ray_goodput.checkpoint.image import ALIGNMENT, ImageLayout, envelope_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool, torch.complex32, torch.complex64,
    torch.complex128, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
]  # fmt: skip
SHAPES = [(), (3, 5), (0,), (4, 0, 2), (1, 1, 7)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_record_is_as_long_as_torch_writes_it_and_loads_as_the_tensor_put_in(dtype: torch.dtype) -> None:
    layout = ImageLayout.build((shape, dtype) for shape in SHAPES)
    image = bytearray(layout.size_bytes)
    layout.write_envelopes(memoryview(image))
    for record, view in zip(layout.records, layout.views(memoryview(image)), strict=True):
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (record.size_bytes,), dtype=torch.uint8)
        tensor = raw.view(dtype).view(record.shape) if record.size_bytes else torch.empty(record.shape, dtype=dtype)
        view.copy_(tensor)
        data = bytes(image[record.offset : record.offset + record.length])
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape, loaded.is_contiguous()) == (dtype, tensor.shape, True)
        assert not record.size_bytes or torch.equal(loaded.reshape(-1).view(torch.uint8), raw)
        stock = io.BytesIO()
        torch.save(tensor, stock)
        assert len(stock.getvalue()) == record.length


def test_records_and_their_data_are_aligned_and_do_not_overlap() -> None:
    layout = ImageLayout.build(
        [((3,), torch.bool), ((1000, 7), torch.bfloat16), ((), torch.int64), ((2,), torch.float64)]
    )
    end = 0
    for record in layout.records:
        assert record.offset % ALIGNMENT == 0 and record.offset >= end
        assert record.data_offset % ALIGNMENT == 0
        assert record.size_bytes == math.prod(record.shape) * record.dtype.itemsize
        end = record.offset + record.length
    assert end == layout.size_bytes


def test_the_envelope_of_a_tensor_larger_than_memory_costs_nothing() -> None:
    envelope = envelope_of((1 << 30, 1 << 10), torch.float32)
    assert envelope.size_bytes == 1 << 42
    assert len(envelope.head) + len(envelope.tail) < 4096

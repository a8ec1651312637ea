"""The two data sets of the data benchmark, in the form that each arm reads. Nothing is timed here.

`jpeg`: photos of about 55 KB with a label. `tokens`: rows of 2,048 int32. Shards have 4 MB in every form.
Run as `python data_forms.py KIND FORM FOLDER ROWS`, by the interpreter that has the form's library.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("jpeg", "tokens")
SHARD_ROWS = {"jpeg": 64, "tokens": 512}
LENGTH = 2048
_MOTIFS = 200
_CLASSES = 10
_HEIGHT, _WIDTH = 288, 384


def photos(rows: int) -> Iterator[bytes]:
    """JPEG files, none like another: 200 motifs, each copy with bytes of its own after the end of the picture."""
    from PIL import Image

    rng = np.random.default_rng(0)
    motifs = []
    for _ in range(min(rows, _MOTIFS)):
        small = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(small).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + rng.normal(0, 24, smooth.shape), 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(noisy).save(out, "JPEG", quality=87)
        motifs.append(out.getvalue())
    for i in range(rows):
        yield motifs[i % len(motifs)] + i.to_bytes(8, "little")


def token_rows(rows: int) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
    """Blocks of `SHARD_ROWS` rows."""
    rng = np.random.default_rng(1)
    for start in range(0, rows, SHARD_ROWS["tokens"]):
        yield rng.integers(0, 50_000, (min(SHARD_ROWS["tokens"], rows - start), LENGTH), dtype=np.int32)


def samples(kind: str, rows: int) -> Iterator[dict[str, Any]]:
    """Row by row, for writers that want them so."""
    if kind == "jpeg":
        for i, data in enumerate(photos(rows)):
            yield {"jpg": data, "cls": i % _CLASSES}
    else:
        for block in token_rows(rows):
            for row in block:
                yield {"tokens": row}


def make(kind: str, form: str, folder: Path, rows: int) -> None:
    """`folder` holds the data set in that form."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _FORMS[form](kind, folder, rows)


def _raw(kind: str, folder: Path, rows: int) -> None:
    """Files as they come: a photo each, or .npy of many rows."""
    if kind == "jpeg":
        for name in range(_CLASSES):
            (folder / str(name)).mkdir()
        for i, data in enumerate(photos(rows)):
            (folder / str(i % _CLASSES) / f"{i:06d}.jpg").write_bytes(data)
    else:
        for i, block in enumerate(token_rows(rows)):
            np.save(folder / f"{i:05d}.npy", block)


def _tar(kind: str, folder: Path, rows: int) -> None:
    coming = enumerate(samples(kind, rows))
    for start in range(0, rows, SHARD_ROWS[kind]):
        with tarfile.open(folder / f"{start // SHARD_ROWS[kind]:05d}.tar", "w") as shard:
            for i, sample in islice(coming, SHARD_ROWS[kind]):
                for ending, data in _members(kind, sample).items():
                    entry = tarfile.TarInfo(f"{i:06d}.{ending}")
                    entry.size = len(data)
                    shard.addfile(entry, io.BytesIO(data))


def _members(kind: str, sample: dict[str, Any]) -> dict[str, bytes]:
    if kind == "jpeg":
        return {"jpg": sample["jpg"], "cls": str(sample["cls"]).encode()}
    return {"bin": sample["tokens"].tobytes()}


def _tables(kind: str, rows: int) -> Iterator[pa.Table]:
    if kind == "tokens":
        for block in token_rows(rows):
            yield pa.table({"tokens": pa.FixedSizeListArray.from_arrays(block.reshape(-1), LENGTH)})
        return
    batch: list[dict[str, Any]] = []
    for sample in samples(kind, rows):
        batch.append(sample)
        if len(batch) == SHARD_ROWS[kind]:
            yield pa.Table.from_pylist(batch)
            batch = []
    if batch:
        yield pa.Table.from_pylist(batch)


def _parquet(kind: str, folder: Path, rows: int) -> None:
    for i, table in enumerate(_tables(kind, rows)):
        pq.write_table(table, folder / f"{i:05d}.parquet", compression="none", use_dictionary=False)


def _arrow(kind: str, folder: Path, rows: int) -> None:
    """One file, for the upper bound."""
    tables = _tables(kind, rows)
    first = next(tables)
    with pa.ipc.new_file(str(folder / "all.arrow"), first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _mds(kind: str, folder: Path, rows: int) -> None:
    from data_peers import import_peer

    columns = {"jpg": "bytes", "cls": "int"} if kind == "jpeg" else {"tokens": f"ndarray:int32:{LENGTH}"}
    writer = import_peer("streaming").MDSWriter
    with writer(out=str(folder), columns=columns, size_limit=4 << 20) as out:
        for sample in samples(kind, rows):
            out.write(sample)


def _litdata(kind: str, folder: Path, rows: int) -> None:
    loader = import_module("litdata.streaming.item_loader").TokensLoader() if kind == "tokens" else None
    torch = import_module("torch")
    writer = import_module("litdata.streaming.writer").BinaryWriter(
        cache_dir=str(folder), chunk_bytes=4 << 20, item_loader=loader
    )
    for i, sample in enumerate(samples(kind, rows)):
        writer[i] = torch.from_numpy(sample["tokens"].copy()) if kind == "tokens" else sample
    writer.done()
    writer.merge(1)


_FORMS = {
    "raw": _raw,
    "tar": _tar,
    "parquet": _parquet,
    "arrow": _arrow,
    "mds": _mds,
    "litdata": _litdata,
}

if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps({"made": sys.argv[3]}))

"""The arms of the data benchmark: each opens a data set and yields, epoch after epoch, how many samples a batch had.

Every arm does the same work: the samples in a shuffled order, photos decoded to 224 x 224, tensors at the end. All have
two workers (threads or processes, as is theirs), and what they shuffle within is of like size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from data_forms import LENGTH, SHARD_ROWS
from data_peers import import_peer

BATCH = {"jpeg": 64, "tokens": 128}
WORKERS = 2
_LANES, _WINDOW = 2, 4
_BUCKET = "vol"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a data set lies and what an arm may use. folder: of the arm's form, on this disk (for the bound) or
    mounted; prefix: of the arm's form in the bucket."""

    kind: str
    rows: int
    prefix: str
    options: dict[str, Any]
    cache: Path
    folder: Path

    @property
    def batch(self) -> int:
        return BATCH[self.kind]

    @property
    def uri(self) -> str:
        return f"s3://{_BUCKET}/{self.prefix}"


Epochs = Callable[[int], Iterator[int]]
"""epoch -> sizes of its batches."""


def decode(data: Any) -> np.ndarray[Any, Any]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))


def _decoded(sample: Any, *_: Any) -> dict[str, Any]:
    return {"image": decode(sample["jpg"]), "label": int(sample["cls"])}


def _sizes(loader: Any) -> Iterator[int]:
    for batch in loader:
        yield len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def ours(place: Place) -> Epochs:
    rg = import_module("ray_goodput")
    tokens = place.kind == "tokens"
    data = rg.ShardedDataset(
        f"{place.uri}/*.{'npy' if tokens else 'tar'}",
        global_batch_size=place.batch,
        lanes=_LANES,
        window=_WINDOW,
        storage_options=place.options,
        format=rg.TokenFormat(length=LENGTH) if tokens else "webdataset",
        columns=None if tokens else ["jpg", "cls"],
        transform=None if tokens else _decoded,
        workers=0 if tokens else WORKERS,
    )
    manifest = data.manifest()  # once a run, not once a process
    opened: list[Any] = []

    def epoch(_: int) -> Iterator[int]:
        if not opened:
            opened.append(iter(data.loader(epochs=None, cache_dir=place.cache, manifest=manifest)))
        for batch in opened[0]:
            yield batch.num_samples
            if batch.samples_end % place.rows < place.batch:
                return

    return epoch


def ours_files(place: Place) -> Epochs:
    rg = import_module("ray_goodput")
    files = rg.FileDataset(place.uri, read=_read_photo, storage_options=place.options, cache_dir=place.cache)
    loader = rg.DataLoader(files, batch_size=place.batch, num_workers=WORKERS)
    return lambda _: _sizes(loader)


def _read_photo(file: Any, rng: Any) -> dict[str, Any]:
    return {"image": decode(file.data), "label": int(file.path.split("/")[0])}


class Photos(torch.utils.data.Dataset[Any]):
    """Map-style, over files read by `read(path)`."""

    def __init__(self, paths: Sequence[str], read: Callable[[str], bytes]) -> None:
        self._paths = list(paths)
        self._read = read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        path = self._paths[i]
        return {"image": decode(self._read(path)), "label": int(path.split("/")[-2])}


class Rows(torch.utils.data.Dataset[Any]):
    """Map-style, over rows of .npy files read by `read(path, row)`."""

    def __init__(self, paths: Sequence[str], rows: int, read: Callable[[str, int], np.ndarray[Any, Any]]) -> None:
        self._paths = list(paths)
        self._rows = rows
        self._read = read

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        shard, row = divmod(i, SHARD_ROWS["tokens"])
        return {"tokens": torch.from_numpy(self._read(self._paths[shard], row))}


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def _mapped_row(path: str, row: int) -> np.ndarray[Any, Any]:
    return np.array(np.load(path, mmap_mode="r")[row])


class _S3fs:
    """Opened in the process that reads: s3fs does not survive a fork."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._opened: Any = None

    @property
    def system(self) -> Any:
        if self._opened is None:
            self._opened = import_module("s3fs").S3FileSystem(**self._options, skip_instance_cache=True)
        return self._opened

    def read(self, path: str) -> bytes:
        return self.system.cat_file(path)

    def row(self, path: str, row: int) -> np.ndarray[Any, Any]:
        start = 128 + row * LENGTH * 4  # behind the header that np.save writes
        return np.frombuffer(self.system.cat_file(path, start=start, end=start + LENGTH * 4), np.int32).copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def _stock(data: Any, place: Place) -> Epochs:
    loader = torch.utils.data.DataLoader(
        data, place.batch, shuffle=True, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4
    )
    return lambda _: _sizes(loader)


def stock_fuse(place: Place) -> Epochs:
    if place.kind == "jpeg":
        return _stock(Photos(sorted(map(str, place.folder.glob("*/*.jpg"))), _read_file), place)
    return _stock(Rows(sorted(map(str, place.folder.glob("*.npy"))), place.rows, _mapped_row), place)


def stock_s3fs(place: Place) -> Epochs:
    paths = sorted(_S3fs(place.options).system.find(f"{_BUCKET}/{place.prefix}"))
    reader = _S3fs(place.options)
    return _stock(Photos(paths, reader.read) if place.kind == "jpeg" else Rows(paths, place.rows, reader.row), place)


def mosaic(place: Place) -> Epochs:
    streaming = import_peer("streaming")

    class Data(streaming.StreamingDataset):  # type: ignore[misc, name-defined] (imported at run time)
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return _decoded(sample) if place.kind == "jpeg" else {"tokens": torch.from_numpy(sample["tokens"].copy())}

    data = Data(
        remote=place.uri,
        local=str(place.cache),
        shuffle=True,
        batch_size=place.batch,
        shuffle_block_size=_LANES * _WINDOW * SHARD_ROWS[place.kind],
    )
    for stream in data.streams:
        stream._downloader.clean_up()  # its S3 client, carried over the fork, gave shards with another one's bytes
    loader = streaming.StreamingDataLoader(
        data, batch_size=place.batch, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4
    )
    return lambda _: _sizes(loader)


def litdata(place: Place) -> Epochs:
    module = import_peer("litdata")
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the proxy has no TLS
    options = place.options
    data = module.StreamingDataset(
        place.uri,
        cache_dir=str(place.cache),
        shuffle=True,
        item_loader=module.TokensLoader(block_size=LENGTH) if place.kind == "tokens" else None,
        transform=_decoded if place.kind == "jpeg" else None,
        storage_options={
            "endpoint_url": options["endpoint_url"],
            "aws_access_key_id": options["key"],
            "aws_secret_access_key": options["secret"],
            "region_name": "us-east-1",
        },
    )
    loader = module.StreamingDataLoader(
        data, batch_size=place.batch, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4
    )
    return lambda _: _sizes(loader)


def webdataset(place: Place) -> Epochs:
    wds = import_peer("webdataset")
    options = place.options
    keys = [f"{place.prefix}/{i:05d}.tar" for i in range(-(-place.rows // SHARD_ROWS[place.kind]))]

    def opened(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:
        client = import_module("boto3").client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            region_name="us-east-1",
        )
        bucket, _sep, key = url.removeprefix("s3://").partition("/")
        return client.get_object(Bucket=bucket, Key=key)["Body"]

    import_module("webdataset.gopen").gopen_schemes["s3"] = opened
    place.cache.mkdir(parents=True, exist_ok=True)
    data = wds.WebDataset(
        [f"s3://{_BUCKET}/{key}" for key in keys],
        shardshuffle=len(keys),
        cache_dir=str(place.cache),
        empty_check=False,
    )
    data = data.shuffle(_LANES * _WINDOW * SHARD_ROWS[place.kind] // WORKERS).map(
        _decoded if place.kind == "jpeg" else _row_of_tar
    )
    loader = torch.utils.data.DataLoader(
        data.batched(place.batch, collation_fn=torch.utils.data.default_collate),
        batch_size=None,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=4,
    )
    return lambda _: _sizes(loader)


def _row_of_tar(sample: Any) -> dict[str, Any]:
    return {"tokens": torch.from_numpy(np.frombuffer(sample["bin"], np.int32).copy())}


def ray_data(place: Place) -> Epochs:
    import pyarrow.fs
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    ray.data.DataContext.get_current().enable_progress_bars = False
    options = place.options
    system = pyarrow.fs.S3FileSystem(
        access_key=options["key"],
        secret_key=options["secret"],
        endpoint_override=options["endpoint_url"],
        region="us-east-1",
    )
    data = ray.data.read_parquet(f"{_BUCKET}/{place.prefix}", filesystem=system, shuffle="files")
    if place.kind == "jpeg":
        data = data.map(_decoded)
    buffer = _LANES * _WINDOW * SHARD_ROWS[place.kind]
    return lambda _: _sizes(
        data.iter_torch_batches(batch_size=place.batch, local_shuffle_buffer_size=buffer, prefetch_batches=2)
    )


def bound(place: Place) -> Epochs:
    """The upper bound: everything in one memory-mapped Arrow file, the same decoding, two threads."""
    table = pa.ipc.open_file(pa.memory_map(str(place.folder / "all.arrow"))).read_all()
    pool = ThreadPoolExecutor(WORKERS)
    if place.kind == "tokens":
        flat = [c.flatten().to_numpy().reshape(-1, LENGTH) for c in table["tokens"].chunks]
        starts = np.cumsum([0, *(len(block) for block in flat)])

        def build(rows: Any) -> Any:
            out = np.empty((len(rows), LENGTH), np.int32)
            shards = np.searchsorted(starts, rows, side="right") - 1
            for i, (shard, row) in enumerate(zip(shards.tolist(), (rows - starts[shards]).tolist(), strict=True)):
                out[i] = flat[shard][row]
            return torch.from_numpy(out)
    else:
        photos, labels = table["jpg"], table["cls"]

        def build(rows: Any) -> Any:
            images = np.stack([decode(photos[int(row)].as_py()) for row in rows])
            return torch.from_numpy(images), [labels[int(row)].as_py() for row in rows]

    def epoch(number: int) -> Iterator[int]:
        order = np.random.default_rng(number).permutation(place.rows)
        batches = np.array_split(order, range(place.batch, place.rows, place.batch))
        coming = [pool.submit(build, rows) for rows in batches[: 2 * WORKERS]]
        for i, rows in enumerate(batches):
            coming.pop(0).result()
            if i + 2 * WORKERS < len(batches):
                coming.append(pool.submit(build, batches[i + 2 * WORKERS]))
            yield len(rows)

    return epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """An arm, the form it reads, the modules it imports and the peer (a package) it needs.

    absent: kinds it cannot read, with the reason.
    """

    open: Callable[[Place], Epochs]
    form: str
    modules: tuple[str, ...] = ()
    peer: str | None = None
    mounted: bool = False
    absent: tuple[tuple[str, str], ...] = ()

    def form_of(self, kind: str) -> str:
        return "tar" if self.form == "raw or tar" and kind == "jpeg" else self.form.split(" ")[0]


_OURS = (
    "ray_goodput.data.loader",
    "ray_goodput.data.file_dataset",
    "ray_goodput.data.fetch",
    "ray_goodput.storage.cloud",
)

ARMS = {
    "ours": ArmSpec(open=ours, form="raw or tar", modules=_OURS),
    "bound": ArmSpec(open=bound, form="arrow"),
    "ours: FileDataset": ArmSpec(
        open=ours_files,
        form="raw",
        modules=_OURS,
        absent=(("tokens", "a sample is a file there, and rows lie many to a file"),),
    ),
    "DataLoader on FUSE": ArmSpec(open=stock_fuse, form="raw", modules=("PIL.Image",), mounted=True),
    "DataLoader on s3fs": ArmSpec(open=stock_s3fs, form="raw", modules=("s3fs",)),
    "Mosaic": ArmSpec(open=mosaic, form="mds", modules=("streaming",), peer="mosaicml-streaming"),
    "litdata": ArmSpec(open=litdata, form="litdata", modules=("litdata",), peer="litdata"),
    "WebDataset": ArmSpec(open=webdataset, form="tar", modules=("webdataset", "boto3"), peer="webdataset"),
    "Ray Data": ArmSpec(open=ray_data, form="parquet", modules=("ray.data", "pyarrow.fs")),
}

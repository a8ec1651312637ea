"""Manifests at scale: 1e5 data shards and 1e6 small files, what they cost to make and in every process; and seeking.

The listing and the footers are made up: what is measured is this package. Each arm runs in a process of its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from results_file import Budget, parser, report, spread

SHARDS, ROWS_EACH, FILES = 100_000, 10_000, 1_000_000


class MadeUp:
    """A listing of `num` objects; nothing can be read."""

    uri = "s3://bucket/data"

    def __init__(self, num: int, ending: str) -> None:
        self._num = num
        self._ending = ending

    def list(self, prefix: str = "") -> Iterator[Any]:
        from ray_goodput.storage.protocol import ObjectInfo

        for i in range(self._num):
            key = f"{i // 1000:06d}/{i:09d}-0123456789abcdef{self._ending}"
            yield ObjectInfo(key=key, size_bytes=1000 + i % 7, etag=f"{i:032x}")


class Footers:
    """A format whose files say at once what is in them."""

    name, extensions = "parquet", (".parquet",)

    def inspect(self, store: Any, info: Any) -> Any:
        from ray_goodput.data.formats import ShardFacts

        return ShardFacts(ROWS_EACH, pa.schema([("tokens", pa.list_(pa.int32())), ("source", pa.string())]))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    value = action()
    return value, time.perf_counter() - began


def manifest_of_shards() -> dict[str, float]:
    """One data shard a file, by the footers."""
    return made_and_opened(SHARDS, ".parquet", Footers())


def manifest_of_files() -> dict[str, float]:
    """Grouped to virtual data shards."""
    from ray_goodput.data.formats import RawFilesFormat

    return made_and_opened(FILES, ".jpg", RawFilesFormat())


def made_and_opened(num: int, suffix: str, how: Any) -> dict[str, float]:
    """Made of a listing of `num` files as on the driver, and opened as in another process. `how`: a format, or what
    stands in for one."""
    from ray_goodput.data.manifest import Manifest, build_manifest

    store: Any = MadeUp(num, suffix)
    before, before_cpu_s = peak_bytes(), time.process_time()
    manifest, make_s = timed(lambda: build_manifest(store, f"**/*{suffix}", how))
    made_bytes, make_cpu_s = peak_bytes() - before, time.process_time() - before_cpu_s
    data = manifest.to_bytes()
    _, open_s = timed(lambda: Manifest.from_bytes(data))
    return {
        "make_s": make_s,
        "make_cpu_s": make_cpu_s,
        "make_peak_bytes": made_bytes,
        "open_s": open_s,
        "stored_bytes": len(data),
    }


def opened_elsewhere(num: int) -> dict[str, float]:
    """What a process that reads the stored manifest holds: its growth from before to after, at most."""
    from ray_goodput.data.manifest import Manifest

    keys = pa.array([f"{i // 1000:06d}/{i:09d}-0123456789abcdef.parquet" for i in range(num)], pa.large_string())
    etags = pa.array([f"{i:032x}" for i in range(num)], pa.large_string())
    rows, sizes = np.full(num, ROWS_EACH), np.full(num, 1 << 20)
    data = Manifest("s3://bucket/data", "parquet", keys=keys, rows=rows, sizes=sizes, etags=etags).to_bytes()
    before = peak_bytes()
    manifest, open_s = timed(lambda: Manifest.from_bytes(data))
    return {
        "open_s": open_s,
        "open_peak_bytes": peak_bytes() - before,
        "stored_bytes": len(data),
        "n": manifest.num_shards,
    }


def seeking(lanes: int) -> dict[str, float]:
    """In 1e9 rows of 1e5 data shards, at a new place of a new epoch each time."""
    from ray_goodput.core.order import SampleOrder

    before = peak_bytes()
    order = SampleOrder(np.full(SHARDS, ROWS_EACH), seed=0, lanes=lanes, window=8)
    seeks: list[float] = []
    began_cpu_s = time.thread_time()
    for k in range(20):
        seeks.append(timed(lambda k=k: order.at(k * 1_000_000_007 + 5))[1])
    return {
        "at_ms": 1e3 * float(np.median(seeks)),
        "at_worst_ms": 1e3 * max(seeks),
        "at_cpu_ms": 1e3 * (time.thread_time() - began_cpu_s) / len(seeks),
        "peak_bytes": peak_bytes() - before,
    }


ARMS: dict[str, Callable[[], dict[str, float]]] = {
    "1e5 shards, made": manifest_of_shards,
    "1e6 small files, made": manifest_of_files,
    "1e5 shards, opened": lambda: opened_elsewhere(SHARDS),
    "1e6 shards, opened": lambda: opened_elsewhere(FILES),
    "seek, 64 lanes": lambda: seeking(64),
    "seek, 1 lane": lambda: seeking(1),
}


def main() -> None:
    arguments = parser("manifest")
    arguments.add_argument("--arm", choices=ARMS, default=None, help="this arm only, here, as JSON")
    given = arguments.parse_args()
    if given.arm is not None:
        print(json.dumps(ARMS[given.arm]()))
        return
    arms: dict[str, dict[str, dict[str, float]]] = {}
    for name in ARMS:
        command = [sys.executable, __file__, "--arm", name]
        values = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        arms[name] = {metric: spread([value]) for metric, value in values.items()}
    budgets = [
        Budget(name=f"{name}: ms", limit=10.0, value=arms[name]["at_ms"]["median"]) for name in ARMS if "seek" in name
    ]
    budgets += [
        Budget(name=f"{name}: bytes", limit=100e6, value=arms[name][metric]["median"])
        for name, metric in (("seek, 1 lane", "peak_bytes"), ("1e5 shards, opened", "open_peak_bytes"))
    ]
    report("manifest", arms, budgets, as_json=given.json)


if __name__ == "__main__":
    main()

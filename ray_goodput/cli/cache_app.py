"""`ray-goodput cache ls|purge`: what this node's data cache holds, and making room in it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_goodput.cli.options import AsJson, seconds

if TYPE_CHECKING:
    from ray_goodput.data.cache_inspect import CachedEntry

cache = typer.Typer(help="Look at and clear this node's cache of training data.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="The cache's folder. Default: `cache` in RAY_GOODPUT_LOCAL_DIR, as the runs use it."),
]
Dataset = Annotated[str | None, typer.Option(help="Only files whose object's URI contains this text.")]


@cache.command("ls")
def ls(folder: Folder = None, dataset: Dataset = None, as_json: AsJson = False) -> None:
    """List the cached data shards, least recently used first."""
    from ray_goodput.data.cache import NodeCache
    from ray_goodput.data.cache_inspect import entry_of

    root = _root(folder)
    entries = [entry for file in NodeCache(root).ls() if (entry := entry_of(file)) and _of(entry, dataset)]
    if as_json:
        total = sum(entry.size_bytes for entry in entries)
        print(json.dumps({"dir": str(root), "size_bytes": total, "files": [entry.to_dict() for entry in entries]}))
    else:
        print(render(root, entries, now_s=time.time()))


@cache.command("purge")
def purge(
    folder: Folder = None,
    dataset: Dataset = None,
    older_than: Annotated[
        str | None, typer.Option(help='Only files not opened for so long: seconds, or "30min", "12h".')
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove cached data shards. Those that a process has open are kept, and the exit code is then 1."""
    from ray_goodput.cli.checkpoints import human_bytes
    from ray_goodput.data.cache import NodeCache
    from ray_goodput.data.cache_inspect import purge as purge_files
    from ray_goodput.errors import ConfigError

    if everything == (dataset is not None or older_than is not None):
        raise ConfigError("Say what to remove: --all, or --dataset TEXT and --older-than DURATION, one or both.")
    age_s = None if older_than is None else seconds("--older-than", older_than)
    root, now_s = _root(folder), time.time()

    def chosen(entry: CachedEntry) -> bool:
        return _of(entry, dataset) and (age_s is None or now_s - entry.used_at_s >= age_s)

    node_cache = NodeCache(root)
    done = purge_files(node_cache.ls(), chosen)
    if root.is_dir():
        node_cache.open()  # and what dead processes left
    if as_json:
        body = {"dir": str(root), "files": done.files, "freed_bytes": done.freed_bytes, "kept": list(done.kept)}
        print(json.dumps(body))
    else:
        print(f"Removed {done.files} files, {human_bytes(done.freed_bytes)}, from {root}.")
        if done.kept:
            print(
                f"{len(done.kept)} files are in use and were kept: purge again when the jobs that read them have ended."
            )
    if done.kept:
        raise typer.Exit(1)


def render(root: Path, entries: Sequence[CachedEntry], *, now_s: float) -> str:
    """A terminal table of `entries`."""
    from rich.console import Console
    from rich.table import Table

    from ray_goodput.cli.checkpoints import human_age, human_bytes

    if not entries:
        return f"Nothing is cached in {root}."
    table = Table("dataset", "object", "size", "age", "last opened", "opens", "in use", box=None, pad_edge=False)
    for entry in entries:
        table.add_row(
            entry.dataset or "-",
            entry.key or entry.name,
            human_bytes(entry.size_bytes),
            human_age(max(0.0, now_s - entry.written_at_s)),
            f"{human_age(max(0.0, now_s - entry.used_at_s))} ago",
            "-" if entry.opens is None else str(entry.opens),
            "yes" if entry.in_use else "",
        )
    out = io.StringIO()
    Console(file=out, width=160, markup=False).print(table)
    in_use = sum(entry.in_use for entry in entries)
    total = human_bytes(sum(entry.size_bytes for entry in entries))
    return f"{out.getvalue().rstrip()}\n{len(entries)} files, {total}, {in_use} in use, in {root}"


def _root(folder: Path | None) -> Path:
    from ray_goodput.config import environment

    return environment().local_dir / "cache" if folder is None else folder


def _of(entry: CachedEntry, dataset: str | None) -> bool:
    return dataset is None or dataset in f"{entry.dataset}/{entry.key}"

"""`ray-goodput checkpoints ls|verify|export|gc`: arguments in, text or one JSON object out."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options, seconds

checkpoints = typer.Typer(help="Look at, check, export and clean up the checkpoints of a run.", no_args_is_help=True)

Run = Annotated[
    str, typer.Argument(help="A run's folder, STORAGE_PATH/RUN, or a folder of checkpoints; local or s3://.")
]
RunOrOne = Annotated[
    str, typer.Argument(help="A run's folder, STORAGE_PATH/RUN, or the folder of one checkpoint; local or s3://.")
]
Step = Annotated[int | None, typer.Option(help="Only this step. Default: the newest complete one.")]


class Target(StrEnum):
    """What a checkpoint is exported to."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


@checkpoints.command("ls")
def ls(uri: Run, storage_options: StorageOptions = None, as_json: AsJson = False) -> None:
    """List a run's checkpoints, newest first: what is committed, and what is not and why."""
    from ray_goodput.cli.checkpoints import list_checkpoints, render
    from ray_goodput.config import StoreSpec

    rows = list_checkpoints(StoreSpec(uri=uri, options=parse_options(storage_options)))
    if as_json:
        print(json.dumps({"uri": uri, "checkpoints": [row.to_dict() for row in rows]}))
    else:
        print(render(rows))


@checkpoints.command("verify")
def verify(
    uri: RunOrOne,
    step: Annotated[int | None, typer.Option(help="Only checkpoints of this step. Default: all.")] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run's committed checkpoints and compare checksums; exit code 1 if one is corrupt."""
    from ray_goodput.cli.checkpoint_verify import render, verify_checkpoints
    from ray_goodput.cli.progress import byte_progress
    from ray_goodput.config import StoreSpec

    with byte_progress("verifying", shown=not as_json) as progress:
        result = verify_checkpoints(
            StoreSpec(uri=uri, options=parse_options(storage_options)), step=step, on_total=progress.total,
            on_bytes=progress.advance,
        )  # fmt: skip
    print(json.dumps({"uri": uri, **result.to_dict()}) if as_json else render(result))
    if result.corrupt:
        raise typer.Exit(1)


@checkpoints.command("export")
def export(
    uri: RunOrOne,
    destination: Annotated[str, typer.Argument(help="The file to write; for --to dcp a folder. Must not exist yet.")],
    to: Annotated[
        Target,
        typer.Option(
            help="safetensors: the model's tensors. torch: the whole state, for torch.load. dcp: a plain DCP folder."
        ),
    ],
    step: Step = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Write one complete checkpoint, verified while it is read, in a form that other programs read."""
    from ray_goodput.cli.checkpoint_export import export_checkpoint
    from ray_goodput.cli.progress import byte_progress
    from ray_goodput.config import StoreSpec

    with byte_progress("reading", shown=not as_json) as progress:
        exported = export_checkpoint(
            StoreSpec(uri=uri, options=parse_options(storage_options)), destination, to=to.value, step=step,
            on_total=progress.total, on_bytes=progress.advance,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"uri": uri, **exported.to_dict()}))
    else:
        print(f"step {exported.step}: {exported.tensors} tensors, {exported.size_bytes:,} bytes -> {destination}")


@checkpoints.command("gc")
def gc(
    uri: Run,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    keep_last: Annotated[
        int | None, typer.Option(help="Also remove complete checkpoints but the newest N.", min=1)
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="With --keep-last: keep multiples of this many steps too.", min=1)
    ] = None,
    older_than: Annotated[
        str, typer.Option(help="Remove unfinished saves whose last object is at least this old.")
    ] = "1h",
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Remove what saves left unfinished, and, with --keep-last, old checkpoints; never the newest complete one."""
    from ray_goodput.cli.checkpoint_gc import collect_garbage, render
    from ray_goodput.config import StoreSpec

    removed = collect_garbage(
        StoreSpec(uri=uri, options=parse_options(storage_options)), dry_run=dry_run, keep_last=keep_last,
        keep_every=keep_every, older_than_s=seconds("--older-than", older_than),
    )  # fmt: skip
    if as_json:
        body = [garbage.to_dict() for garbage in removed]
        freed = sum(garbage.size_bytes for garbage in removed)
        print(json.dumps({"uri": uri, "dry_run": dry_run, "removed": body, "freed_bytes": freed}))
    else:
        print(render(removed, dry_run=dry_run))

"""The command line: arguments in, text or one JSON object out, one-line errors.

Imports neither torch nor Ray: what a command needs is imported when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ray_goodput.cli.cache_app import cache
from ray_goodput.cli.chaos import chaos
from ray_goodput.cli.checkpoints_app import checkpoints
from ray_goodput.cli.doctor import doctor
from ray_goodput.cli.grafana import grafana
from ray_goodput.cli.mlflow import mlflow
from ray_goodput.cli.options import AsJson, StorageOptions, parse_options
from ray_goodput.cli.plan import plan
from ray_goodput.cli.report import report
from ray_goodput.errors import GoodputError

app = typer.Typer(
    name="ray-goodput",
    help="Checkpoints, data and restarts that lose nothing, for PyTorch on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cache, name="cache")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(grafana, name="grafana")
app.add_typer(mlflow, name="mlflow")
app.command("chaos")(chaos)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("report")(report)


class Kill(StrEnum):
    """What the demo kills in mid-run."""

    WORKER = "worker"
    NODE = "node"
    NONE = "none"


@app.command()
def demo(
    kill: Annotated[Kill, typer.Option(help="What to kill in mid-run, with SIGKILL.")] = Kill.WORKER,
    workers: Annotated[int, typer.Option(help="Training processes.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps: one epoch of a text cut to this length.", min=1)] = 120,
    storage: Annotated[
        str | None, typer.Option(help="Folder or s3:// URL. Default: a folder in the temporary folder.")
    ] = None,
    storage_options: StorageOptions = None,
    logs: Annotated[
        bool, typer.Option(help="Show what Ray and the workers log, instead of keeping it in a file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT on this machine, kill a part of it in mid-run, and show that nothing was lost."""
    from ray_goodput.cli.demo import DemoConfig, run_demo
    from ray_goodput.cli.stdout import only_ours

    config = DemoConfig(
        kill=kill.value, workers=workers, steps=steps, storage=storage, storage_options=parse_options(storage_options)
    )
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    log = None if logs or as_json else Path(tempfile.gettempdir()) / "ray_goodput_demo" / f"{name}.log"
    with only_ours(log) as out:
        if log is not None:
            print(f"what Ray and the workers log is in {log}", file=out)
        result = run_demo(config, name, say=(lambda _: None) if as_json else lambda line: print(line, file=out))
        print(json.dumps(result.to_dict()) if as_json else result.text(), file=out)


def main() -> None:
    """Entry point of `ray-goodput`: exit code 0 only on success, 1 on an error of ours, 2 on wrong usage."""
    try:
        app()
    except GoodputError as error:
        print(f"ray-goodput: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("ray-goodput: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""`ray-goodput report`: where a run's time went, from what it left in storage."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options, seconds
from ray_goodput.errors import ConfigError

if TYPE_CHECKING:
    from ray_goodput.goodput.run_view import RunView


def report(
    uri: Annotated[str, typer.Argument(help="A run's folder: STORAGE_PATH/RUN, local or s3://; a copy of it will do.")],
    storage_options: StorageOptions = None,
    cost_per_accelerator_hour: Annotated[
        float | None, typer.Option(help="What an accelerator-hour costs, in any money.")
    ] = None,
    days: Annotated[float, typer.Option(help="Length of the next run, for the advice.")] = 30.0,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file, too.")] = None,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing a run that goes on, until it ends.")] = False,
    interval: Annotated[str, typer.Option(help="With --watch: how often to look.")] = "5s",
    as_json: AsJson = False,
) -> None:
    """Say where every rank-second of a run went, what its incidents cost, and what to change next.

    Works while the run goes on, and afterwards on a copy of its folder: only the folders ledger and metrics are read.
    """
    from ray_goodput.config import StoreSpec
    from ray_goodput.goodput.run_files import RunReader
    from ray_goodput.goodput.run_view import view_run
    from ray_goodput.storage import open_store

    if as_json + as_markdown + watch > 1:
        raise ConfigError("Give one of --json, --md and --watch: they print the same in three ways.")
    interval_s = seconds("--interval", interval)
    if not interval_s >= 0.1:
        raise ConfigError(f"--interval {interval} is too short: give at least 0.1 s.")
    reader = RunReader(open_store(StoreSpec(uri=uri, options=parse_options(storage_options))))

    def read() -> RunView:
        return view_run(reader.read(), cost_per_accelerator_hour=cost_per_accelerator_hour, days=days)

    if watch:
        from rich.console import Console

        from ray_goodput.cli.report_text import watch as show

        view = show(read, Console(), time.sleep, interval_s)
    else:
        view = read()
        _print(view, as_json=as_json, as_markdown=as_markdown)
    if html is not None:
        _write_page(view, html)


def _print(view: RunView, *, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        print(json.dumps(view.to_dict()))
        return
    from rich.console import Console

    from ray_goodput.cli.report_text import markdown, render

    if as_markdown:
        print(markdown(view))
        return
    # Into a pipe or a file: as wide as the table needs, not the 80 columns that rich assumes.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(render(view, console.width, colour=console.color_system is not None))


def _write_page(view: RunView, html: Path) -> None:
    from ray_goodput.cli.report_page import render_page

    try:
        html.write_text(render_page(view), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The page cannot be written to {html}: {error.strerror}.") from None
    print(f"The page is in {html}.", file=sys.stderr)

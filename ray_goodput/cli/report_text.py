"""A run's report for a terminal (rich, also live) and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ray_goodput.cli import report_tables as words
from ray_goodput.cli.report_tables import COLOUR, MEANING, TextTable
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError
from ray_goodput.goodput.report import AVAILABILITY, headline, loss_curve

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ray_goodput.goodput.run_view import RunView

MAX_ROWS = 16
"""Ranks whose timeline a terminal shows."""
LETTER = dict(zip(Bucket, "?#dclsrthiepqx", strict=True))
"""Of each bucket, where there is no colour."""


def render(view: RunView, width: int = 100, *, colour: bool = True, trouble: str = "") -> RenderableType:
    """Everything, for a console of `width` columns. Without colour the timeline is made of letters.

    What matters most stands first: a live view is cut off where the terminal ends. trouble: a line to warn with.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(headline(view.report), style="bold"),
        Text(f"({AVAILABILITY})", style="dim"),
        Text(f"{view.name}: {words.scale(view)}; {words.state(view)}", style="dim"),
        Text.assemble(("next: ", "bold"), words.next_step(view)),
        *([Text.assemble(("data: ", "bold"), words.data_line(view))] if words.data_line(view) else []),
        Text(trouble, style="yellow"),
        *_timeline(view, width, colour),
        *(part for table in words.tables(view) for part in _table(table)),
    ]
    if curve := _loss(view, width):
        parts.append(Text(curve))
    return Group(*parts)


def markdown(view: RunView) -> str:
    """Everything but the pictures, as GitHub's Markdown."""
    lines = [
        f"# {_cell(view.name)}",
        "",
        f"**{headline(view.report)}** ({AVAILABILITY})",
        "",
        f"{words.scale(view)}; {words.state(view)}.",
    ]
    if view.cost is not None:
        lines += ["", f"Cost (estimate): {words.money(view.cost.total)}, wasted {words.money(view.cost.wasted)}."]
    lines += ["", f"**Next:** {words.next_step(view)}"]
    if data := words.data_line(view):
        lines += ["", f"**Data:** {data}"]
    for table in words.tables(view):
        lines += ["", f"## {table.title}", ""]
        if not table.rows:
            lines.append(table.empty)
            continue
        lines.append(_row(table.header))
        lines.append(_row(["---:" if i in table.right else "---" for i in range(len(table.header))]))
        lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def watch(
    read: Callable[[], RunView], console: Console, wait: Callable[[float], None], interval_s: float = 5.0
) -> RunView:
    """Show the run until its driver ends it, reading every `interval_s`; returns the last view.

    A storage that does not answer is said above the last view and asked again.

    Raises:
        StorageError: already the first read failed.
    """
    from rich.live import Live

    view = read()
    colour = console.color_system is not None
    with Live(
        render(view, console.width, colour=colour), console=console, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        while not view.report.finished:
            wait(interval_s)
            trouble = ""
            try:
                view = read()
            except StorageError as error:
                trouble = f"not read again: {' '.join(str(error).split())}"
            live.update(render(view, console.width, colour=colour, trouble=trouble), refresh=True)
    return view


def _timeline(view: RunView, width: int, colour: bool) -> list[RenderableType]:
    from rich.text import Text

    ranks = view.shown_ranks
    if not ranks or view.timeline.wall_s <= 0:
        return []
    shown = ranks[:: -(-len(ranks) // MAX_ROWS)]
    num = max(10, min(100, width - 8))
    lines: list[RenderableType] = []
    seen: dict[Bucket, None] = {}
    for rank in shown:
        line = Text(f"{rank:>5}  ")
        for column in view.timeline.columns(rank, num):
            bucket = Bucket(int(np.argmax(column))) if column.any() else None
            if bucket is None:
                line.append(" ")
                continue
            seen[bucket] = None
            line.append("█" if colour else LETTER[bucket], style=COLOUR[bucket])
        lines.append(line)
    legend = Text(" rank  ")
    for bucket in sorted(seen):
        legend.append("█ " if colour else f"{LETTER[bucket]} ", style=COLOUR[bucket])
        legend.append(f"{bucket.label}  ", style="dim")
    return [*lines, legend, Text("")]


def _table(table: TextTable) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    if not table.rows:
        return [Text.assemble((f"{table.title}: ", "bold"), table.empty), Text("")]
    grid = Table(box=None, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
    names = {bucket.label: bucket for bucket in MEANING} if table.header[0] == "bucket" else {}
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i in table.right else "left", overflow="fold", header_style="dim")
    for row in table.rows:
        first = Text(row[0], style=COLOUR[names[row[0]]] if row[0] in names else "")
        grid.add_row(first, *(Text(cell) for cell in row[1:]))  # as Text: a reason may hold square brackets
    return [grid, Text("")]


def _loss(view: RunView, width: int) -> str:
    from ray_goodput.goodput.metrics_log import main_metric

    name = main_metric(view.metrics)
    if name is None:
        return ""
    # Steps that were done again later are shown as they were the last time.
    points = {p.step: p.values[name] for log in view.metrics for p in log.points if name in p.values}
    return f"{name}\n{loss_curve(sorted(points.items()), width=max(10, min(80, width - 2)))}" if points else ""


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

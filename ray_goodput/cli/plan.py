"""`ray-goodput plan`: from options, or a run's ledger, to a plan as text, JSON or a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options, seconds
from ray_goodput.errors import ConfigError

if TYPE_CHECKING:
    from ray_goodput.config import StoreSpec
    from ray_goodput.core.reliability import Tier
    from ray_goodput.goodput.plan import Plan
    from ray_goodput.goodput.simulation import SimulationResult
    from ray_goodput.goodput.trace import TraceEvent

Seconds = str
FAILS, COSTS, ASKS, SIMULATES, SHOWS = "How often it fails", "What it costs", "What to ask", "Simulation", "Output"


def plan(
    gpus: Annotated[int | None, typer.Option(help="Accelerators of the job. Default: the run's.")] = None,
    days: Annotated[float, typer.Option(help="Length of the run to plan.")] = 30.0,
    afr: Annotated[
        float | None, typer.Option(help="Probability that one accelerator fails within a year.", rich_help_panel=FAILS)
    ] = None,
    failures_per_gpu_year: Annotated[
        float | None, typer.Option(help="Instead: failures of one accelerator a year.", rich_help_panel=FAILS)
    ] = None,
    mtbf: Annotated[
        Seconds | None, typer.Option(help="Instead: mean time between failures of the job.", rich_help_panel=FAILS)
    ] = None,
    node_failures_per_year: Annotated[
        float, typer.Option(help="Failures of a whole node a year, on top.", rich_help_panel=FAILS)
    ] = 0.0,
    gpus_per_node: Annotated[int, typer.Option(help="Accelerators that a node has.", rich_help_panel=FAILS)] = 8,
    from_run: Annotated[
        str | None,
        typer.Option(help="A run's folder: whatever is not given is taken from its ledger.", rich_help_panel=FAILS),
    ] = None,
    storage_options: StorageOptions = None,
    stall: Annotated[
        Seconds | None, typer.Option(help="Training stands still for a save. Default 0.", rich_help_panel=COSTS)
    ] = None,
    latency: Annotated[
        Seconds | None, typer.Option(help="From there until it is durable. Default 0.", rich_help_panel=COSTS)
    ] = None,
    restart: Annotated[
        Seconds | None, typer.Option(help="From a failure to the first new step. Default 0.", rich_help_panel=COSTS)
    ] = None,
    cost_per_gpu_hour: Annotated[
        float | None, typer.Option(help="What an accelerator-hour costs, in any money.", rich_help_panel=COSTS)
    ] = None,
    interval: Annotated[
        Seconds | None,
        typer.Option(help='Work between saves, or "best". Default: the run\'s, else the best.', rich_help_panel=ASKS),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="SHARE,INTERVAL,STALL,LATENCY,RESTART of a place to save to; repeat it, fragile first. SHARE of the "
            "failures restore from it at the earliest.",
            rich_help_panel=ASKS,
        ),
    ] = None,
    local_share: Annotated[
        float | None,
        typer.Option(help="Without --tier: share of the failures that leave the node up.", rich_help_panel=ASKS),
    ] = None,
    lost: Annotated[
        int | None, typer.Option(help="Accelerators a failure takes away. Default: a node.", rich_help_panel=ASKS)
    ] = None,
    replacement: Annotated[
        Seconds | None, typer.Option(help="How long until they are back: shrink or wait?", rich_help_panel=ASKS)
    ] = None,
    resize: Annotated[
        Seconds | None, typer.Option(help="What one change of size takes. Default: a restart.", rich_help_panel=ASKS)
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate it too.", rich_help_panel=SIMULATES)] = False,
    seed: Annotated[int, typer.Option(help="Of the random numbers.", min=0, rich_help_panel=SIMULATES)] = 0,
    runs: Annotated[int, typer.Option(help="Runs to simulate.", rich_help_panel=SIMULATES)] = 400,
    spares: Annotated[
        int | None,
        typer.Option(help="Nodes in reserve for failed ones. Default: always enough.", rich_help_panel=SIMULATES),
    ] = None,
    repair: Annotated[
        Seconds, typer.Option(help="Until a failed node is back in reserve.", rich_help_panel=SIMULATES)
    ] = "24h",
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay failures: a file of SECONDS[,CLASS[,node]] a line.", rich_help_panel=SIMULATES),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Only compare with published figures.", rich_help_panel=SHOWS)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with curves to this file, too.", rich_help_panel=SHOWS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a job's goodput will be, how often to save, and what to improve first.

    Times are seconds, or durations such as 10min. Example: ray-goodput plan --gpus 1024 --days 30 --afr 0.01 --stall 9
    --latency 120 --restart 600
    """
    if published:
        _print_published(seed, as_json)
        return
    given: dict[str, Any] = {
        "gpus": gpus,
        "failures_per_node_year": node_failures_per_year,
        "gpus_per_node": gpus_per_node,
        "local_share": local_share,
        "lost_gpus": lost,
        "cost_per_gpu_hour": cost_per_gpu_hour,
        "tiers": tuple(_tier(text) for text in tier or []),
    }
    times = {"stall": stall, "latency": latency, "restart": restart, "replacement": replacement, "resize": resize}
    given |= {f"{name}_s": seconds(f"--{name}", text) for name, text in times.items() if text is not None}
    given = {name: value for name, value in given.items() if value is not None}
    if interval is not None:
        given["interval_s"] = None if interval == "best" else seconds("--interval", interval)
    events = _read_trace(trace) if trace else ()
    spec = _spec(from_run, storage_options) if from_run is not None else None
    answer = _make_plan(given, days, (afr, failures_per_gpu_year, mtbf), len(events), spec)
    result = None
    if simulate or events or spares is not None:
        from ray_goodput.goodput.simulator import simulate as run_simulation

        changes = {"spares": spares, "repair_s": seconds("--repair", repair), "trace": events}
        result = run_simulation(answer.simulation(runs=runs, seed=seed, **changes))
    _show(answer, result, html, as_json)


def _make_plan(
    given: dict[str, Any],
    days: float,
    rates: tuple[float | None, float | None, str | None],
    failures_in_trace: int,
    spec: StoreSpec | None,
) -> Plan:
    from ray_goodput.goodput.plan_inputs import PlanInputs, rate_from_afr, rate_from_mtbf
    from ray_goodput.goodput.planner import make_plan, plan_from_run

    afr, rate, mtbf = rates
    if sum(r is not None for r in rates) > 1:
        raise ConfigError("Give one of --afr, --failures-per-gpu-year and --mtbf: they say the same in three ways.")
    report, lines = ({}, []) if spec is None else _read_ledger(spec)
    gpus = given.get("gpus", report.get("target_world"))
    if gpus is None:
        raise ConfigError("Give the number of accelerators (--gpus), or a run to take it from (--from-run).")
    if afr is not None:
        given["failures_per_gpu_year"] = rate_from_afr(afr)
    elif rate is not None:
        given["failures_per_gpu_year"] = rate
    elif mtbf is not None:
        given["failures_per_gpu_year"] = rate_from_mtbf(seconds("--mtbf", mtbf), gpus)
    elif failures_in_trace and days > 0:
        given["failures_per_gpu_year"] = rate_from_mtbf(days * 86400.0 / failures_in_trace, gpus)
    if spec is not None:
        return plan_from_run(report, lines, days=days, **given)
    if "failures_per_gpu_year" not in given:
        if not given["failures_per_node_year"]:
            raise ConfigError(
                "How often does it fail? Give --afr, --failures-per-gpu-year or --mtbf, a --trace, or a run that knows "
                "(--from-run); published rates of one accelerator go from 0.01 to 8 a year."
            )
        given["failures_per_gpu_year"] = 0.0
    return make_plan(PlanInputs(days=days, **given))


def _spec(uri: str, storage_options: str | None) -> StoreSpec:
    from ray_goodput.config import StoreSpec

    return StoreSpec(uri=uri, options=parse_options(storage_options))


def _read_ledger(spec: StoreSpec) -> tuple[dict[str, Any], Sequence[bytes]]:
    from ray_goodput.goodput.ledger import Ledger
    from ray_goodput.goodput.run_files import RunReader
    from ray_goodput.storage import open_store

    lines = RunReader(open_store(spec)).read().lines
    return Ledger.from_lines(lines).report().to_dict(), lines


def _read_trace(path: Path) -> tuple[TraceEvent, ...]:
    from ray_goodput.goodput.trace import parse_trace

    try:
        return parse_trace(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.") from None


def _tier(text: str) -> Tier:
    from ray_goodput.core.reliability import Tier

    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 5:
        raise ConfigError(f"--tier {text!r} has {len(parts)} parts: write SHARE,INTERVAL,STALL,LATENCY,RESTART.")
    share, *times = (seconds("--tier", part) for part in parts)
    return Tier(share=share, interval_s=times[0], stall_s=times[1], latency_s=times[2], restart_s=times[3])


def _show(answer: Plan, result: SimulationResult | None, html: Path | None, as_json: bool) -> None:
    from ray_goodput.cli.plan_text import render_plan

    if html is not None:
        from ray_goodput.cli.plan_page import render_page

        try:
            html.write_text(render_page(answer, result), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The page cannot be written to {html}: {error.strerror}.") from None
    if as_json:
        print(json.dumps(answer.to_dict() | {"simulation": result.to_dict() if result else None}))
    else:
        print(render_plan(answer, result))


def _print_published(seed: int, as_json: bool) -> None:
    from ray_goodput.cli.plan_text import render_published
    from ray_goodput.goodput.published import published_table

    rows = published_table(seed)
    print(json.dumps({"published": [row.to_dict() for row in rows]}) if as_json else render_published(rows))

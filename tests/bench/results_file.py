"""The table and the JSON file that every benchmark leaves: what was measured, and each budget met or missed."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`value` should not be above `limit`; both in the same unit. `why`: told when it is."""

    name: str
    limit: float
    value: float
    why: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, maximum and number of the values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def parser(topic: str) -> argparse.ArgumentParser:
    """Arguments every benchmark takes."""
    result = argparse.ArgumentParser(prog=f"bench_{topic}")
    result.add_argument("--json", action="store_true", help="print the JSON object and nothing else")
    return result


def report(
    topic: str,
    arms: Mapping[str, Mapping[str, dict[str, float]]],
    budgets: Sequence[Budget],
    *,
    as_json: bool,
    every_figure: bool = True,
) -> None:
    """Print the figures side by side (the budgets alone without `every_figure`) and write `results/TOPIC.json`."""
    body: dict[str, Any] = {
        "topic": topic,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),  # at the end: far above the benchmark's own, others worked here too
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arms": arms,
        "budgets": [{"name": b.name, "limit": b.limit, "value": b.value, "met": b.met} for b in budgets],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{topic}.json").write_text(json.dumps(body, indent=1) + "\n")
    if as_json:
        print(json.dumps(body))
        return
    for arm, metrics in arms.items() if every_figure else ():
        for metric, s in metrics.items():
            print(f"{arm:<28} {metric:<24} {s['median']:>12.6g}   ({s['min']:.6g} to {s['max']:.6g}, n={s['n']})")
    for b in budgets:
        reason = f" {b.why}" if b.why and not b.met else ""
        print(f"{'met ' if b.met else 'MISSED'} {b.name}: {b.value:.6g} (limit {b.limit:.6g}){reason}")

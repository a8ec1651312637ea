"""C5 at length: training while its S3 storage is stopped, silent, slow, refusing or failing every other call.

One training process with 32 MiB a save, one every ten steps, the real gateway, a proxy in front of it. `--seconds`
sets the length of each phase, `--kinds` which of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results_file import Budget, parser, report, spread

from outages import Outage, run_outage

KINDS = ("stopped", "silent", "slow", "refusing", "503 to half")
MEMORY_BYTES = 128 << 20


def main() -> None:
    arguments = parser("outage")
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    chosen = arguments.parse_args()
    seen: list[Outage] = []
    for kind in chosen.kinds:
        with tempfile.TemporaryDirectory(prefix="outage-") as root:
            quiet_s = min(10.0, chosen.seconds)
            seen.append(run_outage(kind, Path(root), quiet_s=quiet_s, outage_s=chosen.seconds, recovery_s=180.0))
        print(seen[-1].line(), file=sys.stderr)
    report("outage", {o.kind: _figures(o) for o in seen}, [b for o in seen for b in _budgets(o)], as_json=chosen.json)


def _figures(o: Outage) -> dict[str, dict[str, float]]:
    values = {
        "step quiet, s": o.quiet_median_s,
        "step in the outage, s": o.outage_median_s,
        "longest step in the outage, s": o.outage_longest_s,
        "memory added, MiB": (o.outage_rss_bytes - o.quiet_rss_bytes) / 2**20,
        "saves skipped": o.skipped,
        "commit after the end, s": o.commit_after_s,
    }
    return {name: spread([value]) for name, value in values.items()}


def _budgets(o: Outage) -> list[Budget]:
    return [
        Budget(name=f"{o.kind}: step time, outage / quiet", limit=1.2, value=o.outage_median_s / o.quiet_median_s),
        Budget(
            name=f"{o.kind}: memory added, MiB",
            limit=MEMORY_BYTES / 2**20,
            value=(o.outage_rss_bytes - o.quiet_rss_bytes) / 2**20,
        ),
        Budget(name=f"{o.kind}: last step not committed", limit=0.0, value=float(not o.last_committed)),
    ]


if __name__ == "__main__":
    main()

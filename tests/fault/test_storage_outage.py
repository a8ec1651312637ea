"""C5: a storage that fails never stops or slows training, memory stays bounded, and the next commit comes by itself.

The short form; `make bench-outage` runs it with outages of a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outages import run_outage

MEMORY_BYTES = 128 << 20  # four saves; a client that kept what it could not send would pass it within 3 s


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["stopped", "slow", "503 to half"])
def test_training_goes_on_at_its_pace_and_the_next_commit_comes_by_itself(kind: str, tmp_path: Path) -> None:
    seen = run_outage(kind, tmp_path, quiet_s=2.0, outage_s=3.0, recovery_s=90.0)
    print(seen.line())
    assert seen.outage_steps >= 0.5 * 1.5 * seen.quiet_steps, seen.line()
    assert seen.outage_median_s <= 2 * seen.quiet_median_s, seen.line()
    assert seen.outage_rss_bytes <= seen.quiet_rss_bytes + MEMORY_BYTES, seen.line()
    assert seen.last_committed, seen.line()

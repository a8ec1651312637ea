"""Law G1 as an assertion, for the report of whatever run a test has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

SHARE, ROUNDING_S = 1e-3, 1e-6


def assert_law(report: Mapping[str, Any]) -> None:
    """The report (`GoodputReport.to_dict()`) balances: every rank-second is in one bucket, up to 0.1 % and the printed
    uncertainty, and its parts say what the whole says."""
    buckets, total = report["buckets_s"], report["target_world"] * report["wall_s"]
    assert all(seconds >= -ROUNDING_S for seconds in buckets.values()), buckets
    difference = abs(sum(buckets.values()) - total)
    assert difference <= SHARE * total + report["uncertainty_s"] + ROUNDING_S, report
    assert difference == pytest.approx(abs(report["imbalance_s"]), abs=1e-5)
    for name, seconds in buckets.items() if report["attempts"] else ():
        assert sum(a["buckets_s"][name] for a in report["attempts"]) == pytest.approx(seconds, abs=1e-5), name
    assert report["committed_s"] + report["at_risk_s"] == pytest.approx(buckets["step"], abs=1e-5)
    assert report["lost_s"] == pytest.approx(buckets["lost"], abs=1e-5)
    assert report["overall"] == pytest.approx(report["availability"] * report["runtime"])
    for incident in report["incidents"]:
        parts = sum(incident[f"{part}_s"] for part in ("detect", "teardown", "wait", "start", "load"))
        assert parts == pytest.approx(incident["down_s"], abs=1e-5)

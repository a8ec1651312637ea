"""What is left of a run for its driver."""

from __future__ import annotations

from dataclasses import dataclass

from ray_goodput.core.commit import CommitRecord
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.run_state import Resume
from ray_goodput.goodput.report import GoodputReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What the driver learns when a run is over. `history`: (step, metrics of rank 0), later attempts overriding."""

    report: GoodputReport
    newest: CommitRecord | None
    resumes: tuple[Resume, ...]
    history: tuple[tuple[int, dict[str, float]], ...]
    data: DataCounts | None = None

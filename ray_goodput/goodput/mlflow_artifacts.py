"""The files that an MLflow run keeps: the report, the ledger behind it, and the planner's advice from its figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from ray_goodput.errors import GoodputError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.planner import plan_from_run
from ray_goodput.goodput.report import render_table
from ray_goodput.goodput.run_files import RunReader
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)


def run_artifacts(store: ObjectStore) -> Mapping[str, bytes]:
    """`report.json`, `report.txt`, `ledger.jsonl` and `plan.json` of the run in `store`, as far as they can be had."""
    try:
        lines = RunReader(store).read().lines
        report = Ledger.from_lines(lines).report()
    except GoodputError as error:
        logger.warning("MLflow gets no report of the run: %s", error)
        return {}
    files = {
        "report.json": json.dumps(report.to_dict(), indent=1).encode(),
        "report.txt": render_table(report).encode(),
        "ledger.jsonl": b"\n".join(lines) + b"\n",
    }
    try:
        files["plan.json"] = json.dumps(plan_from_run(report.to_dict(), lines).to_dict(), indent=1).encode()
    except GoodputError as error:  # a run without a save cannot say what one costs
        logger.debug("MLflow gets no plan of the run: %s", error)
    return files

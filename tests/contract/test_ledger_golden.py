"""The ledger's format: what every release wrote reads the same for ever, and this one writes what is kept here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport

GOLDEN = Path(__file__).parent / "golden"
ACCOUNTS = json.loads((GOLDEN / "ledger_report.json").read_text())


def lines_of(version: int) -> list[str]:
    return (GOLDEN / f"ledger_v{version}.jsonl").read_text().splitlines()


def accounts(report: GoodputReport) -> dict[str, Any]:
    body = report.to_dict()
    kept = {name: body[name] for name in ACCOUNTS if name not in ("attempts", "incidents")}
    for name in ("attempts", "incidents"):
        kept[name] = [{k: entry[k] for k in told} for entry, told in zip(body[name], ACCOUNTS[name], strict=True)]
    return kept


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_ledger_of_every_version_gives_the_same_accounts(version: int) -> None:
    assert accounts(Ledger.from_lines(lines_of(version)).report()) == ACCOUNTS


def test_version_3_is_written_as_it_is_kept_here() -> None:
    """Read and sealed whole again, it is the same but for its number."""
    lines = lines_of(3)
    ledger = Ledger.from_lines(lines)
    assert ledger.to_segments() == (), "reading is no news"
    ledger.seal_whole(1_760_003_000.0)
    [segment] = ledger.to_segments()
    again = segment.data.decode().splitlines()
    ledger = Ledger.from_lines(again)
    ledger.seal_whole(1_760_003_000.0)
    [last] = ledger.to_segments()
    assert last.data.decode().splitlines()[1:] == again[1:]
    assert json.loads(again[0]) | {"segment": 0} == json.loads(lines[0]) | {"segment": 0}
    assert again[1:] == lines[1 : len(again)]


def test_what_an_older_release_cannot_read_it_is_told_to_read_with_a_newer_one() -> None:
    heads = [json.loads(line) for line in lines_of(3) if "format" in json.loads(line)]
    assert {head["version"] for head in heads} == {3}

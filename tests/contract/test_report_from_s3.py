"""A run in object storage and a copy of it on disk give the same report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.config import StoreSpec
from ray_goodput.errors import ObjectNotFoundError
from ray_goodput.storage import open_store
from scripted_run import write_run
from servers import JuiceFSGateway


def report(*args: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["report", *args, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_run_in_object_storage_has_the_report_of_its_copy(juicefs_gateway: JuiceFSGateway, tmp_path: Path) -> None:
    copy = write_run(tmp_path / "run-1")
    uri, options = f"{juicefs_gateway.uri}/report/run-1", json.dumps(juicefs_gateway.storage_options)
    store = open_store(StoreSpec(uri=uri, options=juicefs_gateway.storage_options))
    for path in sorted(copy.rglob("*.jsonl")):
        store.put(path.relative_to(copy).as_posix(), path.read_bytes())
    far, near = report(uri, "--storage-options", options), report(str(copy))
    assert far["uri"] != near["uri"]
    assert far | {"uri": ""} == near | {"uri": ""}
    with pytest.raises(ObjectNotFoundError, match="STORAGE_PATH/RUN"):
        report(f"{uri}-2", "--storage-options", options)

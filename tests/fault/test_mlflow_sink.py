"""The MLflow sink against a real MLflow server that dies, hangs and comes back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlflow_server import MlflowServer
from ray_goodput.cli.app import app
from ray_goodput.config import MlflowConfig, StoreSpec
from ray_goodput.goodput.mlflow_sink import MlflowSink, send_spools
from ray_goodput.goodput.mlflow_spool import SpoolHead, to_bytes
from ray_goodput.goodput.mlflow_values import Points, training_points
from ray_goodput.storage import ObjectStore, open_store

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def client(server: MlflowServer) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server.uri)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSpec(uri=str(tmp_path / "run")))


def sink_of(server: MlflowServer, name: str, **kwargs: Any) -> MlflowSink:
    config = MlflowConfig(tracking_uri=server.uri, experiment="tests", tags={"team": "a"})
    sink = MlflowSink(config, run=name, run_key=f"{name}-key", **kwargs)
    sink.start()
    return sink


def goodput(step: int, overall: float, attempt: int = 1, at_ms: int = 1) -> Points:
    return Points(at_ms=at_ms, step=step, values={"goodput/overall": overall}, attempt=attempt, goodput=True)


def wait_until(what: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.05)


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def the_run(client: Any, name: str) -> Any:
    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id], f"tags.`ray_goodput.run_key` = '{name}-key'")
    assert len(runs) == 1
    return runs[0]


def test_drivers_and_attempts_share_one_run_whose_goodput_never_steps_back(server: MlflowServer, client: Any) -> None:
    ends = ["KILLED", "FAILED", "FINISHED"]
    for driver, status in enumerate(ends):
        sink = sink_of(server, "three", params={"lr": "0.1", "size": str(driver)})
        first = 10 * driver
        sink.add([training_points(driver + 1, first + i, 100.0 * driver + i, {"loss": 1.0}) for i in range(15)])
        sink.add([goodput(first + 14 - 3 * driver, 0.5 + driver / 10, driver + 1, 2 * driver + 1)])
        sink.add([goodput(first, 0.6 + driver / 10, driver + 1, 2 * driver + 2)])  # a rollback
        assert sink.close(status, lambda: {"report.json": b"{}"}, timeout_s=30)  # type: ignore[arg-type] (a str to pyright)
        run = the_run(client, "three")
        assert run.info.status == status and run.info.end_time is not None
    steps = [step for step, _ in history(client, run.info.run_id, "goodput/overall")]
    assert len(steps) == 6 and steps == sorted(steps)
    assert run.data.metrics["goodput/overall"] == 0.8, "the newest value is the latest one"
    assert len(history(client, run.info.run_id, "train/loss")) == 45
    attempts = dict(history(client, run.info.run_id, "train/attempt"))
    assert attempts[5] == 1 and attempts[34] == 3, "each point tells the attempt it comes from"
    assert run.data.params == {"lr": "0.1", "size": "0"}, "params are written once"
    assert run.data.tags["ray_goodput.changed.size"] == "2", "what a later driver changed is told by a tag"
    assert run.data.tags["team"] == "a" and run.data.tags["ray_goodput.attempt"] == "3"
    assert run.info.run_name == "three"
    assert [f.path for f in client.list_artifacts(run.info.run_id, "goodput")] == ["goodput/report.json"]


def test_what_a_dead_server_missed_is_sent_when_it_returns(server: MlflowServer, client: Any) -> None:
    sink = sink_of(server, "dead")
    sink.add([training_points(1, 1, 1.0, {"loss": 1.0})])
    wait_until(lambda: sink.run_id is not None)
    server.kill()
    try:
        began = time.monotonic()
        for step in range(2, 2002):
            sink.add([training_points(1, step, float(step), {"loss": 1.0 / step})])
        assert time.monotonic() - began < 1.0, "adding does not wait for a server"
        wait_until(lambda: sink._down_since is not None)
    finally:
        server.start()
    wait_until(lambda: sink._down_since is None)  # else the run's end has two seconds for it: few on a busy machine
    assert sink.close("FINISHED", timeout_s=40)
    run = the_run(client, "dead")
    assert [step for step, _ in history(client, run.info.run_id, "train/loss")] == list(range(1, 2002))
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("how", ["dead", "hangs"])
def test_a_driver_that_ends_while_the_server_is_away_leaves_it_all_to_the_next(
    server: MlflowServer, client: Any, store: ObjectStore, how: str
) -> None:
    sink = sink_of(server, how + "-at-end", store=store)
    sink.add([training_points(1, 1, 1.0, {"loss": 1.0})])
    wait_until(lambda: sink.run_id is not None and not sink._in_flight and not len(sink._spool))
    (server.kill if how == "dead" else server.pause)()
    try:
        sink.add([training_points(1, step, float(step), {"loss": float(step)}) for step in range(2, 50)])
        began = time.monotonic()
        assert not sink.close("FAILED", timeout_s=1.5)
        assert time.monotonic() - began < 4
    finally:
        (server.start if how == "dead" else server.resume)()
    assert len(list(store.list("mlflow"))) == 1
    after = sink_of(server, how + "-at-end", store=store)
    after.add([training_points(2, 50, 50.0, {"loss": 50.0})])
    assert after.close("FINISHED", timeout_s=30)
    run = the_run(client, how + "-at-end")
    assert [step for step, _ in history(client, run.info.run_id, "train/loss")] == list(range(1, 51))
    assert run.info.status == "FINISHED"
    assert list(store.list("mlflow")) == []


def test_a_spool_left_behind_can_be_sent_by_hand(server: MlflowServer, client: Any, store: ObjectStore) -> None:
    config = MlflowConfig(tracking_uri="http://127.0.0.1:9", experiment="tests", run_name="by hand")  # nobody there
    sink = MlflowSink(config, run="hand", run_key="hand-key", store=store, params={"lr": "1"})
    sink.start()
    sink.add([training_points(1, 3, 3.0, {"loss": 0.3}), goodput(3, 0.9)])
    assert not sink.close("KILLED", timeout_s=0.5)
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        send_spools(store)
    sent = send_spools(store, lambda: {"report.json": b"{}"}, tracking_uri=server.uri)
    run = the_run(client, "hand")
    assert json.loads(json.dumps(sent))[0] | {"spool": ""} == {
        "spool": "",
        "run_id": run.info.run_id,
        "points": 2,
        "status": "KILLED",
    }
    assert run.info.status == "KILLED" and run.info.run_name == "by hand" and run.data.params == {"lr": "1"}
    assert run.data.metrics["goodput/overall"] == 0.9
    assert send_spools(store, tracking_uri=server.uri) == []


def test_the_command_sends_what_is_left_and_says_so(
    server: MlflowServer, client: Any, store: ObjectStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = SpoolHead(tracking_uri="http://127.0.0.1:9", experiment="tests", run_key="told-key", run_name="told")
    store.put("mlflow/spool-1.jsonl", to_bytes(replace(head, status="FAILED", ended_at_ms=9), [goodput(3, 0.9)]))
    run_folder = str(tmp_path / "run")
    refused = CliRunner().invoke(app, ["mlflow", "send", run_folder])
    assert refused.exit_code == 1 and "it stays where it is" in str(refused.exception)
    arguments = ["mlflow", "send", run_folder, "--tracking-uri", server.uri, "--json"]
    capfd.readouterr()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (sent,) = json.loads(capfd.readouterr().out)["sent"]
    assert sent["points"] == 1 and the_run(client, "told").info.status == "FAILED"
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert json.loads(capfd.readouterr().out)["sent"] == []


def test_points_that_the_server_refuses_do_not_hold_up_the_rest(server: MlflowServer, client: Any) -> None:
    sink = sink_of(server, "refused")
    wait_until(lambda: sink.run_id is not None)
    sink.add([Points(at_ms=1, step=1, values={"not % a name": 1.0})])
    wait_until(lambda: not sink._in_flight and not len(sink._spool))
    sink.add([training_points(1, 2, 2.0, {"loss": float("nan"), "x": float("inf")})])
    assert sink.close("FINISHED", timeout_s=30)
    run = the_run(client, "refused")
    assert run.data.metrics["train/x"] > 1e300 and run.data.metrics["train/attempt"] == 1


def test_a_run_deleted_in_mlflow_is_begun_anew(server: MlflowServer, client: Any) -> None:
    sink = sink_of(server, "deleted")
    wait_until(lambda: sink.run_id is not None)
    client.delete_run(sink.run_id)
    sink.add([training_points(1, 1, 1.0, {"loss": 1.0})])  # refused, and left out
    wait_until(lambda: not sink._in_flight and not len(sink._spool))
    sink.add([training_points(1, 2, 2.0, {"loss": 2.0})])
    assert sink.close("FINISHED", timeout_s=30)
    assert history(client, the_run(client, "deleted").info.run_id, "train/loss") == [(2, 2.0)]


def test_more_numbers_at_once_than_a_request_may_hold(server: MlflowServer, client: Any) -> None:
    sink = sink_of(server, "wide", params={f"p{i}": str(i) for i in range(250)})
    sink.add([training_points(1, 1, 1.0, {f"m{i}": float(i) for i in range(2500)})])
    assert sink.close("FINISHED", timeout_s=40)
    run = the_run(client, "wide")
    assert len(run.data.metrics) == 2501 and len(run.data.params) == 250


def test_mlflow_keeps_its_own_patience_outside_a_run(server: MlflowServer) -> None:
    before = dict(os.environ)
    sink = sink_of(server, "patience")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert sink.close("FINISHED", timeout_s=30)
    assert dict(os.environ) == before

"""What MLflow is told: names, points, params, and the spool in which they wait."""

from __future__ import annotations

import math
import posixpath
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal_pages import page, steps
from ray_goodput.config import MlflowConfig
from ray_goodput.errors import ConfigError, StorageError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.mlflow_run import message_of, without_credentials
from ray_goodput.goodput.mlflow_spool import Spool, SpoolHead, from_bytes, to_bytes
from ray_goodput.goodput.mlflow_values import Points, flat_params, goodput_points, metric_name, training_points


def points(step: int, *, goodput: bool = False, num: int = 1) -> Points:
    return Points(at_ms=step, step=step, values={f"v{i}": float(i) for i in range(num)}, goodput=goodput)


@given(st.text(max_size=400))
def test_any_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    clean = metric_name(name)
    assert re.fullmatch(r"[/\w.\- :]+", clean)  # MLflow's own two rules and its bound
    assert posixpath.normpath(clean) == clean and not clean.startswith(("/", ".."))
    assert len(clean) <= 250
    assert metric_name(clean) == clean


def test_a_name_keeps_its_group_unless_it_is_ours() -> None:
    assert metric_name("loss") == "train/loss"
    assert metric_name("val/loss") == "val/loss"
    assert metric_name("goodput/overall") == "train/goodput/overall"
    assert metric_name("acc (top 5%)") == "train/acc _top 5__"


def rolled_back(at: float = 130) -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    ledger.attempt_started(1, 2, 10)
    for rank in (0, 1):
        ledger.rank_hello(1, rank, 12)
        ledger.page(page(1, rank, steps(1, 9, 10)))
    ledger.commit(5, 1, 80)
    ledger.attempt_ended(1, 110, "worker", ranks=[1], reason="killed")
    ledger.attempt_started(2, 2, 120)
    ledger.resumed(2, 5)
    return ledger


def test_the_step_of_goodput_does_not_go_back_with_a_rollback() -> None:
    ledger = rolled_back()
    before = goodput_points(ledger.report(at=109), 109.0)
    ledger.page(page(2, 0, steps(6, 6, 1)))
    after = goodput_points(ledger.report(at=130), 130.0)
    assert before.step == after.step == 9
    assert after.attempt == 2
    assert after.values["goodput/durable_step"] == 5
    assert after.values["goodput/steps_lost"] == 4


def test_the_metrics_are_the_reports_own_figures() -> None:
    report = rolled_back().report(at=130)
    values = goodput_points(report, 130.0).values
    assert values["goodput/overall"] == report.overall
    buckets = {k.removeprefix("goodput/bucket_seconds/"): v for k, v in values.items() if "bucket_seconds" in k}
    assert buckets == report.buckets_s
    assert math.isclose(sum(buckets.values()), report.target_world * report.wall_s + report.imbalance_s)
    assert {metric_name(name) for name in values if "/" in name} == {f"train/{name}" for name in values if "/" in name}


def test_training_metrics_come_with_their_attempt() -> None:
    p = training_points(3, 7, 1.5, {"loss": 2.0, "val/acc": 0.5})
    assert (p.at_ms, p.step, p.attempt, p.goodput) == (1500, 7, 3, False)
    assert p.values == {"train/loss": 2.0, "val/acc": 0.5, "train/attempt": 3.0}


def test_a_configuration_becomes_flat_params() -> None:
    class Model:
        pass

    config = {"lr": 1e-3, "layers": [1, 2], "opt": {"name": "adam", "deep": {"x%": None}}, "model": Model(), "e": {}}
    assert flat_params(config) == {
        "lr": "0.001",
        "layers": "[1, 2]",
        "opt.name": "adam",
        "opt.deep.x_": "None",
        "model": "Model",
        "e": "{}",
    }
    assert len(flat_params({str(i): "x" * 9999 for i in range(9999)})) == 300


def test_the_spool_gives_back_in_order_and_counts_its_numbers() -> None:
    spool = Spool(100)
    spool.add(points(i, num=3) for i in range(5))
    first = spool.take(7)
    assert [p.step for p in first] == [0, 1] and spool.num_values == 9
    spool.put_back(first)
    assert [p.step for p in spool.take(10**6)] == [0, 1, 2, 3, 4] and spool.num_values == 0
    spool.add([points(9, num=50)])
    assert [p.step for p in spool.take(10)] == [9], "a point larger than the request still leaves"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=400), st.integers(1, 200))
def test_a_full_spool_thins_what_is_old_and_keeps_the_newest(sizes: list[tuple[int, bool]], bound: int) -> None:
    spool = Spool(bound)
    for step, (num, goodput) in enumerate(sizes):
        spool.add([points(step, num=num, goodput=goodput)])
        assert spool.num_values <= bound or len(spool) == 1
    kept = spool.take(10**6)
    assert [p.step for p in kept] == sorted(p.step for p in kept)
    assert len(kept) + spool.num_dropped == len(sizes)
    assert not sizes or kept[-1].step == len(sizes) - 1


def test_thinning_spares_both_kinds_even_where_they_alternate() -> None:
    spool = Spool(60)
    spool.add(points(i, goodput=i % 2 == 0) for i in range(100))
    kept = spool.take(10**6)
    assert {p.goodput for p in kept[:20]} == {True, False}


def test_a_spool_survives_storage() -> None:
    head = SpoolHead(
        tracking_uri="http://mlflow:5000",
        experiment="e",
        run_key="k",
        run_name="n",
        tags={"a": "b"},
        params={"lr": "1"},
        status="KILLED",
        ended_at_ms=5,
    )
    waiting = [points(1, num=2), points(2, goodput=True), Points(at_ms=3, step=3, values={"x": math.inf}, attempt=4)]
    assert from_bytes(to_bytes(head, waiting)) == (head, waiting)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b"[]\n",
        b"\xff\xfe\n",
        to_bytes(SpoolHead(tracking_uri="u", experiment="e", run_key="k", run_name="n"), [points(1)])[:-20],
        b'{"format": "ray_goodput.mlflow_spool", "version": 2}\n',
        b'{"format": "ray_goodput.mlflow_spool", "version": 1, "colour": 1}\n',
    ],
)
def test_a_damaged_spool_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(StorageError, match="The MLflow spool"):
        from_bytes(data)


def test_a_configuration_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="tracking_uri"):
        MlflowConfig(tracking_uri=" ", experiment="e")
    with pytest.raises(ConfigError, match="experiment"):
        MlflowConfig(tracking_uri="http://x", experiment="")
    with pytest.raises(ConfigError, match=r"ray_goodput\.step"):
        MlflowConfig(tracking_uri="http://x", experiment="e", tags={"ray_goodput.step": "1"})


def test_a_password_in_the_servers_url_is_never_shown() -> None:
    uri = "https://me:s3cret@mlflow:5000/x"
    assert without_credentials(uri) == "https://mlflow:5000/x"
    assert without_credentials("sqlite:///a.db") == "sqlite:///a.db"
    assert "s3cret" not in repr(MlflowConfig(tracking_uri=uri, experiment="e"))
    error = RuntimeError(f"API request to {uri}/api failed\nbadly")
    assert message_of(error, uri) == "API request to https://mlflow:5000/x/api failed badly"
    assert message_of(error, "http://other") == f"API request to {uri}/api failed badly"

"""Whether a tracking server that is away is felt in training: one run, with a real MLflow server that is killed in the
middle, stays away for a minute, and comes back.

The steps are sleeps of 50 ms in a Ray Train worker, with `run.step` in them: what is measured is whether anything of
ours waits. Budget: while the server is away no step takes longer than 1.2 x the median step, and afterwards nothing is
missing. On a busy machine a sleep itself may take longer: the arm with the server there is the measure of that.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from results_file import Budget, parser, report, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlflow_server import MlflowServer

STEP_S = 0.05
UP_S, AWAY_S, BACK_S = 25.0, 60.0, 15.0
NAME = "away"


def train_loop(config: dict[str, Any]) -> list[tuple[float, float]]:
    """(when it ended, how long it took) of every step, until the file `config["stop"]` is there."""
    import torch

    import ray_goodput as rg

    run = rg.session()
    model = run.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    times: list[tuple[float, float]] = []
    before = time.perf_counter()
    while not Path(config["stop"]).exists():
        time.sleep(config["step_s"])
        run.step({"loss": 1.0})
        now = time.perf_counter()
        times.append((time.time(), now - before))
        before = now
        if len(times) == 20:
            Path(config["started"]).touch()
    return times


def take_away(server: MlflowServer, folder: Path, moments: dict[str, float], done: threading.Event) -> None:
    """Kill the server in mid-run and start it again; notes when it was away."""
    while not (folder / "started").exists():
        if done.wait(0.1):
            return
    done.wait(UP_S)
    moments["killed"] = time.time()
    server.kill()
    done.wait(AWAY_S)
    moments["back"] = time.time()
    server.start()
    done.wait(BACK_S)
    (folder / "stop").touch()


def main() -> None:
    arguments = parser("mlflow").parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    with tempfile.TemporaryDirectory() as name, MlflowServer(Path(name)) as server:
        times, moments, missing = _run(Path(name), server)
    settled = times[20:]  # the first ones prepare the slots
    away = [s for at, s in settled if moments["killed"] <= at <= moments["back"]]
    there = [s for at, s in settled if not moments["killed"] <= at <= moments["back"]]
    arms = {"server there": {"step_s": spread(there)}, "server away": {"step_s": spread(away)}}
    for arm, steps in (("server there", there), ("server away", away)):
        arms[arm]["p99_s"] = spread([sorted(steps)[int(0.99 * len(steps))]])
    ratio = {arm: arms[arm]["step_s"]["max"] / arms[arm]["step_s"]["median"] for arm in arms}
    budgets = [
        Budget(
            name="server away: slowest step by median step",
            limit=1.2,
            value=ratio["server away"],
            why=f"(with the server there it is {ratio['server there']:.3g} on this machine)",
        ),
        Budget(name="steps of which MLflow has no point afterwards", limit=0, value=missing),
    ]
    report("mlflow", arms, budgets, as_json=arguments.json)


def _run(folder: Path, server: MlflowServer) -> tuple[list[tuple[float, float]], dict[str, float], int]:
    import ray
    import ray.train
    from mlflow import MlflowClient

    import ray_goodput as rg

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    moments, done = {}, threading.Event()
    trainer = rg.GoodputTrainer(
        train_loop,
        train_loop_config={
            "step_s": STEP_S,
            "stop": str(folder / "stop"),
            "started": str(folder / "started"),
        },
        checkpoint=rg.CheckpointConfig(every=10_000),
        mlflow=rg.MlflowConfig(tracking_uri=server.uri, experiment="bench"),
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name=NAME, storage_path=str(folder / "runs")),
    )
    thread = threading.Thread(target=take_away, args=(server, folder, moments, done), daemon=True)
    thread.start()
    try:
        result: Any = trainer.fit()
    finally:
        done.set()
        ray.shutdown()
    thread.join(60)
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("bench")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    told = {m.step for m in client.get_metric_history(run.info.run_id, "train/loss")}
    times: list[tuple[float, float]] = [tuple(pair) for pair in result.return_value]
    return times, moments, len(set(range(1, len(times) + 1)) - told)


if __name__ == "__main__":
    main()

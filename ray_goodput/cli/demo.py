"""`ray-goodput demo`: the example's job on this machine, a part of it killed in mid-run, and what it lost: nothing.

The job is `examples/train_gpt.py` itself (`cli/train_gpt.py` is a link to it). Nothing in it knows that it will be
killed: the saboteur works from outside, by process id.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ray_goodput.cli.saboteur import STEPS_AFTER_COMMIT, Saboteur
from ray_goodput.config import StoreSpec
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.errors import ConfigError, RunError
from ray_goodput.storage import open_store

if TYPE_CHECKING:
    from ray_goodput.cli.demo_cluster import DemoCluster
    from ray_goodput.goodput.report import GoodputReport

Say = Callable[[str], None]

_SAVES = 6
_NODE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What `ray-goodput demo` was asked for."""

    kill: Literal["worker", "node", "none"] = "worker"
    workers: int = 2
    steps: int = 120
    storage: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kill != "none" and self.every <= 2 * STEPS_AFTER_COMMIT:
            needed = _SAVES * (2 * STEPS_AFTER_COMMIT + 1)
            raise ConfigError(
                f"{self.steps} steps are too few to kill a part of the run in the middle: give {needed} or more."
            )
        if self.kill == "node" and self.workers < 2:
            raise ConfigError("With one worker on one node, no node is left to go on with: give --workers 2 or more.")

    @property
    def every(self) -> int:
        """Steps between saves."""
        return max(1, self.steps // _SAVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the run lost. `resumed_from_step` and `resumed_from_tier` are None if nothing was killed."""

    run: str
    run_uri: str
    resumed_from_step: int | None
    resumed_from_tier: str | None
    samples: int
    samples_repeated: int
    samples_skipped: int
    loss: list[tuple[int, float]]
    goodput: GoodputReport

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; the keys are a promise."""
        return {
            "resumed_from_step": self.resumed_from_step,
            "resumed_from_tier": self.resumed_from_tier,
            "samples_repeated": self.samples_repeated,
            "samples_skipped": self.samples_skipped,
            "final_loss": self.loss[-1][1] if self.loss else None,
            "goodput": {
                "overall": self.goodput.overall,
                "runtime": self.goodput.runtime,
                "availability": self.goodput.availability,
            },
            "run": self.run,
        }

    def text(self) -> str:
        """What a person reads."""
        from ray_goodput.goodput.report import loss_curve, render_table

        resumed = "nothing was killed"
        if self.resumed_from_step is not None:
            resumed = f"after step {self.resumed_from_step}, from {self.resumed_from_tier}"
        return "\n".join(
            [
                "",
                f"resumed            {resumed}",
                f"samples trained on {self.samples}",
                f"samples repeated   {self.samples_repeated}",
                f"samples skipped    {self.samples_skipped}",
                "",
                "loss",
                loss_curve(self.loss, width=72),
                "",
                str(render_table(self.goodput)),
                "",
                f"what is left of it: {_command()} checkpoints ls {self.run_uri}",
            ]
        )


def _command() -> str:
    """This command as it can be typed again."""
    return "ray-goodput" if shutil.which("ray-goodput") else sys.argv[0]


def run_demo(config: DemoConfig, name: str, *, say: Say) -> DemoResult:
    """Run the demo, as run `name`, on a Ray of its own, which is gone afterwards; tell what happens through `say`.

    Raises:
        GoodputError: the run could not be done, or was over before anything could be killed.
    """
    storage = config.storage or str(Path(tempfile.gettempdir()) / "ray_goodput_demo")
    say(f"run {name}: {config.steps} steps with {config.workers} workers, storage {storage}")
    with ExitStack() as stack:
        cluster = _start_ray(config, stack)
        return _train(config, storage, name, cluster, say)


def _start_ray(config: DemoConfig, stack: ExitStack) -> DemoCluster | None:
    """This process is connected to a Ray of the demo's own; `stack` ends it."""
    # A cluster named in the environment is not the demo's to break.
    os.environ.pop("RAY_ADDRESS", None)
    cluster: DemoCluster | None = None
    if config.kill == "node":
        from ray_goodput.cli.demo_cluster import DemoCluster

        cluster = DemoCluster()
        stack.callback(cluster.close)
        cluster.start()

    import ray  # only now: it reads the cluster's settings from the environment, once

    stack.callback(ray.shutdown)
    if cluster is None:
        ray.init("local", num_cpus=max(config.workers, os.cpu_count() or 1), include_dashboard=False)
        return None
    ray.init(cluster.address)
    for num_nodes in range(1, config.workers + 1):
        cluster.add_node()
        deadline = time.monotonic() + _NODE_TIMEOUT_S
        while sum(node["Alive"] for node in ray.nodes()) < num_nodes + 1:  # the head is one, too
            cluster.check()
            if time.monotonic() > deadline:
                raise RunError(f"Node {num_nodes} of the demo's Ray did not come up within {_NODE_TIMEOUT_S:.0f} s.")
            time.sleep(0.2)
    return cluster


def _train(config: DemoConfig, storage: str, name: str, cluster: DemoCluster | None, say: Say) -> DemoResult:
    from ray_goodput.cli import train_gpt
    from ray_goodput.train.observe import RunObserver
    from ray_goodput.train.sample_log import audit
    from ray_goodput.train.storage_path import probe_storage

    probe_storage(StoreSpec(uri=storage, options=config.storage_options))
    trainer = train_gpt.make_trainer(
        storage,
        name,
        workers=(config.workers - 1, config.workers) if cluster else config.workers,
        max_steps=config.steps,
        every=config.every,
        storage_options=dict(config.storage_options) or None,
        sample_log=True,
    )

    def kill(worker: WorkerInfo) -> None:
        if cluster is None:
            os.kill(worker.pid, signal.SIGKILL)
        else:
            say(f"its node is gone: {cluster.kill_node_of(worker.pid)} processes killed, its local directory deleted")

    saboteur = Saboteur(
        RunObserver(name, trainer.run_store).status,
        kill if config.kill != "none" else None,
        last_step=config.steps,
        say=say,
    )
    saboteur.start()
    try:
        result = trainer.fit()
    finally:
        saboteur.close()
    if config.kill != "none" and saboteur.strike is None:
        raise RunError(
            f"The run {name} was over before anything could be killed: give more than {config.steps} --steps."
        )
    if result.goodput is None:
        raise RunError(f"The run {name} is done, but its ledger could not be read: see the log of its RunCoordinator.")
    resume = result.resumes[-1] if len(result.resumes) > 1 else None
    samples = audit(open_store(trainer.run_store))
    return DemoResult(
        run=name,
        run_uri=trainer.run_store.uri,
        resumed_from_step=resume.step if resume else None,
        resumed_from_tier=resume.tier if resume else None,
        samples=samples.samples,
        samples_repeated=samples.repeated,
        samples_skipped=samples.skipped,
        loss=[(step, metrics["loss"]) for step, metrics in result.history if "loss" in metrics],
        goodput=result.goodput,
    )

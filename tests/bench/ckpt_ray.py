"""Ray Train's own way: `torch.save` at rank 0, then `report(checkpoint_upload_mode=ASYNC)`."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

from ckpt_arms import Arm, Site
from ckpt_rank import Measured, measure, quiet_torch
from ckpt_state import CASES, Case, build
from ckpt_world import Outcome, Place, combine
from pyarrow.fs import FSSpecHandler, PyFileSystem

_OBJECT_STORE_BYTES = 100 << 20


class RayReport(Arm):
    """The local folder goes when its upload is done, which is how that is known here: to one step's length."""

    asynchronous = True

    def save(self, step: int) -> None:
        import ray.train
        import torch

        state = self.training.whole_state()
        checkpoint = None
        self._folder = self.folder(step)
        if self.site.world_rank == 0:
            self._folder.mkdir(parents=True)
            torch.save(state, self._folder / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(self._folder)
        mode = ray.train.CheckpointUploadMode.ASYNC
        ray.train.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=mode)
        self.durable_at = time.perf_counter()

    def done(self) -> bool:
        if self.site.world_rank == 0 and self._folder.exists():
            return False
        if self.site.world_rank == 0:
            self.durable_at = time.perf_counter()
        return True

    def tidy(self, step: int) -> None:
        """Ray keeps its checkpoints; the storage of this benchmark is removed at its end."""


def train_loop(config: dict[str, Any]) -> None:
    import ray.train

    context = ray.train.get_context()
    case = next(case for case in CASES if case.name == config["case"])
    quiet_torch(case.world_size)
    site = Site(
        world_rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        store=config["store"],
        disk=Path(config["disk"]),
        memory=Path(config["disk"]),
    )
    arm = RayReport(site, build(case, config["state_mb"]))
    measured = measure(arm, config["repeats"], lambda _: None)
    (site.disk / f"rank-{site.world_rank}.pickle").write_bytes(pickle.dumps(measured))


def run_ray(case: Case, place: Place, *, state_mb: float, repeats: int) -> Outcome:
    """A TorchTrainer on a Ray of its own, which is gone afterwards. Its memory is not watched: it is Ray's too."""
    import ray
    import ray.train
    import s3fs
    from ray.train.torch import TorchConfig, TorchTrainer

    scratch = Path(tempfile.mkdtemp(dir=place.disk))
    config = {"case": case.name, "store": place.store, "disk": str(scratch), "state_mb": state_mb, "repeats": repeats}
    ray.init(
        num_cpus=case.world_size + 1,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": _import_path()},
    )
    try:
        TorchTrainer(
            train_loop,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=case.world_size),
            run_config=ray.train.RunConfig(
                name=scratch.name,
                storage_path=place.store.uri.removeprefix("s3://"),
                # Not pyarrow's own client: what it uploads to such a gateway vanishes without an error.
                storage_filesystem=PyFileSystem(FSSpecHandler(s3fs.S3FileSystem(**place.store.options))),
            ),
        ).fit()
    finally:
        ray.shutdown()
    files = [scratch / f"rank-{rank}.pickle" for rank in range(case.world_size)]
    measured: list[Measured] = [pickle.loads(file.read_bytes()) for file in files]
    return combine(measured, [])


def _import_path() -> dict[str, str]:
    here = Path(__file__).parent
    return {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])}

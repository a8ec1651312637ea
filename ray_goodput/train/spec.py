"""What the driver hands to every training process; picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_goodput.actors.spec import RunSpec
from ray_goodput.data.mixture import AnyDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """`run` plus what only the session needs. Manifests lie in the run's storage, see `datasets.manifest_key`."""

    run: RunSpec
    datasets: Mapping[str, AnyDataset] = field(default_factory=dict)
    reproducible: bool = False
    sample_log: bool = False
    apply_batch_weight: bool = True

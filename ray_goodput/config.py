"""Configuration a user passes in: frozen, keyword-only, checked when made.

Precedence everywhere: argument, then `RAY_GOODPUT_*` environment variable, then default. `environment()` is the only
reader of the environment.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ray_goodput.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)")
_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the surroundings of a process say; see `environment()`."""

    local_dir: Path
    drills: bool = False


def environment(env: Mapping[str, str] | None = None) -> Environment:
    """Read the `RAY_GOODPUT_*` variables.

    `RAY_GOODPUT_LOCAL_DIR`: folder on node-local NVMe for the data cache, local checkpoint copies and journals. On a
    cluster set it where the raylet starts, so that each node has its own. Default: `ray_goodput` in the system's
    temporary folder.
    `RAY_GOODPUT_DRILLS`: 1 opens the gates of `gates.py`, at which `ray_goodput.testing` can hold or slow a process; to
    be set where the raylet starts, too. Default: 0.
    """
    env = os.environ if env is None else env
    default = Path(tempfile.gettempdir()) / "ray_goodput"
    drills = env.get("RAY_GOODPUT_DRILLS") or "0"
    if drills not in ("0", "1"):
        raise ConfigError(f"RAY_GOODPUT_DRILLS={drills!r}: give 1 to open the gates for drills, or 0.")
    return Environment(local_dir=Path(env.get("RAY_GOODPUT_LOCAL_DIR") or default), drills=drills == "1")


def parse_duration_s(text: str) -> float:
    """Seconds in a duration such as `"90s"`, `"10min"` or `"1.5h"`."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ConfigError(f'Cannot read the duration {text!r}: write for example "90s", "10min" or "1.5h".')
    return float(match[1]) * _UNIT_S[match[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, how much to keep, and where to stage.

    every: steps between saves (int), a duration ("10min"), or "auto": the interval that loses least, from the measured
        cost of a save and the failures seen so far.
    keep_last: how many committed checkpoints stay in storage; the newest verified one always does.
    keep_every: also keep for ever each checkpoint whose step is a multiple of this.
    when_full: when the previous saves still hold both staging slots of some rank, "skip" this save or "wait"; both are
        counted.
    every_local: when to save also to the nearer tiers, in between: the nodes' NVMe (and peers). Such a save costs the
        same stall, no network, and survives the processes. As `every`; default: "auto" if `every` is, else never. With
        GoodputTrainer only, as `peer_copies`.
    peer_copies: on how many other nodes each save is copied, so that it survives its own. Another failure domain is
        preferred, as the label `ray-goodput/failure-domain` of the Ray nodes, or their zone, tells.
    max_durable_age: a duration. A storage that fails never stops training by itself; when the newest durable checkpoint
        is older than this, what `on_durable_age` says happens: "warn" in the log, or "stop": a last save to the nodes,
        and the run ends with a `DurableAgeError`. Default: no limit.
    staging_dir: folder for the staging slots (two a rank, each the size of a rank's slice). Default: shared memory
        when it has room, else the node's local directory.
    """

    every: int | str = "auto"
    keep_last: int = 3
    keep_every: int | None = None
    when_full: Literal["wait", "skip"] = "skip"
    staging_dir: str | None = None
    every_local: int | str | None = None
    peer_copies: int = 0
    max_durable_age: str | None = None
    on_durable_age: Literal["warn", "stop"] = "warn"

    def __post_init__(self) -> None:
        _check_interval("every", self.every)
        if self.every_local is not None:
            _check_interval("every_local", self.every_local)
        if self.max_durable_age is not None and self.max_durable_age_s == 0.0:
            raise ConfigError(f"CheckpointConfig(max_durable_age={self.max_durable_age!r}): must be above 0.")
        if self.on_durable_age not in ("warn", "stop"):
            raise ConfigError(f'CheckpointConfig(on_durable_age={self.on_durable_age!r}): give "warn" or "stop".')
        if self.peer_copies < 0:
            raise ConfigError(f"CheckpointConfig(peer_copies={self.peer_copies}): must be 0 or more.")
        if self.keep_last < 1:
            raise ConfigError(f"CheckpointConfig(keep_last={self.keep_last}): at least 1 checkpoint must be kept.")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"CheckpointConfig(keep_every={self.keep_every}): must be at least 1 step.")
        if self.when_full not in ("wait", "skip"):
            raise ConfigError(f'CheckpointConfig(when_full={self.when_full!r}): give "wait" or "skip".')

    @property
    def max_durable_age_s(self) -> float | None:
        """The limit in seconds."""
        return None if self.max_durable_age is None else parse_duration_s(self.max_durable_age)


def _check_interval(name: str, every: int | str) -> None:
    # Not every caller has a type checker, so the ignored question is asked all the same.
    if isinstance(every, bool) or not isinstance(every, int | str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f'CheckpointConfig({name}={every!r}): give steps, a duration like "10min", or "auto".')
    if isinstance(every, int) and every < 1:
        raise ConfigError(f"CheckpointConfig({name}={every}): the number of steps must be at least 1.")
    if isinstance(every, str) and every != "auto" and parse_duration_s(every) <= 0:
        raise ConfigError(f"CheckpointConfig({name}={every!r}): the duration must be above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureBudget:
    """Which failures a run takes by itself, and for what it waits.

    max_failures_without_progress: failures in a row, with no new commit in between, that are tried again; one more ends
        the run. Drains, preemptions and starts that found no room are not counted.
    stop_on_repeated_error: an exception of the train loop that comes twice in a row at the same step of the same ranks,
        with no commit in between, ends the run without using the rest of the budget up. Connections, files and lost
        processes are never taken for such an error. False: always the whole budget.
    max_wait_for_workers_s: the run ends with `WorkersUnavailableError` when the cluster has had no room for the workers
        it needs (all of a fixed number, or the minimum) for longer than this. None: it waits for ever.
    replacement_wait_s: how long a replacement for a lost node usually takes to come. An elastic run waits that long
        for it if this loses less than going on without it and growing later. Default: what this run has seen so far,
        and until then no waiting.
    """

    max_failures_without_progress: int = 3
    stop_on_repeated_error: bool = True
    max_wait_for_workers_s: float | None = 1800.0
    replacement_wait_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_failures_without_progress < 0:
            raise ConfigError(
                f"FailureBudget(max_failures_without_progress={self.max_failures_without_progress}): must be 0 or more."
            )
        for name in ("max_wait_for_workers_s", "replacement_wait_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"FailureBudget({name}={value}): must be 0 or more seconds, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """When a run that no longer moves is taken for hung; what hangs is killed, and the run goes on from its newest
    state.

    hang_after_s: without progress for longer than this, or `times_p99_step` times the 99th percentile of the run's
        step times if that is longer, a rank is hung. A rank whose process is stopped (SIGSTOP) is hung after
        `hang_after_s` whatever its steps take. None: nothing is ever taken for hung. It doubles with each hang in a
        row that no new step came after, so that a slow stretch of an unknown kind does not end a run.
    first_step_after_s: the same for the first step of an attempt, which may compile, and for a process that gives no
        sign of life while it starts or restores.
    actor_silent_after_s: a vault, shard cache or coordinator that answers no ping for this long is killed, and
        started again by Ray while training goes on. None: never.

    Waiting for data, saving, restoring and evaluating (`run.evaluate_batches`, `run.measure("eval")`) are no hangs,
    however long they take. Other long work between two steps should stand in `run.measure("other")`.
    """

    hang_after_s: float | None = 60.0
    times_p99_step: float = 10.0
    first_step_after_s: float = 1800.0
    actor_silent_after_s: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("hang_after_s", "actor_silent_after_s", "first_step_after_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"WatchdogConfig({name}={value}): the seconds must be above 0.")
        if not self.times_p99_step >= 1:
            raise ConfigError(f"WatchdogConfig(times_p99_step={self.times_p99_step}): must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """Where a run shows up in MLflow: one MLflow run, whatever restarts and however many drivers it takes.

    tracking_uri: as for `mlflow.set_tracking_uri`: `http://host:5000`, `sqlite:///file.db`, `databricks`, ...
        Credentials come from MLflow's own environment variables in the driver's process.
    run_name: shown in MLflow; default: the name of the Ray Train run.
    tags: set on the MLflow run each time a driver takes it up. Names beginning with `ray_goodput.` are ours.
    log_training_metrics: whether the numbers given to `run.step` are sent, too.
    """

    tracking_uri: str = field(repr=False)  # may hold a password
    experiment: str
    run_name: str | None = None
    tags: Mapping[str, str] | None = None
    log_training_metrics: bool = True

    def __post_init__(self) -> None:
        for name in ("tracking_uri", "experiment"):
            if not str(getattr(self, name)).strip():
                raise ConfigError(f'MlflowConfig({name}=""): it must not be empty, for example "http://mlflow:5000".')
        ours = [tag for tag in self.tags or {} if tag.startswith("ray_goodput.")]
        if ours:
            raise ConfigError(
                f"MlflowConfig(tags=...): {ours[0]!r} begins with ray_goodput., which is ours: rename it."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Where objects live and how to reach them; picklable, opened where it is used (`storage.open_store`).

    uri: `s3://bucket/prefix`, any other URL that fsspec knows, or a local path.
    options: `storage_options` in the spelling of s3fs and fsspec: `key`, `secret`, `token`, `endpoint_url`,
        `client_kwargs`, ... Never logged.
    """

    uri: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def child(self, *parts: str) -> StoreSpec:
        """The store of a sub-folder."""
        return StoreSpec(uri="/".join([self.uri.rstrip("/"), *parts]), options=self.options)

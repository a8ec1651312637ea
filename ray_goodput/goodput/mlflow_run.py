"""One run in MLflow, found by its tag or made: the only module that calls MLflow. Everything here blocks."""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ray_goodput.errors import StorageError
from ray_goodput.goodput.mlflow_spool import SpoolHead
from ray_goodput.goodput.mlflow_values import (
    ATTEMPT_TAG,
    CHANGED_TAG,
    RUN_KEY_TAG,
    STEP_TAG,
    Points,
)

MAX_METRICS_A_REQUEST = 1000  # MLflow's own bounds
MAX_PARAMS_A_REQUEST = 100
ARTIFACTS = "goodput"

# MLflow would try seven times, two minutes each. Here the sender tries again, and it must notice soon that it has to.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is the user's
}


@contextmanager
def impatient() -> Iterator[None]:
    """MLflow's requests in this process give up after seconds; a variable that is set already keeps its value."""
    mine = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


class MlflowRun:
    """An open MLflow run. Not thread-safe. Any call may raise MLflow's errors; `is_permanent` says which to give up."""

    def __init__(self, client: Any, run_id: str, *, goodput_step: int) -> None:
        self._client = client
        self.run_id = run_id
        self._goodput_step = goodput_step
        self._tags: dict[str, str] = {}

    @classmethod
    def open(cls, tracking_uri: str, head: SpoolHead) -> MlflowRun:
        """The run with this key, RUNNING: found again, or made. Params it has already are not touched; one that
        changed becomes a tag, since MLflow's params cannot.

        Raises:
            StorageError: the experiment was deleted.
        """
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=tracking_uri)
        experiment = _experiment_id(client, head.experiment)
        # Oldest first: should two ever have been made, all drivers agree on one.
        found = client.search_runs(
            [experiment],
            filter_string=f"tags.`{RUN_KEY_TAG}` = '{head.run_key}'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        tags = {**head.tags, RUN_KEY_TAG: head.run_key}
        if found:
            run = found[0]
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = client.create_run(experiment, run_name=head.run_name, tags={**_origin(), **tags})
        goodput_step = int(run.data.tags.get(STEP_TAG, "0") or 0)
        opened = cls(client, run.info.run_id, goodput_step=goodput_step)
        opened._describe(head.params, tags if found else {}, run.data.params)
        return opened

    def log(self, batch: Sequence[Points]) -> None:
        """The points are in MLflow; points sent twice count once. Goodput never goes to an earlier step than before."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        for p in batch:
            step = max(p.step, self._goodput_step) if p.goodput else p.step
            if p.goodput:
                self._goodput_step = step
            metrics += [Metric(name, value, p.at_ms, step) for name, value in p.values.items()]
        tags = {STEP_TAG: str(self._goodput_step)}
        if attempt := max((p.attempt for p in batch), default=0):
            tags[ATTEMPT_TAG] = str(attempt)
        news = [RunTag(k, v) for k, v in tags.items() if self._tags.get(k) != v]
        room = MAX_METRICS_A_REQUEST - len(news)
        for first in range(0, len(metrics), room):
            self._client.log_batch(
                self.run_id, metrics=metrics[first : first + room], tags=news if first == 0 else [], synchronous=True
            )
        self._tags |= tags

    def log_artifact(self, name: str, data: bytes) -> None:
        """The file `goodput/<name>` of the run holds `data`."""
        with tempfile.TemporaryDirectory(prefix="ray_goodput_mlflow_") as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            self._client.log_artifact(self.run_id, str(path), ARTIFACTS)

    def finish(self, status: str, ended_at_ms: int) -> None:
        """The run's status is "FINISHED", "FAILED" or "KILLED"."""
        self._client.set_terminated(self.run_id, status=status, end_time=ended_at_ms)

    def _describe(self, params: Mapping[str, str], tags: Mapping[str, str], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        changed = {f"{CHANGED_TAG}{k}"[:250]: v for k, v in params.items() if k in known and known[k] != v}
        new = [Param(k, v) for k, v in params.items() if k not in known]
        marks = [RunTag(k, v) for k, v in {**tags, **changed}.items()]
        for first in range(0, max(len(new), len(marks)), MAX_PARAMS_A_REQUEST):
            part = slice(first, first + MAX_PARAMS_A_REQUEST)
            self._client.log_batch(self.run_id, params=new[part], tags=marks[part], synchronous=True)


def is_permanent(error: BaseException) -> bool:
    """Whether trying again cannot help: the server answered, and refused what was sent.

    Not so when it does not know who we are: a token can be renewed.
    """
    from mlflow.exceptions import MlflowException

    if isinstance(error, StorageError):
        return True
    if not isinstance(error, MlflowException):
        return False
    code = error.get_http_status_code()
    return 400 <= code < 500 and code not in (401, 403, 408, 429)


def without_credentials(uri: str) -> str:
    """`http://user:secret@host` is `http://host`."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))


def message_of(error: BaseException, uri: str) -> str:
    """The error in one line, without the credentials of `uri`, which MLflow repeats in its own messages."""
    credentials, at, _ = urlsplit(uri).netloc.rpartition("@")
    text = " ".join(str(error).split())
    return (text.replace(f"{credentials}@", "") if at else text)[:300]


def _origin() -> dict[str, str]:
    """Who began the run, and with what, in MLflow's own tags; they are what its lists show."""
    tags = {"mlflow.source.name": Path(sys.argv[0]).name or "python", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another driver was quicker
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise StorageError(
            f"The MLflow experiment {name!r} was deleted: restore it, or name another in MlflowConfig(experiment=...)."
        )
    return experiment.experiment_id

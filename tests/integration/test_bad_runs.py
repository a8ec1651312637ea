"""What only shows once workers run: each ends the run with one clear sentence, without a retry, and loses nothing."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from running import Finished, Job, ray_job

pytestmark = pytest.mark.timeout(300)

StartJob = Callable[..., Job]


def failed(job: Job) -> Finished:
    finished = job.wait()
    assert finished.code != 0, finished.log[-3000:]
    assert "\n" not in finished.outcome["message"]
    return finished


def test_a_step_before_restore_says_so(job: StartJob) -> None:
    outcome = failed(job("no-restore", "--skip-restore")).outcome
    assert outcome["error"] == "SessionError" and "run.restore" in outcome["message"]


def test_a_crash_loop_ends_with_the_step_the_ranks_and_the_last_error(job: StartJob) -> None:
    outcome = failed(job("crash-loop", "--fail-at", "7", "--max-failures", "1")).outcome
    assert outcome["error"] == "CrashLoopError"
    assert all(part in outcome["message"] for part in ("step 5", "exploded at step 7", "[0"))


@pytest.fixture(scope="module")
def cosmic_rays(job: StartJob) -> Finished:
    """A run that allows one failure without progress, and had two, each after a commit of its own."""
    return job("cosmic-rays", "--fail-once-at", "8", "18", "--max-failures", "1").succeed()


def test_errors_with_commits_in_between_never_end_a_run(cosmic_rays: Finished) -> None:
    assert [a["outcome"] for a in cosmic_rays.outcome["goodput"]["attempts"]] == ["worker", "worker", "finished"]
    assert (cosmic_rays.audit().repeated, cosmic_rays.audit().skipped) == (0, 0)


def test_the_checkpoint_of_another_model_names_the_keys_and_stays_good(job: StartJob, cosmic_rays: Finished) -> None:
    before = {info.key: info.size_bytes for info in cosmic_rays.store.list("checkpoints")}
    other = failed(job("cosmic-rays", "--width", "24"))
    assert other.outcome["error"] == "StructureMismatchError"
    assert "model." in other.outcome["message"] and "24" in other.outcome["message"]
    assert {info.key: info.size_bytes for info in cosmic_rays.store.list("checkpoints")} == before
    checked = CliRunner().invoke(app, ["checkpoints", "verify", cosmic_rays.store.uri])
    assert checked.exit_code == 0, checked.output


def test_workers_that_cannot_be_had_end_the_run_after_the_limit(job: StartJob) -> None:
    outcome = failed(job("too-many", "--workers", "9", "--max-wait", "3")).outcome
    assert outcome["error"] == "WorkersUnavailableError"
    assert all(part in outcome["message"] for part in ("9 worker(s) are needed", "room for 3", "num_workers"))


def test_a_job_submitted_to_a_cluster_ends_well_and_its_log_shows_the_goodput_table(
    job: StartJob, cluster, tmp_path
) -> None:
    import subprocess
    from pathlib import Path

    repository = Path(__file__).parents[2]
    script = "python examples/train_gpt.py --storage {} --name submitted --max-steps 20 --every 10 --workers 2"
    done = subprocess.run(
        [
            *ray_job("submit", cluster.dashboard_url),
            *("--working-dir", str(repository), "--", *script.format(tmp_path / "gpt").split()),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    assert "goodput" in log and "rank-seconds" in log and "succeeded" in log

"""The coordinator of a run: attempts, resume points, commits and the ledger. No Ray in the class.

All its state can be rebuilt from storage: commits from their records, attempts and time from the ledger's segments.
Each part (`attempts.py`, `commits.py`, the ledger) has a lock of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from ray_goodput.actors.attempts import Attempts
from ray_goodput.actors.commit_age import CommitAge
from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.housekeeping import Errand
from ray_goodput.actors.identity import run_identity
from ray_goodput.actors.lease import RunLease
from ray_goodput.actors.ledger_store import LedgerStore
from ray_goodput.actors.metrics_tail import MetricsNews, MetricsPage
from ray_goodput.actors.orders import RunOrders
from ray_goodput.actors.progress_watch import ProgressWatch
from ray_goodput.actors.resume_points import ResumePoints
from ray_goodput.actors.run_end import RunEnd
from ray_goodput.actors.run_metrics import RunMetrics
from ray_goodput.actors.save_times import SaveTimes
from ray_goodput.clock import Clock
from ray_goodput.config import WatchdogConfig
from ray_goodput.core.commit import CheckpointId, CommitRecord, LandedSlice
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.run_state import AttemptStart, HeartbeatAnswer, RunStatus, WorkerInfo
from ray_goodput.core.tiers import peers_of
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.goodput.metrics import RunFigures
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.storage.protocol import ObjectStore

_CURVES_WAIT_S = 10.0
_WORD_WAIT_S = 60.0
"""How long a coordinator that was restarted waits for a word of the attempt that lives before it commits anything.
Ranks speak once a second; when none lives, what dead ones left is committed so much later."""


class RunCoordinator:
    """Thread-safe. `open()` reads the storage and starts the housekeeping thread.

    answering: those of the given nodes whose vaults answer now. domains: failure domain of each node with a vault.
    restarted: an attempt may live that an earlier life told where to go on, and that life may have died before it could
        note that down. So nothing is committed until the attempt has said it.
    """

    def __init__(
        self,
        *,
        run: str,
        store: ObjectStore,
        clock: Clock,
        target_world: int,
        run_started_at: float | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        watchdog: WatchdogConfig | None = None,
        answering: Callable[[Collection[str]], Collection[str]] = lambda nodes: nodes,
        domains: Callable[[], Mapping[str, str]] = dict,
        lease: RunLease | None = None,
        age: CommitAge | None = None,
        restarted: bool = False,
    ) -> None:
        self._run = run
        self._restarted = restarted
        self._store = store
        self._answering = answering
        self._domains = domains
        self._age = age or CommitAge(clock, None, stop=False)
        self._clock = clock
        self._lease = lease
        self._commits = CommitLog(
            run=run,
            store=store,
            clock=clock,
            keep_last=keep_last,
            keep_every=keep_every,
            check_owner=lease.check if lease is not None else None,
        )
        self._ledger = LedgerStore(
            store=store,
            clock=clock,
            target_world=target_world,
            holds=lease.holds if lease is not None else lambda: True,
        )
        self._metrics = RunMetrics(store=store, clock=clock)
        self.watch = ProgressWatch(clock, watchdog or WatchdogConfig())
        self._run_started_at = clock.at_s() if run_started_at is None else run_started_at
        self._attempts = Attempts(self._ledger, self.watch)
        self._save_times = SaveTimes()
        self._train_run_id = ""
        self._orders = RunOrders(clock)
        self._prune = Errand("prune", self._commits.prune)
        self._flush = Errand("ledger", self._write_books, every_s=self._ledger.flush_interval_s)

    def open(self) -> None:
        """Read what earlier lives left; from now on the object serves.

        Raises:
            StorageError: the storage cannot be read.
            RunInUseError: another driver, perhaps of another cluster, trains the run.
        """
        if self._lease is not None:
            self._lease.take(self._taken_over)
            self._lease.start()
        self._commits.open()
        self._run_id = run_identity(self._store)
        self._points = ResumePoints(self._run, self._run_id, self._commits, self._answering)
        self._ledger.open(self._run_started_at)
        self._attempts.go_on_from(max(self._commits.highest_attempt, self._ledger.highest_attempt))
        self._restore_fence()
        if self._restarted:
            self._commits.hold_commits(_WORD_WAIT_S)
        self._prune.start()
        self._flush.start()

    def _restore_fence(self) -> None:
        """Fenced is what was: an attempt that never chose where to go on has replaced nothing, and what the nodes hold
        of those before it may be all that is left. Who has saved has chosen."""
        began, trunk = self._ledger.last_start()
        saved = self._commits.highest_attempt
        self._commits.restore_fence(max(began, saved), trunk if began >= saved else None)

    def ping(self) -> str:
        return self._run

    def _taken_over(self, reason: str) -> None:
        """Another driver has taken the run, as its lease says: nothing of ours may count any more."""
        self._commits.fence_all(reason)
        self._orders.taken_over(reason)

    # attempts

    def train_run(self, run_id: str) -> None:
        """Ray Train's own name for what the driver has begun; the run's metrics carry it."""
        self._train_run_id = run_id

    def group_allocated(self, workers: Sequence[WorkerInfo]) -> int:
        """A worker group got its processes: a new attempt begins. Idempotent for the same processes."""
        return self._attempts.allocated(workers)

    def group_lives(self, workers: Sequence[WorkerInfo]) -> None:
        """Said again and again by the controller: a coordinator that was restarted does not know the processes."""
        self._attempts.lives(workers)

    def join_attempt(self, workers: Sequence[WorkerInfo]) -> int:
        """The attempt these processes belong to, from rank 0; a new one if the controller could not announce them."""
        return self.group_allocated(workers)

    def hello(self, attempt: int, world_rank: int, elapsed_s: float) -> None:
        """A rank's journal began `elapsed_s` ago."""
        self._ledger.rank_hello(attempt, world_rank, elapsed_s)

    def heartbeat(
        self,
        attempt: int,
        world_rank: int,
        page: JournalPage | None,
        metrics: MetricsPage,
        data: DataCounts | None = None,
        start: AttemptStart | None = None,
    ) -> HeartbeatAnswer:
        """Time a rank spent since its last heartbeat; `data`: what it has counted so far; `start`: where the attempt
        goes on, from rank 0 once it was told.

        No page: its journal cannot be written any more, and from now on its silence means nothing.
        """
        self._attempts.heard_of(attempt)
        replaced = not self._attempts.trained(attempt, [step for step, _ in metrics])
        if start is not None and not replaced:
            self._points.goes_on(attempt, start.near, wait=False)  # heartbeats are not held up
            if self._restarted:
                self._age.begin()  # `resumed` was told to an earlier life
        if page is not None:
            self.watch.take(page)
        else:
            self.watch.leave_out(attempt, world_rank)
        self._metrics.add(attempt, metrics, world_rank, data)
        too_old = self._age.stop_reason(committed_step=self.committed_step(), step=self._attempts.now().step)
        next_record = self._ledger.add_page(page) if page is not None else 0
        return self._orders.answer(next_record, replaced=replaced, stop_reason=too_old)

    def hang_found(self, attempt: int) -> None:
        """The attempt hangs; its ranks' time since their last progress was lost to it."""
        self._ledger.hung(attempt)

    def stuck_ranks(self) -> tuple[int, ...]:
        """World ranks that hang and may still be there: the controller ends them if their node does not."""
        return self.watch.stuck()

    def request_drain(self) -> None:
        """All ranks save at one of their next steps and leave their loops; told to them by their heartbeats."""
        self._orders.end_run()

    def request_save(self) -> None:
        """A save begins at one of the next steps."""
        self._orders.save_soon()

    def nodes_draining(self, left_s: Mapping[str, float | None]) -> None:
        """These nodes, of all that are alive, go in so many seconds (None: unknown). Idempotent."""
        self._orders.nodes_draining(left_s)

    def journal_tail(self, attempt: int, world_rank: int, page: JournalPage) -> None:
        """What a dead rank's journal held, read from its node's disk."""
        self._ledger.add_tail(page)

    def failure_seen(self, *, kind: str, message: str, ranks: tuple[int, ...], reason: str, retry: bool) -> None:
        """The controller noticed that the current attempt failed."""
        self._attempts.failed(kind=kind, message=message, ranks=ranks, reason=reason, retry=retry)

    def group_down(self) -> None:
        """The worker group is gone, for whatever reason."""
        self._attempts.down(outcome="stopped" if self._orders.ending else "finished")

    def failure_history(self) -> tuple[int, float]:
        """Failures so far and the accelerator-seconds in which they happened, for the interval of saves."""
        return self._ledger.failure_history()

    # checkpoints

    def resume_point(self, attempt: int) -> CommitRecord | None:
        """Where `attempt` goes on, a `NearRecord` if that is not committed; earlier attempts can no longer commit."""
        self._attempts.heard_of(attempt)
        return self._points.choose(attempt)

    def mark_bad(self, checkpoint: CheckpointId, reason: str) -> None:
        self._points.mark_bad(checkpoint, reason)

    def pass_over(self, checkpoint: CheckpointId, reason: str) -> bool:
        """See `ResumePoints.pass_over`."""
        return self._points.pass_over(checkpoint, reason)

    def identity(self) -> str:
        """The run's own id: a run of the same name in the same place has another one."""
        return self._run_id

    def held(self, landed: LandedSlice, node_id: str) -> CheckpointId | None:
        """See `ResumePoints.held`."""
        complete = self._points.held(landed, node_id)
        # Of this run only: a deleted one may have had more attempts.
        self._attempts.heard_of(landed.slice.checkpoint.attempt)
        return complete

    def holders(self, checkpoint: CheckpointId) -> dict[str, tuple[str, ...]]:
        return self._points.holders(checkpoint)

    def peers(self, node_id: str) -> tuple[str, ...]:
        """Nodes for copies of what `node_id` holds, best first."""
        return peers_of(node_id, self._domains())

    def restores_by_tier(self) -> dict[str, int]:
        """How many attempts of this life of the coordinator had to read from which tier."""
        return dict(Counter(r.tier for r in self._attempts.resumes))

    def resumed(self, attempt: int, step: int, tier: str, near: CheckpointId | None = None) -> None:
        """All ranks of `attempt` have loaded their state and go on after `step`. Idempotent.

        near: the save it goes on from, if that lies on the nodes and is not committed.
        """
        if not self._attempts.resumed(attempt, step, tier):
            return
        self._age.begin()
        self._points.goes_on(attempt, near, wait=True)  # an earlier life of this actor may have told it
        self._ledger.resumed(attempt, step, near.attempt if near is not None else None)
        self._flush.soon()
        self._prune.soon()  # not before: until ranks have read it, nobody knows whether the newest commit is good

    def landed(self, landed: LandedSlice) -> None:
        """A vault has put a slice into storage; the last one of a checkpoint commits it.

        Raises:
            FencedError: the slice belongs to an attempt that was replaced, or to another run of the same name.
        """
        self._points.check_owner(landed)
        self._attempts.heard_of(landed.slice.checkpoint.attempt)
        self._save_times.landed(landed, self._clock.mono_s())
        record = self._commits.landed(landed)
        if record is not None:
            self._age.committed()
            took = self._save_times.committed(record.checkpoint, self._clock.mono_s())
            step, attempt = record.checkpoint.step, record.checkpoint.attempt
            self._ledger.commit(step, attempt, stall_s=took.stall_s, latency_s=took.latency_s, upload_s=took.upload_s)
            self._prune.soon()
            self._flush.soon()

    def save_stalled(self, checkpoint: CheckpointId, stall_s: float) -> None:
        """Training stood still for `stall_s` on rank 0 for this save."""
        self._save_times.stalled(checkpoint, stall_s)

    def save_skipped(self, attempt: int) -> None:
        self._save_times.skipped()

    def wait_committed(self, checkpoint: CheckpointId, timeout_s: float) -> bool:
        return self._commits.wait_committed(checkpoint, timeout_s)

    def committed_step(self) -> int:
        """Newest committed step, -1 for none."""
        newest = self._commits.newest()
        return newest.checkpoint.step if newest is not None else -1

    def commit_age_s(self) -> float | None:
        """Seconds since the newest commit of the present attempt, by this process's clock; None for none."""
        own = [r.committed_at_s for r in self._commits.records() if r.checkpoint.attempt == self._attempts.now().number]
        return max(0.0, self._clock.at_s() - max(own)) if own else None

    def last_committed(self) -> CheckpointId | None:
        """The save made last that survives processes, committed or complete on the nodes: of the latest attempt that
        has any, which need not be the one of the largest step."""
        saves = [*(r.checkpoint for r in self._commits.records()), *filter(None, [self._points.newest_complete()])]
        return max(saves, key=lambda c: c.made, default=None)

    # for people and tools

    def status(self) -> RunStatus:
        committed, hang, now = self.committed_step(), self.watch.hang_now(), self._attempts.now()
        return RunStatus(
            run=self._run,
            attempt=now.number,
            step=max(now.step, committed),
            committed_step=committed,
            workers=now.workers,
            resumes=self._attempts.resumes,
            saves_skipped=self._save_times.num_skipped,
            hang=hang,
        )

    def goodput(self) -> GoodputReport:
        """The accounts as of now."""
        return self._ledger.report()

    def figures(self) -> RunFigures:
        """The run as of now, for its metrics."""
        report = self._ledger.report()
        newest = self._commits.newest()
        since_s = newest.committed_at_s if newest is not None else self._run_started_at
        now = self._attempts.now()
        return RunFigures(
            report=report,
            attempt=now.number,
            ranks=len(now.workers),
            step=now.step,
            committed_step=newest.checkpoint.step if newest is not None else -1,
            commits=self._save_times.num_committed,
            saves_skipped=self._save_times.num_skipped,
            commit_age_s=max(0.0, self._clock.at_s() - since_s),
            data=self._metrics.data.total(),
        )

    @property
    def train_run_id(self) -> str:
        """Ray Train's name for the run, "" until it is known."""
        return self._train_run_id

    def metrics_since(self, life: float, upto: int) -> MetricsNews:
        """Rank 0's metrics that arrived after those the caller has; see `MetricsTail.since`."""
        return self._metrics.since(life, upto)

    def gave_up(self) -> str | None:
        """Why no further attempt is made, None if the run was not given up."""
        return self._attempts.gave_up

    def finish(self) -> RunEnd:
        """Close the books; the ledger's last segment is in storage afterwards if the storage takes it."""
        self.group_down()
        self.stop()
        curves = threading.Thread(target=self._metrics.flush, kwargs={"now": True}, daemon=True)
        curves.start()
        report = self._ledger.finish()
        if self._lease is not None:
            self._lease.release()
        curves.join(_CURVES_WAIT_S)  # they are for looking at: a storage that is away must not cost the report
        return RunEnd(
            report=report,
            newest=self._commits.newest(),
            resumes=self._attempts.resumes,
            history=self._metrics.history(),
            data=self._metrics.data.total(),
        )

    def stop(self) -> None:
        """No errand begins any more; the object still answers."""
        self._prune.stop()
        self._flush.stop()

    def _write_books(self) -> None:
        """Now and then, and soon after what a new driver should know if this one dies."""
        self._ledger.flush()
        self._metrics.flush()

"""What a train loop talks to: what `rg.session()` gives inside a worker of a `GoodputTrainer`.

One session an attempt and process. All public methods are collective in the sense of training: every rank calls them in
the same order, on the training thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.cursor import DataCursor
from ray_goodput.core.drain import commit_wait_s, farewell, merged
from ray_goodput.core.tiers import SaveTier
from ray_goodput.data.loader import Batch
from ray_goodput.data.mixture import AnyDataset
from ray_goodput.errors import ConfigError, DrainedError, FencedError, SessionError, StagingFullError
from ray_goodput.gates import gate
from ray_goodput.train import reproducible, sigterm
from ray_goodput.train.batch_weight import BatchWeight
from ray_goodput.train.decide import decide, raise_if_too_old
from ray_goodput.train.feed import DataFeed, evaluated, open_feed, whole_pass
from ray_goodput.train.lanes import LaneAgreement
from ray_goodput.train.own_time import OwnTime
from ray_goodput.train.restorer import Restored, restore_newest
from ray_goodput.train.sample_log import SampleLog
from ray_goodput.train.saver import Saver
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.worker import WorkerContext
from ray_goodput.train.world import ControlWord


class Session:
    """Restore, batches, step, save: the ten lines of a train loop that make it survive. See `rg.session()`."""

    def __init__(self, spec: TrainSpec, worker: WorkerContext) -> None:
        self._spec = spec
        self._worker = worker
        self._recorder = worker.recorder
        self._stateful: dict[str, Any] = {}
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._restored: Restored | None = None
        self._lanes: LaneAgreement | None = None
        self._step = 0
        self._stop = False
        self._prepared = False
        self._iterated = False
        self._cursors: dict[str, DataCursor] = {}
        self._pending: dict[str, list[Batch]] = {}
        self._feeds: list[DataFeed] = []
        self._unlogged: set[str] = set()  # datasets whose batches another rank reads too, and logs
        self._control = ControlWord(worker.world)
        self._weight = BatchWeight(spec.apply_batch_weight)
        self._own = OwnTime()
        self._metrics = worker.metrics
        self._samples = (
            SampleLog(worker.store, attempt=worker.attempt, world_rank=worker.world.world_rank)
            if spec.sample_log
            else None
        )
        self._saver = Saver(spec.run, worker)
        if spec.reproducible:
            reproducible.use_deterministic_kernels()

    @property
    def world_rank(self) -> int:
        return self._worker.world.world_rank

    @property
    def world_size(self) -> int:
        return self._worker.world.world_size

    @property
    def attempt(self) -> int:
        """Which life of the run's worker group this is; the first is 1."""
        return self._worker.attempt

    @property
    def step_index(self) -> int:
        """Optimizer steps done so far, over all attempts."""
        return self._step

    @property
    def should_stop(self) -> bool:
        """Whether all ranks agreed to leave the loop after this step."""
        return self._stop

    def stop(self) -> None:
        """Ask all ranks to leave their loops: `should_stop` turns true, and `batches` ends, at one step on every
        rank."""
        self._saver.request_stop()

    def prepare_model(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """`ray.train.torch.prepare_model`, with DDP set up to be reproducible if the trainer was told to be."""
        return reproducible.prepare_model(model, reproducible=self._spec.reproducible, **kwargs)

    def register(self, name: str, stateful: Any) -> None:
        """Save and restore `stateful` (with `state_dict` and `load_state_dict`) under `name`; before `restore`.

        Raises:
            SessionError: after `restore`.
            ConfigError: the name is taken, or the object has no state.
        """
        if self._restored is not None:
            raise SessionError(f"register({name!r}) came after restore(): its state would be missed. Call it before.")
        if name in self._stateful or name in ("model", "optimizer"):
            raise ConfigError(f"register({name!r}): the name is taken.")
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise ConfigError(f"register({name!r}): {type(stateful).__name__} has no state_dict and load_state_dict.")
        self._stateful[name] = stateful

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        strict: bool = True,
        **stateful: Any,
    ) -> int:
        """The newest verified checkpoint is loaded, with random streams and cursors; nothing changes on a fresh run.

        Other keyword arguments are registered under their names, as by `register`. Returns the step the run resumes
        after, 0 for a fresh run. A damaged checkpoint is passed over, said once, and the next older one taken.

        strict: whether keys, shapes and dtypes must be the same as in the checkpoint.

        Raises:
            StructureMismatchError: the checkpoint is of another model.
            DatasetMismatchError: its cursor is of other data.
            SessionError: called twice.
        """
        if self._restored is not None:
            raise SessionError("run.restore() was called twice: call it once, before the first batch.")
        for name, value in stateful.items():
            self.register(name, value)
        if self._spec.reproducible and model is not None:
            reproducible.check_model(model, self.world_size)
        self._model, self._optimizer = model, optimizer
        with self._recorder.span(Bucket.CKPT_LOAD):
            self._restored = restore_newest(
                self._spec, self._worker, model=model, optimizer=optimizer, stateful=self._stateful, strict=strict
            )
        if not self._spec.reproducible:
            self._lanes = LaneAgreement(self._worker, self._restored.world_size, self._restored.lane_places)
        self._step = self._restored.step
        self._cursors = dict(self._restored.cursors)
        self._saver.begin(self._step, durable=self._restored.near is None)
        if self._step > 0:  # the optimizer has its state
            self._prepare_saves()
        self._recorder.resumed(self._step)
        if self._samples is not None:
            self._samples.begin(self._step)
        if model is not None:
            self._weight.attach(model)
            self._own.attach(model)
        self._recorder.switch(Bucket.STEP)
        sigterm.listen(True)
        return self._step

    def batches(
        self, name: str, *, epochs: int | None = 1, dp_rank: int | None = None, dp_world: int | None = None
    ) -> Iterator[Batch]:
        """Batches of dataset `name` for this rank, from the cursor to the end of `epochs`, counted from the run's
        start.

        Each global batch is one step: call `step` once for each batch, or for several to accumulate gradients over
        them; those that no step has followed come again with the next call. `None` epochs never end.
        The iterator ends early once `should_stop` is true. All ranks call it: after a change of the world's size they
        agree on who reads what.

        dp_rank, dp_world: this rank's place in a data-parallel group that is not the world (tensor or pipeline
            parallel ranks share their batches). All ranks give them, or none.

        Raises:
            SessionError: before `restore`.
            ConfigError: no such dataset, or no such group.
            ShardReadError, ObjectChangedError: a data shard cannot be had, naming it.
        """
        self._need_restore("batches")
        dataset = self._dataset(name)
        with self._recorder.span(Bucket.DATA_WAIT):
            feed = open_feed(
                self._spec.run,
                self._worker,
                name,
                dataset,
                self._cursors.get(name),
                epochs=epochs,
                dp_rank=dp_rank,
                dp_world=dp_world,
                lanes=self._lanes,
            )
        self._cursors[name] = feed.cursor
        if not feed.is_first:
            self._unlogged.add(name)
        self._feeds.append(feed)
        self._worker.data.opened(feed)
        return self._iterate(name, feed)

    def _iterate(self, name: str, feed: DataFeed) -> Iterator[Batch]:
        batches = iter(feed.loader)
        self._recorder.switch(Bucket.STEP)
        self._iterated = True
        try:
            while not self._stop:
                with self._recorder.span(Bucket.DATA_WAIT):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._pending.setdefault(name, []).append(batch)
                self._weight.set(batch.weight)
                self._own.begin()
                yield batch
                feed.source.advance(self._cursors[name].samples_consumed)
        finally:
            self._weight.set(1.0)
            self._feeds.remove(feed)
            if not self._feeds:
                self._recorder.switch(Bucket.OTHER)  # until there are batches again, no step is owed
            self._worker.data.closed(feed)
            feed.close()

    def evaluate_batches(
        self, name: str, *, dp_rank: int | None = None, dp_world: int | None = None
    ) -> Iterator[Batch]:
        """Every sample of dataset `name` exactly once over all ranks, as many batches on every rank.

        Always starts at the first sample, and moves no cursor. The time until the iterator ends or is closed counts as
        `eval`. Ranks' batches differ in size by at most one sample; a rank for which the last batch has none left gets
        a padding sample with `weight` 0. So weigh a batch's mean by `batch.num_samples`, and divide the sums over
        ranks:

            for batch in run.evaluate_batches("val"):
                sums += torch.tensor([loss(batch) * batch.num_samples, batch.num_samples])
            torch.distributed.all_reduce(sums)

        dp_rank, dp_world: as in `batches`.

        Raises:
            ConfigError: no such dataset, or it is a mixture.
            ShardReadError, ObjectChangedError: a data shard cannot be had, naming it.
        """
        dataset = self._dataset(name)
        whole = whole_pass(name, dataset)

        def open_one() -> DataFeed:
            return open_feed(
                self._spec.run,
                self._worker,
                name,
                whole,
                None,
                epochs=1,
                purpose="evaluation",
                dp_rank=dp_rank,
                dp_world=dp_world,
            )

        return evaluated(open_one, self._recorder, self._feeds)

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """One optimizer step is done: it is accounted, the cursor moves on, and a save begins if one is due.

        metrics: numbers or 0-d tensors; rank 0's are kept. Tensors are read later, off the training thread.

        Raises:
            SessionError: before `restore`.
            FencedError: this attempt has been replaced.
            DrainedError: a node or process of the attempt is about to go; the state is saved. Let it through.
        """
        self._need_restore("step")
        self._saver.settle()
        if self._worker.orders.taken_over:
            raise FencedError(self._worker.orders.taken_over)
        agreed = self._control.read()
        self._step += 1
        batches_used = any(self._pending.values())
        for name, batches in self._pending.items():
            if batches:
                self._cursors[name] = self._cursors[name].moved_to(batches[-1].samples_end)
            if self._samples is not None and name not in self._unlogged:
                for batch in batches:
                    self._samples.note(self._step, name, batch.sample_ids.tolist())
            batches.clear()
        self._recorder.step_done(self._step, self._own.take())
        gate("step", rank=self.world_rank, step=self._step)
        if self._iterated and not self._feeds and not batches_used:
            self._iterated = False
            self._recorder.switch(Bucket.STEP)  # batches of the loop's own
        if metrics and self.world_rank == 0:
            self._metrics.note(self._step, metrics)
        self._stop = self._stop or agreed.stop
        if not self._prepared:
            with self._recorder.span(Bucket.CKPT_BLOCK):
                self._prepare_saves()
        if agreed.leave and not self._stop:
            self._leave()
        if agreed.save or agreed.near:
            tier = SaveTier.STORAGE if agreed.save else agreed.near
            self._save(must=agreed.stop and not agreed.near, tier=tier)
        self._control.post(decide(self._worker.orders, self._saver.due(self._step + 1), self._saver.stop_requested))

    def _leave(self) -> None:
        """Some ranks are about to go: save now, wait until the save is committed or the time is up, end this attempt.

        Collective. The run goes on in another attempt, without the nodes that are going. Nothing happens if the notice
        was taken back meanwhile.

        Raises:
            DrainedError: the attempt has ended.
        """
        worker = self._worker
        with self._recorder.span(Bucket.DRAIN):
            notice = merged(worker.world.gather(worker.orders.notice()))
            if notice is None:
                return
            worker.vault.hurry.remote()
            saved = self._save(must=True)
            committed = saved and self._saver.wait_committed(commit_wait_s(notice))
        raise DrainedError(farewell(notice, step=self._step, committed=committed), notice.ranks)

    def save(self) -> bool:
        """The state after the last step is staged on every rank, waiting for a slot if need be; its upload goes on
        behind. False, on all ranks, if one has no room for it.

        Raises:
            SessionError: before `restore`.
        """
        self._need_restore("save")
        return self._save(must=True)

    def measure(self, label: str) -> AbstractContextManager[None]:
        """Time inside counts as `label`: "eval", or any bucket of `core.buckets` a rank may spend time in."""
        try:
            bucket = Bucket[label.upper()]
        except KeyError:
            raise ConfigError(f"measure({label!r}): known labels are {[b.label for b in Bucket]}.") from None
        return self._recorder.span(bucket)

    def close(self) -> None:
        """The train loop returned: save what is not saved yet and wait until it is committed.

        Raises:
            StagingFullError, StorageError: the last state could not be saved.
            DurableAgeError: the run was stopped because no checkpoint became durable for too long.
        """
        for feed in list(self._feeds):
            feed.close()
        if self._restored is None:
            return
        self._raise_if_too_old()
        unsaved = self._step > self._saver.last_step and self._model is not None
        if unsaved and not self._save(must=True):
            self._raise_if_too_old()  # told while the save waited for a slot, it waits no longer
            raise StagingFullError(
                f"The last state, of step {self._step}, could not be staged: a rank has no room for it (see its "
                "log), and the run's newest checkpoint is older. Give the container a larger /dev/shm, or set "
                "CheckpointConfig(staging_dir=...) to a folder on NVMe."
            )
        with self._recorder.span(Bucket.SHUTDOWN):
            committed = self._saver.finish()
        if not committed:
            self._raise_if_too_old()

    def _raise_if_too_old(self) -> None:
        """Collective."""
        reasons = self._worker.world.gather(self._worker.orders.stop_reason)
        raise_if_too_old(
            reasons, self._step, lambda: self._save(must=False, tier=SaveTier.PEER) and self._saver.leave()
        )

    def _dataset(self, name: str) -> AnyDataset:
        dataset = self._spec.datasets.get(name)
        if dataset is None:
            raise ConfigError(
                f"There is no dataset {name!r}; GoodputTrainer(datasets=) has {sorted(self._spec.datasets) or 'none'}."
            )
        return dataset

    def _prepare_saves(self) -> None:
        self._prepared = True
        self._saver.prepare(model=self._model, optimizer=self._optimizer, stateful=self._stateful)

    def _save(self, *, must: bool, tier: SaveTier = SaveTier.STORAGE) -> bool:
        with self._recorder.span(Bucket.CKPT_BLOCK):
            if self._samples is not None:
                self._samples.flush()
            return self._saver.save(
                step=self._step,
                model=self._model,
                optimizer=self._optimizer,
                stateful=self._stateful,
                cursors={name: cursor.to_dict() for name, cursor in self._cursors.items()},
                lane_places=None if self._lanes is None else self._lanes.record(),
                must=must,
                tier=tier,
            )

    def _need_restore(self, method: str) -> None:
        if self._restored is None:
            raise SessionError(
                f"run.{method}() was called before run.restore(model=..., optimizer=...): restore first, also on a "
                "fresh run, so that a restart goes on where this run stops."
            )

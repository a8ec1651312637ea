"""Laws of copies on nodes: a run goes on from the newest save complete anywhere, and never from two histories."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from journal_pages import page
from near_nodes import NearNodes, content
from ray_goodput.checkpoint.peer_source import PeerSource
from ray_goodput.checkpoint.sidecar import write_sidecar
from ray_goodput.checkpoint.sources import LocalFirstSource, StoreSource
from ray_goodput.core.commit import CheckpointId, StagedSlice
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.core.tiers import SaveTier, peers_of
from ray_goodput.errors import FencedError, StorageError


class Made:
    """Clusters whose coordinators' threads end with the test."""

    def __init__(self) -> None:
        self.clusters: list[NearNodes] = []

    def __call__(self, *args, **kwargs) -> NearNodes:
        self.clusters.append(NearNodes(*args, **kwargs))
        return self.clusters[-1]


@pytest.fixture
def cluster() -> Iterator[Made]:
    made = Made()
    yield made
    for nodes in made.clusters:
        nodes.coordinator.stop()


def committed(nodes: NearNodes, step: int = 10) -> None:
    nodes.persist(nodes.stage(step))
    assert nodes.coordinator.committed_step() == step


def failed_upload(nodes: NearNodes, step: int) -> None:
    nodes.storage_up = False
    for staged in nodes.stage(step):
        with pytest.raises(StorageError):
            nodes.vaults[nodes.names[staged.world_rank]].persist(staged)
    nodes.storage_up = True


def test_a_save_whose_upload_never_came_through_is_where_the_next_attempt_goes_on(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    failed_upload(nodes, 20)
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert isinstance(record, NearRecord) and record.checkpoint == CheckpointId(20, 1)
    assert [o.name for o in record.objects] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for rank, name in enumerate(nodes.names):
        source = LocalFirstSource(record, [nodes.local(name) / record.checkpoint.folder])
        assert source.path(f"__{rank}_0.distcp").read_bytes() == content(20, rank)


def test_what_workers_staged_and_told_nobody_is_found_by_hold(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    nodes.stage(20)
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(20, 1)


def test_a_save_that_one_rank_did_not_finish_is_never_chosen(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL)[:1])
    Path(nodes.stage(20)[1].slot_path + ".json").unlink()
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(10, 1) and not isinstance(record, NearRecord)


def test_the_save_that_an_attempt_went_on_from_may_still_be_committed_and_a_later_one_may_not(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    staged = nodes.stage(20)
    nodes.hold(2)
    assert nodes.coordinator.resume_point(2) is not None
    later = nodes.stage(30)  # a worker of attempt 1 that was stopped, and woke up
    nodes.persist(staged)
    assert nodes.coordinator.committed_step() == 20
    with pytest.raises(FencedError):
        nodes.persist(later)
    assert nodes.coordinator.committed_step() == 20


def test_a_save_of_a_node_that_is_silent_is_not_offered_then_and_not_when_the_node_is_back(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.silent = {"b"}
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(10, 1)
    nodes.silent = set()  # attempt 2 has gone on from step 10: step 20 of attempt 1 leads elsewhere
    nodes.hold(3)
    record = nodes.coordinator.resume_point(3)
    assert record is not None and record.checkpoint == CheckpointId(10, 1)
    assert not (nodes.local("b") / CheckpointId(20, 1).folder).exists()


def test_a_lost_nodes_slices_come_from_the_peer_that_has_copies(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path, ("a", "b", "c"), peer_copies=1)
    committed(nodes)
    nodes.persist(nodes.stage(20, tier=SaveTier.PEER, size=20 << 20))
    nodes.silent = {"b"}
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(20, 1)
    source, reads = restoring_on("a", nodes, record)
    for rank in range(3):
        assert source.path(f"__{rank}_0.distcp").read_bytes() == content(20, rank, size=20 << 20)
        assert source.path(f"__{rank}_0.distcp").is_relative_to(nodes.local("a"))
    assert source.path(".metadata").read_bytes() == b"meta"
    assert source.tier == "peer" and {node for node, *_ in reads} == {"c"}
    assert max(size for *_, size in reads) <= 8 << 20, "a piece is bounded"
    again, reads = restoring_on("a", nodes, record)
    assert again.path("__1_0.distcp").exists() and reads == [], "another rank of the node finds it there"


def test_a_damaged_copy_at_a_peer_is_found_and_the_next_place_asked(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path, ("a", "b", "c"), peer_copies=1)
    committed(nodes)
    record = nodes.coordinator.resume_point(2)
    assert record is not None
    flip(nodes.local("c") / record.checkpoint.folder / "__1_0.distcp")
    flip(nodes.local("b") / record.checkpoint.folder / "__1_0.distcp")
    source, _ = restoring_on("a", nodes, record)
    assert source.path("__1_0.distcp").read_bytes() == content(10, 1) and source.tier == "storage"


def test_a_peer_that_dies_in_mid_copy_is_replaced_by_the_next(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path, ("a", "b", "c"), peer_copies=1)

    def die(node: str, offset: int) -> None:
        if node == "b" and offset:
            nodes.silent = {"b"}

    nodes.before_receive = die
    nodes.vaults["a"].persist(nodes.stage(10, tier=SaveTier.PEER, size=20 << 20)[0])
    folder = CheckpointId(10, 1).folder
    assert (nodes.local("c") / folder / "__0_0.distcp").read_bytes() == content(10, 0, size=20 << 20)
    assert not (nodes.local("b") / folder / "__0_0.distcp").exists()


def test_with_no_peer_left_the_save_goes_on_and_the_missing_copy_is_said(
    tmp_path: Path, cluster: Made, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = cluster(tmp_path, peer_copies=1)
    nodes.silent = {"b"}
    nodes.vaults["a"].persist(nodes.stage(10)[0])
    nodes.vaults["b"].persist(nodes.stage(10)[1])
    assert nodes.coordinator.committed_step() == 10
    assert "has 0 of 1 copies on other nodes" in caplog.text


def test_a_copy_with_a_missing_piece_is_refused(
    tmp_path: Path, cluster: Made, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = cluster(tmp_path, peer_copies=1)
    receive = nodes.vaults["b"].receive

    def lossy(checkpoint, name, sender, offset, data) -> None:
        if offset != 8 << 20:
            receive(checkpoint, name, sender, offset, data)

    nodes.vaults["b"].receive = lossy  # type: ignore[method-assign] (struck on purpose)
    nodes.vaults["a"].persist(nodes.stage(10, tier=SaveTier.PEER, size=20 << 20)[0])
    assert not (nodes.local("b") / CheckpointId(10, 1).folder / "__0_0.distcp").exists()
    assert "bytes were changed" in caplog.text


def test_local_saves_free_their_slots_are_never_committed_and_only_the_newest_stay(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    for step in (20, 30, 40, 50):
        slices = nodes.stage(step, tier=SaveTier.LOCAL)
        nodes.persist(slices)
        assert not any(Path(staged.slot_path + ".json").exists() for staged in slices)
    assert nodes.coordinator.committed_step() == 10
    for name in nodes.names:
        kept = {CheckpointId.parse(path.name) for path in nodes.local(name).iterdir()}
        assert kept == {CheckpointId(40, 1), CheckpointId(50, 1)}
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(50, 1)


def test_a_node_far_ahead_of_a_slow_one_keeps_what_both_have(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.persist(nodes.stage(10, tier=SaveTier.LOCAL))
    ahead = [nodes.stage(step, tier=SaveTier.LOCAL) for step in (20, 30, 40)]
    for slices in ahead:
        nodes.persist(slices[:1])
    nodes.silent = set()
    for slices in ahead:  # the slow rank's worker dies before it has told anybody
        Path(slices[1].slot_path + ".json").unlink()
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(10, 1)


def test_a_damaged_local_save_is_passed_over_for_the_next_older_one(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    for step in (20, 30):
        nodes.persist(nodes.stage(step, tier=SaveTier.LOCAL))
    nodes.hold(2)
    steps = []
    while (record := nodes.coordinator.resume_point(2)) is not None and isinstance(record, NearRecord):
        steps.append(record.checkpoint.step)
        nodes.coordinator.mark_bad(record.checkpoint, "a flipped byte")
    assert steps == [30, 20] and record is not None and record.checkpoint.step == 10


def test_with_the_storage_away_damaged_copies_are_passed_over_only_for_what_lies_on_the_nodes_too(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    for step in (20, 30):
        nodes.persist(nodes.stage(step, tier=SaveTier.LOCAL))
    nodes.hold(2)
    chosen = []
    while (record := nodes.coordinator.resume_point(2)) is not None:
        chosen.append(record.checkpoint.step)
        if not nodes.coordinator.pass_over(record.checkpoint, "a flipped byte, and 503"):
            break
    assert chosen == [30, 20], "what is older is a commit, and in storage only"
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint.step == 20, "it may be read when the storage is back"


def test_damaged_copies_of_a_run_without_a_commit_let_it_begin_anew(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.hold(2)
    assert nodes.coordinator.resume_point(2) is not None
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "a flipped byte")
    assert nodes.coordinator.resume_point(2) is None


def test_vaults_and_coordinator_restarted_together_know_what_the_nodes_hold(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.coordinator.group_allocated(())
    committed(nodes)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.coordinator.stop()
    nodes.restart_coordinator()
    nodes.vaults = {name: nodes.vault(name) for name in nodes.names}
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(20, 1)


def test_copies_that_a_deleted_run_of_the_same_name_left_are_not_used_and_go(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.store.delete([info.key for info in list(nodes.store.list())])
    nodes.coordinator.stop()
    nodes.restart_coordinator()
    nodes.hold(2)
    assert nodes.coordinator.resume_point(2) is None
    assert not (nodes.local("a") / CheckpointId(20, 1).folder).exists()


def test_an_attempt_number_given_out_twice_never_mixes_two_saves(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL, life="1")[:1])
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL, life="2")[1:])
    assert nodes.coordinator.last_committed() is None
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL, life="2")[:1])
    record = nodes.coordinator.resume_point(2)
    assert record is not None
    source = LocalFirstSource(record, [nodes.local("a") / record.checkpoint.folder])
    assert source.path("__0_0.distcp").read_bytes() == content(20, 0, "2")


def test_a_slice_without_room_on_the_disk_is_uploaded_all_the_same_and_a_local_save_says_so(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path, ("a",))
    nodes.local("a").parent.mkdir(parents=True, exist_ok=True)
    nodes.local("a").write_bytes(b"")  # no folder can be made there
    nodes.persist(nodes.stage(10))
    assert nodes.coordinator.committed_step() == 10
    with pytest.raises(StorageError, match="no room for a copy"):
        nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))


def test_an_unreadable_note_is_said_and_the_copy_made_again(
    tmp_path: Path, cluster: Made, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = cluster(tmp_path, ("a",))
    nodes.persist(nodes.stage(10, tier=SaveTier.LOCAL))
    note = nodes.local("a") / CheckpointId(10, 1).folder / ".held-00000.json"
    assert json.loads(note.read_bytes())["version"] == 1
    note.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        nodes.hold(2)
        nodes.persist(nodes.stage(10, tier=SaveTier.LOCAL))
    assert "cannot be read" in caplog.text and json.loads(note.read_bytes())["version"] == 1


def test_copies_go_to_another_failure_domain_first_and_spread_evenly() -> None:
    zones = {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert {node: peers_of(node, zones)[0] for node in zones} == {"a": "c", "b": "c", "c": "a", "d": "a"}
    assert peers_of("a", zones) == ("c", "d", "b")
    same = dict.fromkeys("abcd", "")
    assert {node: peers_of(node, same)[0] for node in same} == {"a": "b", "b": "c", "c": "d", "d": "a"}
    assert peers_of("a", {"a": ""}) == () and peers_of("z", {"a": ""}) == ("a",)


def restoring_on(node: str, nodes: NearNodes, record) -> tuple[LocalFirstSource, list[tuple[str, str, int]]]:
    """What a rank on `node` reads with, and the pieces it has asked other nodes for."""
    reads: list[tuple[str, str, int]] = []

    class Peers:
        def holders(self):
            return {name: [n for n in held if n not in nodes.silent and n != node] for name, held in holders.items()}

        def read(self, node_id: str, name: str, offset: int, size_bytes: int) -> bytes:
            reads.append((node_id, name, size_bytes))
            return nodes.connect(node_id).read(record.checkpoint, name, offset, size_bytes)

    holders = nodes.coordinator.holders(record.checkpoint)
    folder = record.checkpoint.folder
    local = nodes.local(node) / folder
    storage = StoreSource(record, nodes.store, f"checkpoints/{folder}", local)
    return LocalFirstSource(record, [local], PeerSource(record, Peers(), local, storage)), reads


def flip(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def workers(pid: int) -> list[WorkerInfo]:
    return [WorkerInfo(world_rank=rank, pid=pid, node_id=n, node_ip="10.0.0.1") for rank, n in enumerate(("a", "b"))]


def of_a_deleted_run(nodes: NearNodes, **stage: Any) -> list[StagedSlice]:
    """Slices that a run of the same name staged whose storage is gone."""
    slices = [replace(s, extra={**s.extra, "run_id": "deleted"}) for s in nodes.stage(50, **stage)]
    for staged in slices:
        write_sidecar(staged)
    return slices


def test_what_a_deleted_run_of_many_attempts_left_replaces_no_living_attempt(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    assert nodes.coordinator.group_allocated(workers(1)) == 1
    for staged in of_a_deleted_run(nodes, attempt=7):
        with pytest.raises(FencedError, match="deleted run"):
            nodes.persist([staged])
    assert not nodes.coordinator.heartbeat(1, 0, page(1, 0, []), []).replaced


def test_what_a_deleted_run_staged_is_not_committed_even_without_room_on_the_disk(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path, ("a",))
    nodes.local("a").parent.mkdir(parents=True, exist_ok=True)
    nodes.local("a").write_bytes(b"")  # no folder can be made there: nobody asks whether the copy is wanted
    with pytest.raises(FencedError, match="deleted run"):
        nodes.persist(of_a_deleted_run(nodes))
    assert nodes.coordinator.committed_step() == -1


def test_the_save_that_an_attempt_went_on_from_outlives_the_coordinator_and_the_driver(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    nodes.coordinator.group_allocated(workers(1))
    committed(nodes)
    staged = nodes.stage(20)
    nodes.hold(2)
    assert nodes.coordinator.group_allocated(workers(2)) == 2
    record = nodes.coordinator.resume_point(2)
    assert isinstance(record, NearRecord)
    nodes.coordinator.resumed(2, 20, "local", record.checkpoint)
    nodes.coordinator.finish()
    nodes.restart_coordinator(new_driver=True)  # attempt 2 has saved nothing yet
    nodes.hold(3)
    assert nodes.coordinator.resume_point(3) == record
    nodes.persist(staged)
    assert nodes.coordinator.committed_step() == 20
    with pytest.raises(FencedError):
        nodes.persist(nodes.stage(30))


def test_starts_that_fail_before_their_restore_cost_no_copies(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    nodes.coordinator.group_allocated(workers(1))
    nodes.coordinator.resumed(1, 0, "none")
    committed(nodes)
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.coordinator.finish()  # the storage was away for too long, say
    for attempt in (2, 3):
        nodes.restart_coordinator(new_driver=True)
        assert nodes.coordinator.group_allocated(workers(attempt)) == attempt
        for vault in nodes.vaults.values():
            vault.land_again()
        nodes.coordinator.finish()  # the script has an error
    nodes.restart_coordinator(new_driver=True)
    nodes.hold(4)
    record = nodes.coordinator.resume_point(4)
    assert record is not None and record.checkpoint == CheckpointId(20, 1)


def test_an_attempt_that_went_on_stays_fencing_in_the_next_life_of_the_coordinator(
    tmp_path: Path, cluster: Made
) -> None:
    nodes = cluster(tmp_path)
    nodes.coordinator.group_allocated(workers(1))
    committed(nodes)
    late = nodes.stage(20)
    assert nodes.coordinator.group_allocated(workers(2)) == 2
    assert nodes.coordinator.resume_point(2) is not None
    nodes.coordinator.resumed(2, 10, "local")
    nodes.coordinator.finish()
    nodes.restart_coordinator(new_driver=True)
    with pytest.raises(FencedError):
        nodes.persist(late)
    assert nodes.coordinator.committed_step() == 10


def test_what_a_deleted_run_staged_is_written_over_nothing_of_the_same_number(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    of_a_deleted_run(nodes, life="0")
    nodes.persist(nodes.stage(50))
    nodes.hold(2)
    for vault in nodes.vaults.values():
        vault.adopt(2)
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(50, 1)
    for rank, name in enumerate(nodes.names):
        folder = record.checkpoint.folder
        assert nodes.store.get(f"checkpoints/{folder}/__{rank}_0.distcp") == content(50, rank)
        source = LocalFirstSource(record, [nodes.local(name) / folder])
        assert source.path(f"__{rank}_0.distcp").read_bytes() == content(50, rank)


def test_damaged_copies_do_not_count_against_a_commit_that_is_made_meanwhile(tmp_path: Path, cluster: Made) -> None:
    nodes = cluster(tmp_path)
    committed(nodes)
    staged = nodes.stage(20)
    nodes.hold(2)
    assert isinstance(nodes.coordinator.resume_point(2), NearRecord)
    nodes.persist(staged)  # its upload comes through while ranks read the copies
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "a copy is damaged, and storage had none yet")
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(20, 1) and not isinstance(record, NearRecord)
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "in storage, too")
    record = nodes.coordinator.resume_point(2)
    assert record is not None and record.checkpoint == CheckpointId(10, 1)

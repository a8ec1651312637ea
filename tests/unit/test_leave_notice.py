"""Laws of a notice: who is meant, how long is left, and that it reaches a rank whoever was restarted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ray_goodput.actors.orders import RunOrders
from ray_goodput.clock import ManualClock
from ray_goodput.core.drain import LeaveNotice, commit_wait_s, farewell, merged, notice_of_nodes
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.train import sigterm
from ray_goodput.train.drain_watch import DrainWatch
from ray_goodput.train.orders import RankOrders

WORKERS = tuple(WorkerInfo(world_rank=r, pid=r, node_id=f"n{r // 2}", node_ip=f"10.0.0.{r // 2}") for r in range(4))


def test_a_notice_names_the_ranks_of_the_nodes_that_go_and_the_earliest_time() -> None:
    notice = notice_of_nodes({"n0": 30.0, "n1": None, "elsewhere": 1.0}, WORKERS)
    assert notice is not None and notice.ranks == (0, 1, 2, 3) and notice.left_s == 30.0
    assert "10.0.0.0, 10.0.0.1" in notice.reason
    assert notice_of_nodes({"elsewhere": 1.0}, WORKERS) is None


def test_what_each_rank_knows_becomes_one_notice() -> None:
    one = LeaveNotice(reason="SIGTERM", ranks=(3,))
    two = LeaveNotice(reason="node n0 being drained", ranks=(0, 1), left_s=12.0)
    assert merged([None, one, two, None, one]) == LeaveNotice(
        reason="SIGTERM; node n0 being drained", ranks=(0, 1, 3), left_s=12.0
    )
    assert merged([None, None]) is None


@pytest.mark.parametrize(("left_s", "wait_s"), [(None, 120.0), (0.0, 10.0), (25.0, 25.0)])
def test_a_last_commit_is_waited_for_until_the_node_goes(left_s: float | None, wait_s: float) -> None:
    assert commit_wait_s(LeaveNotice(reason="r", ranks=(0,), left_s=left_s)) == wait_s


def test_the_farewell_says_what_is_kept() -> None:
    notice = LeaveNotice(reason="SIGTERM", ranks=(1,))
    kept = farewell(notice, step=7, committed=True)
    assert "rank 1" in kept and "SIGTERM" in kept and "step 7 is committed" in kept
    assert "step 7 could not be committed in time" in farewell(notice, step=7, committed=False)


def test_the_time_left_goes_down_on_the_clocks_of_those_who_wait() -> None:
    clock = ManualClock()
    orders = RunOrders(clock)
    orders.nodes_draining({"n0": 30.0, "n1": None})
    clock.advance(12.0)
    assert orders.answer(0).draining == {"n0": 18.0, "n1": None}
    clock.advance(100.0)
    assert orders.answer(0).draining == {"n0": 0.0, "n1": None}
    orders.nodes_draining({})
    assert orders.answer(0).draining == {}


def test_a_rank_leaves_when_a_node_of_its_attempt_goes_and_stays_when_another_does() -> None:
    orders, rank = RunOrders(ManualClock()), RankOrders(2, WORKERS)
    orders.nodes_draining({"elsewhere": 5.0})
    rank.hear(orders.answer(0))
    assert not rank.must_leave and rank.notice() is None
    orders.nodes_draining({"n0": 30.0})
    rank.hear(orders.answer(0))
    notice = rank.notice()
    assert rank.must_leave and notice is not None and notice.ranks == (0, 1)
    assert notice.left_s is not None and 29.0 < notice.left_s <= 30.0


def test_a_save_that_was_asked_for_is_made_once_also_over_a_restart_of_the_coordinator() -> None:
    orders, rank = RunOrders(ManualClock()), RankOrders(0, WORKERS)
    orders.save_soon()
    rank.hear(orders.answer(0))
    assert not rank.take_save(), "asked for before this attempt began"
    orders.save_soon()
    rank.hear(orders.answer(0))
    rank.hear(orders.answer(0))
    assert rank.take_save() and not rank.take_save()
    restarted = RunOrders(ManualClock())
    rank.hear(restarted.answer(0))
    assert not rank.take_save()
    restarted.save_soon()
    rank.hear(restarted.answer(0))
    assert rank.take_save()


def test_one_wish_for_a_save_makes_one_save_though_ranks_hear_of_it_at_different_steps() -> None:
    orders, ranks = RunOrders(ManualClock()), [RankOrders(r, WORKERS) for r in range(4)]
    for rank in ranks:
        rank.hear(orders.answer(0))
    orders.save_soon()
    saves = 0
    for rank in ranks:  # one hears at each step
        rank.hear(orders.answer(0))
        saves += any([r.take_save() for r in ranks])
    assert saves == 1


def test_the_end_of_the_run_is_not_forgotten_by_a_restarted_coordinator() -> None:
    orders, rank = RunOrders(ManualClock()), RankOrders(0, WORKERS)
    orders.end_run()
    rank.hear(orders.answer(0))
    rank.hear(RunOrders(ManualClock()).answer(0))
    assert rank.end_run


def test_the_watch_tells_what_is_new_at_once_and_survives_whoever_is_away() -> None:
    seen: list[dict[str, float | None] | Exception] = [{}, {"n0": 30.0}, {"n0": 29.0}, RuntimeError("GCS away"), {}]
    told: list[dict[str, float | None]] = []

    def look() -> dict[str, float | None]:
        found = seen.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    watch = DrainWatch(look, lambda nodes: told.append(dict(nodes)))
    while seen:
        watch.beat()
    assert told == [{"n0": 30.0}, {}]


def test_a_coordinator_that_could_not_be_told_is_told_at_the_next_look() -> None:
    told: list[object] = []

    def tell(nodes: object) -> None:
        told.append(nodes)
        if len(told) == 1:
            raise ValueError("no actor of that name")

    watch = DrainWatch(lambda: {"n0": None}, tell)
    watch.beat()
    watch.beat()
    assert len(told) == 2


WORKER = """
import os, signal, sys, time
from ray_goodput.train import sigterm
sigterm.install()
sigterm.listen(sys.argv[1] == "listening")
for kill in range(int(sys.argv[2])):
    os.kill(os.getpid(), signal.SIGTERM)
print("received" if sigterm.received() else "not received", flush=True)
"""


@pytest.mark.parametrize(
    ("listening", "signals", "code"), [("listening", 1, 0), ("listening", 2, -15), ("deaf", 1, -15), ("deaf", 0, 0)]
)
def test_the_first_sigterm_is_heard_by_a_train_loop_and_the_second_ends_the_process(
    listening: str, signals: int, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, listening, str(signals)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stdout.strip() == ("received" if signals else "not received")


def test_a_rank_that_got_a_sigterm_says_so_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigterm, "received", lambda: True)
    rank = RankOrders(3, WORKERS)
    assert rank.must_leave and rank.notice() == LeaveNotice(reason="SIGTERM", ranks=(3,))

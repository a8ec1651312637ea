"""Laws of the control word: what any rank asked for at one step, all ranks do at the next."""

import multiprocessing as mp
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from ray_goodput.errors import SessionError
from ray_goodput.train.world import ControlWord, Decisions, World


def test_alone_a_decision_is_read_once_at_the_next_step() -> None:
    word = ControlWord(World(0, 1, None))
    assert word.read() == Decisions()
    word.post(Decisions(save=True))
    assert word.read() == Decisions(save=True)
    assert word.read() == Decisions()


def _rank(world_rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=2)
    world = World.join(world_rank, 2)
    word = ControlWord(world)
    seen = []
    for step in range(20):
        seen.append(word.read())
        word.post(Decisions(save=world_rank == 0 and step % 3 == 0, stop=world_rank == 1 and step == 18))
    seen.append(word.read())
    agreed = world.broadcast(world_rank), world.gather(world_rank), world.all_true(world_rank == 0)
    before = gloo_threads()
    word.close()
    world.leave()
    world.leave()  # nothing happens twice
    after = gloo_threads()
    with pytest.raises(SessionError, match="left their group"):
        world.all_true(True)
    dist.destroy_process_group()
    world.leave()
    results.put((world_rank, before, after, seen, *agreed))


def gloo_threads() -> int:
    return sum("gloo" in Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir())


def test_all_ranks_read_the_same_decisions_at_the_same_step() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, results), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    answers = sorted([results.get(timeout=50) for _ in ranks], key=lambda answer: answer[0])
    for process in ranks:
        process.join(10)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert all(0 < after < before for _, before, after, *_ in answers), "the group's threads run on"
    (_, _, _, seen0, *rest0), (_, _, _, seen1, *rest1) = answers
    assert seen0 == seen1
    assert [d.save for d in seen0] == [False] + [step % 3 == 0 for step in range(20)]
    assert [d.stop for d in seen0].index(True) == 19
    assert rest0 == rest1 == [0, [0, 1], False]

"""Who waits for whom, from stacks as faulthandler writes them."""

from __future__ import annotations

from ray_goodput.core.stacks import training_frames, who_waits


def stack(*innermost: str) -> str:
    """A training thread with these frames on top, beside a thread that has nothing to do with it."""
    frames = [*innermost, "/home/me/train.py:40 train_loop", "/site/ray_goodput/train/entry.py:66 run_in_session"]
    lines = []
    for frame in frames:
        place, _, function = frame.partition(" ")
        file, _, line = place.rpartition(":")
        lines.append(f'  File "{file}", line {line} in {function}')
    other = 'Thread 0x00007f01 (most recent call first):\n  File "/usr/lib/threading.py", line 327 in wait\n\n'
    return other + "Thread 0x00007f02 (most recent call first):\n" + "\n".join(lines) + "\n"


BACKWARD = stack("/site/torch/autograd/graph.py:979 _engine_run_backward", "/site/torch/_tensor.py:623 backward")
COLLECTIVE = stack("/site/torch/distributed/distributed_c10d.py:1 all_reduce")
SLEEPING = stack("/home/me/train.py:31 wait_for_something")
AT_ITEM = stack()


def test_a_rank_in_a_collective_or_a_backward_pass_waits_and_one_elsewhere_does_not() -> None:
    assert who_waits({0: BACKWARD, 1: SLEEPING, 2: COLLECTIVE}) == {0: True, 1: False, 2: True}


def test_waits_without_a_frame_of_their_own_are_told_by_the_crowd() -> None:
    assert who_waits({0: AT_ITEM, 1: SLEEPING, 2: AT_ITEM}) == {0: True, 1: False, 2: True}


def test_nothing_is_told_where_no_place_stands_out() -> None:
    assert who_waits({0: AT_ITEM, 1: SLEEPING}) == {0: None, 1: None}
    assert who_waits({0: AT_ITEM, 1: AT_ITEM}) == {0: None, 1: None}


def test_a_rank_without_a_stack_is_unknown() -> None:
    text = "rank 1, process 12, state T\n\nNo stacks: a stopped process answers no signal.\n"
    assert who_waits({0: BACKWARD, 1: text, 2: ""}) == {0: True, 1: None, 2: None}
    assert training_frames(text) == ()
    assert who_waits({}) == {}

"""When a silent actor is killed: after its time, and with more patience each time."""

from ray_goodput.core.silence import answered, decide_kill, started


def test_an_actor_that_answers_is_left_alone_and_a_silent_one_killed_once_its_time_is_up() -> None:
    silence = answered(100.0)
    assert decide_kill(silence, 130.0, silent_after_s=30.0) == (False, silence)
    kill, after = decide_kill(silence, 130.1, silent_after_s=30.0)
    assert kill and after.kills == 1
    assert decide_kill(after, 131.0, silent_after_s=30.0) == (False, after)


def test_patience_doubles_with_each_kill_up_to_a_bound_and_begins_anew_with_an_answer() -> None:
    now, silence, waits = 0.0, answered(0.0), []
    for _ in range(8):
        began = now
        while True:
            now += 0.5
            kill, silence = decide_kill(silence, now, silent_after_s=30.0)
            if kill:
                break
        waits.append(now - began)
    assert waits == [30.5, 60.5, 120.5, 240.5, 480.5, 600.5, 600.5, 600.5]  # one that starts gets 60 s in any case
    assert answered(now).kills == 0


def test_a_process_that_starts_has_a_minute_to_answer_however_short_the_limit() -> None:
    assert not decide_kill(started(0.0), 59.0, silent_after_s=4.0)[0]
    kill, after = decide_kill(started(0.0), 61.0, silent_after_s=4.0)
    assert kill and after.starting
    assert not decide_kill(after, 120.0, silent_after_s=4.0)[0]
    assert decide_kill(answered(0.0), 5.0, silent_after_s=4.0)[0]

"""Who waits for whom, told from the stacks of all ranks. Pure: text in, a judgement out.

The text is what Python's `faulthandler` writes: for each thread its frames, the innermost first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_TRAINING = "run_in_session"
"""The function of ours that every training thread is in."""
_COLLECTIVES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/", "ray_goodput/train/world.py")
_INNERMOST = 3


def who_waits(stacks: Mapping[int, str]) -> dict[int, bool | None]:
    """For each rank: whether it waits for its peers, None if its stack does not tell.

    It does when the innermost frame of its training thread is one of torch's collectives or of a backward pass, which
    ends with one. Where the wait has no frame of its own (a device that waits for a peer's part), more than half of the
    ranks at one and the same place wait, and the others are what they wait for.
    """
    places = {rank: place for rank, text in stacks.items() if (place := training_frames(text))}
    judged: dict[int, bool | None] = {rank: None for rank in stacks}
    for rank, place in places.items():
        judged[rank] = any(part in place[0] for part in _COLLECTIVES)
    if places and not any(judged.values()):
        [(place, count)] = Counter(places.values()).most_common(1)
        crowd = count > len(places) / 2 and count < len(places)
        for rank, at in places.items():
            judged[rank] = at == place if crowd else None
    return judged


def training_frames(text: str) -> tuple[str, ...]:
    """The innermost frames of the training thread, as "file:line function"; empty if the text shows none."""
    for part in _THREAD.split(text):
        frames = [f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(part)]
        if any(frame.endswith(f" {_TRAINING}") for frame in frames):
            return tuple(frames[:_INNERMOST])
    return ()

"""When an actor that answers nothing is started anew. A pure rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MAX_PATIENCE_S = 600.0
_START_S = 60.0
"""A process that has just been started has this long to answer: it imports, and may read a storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What is known of one actor: since when it has not answered, whether its process has just been started, and how
    often it was killed since it last answered."""

    since_mono_s: float
    starting: bool = False
    kills: int = 0


def started(now_mono_s: float) -> Silence:
    """Its process is on its way."""
    return Silence(since_mono_s=now_mono_s, starting=True)


def answered(now_mono_s: float) -> Silence:
    """It has just answered."""
    return Silence(since_mono_s=now_mono_s)


def decide_kill(silence: Silence, now_mono_s: float, *, silent_after_s: float) -> tuple[bool, Silence]:
    """Whether to kill it now, and what is known of it afterwards.

    After each kill it gets twice as long, up to ten minutes: its new process may wait for something that is away (a
    coordinator that starts waits for the storage), and killing that again and again would help nobody.
    """
    patience_s = min(silent_after_s * 2**silence.kills, max(_MAX_PATIENCE_S, silent_after_s))
    if silence.starting:
        patience_s = max(patience_s, _START_S)
    if now_mono_s - silence.since_mono_s <= patience_s:
        return False, silence
    return True, replace(silence, since_mono_s=now_mono_s, starting=True, kills=silence.kills + 1)

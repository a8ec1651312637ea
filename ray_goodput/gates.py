"""Places in our own code where a drill may make a process wait, be slow, fail or end. Nothing happens there otherwise.

A process has gates only if `RAY_GOODPUT_DRILLS=1` was set where its Ray node was started. A rule is a JSON file
`<local dir>/drills/rules/<name>.json` on the node, which `ray_goodput.testing` writes; every rule ends by itself at
`until_at_s`, so a drill that dies leaves no fault behind. A process that comes to a gate for which a rule was made
leaves a mark `<local dir>/drills/marks/<name>-<number>.json` before anything happens to it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ray_goodput.config import environment
from ray_goodput.errors import GoodputError

_POLL_S = 0.01


class InjectedFaultError(RuntimeError):
    """What a drill raises in a train loop: a user's exception, as far as anyone can tell."""


class Action(StrEnum):
    """What happens to a process at a gate."""

    HOLD = "hold"  # until the rule is gone
    DELAY = "delay"  # `seconds` each time
    RAISE = "raise"
    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who is struck where.

    place: "join", "restore", "step", "stage", "store" or "disk".
    where: facts of the gate by name -> pattern of a file name (`*`, `?`).
    at_least: facts of the gate that are numbers by name -> their least value.
    until_at_s: wall clock at which the rule is over.
    times: how many passages on this node are struck, None for all.
    """

    place: str
    action: Action
    until_at_s: float
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    at_least: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0
    times: int | None = 1

    def strikes(self, place: str, facts: Mapping[str, object], now_at_s: float) -> bool:
        """Whether the rule is for a process with these `facts` at `place`. Pure."""
        if place != self.place or now_at_s >= self.until_at_s:
            return False
        for name, pattern in self.where.items():
            if name not in facts or not fnmatch.fnmatchcase(str(facts[name]), pattern):
                return False
        for name, least in self.at_least.items():
            value = facts.get(name)
            if not isinstance(value, int | float) or value < least:
                return False
        return True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Rule:
        return cls(**{**body, "action": Action(body["action"])})


def drills_folder() -> Path | None:
    """Where this node's rules and marks lie; None if the node has no gates."""
    surroundings = environment()
    return surroundings.local_dir / "drills" if surroundings.drills else None


def rule_path(folder: Path, name: str) -> Path:
    return folder / "rules" / f"{name}.json"


def mark_path(folder: Path, name: str, number: int) -> Path:
    return folder / "marks" / f"{name}-{number}.json"


_folder = functools.cache(drills_folder)


def gate(place: str, **facts: object) -> None:
    """A process passes `place`; without drills this does nothing and takes a fraction of a microsecond.

    Raises:
        InjectedFaultError: a rule says so.
    """
    folder = _folder()
    if folder is not None:
        obey(folder, place, facts)


def obey(folder: Path, place: str, facts: Mapping[str, object]) -> None:
    """Do what the rules of `folder` say to a process with these `facts` at `place`.

    Raises:
        InjectedFaultError: a rule says so.
    """
    for path in sorted(folder.glob("rules/*.json")):
        rule = _read(path)
        if rule is None or not rule.strikes(place, facts, time.time()):
            continue
        if rule.times is not None and not _claim(folder, path.stem, rule.times, place, facts):
            continue
        _act(rule, path, place)


def _read(path: Path) -> Rule | None:
    """None for a rule that is just gone, or not one of ours: a drill never breaks what it does not mean to."""
    try:
        return Rule.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _claim(folder: Path, name: str, times: int, place: str, facts: Mapping[str, object]) -> bool:
    """Leave a mark, unless `times` processes were here before; of several at once, each gets its own number."""
    body = {"pid": os.getpid(), "at_s": time.time(), "place": place, "facts": {k: str(v) for k, v in facts.items()}}
    for number in range(times):
        path = mark_path(folder, name, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp = path.with_suffix(f".{os.getpid()}.part")
            tmp.write_text(json.dumps(body))
            try:
                os.link(tmp, path)  # whole when it is there, and only one process gets it
                return True
            finally:
                tmp.unlink(missing_ok=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise GoodputError(f"The drill {name!r} cannot leave its mark in {path.parent}: {error}.") from error
    return False


def _act(rule: Rule, path: Path, place: str) -> None:
    if rule.action is Action.HOLD:
        while path.exists() and time.time() < rule.until_at_s:
            time.sleep(_POLL_S)
    elif rule.action is Action.DELAY:
        time.sleep(rule.seconds)
    elif rule.action is Action.RAISE:
        raise InjectedFaultError(f"Injected by a drill at {place!r}.")
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGKILL if rule.action is Action.KILL else signal.SIGSTOP)

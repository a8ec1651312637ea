"""What can be made to go wrong, and when. Pure: nothing is done here, and one seed gives the same faults every time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ray_goodput.errors import ConfigError

E = TypeVar("E", bound=StrEnum)


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    NODE_LOSS = "node-loss"
    SLOW_DISK = "slow-disk"
    SLOW_NETWORK = "slow-network"


class Target(StrEnum):
    """To whom."""

    WORKER = "worker"
    VAULT = "vault"
    COORDINATOR = "coordinator"
    SHARD_CACHE = "shard-cache"
    PREFETCH = "prefetch"
    RAYLET = "raylet"
    DRIVER = "driver"


class Phase(StrEnum):
    """While the run does what."""

    STEP = "step"
    STAGING = "staging"
    UPLOADING = "uploading"
    COMMITTING = "committing"
    RESTORING = "restoring"
    GROWING = "growing"


SLOW = (Kind.SLOW_DISK, Kind.SLOW_NETWORK)
_SLOW_FOR_S = 20.0
_TARGETS = {
    Kind.EXCEPTION: (Target.WORKER,),
    Kind.NODE_LOSS: (Target.RAYLET,),
    Kind.SLOW_DISK: (Target.WORKER, Target.VAULT),
    Kind.SLOW_NETWORK: (Target.WORKER, Target.VAULT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; README.md says what each field means.

    rank: which worker, or whose node; None: the injector's seed chooses.
    step: not before this step. phase: in this phase, None for at once (or at `step`).
    seconds: how long a process stays stopped (None: until somebody kills it), or how long a node is slow.
    delay_s: how much longer each call of a slow disk or network takes.
    """

    kind: Kind
    target: Target
    rank: int | None = None
    step: int | None = None
    phase: Phase | None = None
    seconds: float | None = None
    delay_s: float = 0.5

    def __post_init__(self) -> None:
        allowed = _TARGETS.get(self.kind, tuple(Target))
        if self.target not in allowed:
            raise ConfigError(f"{self.kind}:{self.target} makes no sense: {self.kind} is for {_listed(allowed)}.")
        for name in ("rank", "step", "seconds"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"The fault {self.kind}:{self.target} has {name}={value}: it must not be below 0.")
        if self.delay_s <= 0:
            raise ConfigError(f"The fault {self.kind}:{self.target} has delay={self.delay_s}: it must be above 0.")
        if self.phase not in (None, Phase.STEP) and self.kind not in (Kind.KILL, Kind.STOP, Kind.NODE_LOSS):
            raise ConfigError(f"{self.kind} has no phase {self.phase}: only kill, stop and node-loss have.")

    @property
    def slow_for_s(self) -> float:
        """How long a slow disk or network stays slow."""
        return _SLOW_FOR_S if self.seconds is None else self.seconds

    @property
    def needs_gates(self) -> bool:
        """Whether it can only be injected where the gates are open (`RAY_GOODPUT_DRILLS=1`)."""
        return self.phase is not None or self.kind in (Kind.EXCEPTION, *SLOW)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that `kill:worker:rank=1:step=40` and the like describe.

        Raises:
            ConfigError: not readable, or senseless; the message says what is possible.
        """
        kind, _, rest = text.strip().partition(":")
        target, *fields = rest.split(":") if rest else [""]
        values: dict[str, float] = {}
        phase: Phase | None = None
        for one in fields:
            name, equals, value = one.partition("=")
            if name == "phase" and equals:
                phase = _member(Phase, value, text)
                continue
            try:
                if name not in ("rank", "step", "seconds", "delay") or not equals:
                    raise ValueError
                values[name] = int(value) if name in ("rank", "step") else float(value)
            except ValueError:
                raise ConfigError(
                    f"Cannot read {one!r} in the fault {text!r}: write rank=N, step=N, seconds=S, delay=S or phase=..."
                ) from None
        return cls(
            kind=_member(Kind, kind, text),
            target=_member(Target, target, text),
            rank=None if "rank" not in values else int(values["rank"]),
            step=None if "step" not in values else int(values["step"]),
            phase=phase,
            seconds=values.get("seconds"),
            delay_s=values.get("delay", 0.5),
        )

    def __str__(self) -> str:
        parts = [self.kind.value, self.target.value]
        parts += [f"{name}={value}" for name in ("rank", "step") if (value := getattr(self, name)) is not None]
        parts += [f"phase={self.phase.value}"] if self.phase is not None else []
        parts += [f"seconds={self.seconds:g}"] if self.seconds is not None else []
        parts += [f"delay={self.delay_s:g}"] if self.kind in SLOW else []
        return ":".join(parts)


def random_faults(
    *,
    seed: int,
    mtbf_s: float,
    targets: Sequence[str] = ("worker", "vault", "coordinator", "shard-cache", "prefetch"),
    kinds: Sequence[str] = ("kill",),
) -> Iterator[tuple[float, Fault]]:
    """(seconds to wait, fault) without end: a Poisson process of mean time `mtbf_s` between faults.

    Of the pairs of `kinds` and `targets` those that make sense are equally likely. What is stopped goes on after 5 to
    20 s, as in a live migration or a frozen disk.

    Raises:
        ConfigError: an unknown name, no pair that makes sense, or a mean time that is not above 0.
    """
    if mtbf_s <= 0:
        raise ConfigError(f"The mean time between faults is {mtbf_s} s: it must be above 0.")
    pairs = [
        (kind, target)
        for kind in (_member(Kind, k, k) for k in kinds)
        for target in (_member(Target, t, t) for t in targets)
        if target in _TARGETS.get(kind, tuple(Target))
    ]
    if not pairs:
        raise ConfigError(f"No fault is of the kinds {_listed(kinds)} and for the targets {_listed(targets)}.")
    chance = random.Random(seed)

    def draw() -> Iterator[tuple[float, Fault]]:
        while True:
            pause_s = chance.expovariate(1.0 / mtbf_s)
            kind, target = chance.choice(pairs)
            seconds = round(chance.uniform(5.0, 20.0), 1) if kind is Kind.STOP or kind in SLOW else None
            yield pause_s, Fault(kind=kind, target=target, seconds=seconds)

    return draw()


def _member(kind: type[E], text: str, whole: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"Unknown {kind.__name__.lower()} {text!r} in {whole!r}: known are {_listed(kind)}."
        ) from None


def _listed(names: Sequence[str] | type[StrEnum]) -> str:
    return ", ".join(str(name) for name in names)

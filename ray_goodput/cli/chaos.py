"""`ray-goodput chaos`: make things go wrong in a run that is being trained, and say what was done."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options, seconds
from ray_goodput.config import StoreSpec
from ray_goodput.errors import ConfigError, RunError

if TYPE_CHECKING:
    from ray_goodput.testing import Fault, FaultInjector, LiveRun

_GONE_AFTER_S = 30.0
_POLL_S = 1.0


def chaos(
    run: Annotated[str, typer.Option(help="Name of the run, as in RunConfig(name=...).")],
    address: Annotated[str, typer.Option(help="Ray cluster on which it is trained.")] = "auto",
    fault: Annotated[
        list[str] | None,
        typer.Option(help="A fault, for example kill:worker:rank=1:step=40. Several are injected one after the other."),
    ] = None,
    mtbf: Annotated[str | None, typer.Option(help="Random faults, this long apart on average: 20, 90s, 10min.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same random faults.")] = 0,
    count: Annotated[int | None, typer.Option(help="Stop after so many random faults.", min=1)] = None,
    targets: Annotated[
        str, typer.Option(help="Whom random faults may strike: also raylet and driver.")
    ] = "worker,vault,coordinator,shard-cache,prefetch",
    kinds: Annotated[str, typer.Option(help="What random faults may be: also stop, node-loss, slow-network.")] = "kill",
    timeout: Annotated[str, typer.Option(help="How long to wait for the moment of a fault.")] = "120s",
    storage: Annotated[
        str | None, typer.Option(help="The run's folder; only where two storages have a run of this name.")
    ] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Kill, stop or slow down parts of a run on a Ray cluster, to see that it goes on."""
    from ray_goodput.cli.stdout import only_ours
    from ray_goodput.testing.faults import Fault

    faults = [Fault.parse(text) for text in fault or []]
    if bool(faults) == (mtbf is not None):
        raise ConfigError("Say what is to go wrong: either --fault (once or several times), or --mtbf.")
    mtbf_s = seconds("--mtbf", mtbf) if mtbf is not None else None
    options = parse_options(storage_options)
    with only_ours() as out:
        import ray

        from ray_goodput.testing import FaultInjector, find_run, random_faults

        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise RunError(f"No Ray cluster can be reached at {address!r}: {error}") from None
        try:
            found = find_run(run, StoreSpec(uri=storage, options=options) if storage is not None else None)
            say = _printer(sys.stderr if as_json else out)
            injector = FaultInjector(found, seed=seed, say=say)
            if mtbf_s is not None:
                drawn = random_faults(seed=seed, mtbf_s=mtbf_s, targets=_names(targets), kinds=_names(kinds))
                plan = _pauses(found, drawn, count)
            else:
                plan = iter(faults)
            strikes, ended = [], "done"
            try:
                for strike in _inject(injector, plan, seconds("--timeout", timeout), must=mtbf_s is None, say=say):
                    strikes.append(strike)
            except KeyboardInterrupt:  # the way to end random faults: what was done is told all the same
                ended = "interrupted"
            if mtbf_s is not None and ended == "done":
                ended = "count" if found.status() is not None else "run over"
        finally:
            ray.shutdown()
        if as_json:
            print(json.dumps({"run": run, "seed": seed, "ended": ended, "faults": strikes}), file=out)


def _inject(
    injector: FaultInjector, plan: Iterator[Fault], timeout_s: float, *, must: bool, say: Any
) -> Iterator[dict[str, Any]]:
    """What was done, one after the other. A fault whose moment does not come is an error if `must`, else only said."""
    for fault in plan:
        try:
            strike = injector.inject(fault, timeout_s=timeout_s)
        except RunError as error:
            if must:
                raise
            say(f"left out: {error}")
            continue
        whom = "the node" if strike.pid == 0 else f"process {strike.pid}"
        say(f"step {strike.step}, attempt {strike.attempt}: {strike.fault} struck {whom} on {strike.node_id[:8]}")
        yield strike.to_dict()


def _pauses(run: LiveRun, drawn: Iterator[tuple[float, Fault]], count: int | None) -> Iterator[Fault]:
    """Each fault at its time, until there were `count` or the run is over."""
    due = time.monotonic()
    for number, (pause_s, fault) in enumerate(drawn):
        if number == count:
            return
        due += pause_s
        gone_since: float | None = None
        while time.monotonic() < due or gone_since is not None:
            now = time.monotonic()
            gone_since = None if run.status() is not None else gone_since or now
            if gone_since is not None and now - gone_since > _GONE_AFTER_S:
                return
            time.sleep(min(_POLL_S, max(0.05, due - now)))
        yield fault


def _printer(stream: TextIO) -> Any:
    return lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", file=stream, flush=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]

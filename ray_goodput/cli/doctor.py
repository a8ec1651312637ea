"""`ray-goodput doctor`: known traps in the surroundings and in a run, what each costs and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options
from ray_goodput.errors import ConfigError, GoodputError

if TYPE_CHECKING:
    from ray_goodput.cli.doctor_node import NodeFacts
    from ray_goodput.config import StoreSpec
    from ray_goodput.goodput.doctor import Finding

_CLUSTER_TIMEOUT_S = 60.0
_SIGNS = {"problem": "PROBLEM", "note": "note", "ok": "ok"}


def doctor(
    run: Annotated[str | None, typer.Option(help="A run's folder: STORAGE_PATH/RUN, local or s3://.")] = None,
    address: Annotated[
        str | None, typer.Option(help='A Ray cluster, for example "auto": every node of it is looked at.')
    ] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Look for known traps on this machine, on a cluster's nodes and in a run; exit code 1 if there is a problem."""
    from ray_goodput.cli.stdout import only_ours
    from ray_goodput.config import StoreSpec
    from ray_goodput.goodput.doctor import worst_first

    spec = StoreSpec(uri=run, options=parse_options(storage_options)) if run is not None else None
    with only_ours() as out:
        found = worst_first(_examine(spec, address))
        if as_json:
            counts = {level: sum(f.level == level for f in found) for level in _SIGNS}
            print(json.dumps({"findings": [f.to_dict() for f in found], **counts}), file=out)
        else:
            print(render(found), file=out)
    if any(f.level == "problem" for f in found):
        raise typer.Exit(1)


def render(found: list[Finding]) -> str:
    """Findings as text: what is wrong with its cost and cure, what is right in one line each."""
    lines: list[str] = []
    for f in found:
        where = f" [{f.where}]" if f.where else ""
        lines.append(f"{_SIGNS[f.level]:<8} {f.check}{where}: {f.found}")
        if f.costs:
            lines.append(f"{'':<8} costs: {f.costs}")
        if f.mend:
            lines.append(f"{'':<8} mend:  {f.mend}")
    problems, notes = (sum(f.level == level for f in found) for level in ("problem", "note"))
    lines.append(f"\n{problems} problems, {notes} notes, {len(found) - problems - notes} checks passed")
    return "\n".join(lines)


def _examine(spec: StoreSpec | None, address: str | None) -> list[Finding]:
    from ray_goodput.cli.doctor_node import gather, judge
    from ray_goodput.cli.doctor_storage import try_storage
    from ray_goodput.goodput.doctor import diagnose_run
    from ray_goodput.goodput.run_files import RunReader
    from ray_goodput.goodput.run_view import view_run
    from ray_goodput.storage import open_store

    nodes = _cluster(address) if address is not None else [gather()]
    staging = _staging_bytes(spec) if spec is not None else None
    found = [finding for node in nodes for finding in judge(node, staging_bytes=staging)]
    if spec is not None:
        view = view_run(RunReader(open_store(spec)).read())
        found += diagnose_run(view, now_s=time.time())
        found += try_storage(spec)
    return found


def _staging_bytes(spec: StoreSpec) -> int | None:
    """Shared memory that a node needs if it holds all ranks: two slots of the newest checkpoint's size."""
    from ray_goodput.cli.checkpoints import list_checkpoints

    try:
        rows = list_checkpoints(spec)
    except GoodputError:  # no checkpoint yet: the run's own checks say what is wrong
        return None
    sizes = [row.size_bytes for row in rows if row.state == "complete"]
    return 2 * sizes[0] if sizes else None


def _cluster(address: str) -> list[NodeFacts]:
    """The facts of every living node, told by a task on each."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ray_goodput.cli.doctor_node import gather_with_time

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"There is no Ray cluster at --address {address!r}: {error}") from None
    try:
        ask: Any = ray.remote(gather_with_time)
        facts: list[NodeFacts] = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            pin = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            try:
                ray.get(ask.options(num_cpus=0, scheduling_strategy=pin).remote(), timeout=_CLUSTER_TIMEOUT_S)
                asked = time.time()  # the worker is warm now: the second answer is quick, so its clock can be compared
                told, at_s = ray.get(
                    ask.options(num_cpus=0, scheduling_strategy=pin).remote(), timeout=_CLUSTER_TIMEOUT_S
                )
                middle = (asked + time.time()) / 2
            except (RayError, TimeoutError) as error:
                raise ConfigError(f"The node {node['NodeManagerHostname']} does not run tasks: {error}") from None
            facts.append(dataclasses.replace(told, node=node["NodeManagerHostname"], clock_ahead_s=at_s - middle))
        return facts
    finally:
        ray.shutdown()

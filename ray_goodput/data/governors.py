"""One request governor for each store that a process reads data from, whoever in the process reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from ray_goodput.config import StoreSpec
from ray_goodput.core.request_rate import RequestRecord
from ray_goodput.storage.governor import RequestCounts, RequestGovernor

_mutex = threading.Lock()
_governors: dict[tuple[int, str], RequestGovernor] = {}


def governor_for(spec: StoreSpec, *, hedge_after_s: float | None = None) -> RequestGovernor:
    """The governor of the server and bucket behind `spec`; another after a fork. The last `hedge_after_s` counts."""
    governor = _governor(_server(spec))
    governor.hedge_after_s = hedge_after_s
    return governor


def request_counts() -> RequestCounts:
    """Requests of this process for data, over all stores."""
    counts = RequestCounts()
    for governor in _own().values():
        counts += governor.counts
    return counts


def concurrencies() -> dict[str, int]:
    """How many requests each server may be asked at a time."""
    return {server: governor.concurrency for server, governor in _own().items()}


def take_records() -> dict[str, list[RequestRecord]]:
    """What became of the requests of this process since the last call, by server; for who keeps the node's rates."""
    return {server: governor.take_records() for server, governor in _own().items()}


def note_records(records: Mapping[str, list[RequestRecord]]) -> None:
    """The rates of this process follow what other processes of the node have seen."""
    for server, of_server in records.items():
        governor = _governor(server)
        for seen in of_server:
            governor.note(seen)


def set_shares(shares: Mapping[str, int]) -> None:
    """This process has at most so many requests under way to each server."""
    for server, share in shares.items():
        _governor(server).set_share(share)


def _governor(server: str) -> RequestGovernor:
    key = (os.getpid(), server)
    with _mutex:
        if key not in _governors:
            _governors[key] = RequestGovernor()
        return _governors[key]


def _own() -> dict[str, RequestGovernor]:
    with _mutex:
        return {server: governor for (pid, server), governor in _governors.items() if pid == os.getpid()}


def _server(spec: StoreSpec) -> str:
    """What refuses as one: the bucket at its endpoint."""
    bucket = "/".join(spec.uri.split("/")[:3])
    return f"{bucket} at {spec.options.get('endpoint_url', '')}"


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)

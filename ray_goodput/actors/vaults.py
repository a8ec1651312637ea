"""The vaults of a run, seen from another process: which answer, how to call them, which share a fate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, vault_name
from ray_goodput.actors.remote import RemoteProxy

FAILURE_DOMAIN_LABELS = ("ray-goodput/failure-domain", "ray.io/availability-zone", "ray.io/availability-region")
"""Labels of a Ray node that say with which others it fails; the first one that it has counts."""

_PING_TIMEOUT_S = 3.0
_CALL_TIMEOUT_S = 30.0


def connect_vault(key: str, node_id: str) -> Any:
    """The vault of a node as if it were the plain object; every call is bounded in time."""
    return RemoteProxy(vault_name(key, node_id), timeout_s=_CALL_TIMEOUT_S)


def answering_vaults(key: str, nodes: Collection[str]) -> set[str]:
    """Those of the nodes whose vaults answer within a few seconds."""
    pings = {}
    for node in nodes:
        try:
            pings[ray.get_actor(vault_name(key, node), namespace=NAMESPACE).ping.remote()] = node
        except (ValueError, RayError):
            continue  # there is none
    if not pings:
        return set()
    ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_TIMEOUT_S)
    return {pings[ref] for ref in ready if _answered(ref)}


def failure_domains(key: str) -> dict[str, str]:
    """Living node with a vault of this run -> its failure domain, "" where its labels say nothing."""
    domains = {}
    for node in ray.nodes():
        if node["Alive"] and _has_vault(key, node["NodeID"]):
            labels = node.get("Labels") or {}
            domains[node["NodeID"]] = next((labels[n] for n in FAILURE_DOMAIN_LABELS if n in labels), "")
    return domains


def _has_vault(key: str, node_id: str) -> bool:
    try:
        ray.get_actor(vault_name(key, node_id), namespace=NAMESPACE)
    except (ValueError, RayError):
        return False
    return True


def _answered(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except (RayError, TimeoutError):
        return False
    return True

"""The agents of all nodes as one: calls that outlive a node's end, and a rule at the gates of every node."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.errors import RunError
from ray_goodput.gates import Rule
from ray_goodput.testing.agent import start_agent

_TIMEOUT_S = 30.0
_WAIT_SLICE_S = 5.0


class Agents:
    """One agent a node, made when first needed, owned by this process. Not thread-safe."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}
        self._names = (f"drill-{os.getpid()}-{n}" for n in itertools.count())

    def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """The reference of a call's answer."""
        if node not in self._agents:
            self._agents[node] = start_agent(node)
        return getattr(self._agents[node], method).remote(*args, **kwargs)

    def ask(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """The answer of a node's agent.

        Raises:
            RunError: the process that was meant, or the node, is not there any more.
        """
        try:
            return ray.get(self.call(node, method, *args, **kwargs), timeout=_TIMEOUT_S)
        except ProcessLookupError as error:
            why = str(error).strip().splitlines()[-1]  # the rest is Ray's account of where it was raised
            raise RunError(f"What was to be struck on node {node} is gone already ({why}).") from error
        except (RayError, TimeoutError) as error:
            self.forget(node)
            raise RunError(f"Node {node} cannot be reached ({type(error).__name__}).") from error

    def tell(self, node: str, method: str, *args: Any, timeout_s: float = _TIMEOUT_S, **kwargs: Any) -> None:
        """A call after which the agent may not be able to answer; it is forgotten."""
        with contextlib.suppress(RayError):
            ray.get(self.call(node, method, *args, **kwargs), timeout=timeout_s)
        self.forget(node)

    def forget(self, node: str) -> None:
        self._agents.pop(node, None)

    @contextlib.contextmanager
    def rule(self, rule: Rule) -> Iterator[PlacedRule]:
        """Inside, the rule holds on every node, also on those that `wait_mark` finds later."""
        placed = PlacedRule(self, next(self._names), rule)
        placed.place(alive_nodes())
        try:
            yield placed
        finally:
            placed.drop()


class PlacedRule:
    """A rule that holds on some nodes; see `Agents.rule`."""

    def __init__(self, agents: Agents, name: str, rule: Rule) -> None:
        self._agents = agents
        self._name = name
        self._rule = rule
        self._nodes: set[str] = set()

    def place(self, nodes: set[str]) -> None:
        for node in nodes - self._nodes:
            with contextlib.suppress(RunError):  # a node that is just going
                self._agents.ask(node, "set_rule", self._name, self._rule)
                self._nodes.add(node)

    def wait_mark(self, deadline: float) -> bool:
        """Whether some process comes to the rule's gate before `deadline` (of the monotonic clock)."""
        calls: dict[Any, str] = {}
        while time.monotonic() < deadline:
            self.place(alive_nodes())
            for node in self._nodes - set(calls.values()):
                calls[self._agents.call(node, "wait_mark", self._name, _WAIT_SLICE_S)] = node
            ready, _ = ray.wait(list(calls), timeout=1.0)
            for call in ready:
                node = calls.pop(call)
                try:
                    if ray.get(call) is not None:
                        return True
                except RayError:
                    self._nodes.discard(node)
                    self._agents.forget(node)
        return False

    def drop(self) -> None:
        """Whoever is held goes on. On a node that cannot be reached the rule ends by itself."""
        for node in self._nodes:
            with contextlib.suppress(RunError):
                self._agents.ask(node, "drop_rule", self._name)


def alive_nodes() -> set[str]:
    """The nodes that Ray takes for alive."""
    nodes: list[Mapping[str, Any]] = ray.nodes()
    return {str(node["NodeID"]) for node in nodes if node["Alive"]}

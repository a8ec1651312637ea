from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_goodput.checkpoint.deferred import DeferredCopies
from ray_goodput.errors import StagingFullError


class DeviceCopies:
    """Stands for a `PendingStage` on a device: what `finish` reads is what the copy would have held at the latest."""

    def __init__(self, param: torch.Tensor, on_device: bool = True, full: bool = False) -> None:
        self.on_device = on_device
        self._param = param
        self._full = full

    def finish(self) -> Any:
        self.on_device = False
        if self._full:
            raise StagingFullError("no room for the sidecar")
        return self._param.detach().clone()


@pytest.fixture
def param() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


def take(copies: DeferredCopies, pending: Any, optimizer: Any) -> None:
    copies.take(pending, optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_device_copies_are_handed_over_just_before_the_optimizer_changes_them(
    param: torch.nn.Parameter, several: bool
) -> None:
    handed: list[Any] = []
    copies = DeferredCopies(handed.append)
    optimizer = torch.optim.SGD([param], lr=0.5)
    for number in range(3):
        take(copies, DeviceCopies(param), [optimizer] if several else optimizer)
        assert len(handed) == number
        before = param.detach().clone()
        optimizer.step()
        assert torch.equal(handed[-1], before) and not torch.equal(param, before)
    copies.close()
    optimizer.step()
    assert len(handed) == 3


def test_finished_copies_are_handed_over_at_once(param: torch.nn.Parameter) -> None:
    handed: list[Any] = []
    take(DeferredCopies(handed.append), DeviceCopies(param, on_device=False), torch.optim.SGD([param], lr=0.5))
    assert len(handed) == 1


@pytest.mark.parametrize("optimizer", ["none", "graph", "foreign"])
def test_copies_that_no_hook_protects_are_waited_for(param: torch.nn.Parameter, optimizer: str) -> None:
    handed: list[Any] = []
    kinds = {"none": None, "graph": torch.optim.Adam([param], capturable=True), "foreign": object()}
    take(DeferredCopies(handed.append), DeviceCopies(param), kinds[optimizer])
    assert len(handed) == 1


def test_settling_twice_hands_over_once(param: torch.nn.Parameter) -> None:
    handed: list[Any] = []
    copies = DeferredCopies(handed.append)
    take(copies, DeviceCopies(param), torch.optim.SGD([param], lr=0.5))
    copies.settle()
    copies.settle()
    assert len(handed) == 1


def test_a_slice_that_cannot_be_finished_is_said_and_training_goes_on(
    param: torch.nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    handed: list[Any] = []
    copies = DeferredCopies(handed.append)
    optimizer = torch.optim.SGD([param], lr=0.5)
    take(copies, DeviceCopies(param, full=True), optimizer)
    optimizer.step()
    assert handed == [] and "no room for the sidecar" in caplog.text

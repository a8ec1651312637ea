"""Laws of the actors' beginnings that need no Ray: who waits for the storage, and who says at once that it is away."""

from __future__ import annotations

import pytest

from ray_goodput.actors.factories import open_patiently, vault_class
from ray_goodput.errors import StorageAccessError, StorageError


class Opening:
    """Opens at the call after `failures`."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.opened = False

    def open(self) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.opened = True


def test_a_restarted_coordinator_waits_for_the_storage_with_growing_pauses() -> None:
    pauses: list[float] = []
    away = Opening(*[StorageError("503")] * 6, StorageAccessError("403"))
    open_patiently(away, first_life=False, sleep=pauses.append)
    assert away.opened
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_at_the_start_of_a_run_a_storage_that_cannot_be_read_is_said_at_once() -> None:
    pauses: list[float] = []
    with pytest.raises(StorageError, match="503"):
        open_patiently(Opening(StorageError("503")), first_life=True, sleep=pauses.append)
    assert pauses == []


def test_what_is_no_storage_failure_is_never_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        open_patiently(Opening(ZeroDivisionError()), first_life=False, sleep=lambda s: None)


def test_a_vaults_ping_and_hurry_have_threads_that_no_upload_can_hold() -> None:
    meta = vault_class().__ray_metadata__
    groups = meta.method_meta.concurrency_group_for_methods
    assert {name for name, group in groups.items() if group == groups["ping"]} == {"ping", "look", "kill", "hurry"}
    assert meta.concurrency_groups[groups["ping"]] >= 1


def test_copies_between_vaults_have_threads_that_no_upload_can_hold() -> None:
    meta = vault_class().__ray_metadata__
    groups = meta.method_meta.concurrency_group_for_methods
    assert {"hold", "receive", "received", "read"} <= set(groups)

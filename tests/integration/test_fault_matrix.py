"""F1: whoever is killed in whatever phase, the run goes on by itself, and ends as if nothing had happened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fault_matrix
from ray_goodput.testing.faults import Kind, Phase

SEED = 1


def test_the_sample_has_every_victim_and_every_phase_of_a_run_that_keeps_its_size() -> None:
    cells = fault_matrix.sample(SEED)
    assert len(cells) >= 12 and len(set(cells)) == len(cells)
    assert {cell.victim for cell in cells} == set(fault_matrix.VICTIMS)
    assert {cell.phase for cell in cells} == set(Phase) - {Phase.GROWING}
    assert all(fault_matrix.possible(cell.victim, cell.phase) for cell in cells)
    assert cells == fault_matrix.sample(SEED) != fault_matrix.sample(SEED + 1)


def test_the_matrix_has_everyone_in_every_phase_in_a_run_that_can_be_in_it() -> None:
    cells = fault_matrix.all_cells()
    assert len(set(cells)) == len(cells)
    stopped = {(cell.victim, cell.phase) for cell in cells if cell.kind is Kind.STOP}
    assert {victim for victim, _ in stopped} == set(fault_matrix.VICTIMS)
    assert {phase for _, phase in stopped} == set(Phase)
    pairs = {(cell.victim, cell.phase) for cell in cells if cell.kind is Kind.KILL}
    assert pairs == {(v, p) for v in fault_matrix.VICTIMS for p in Phase if fault_matrix.possible(v, p)}
    assert len(pairs) == len(fault_matrix.VICTIMS) * len(Phase) - 1
    assert all(cell.arm.elastic for cell in cells if cell.phase is Phase.GROWING)
    assert {cell.arm.name for cell in cells if cell.phase is not Phase.GROWING} == {"fsdp2", "ddp", "elastic"}


@pytest.mark.timeout(900)
def test_a_sample_of_the_matrix_ends_as_if_nothing_had_happened() -> None:
    """In a process of its own, as `make fault-matrix` runs it: it has its own Ray cluster and its own Ray driver."""
    tests = Path(__file__).parent.parent
    folders = [str(folder) for folder in (tests.parent, tests, tests / "integration")]
    command = [sys.executable, fault_matrix.__file__, "--sample", str(SEED)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    matrix = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = matrix.communicate(timeout=850)
    finally:
        matrix.terminate()  # it stops its cluster first
        matrix.wait(30)
    assert matrix.returncode == 0, said[-6000:]
    for victim, (target, _) in fault_matrix.VICTIMS.items():
        assert re.search(rf"kill:{target.value}:.*a new step after", said), f"{victim} was never struck"

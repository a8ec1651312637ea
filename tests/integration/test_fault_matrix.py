"""F1: whoever is killed in whatever phase, the run goes on by itself, and ends as if nothing had happened."""

import fault_matrix
from ray_goodput.testing.faults import Phase

SEED = 1


def test_the_sample_has_every_victim_and_every_phase_of_a_run_that_keeps_its_size() -> None:
    cells = fault_matrix.sample(SEED)
    assert len(cells) >= 12 and len(set(cells)) == len(cells)
    assert {cell.victim for cell in cells} == set(fault_matrix.VICTIMS)
    assert {cell.phase for cell in cells} == set(Phase) - {Phase.GROWING}
    assert cells == fault_matrix.sample(SEED) != fault_matrix.sample(SEED + 1)


def test_the_matrix_has_everyone_in_every_phase_in_a_run_that_can_be_in_it() -> None:
    cells = fault_matrix.all_cells()
    assert len(set(cells)) == len(cells)
    pairs = {(cell.victim, cell.phase) for cell in cells}
    assert pairs == {(victim, phase) for victim in fault_matrix.VICTIMS for phase in Phase}
    assert all(cell.arm.elastic for cell in cells if cell.phase is Phase.GROWING)
    assert {cell.arm.name for cell in cells if cell.phase is not Phase.GROWING} == {"fsdp2", "ddp", "elastic"}

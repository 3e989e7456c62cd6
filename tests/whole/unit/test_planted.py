"""The faults of ``make planted`` stand in the code as it is."""

import pytest

from tests.planted.faults import Fault, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.breaks)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert fault.planted()

"""A step of every task and model on a device that is not the CPU: nothing lies on the wrong device, nothing waits."""

from __future__ import annotations

import pytest

from tests.elsewhere import steps
from tests.warm import begin_function


@pytest.mark.parametrize("name", list(steps.CASES))
def test_a_step_elsewhere_mixes_no_devices_and_reads_nothing(name):
    command = begin_function(steps.train, name)
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 0, said

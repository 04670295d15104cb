"""Whole runs on a device that is not the CPU find what runs on the CPU find, interrupted or not."""

from __future__ import annotations

import pytest

from tests.elsewhere import runs
from tests.params import at_once
from tests.warm import begin_function


@pytest.mark.parametrize("name", at_once(of=runs.CASES, seconds=6))
def test_a_run_elsewhere_that_is_resumed_equals_one_on_the_cpu(name, tmp_path):
    command = begin_function(runs.train, name, tmp_path)
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 0, said

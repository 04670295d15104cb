"""A step of every task and model on a device that is not the CPU: nothing lies on the wrong device,
nothing waits.
"""

from __future__ import annotations

import json

import pytest

from tests.elsewhere import steps
from tests.warm import begin_function


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traceback of each case, empty where it held; all cases train in one process, where the
    device is added.
    """
    folder = tmp_path_factory.mktemp("steps")
    command = begin_function(steps.train_all, folder, FLATOUT_CACHE=str(folder / "cache"))
    said, _ = command.communicate(timeout=280)
    assert command.returncode == 0, said
    found: dict[str, str] = json.loads((folder / steps.FAILURES).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", list(steps.CASES))
def test_a_step_elsewhere_mixes_no_devices_and_reads_nothing(name, failures):
    assert failures[name] == ""

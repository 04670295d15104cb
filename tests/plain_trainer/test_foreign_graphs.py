"""Captured steps of modules that know nothing of flatout: equal to a Trainer without the fast loop,
or left plain with the true reason.

They train on the device elsewhere, which captures as a CUDA graph does.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.elsewhere import foreign
from tests.elsewhere.test_graphs import results_of
from tests.plain_trainer.foreign_modules import PLAIN, SERVED


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case gives; all train in one process, where the device is added."""
    return results_of(foreign.compare_all, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("name", SERVED)
def test_replays_of_any_module_leave_what_a_plain_trainer_leaves(name, compared):
    found = compared[name]
    assert "error" not in found, found["error"]
    assert found["replayed"] >= 12, found["said"]
    assert found["has_equal_weights"]
    # losses, logged values, outputs, gradients, counters of each batch
    assert found["differing"] == []
    assert found["different_losses"] == found["steps"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_module_that_a_replay_would_not_repeat_stays_plain_with_the_reason(name, compared):
    found = compared[name]
    assert "error" not in found, found["error"]
    assert found["replayed"] == 0
    assert PLAIN[name].reason in found["said"]
    if "steps" in found:
        assert found["has_equal_weights"]
        assert found["differing"] == []

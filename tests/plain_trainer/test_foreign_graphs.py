"""Captured steps of modules that know nothing of flatout: equal to a Trainer without the fast loop,
or left plain with the true reason.

They train on the device elsewhere, which captures as a CUDA graph does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.data.batches.signatures import Signatures
from tests.elsewhere import foreign
from tests.elsewhere.test_graphs import results_of
from tests.plain_trainer.foreign_modules import PLAIN, SERVED, Named, Typed


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case gives; all train in one process, where the device is added."""
    return results_of(foreign.compare_all, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("name", SERVED)
def test_replays_of_any_module_leave_what_a_plain_trainer_leaves(name, compared):
    found = compared[name]
    assert "error" not in found, found["error"]
    assert found["replayed"] >= SERVED[name].least, found["said"]
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


def test_a_training_of_any_module_is_resumed_amid_replays_to_the_same_bits(compared):
    found = compared[foreign.RESUMED]
    assert found["losses"] == 6  # of the last epoch
    assert found["has_equal_losses"] and found["has_equal_weights"]
    assert min(found["replayed"]) > 0


def test_batches_share_a_signature_if_a_captured_step_serves_both():
    signatures = Signatures(torch.device("cpu"))
    rows = torch.zeros(2, 3)
    like = [
        {"rows": torch.ones(2, 3), "scale": 0.5},
        {"rows": rows, "scale": 1},
        {"rows": rows, "scale": True},
        {"rows": rows.T.contiguous().T, "scale": 0.5},
        {"rows": rows.double(), "scale": 0.5},
        [rows, 0.5],
        (rows, 0.5),
    ]
    known = {signatures.shape_of(batch) for batch in [{"rows": rows, "scale": 0.5}, *like]}
    assert len(known) == len(like)  # the first two are alike
    assert signatures.shape_of([rows, {1}]) == "that hold a set"
    assert signatures.shape_of(rows.to_sparse()) == "with sparse tensors"
    wants = signatures.shape_of([torch.zeros(2, requires_grad=True)])
    assert wants == "with tensors that want a gradient"


def test_a_buffer_has_the_containers_of_its_batch_and_takes_later_tensors():
    signatures = Signatures(torch.device("cpu"))
    first = Typed(torch.zeros(2), [Named(torch.ones(3), torch.ones(1))])
    shape = signatures.shape_of(first)
    assert not isinstance(shape, str)
    buffer = signatures.make(shape, first)
    later = Typed(torch.full((2,), 5.0), [Named(torch.full((3,), 6.0), torch.full((1,), 7.0))])
    signatures.fill(buffer, later)
    assert str(buffer) == str(later)
    assert first.inputs.sum() == 0

"""Checkpoints are folders of tensors and JSON, whole or refused."""

from __future__ import annotations

import json

import pytest
import torch

from flatout.checkpoints.folder import FolderCheckpointIO, read_weights
from flatout.errors import UserError
from tests.same import same

STATE = {
    "state_dict": {"a.weight": torch.randn(3, 2), "b": torch.tensor(4)},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.99)}]}
    ],
    "epoch": 2,
    "loops": {"fit": {"done": True, "name": None, "share": 0.5}},
    "~odd": "key",
}


def test_what_was_saved_is_loaded(tmp_path):
    FolderCheckpointIO().save_checkpoint(STATE, tmp_path / "step-3")
    assert same(FolderCheckpointIO().load_checkpoint(tmp_path / "step-3"), STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]


def test_a_flipped_bit_is_refused(tmp_path):
    FolderCheckpointIO().save_checkpoint(STATE, tmp_path / "step-3")
    file = tmp_path / "step-3" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(
        UserError, match=r"damaged: tensors.safetensors differ from what was written"
    ):
        FolderCheckpointIO().load_checkpoint(tmp_path / "step-3")


def test_half_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "step-3").mkdir()
    with pytest.raises(UserError, match="not a whole checkpoint"):
        FolderCheckpointIO().load_checkpoint(tmp_path / "step-3")


def test_nothing_is_pickled(tmp_path):
    with pytest.raises(UserError, match="checkpoint: value /epoch is a complex"):
        FolderCheckpointIO().save_checkpoint({"epoch": 1j}, tmp_path / "step-3")
    FolderCheckpointIO().save_checkpoint({"epoch": 2, "name": None}, tmp_path / "step-4")
    assert json.loads((tmp_path / "step-4" / "state.json").read_text()) == {
        "epoch": 2,
        "name": None,
    }


def test_weights_alone_go_into_a_module(tmp_path):
    model = torch.nn.Linear(2, 3)
    FolderCheckpointIO().save_checkpoint({"state_dict": model.state_dict()}, tmp_path / "best")
    other = torch.nn.Linear(2, 3)
    other.load_state_dict(read_weights(tmp_path / "best"))
    assert torch.equal(other.weight, model.weight)


def test_tensors_are_as_aligned_after_loading_as_they_were_in_training(tmp_path):
    """Some processors add up unaligned memory in another order: LBFGS then resumes with other last
    digits.
    """
    state = {f"{size}": torch.ones(size) for size in (1, 3, 45, 601)}
    FolderCheckpointIO().save_checkpoint(state, tmp_path / "step-1")
    loaded = FolderCheckpointIO().load_checkpoint(tmp_path / "step-1")
    assert [tensor.data_ptr() % 64 for tensor in loaded.values()] == [0, 0, 0, 0]

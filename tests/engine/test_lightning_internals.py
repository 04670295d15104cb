"""Private names of torch's DDP: found as expected, or reported once and not used."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from flatout.engine import lightning_internals
from flatout.engine.lightning_internals import leave_out_of_ddp, take_back_into_ddp


def test_weights_are_left_out_of_ddp():
    module = torch.nn.Linear(2, 2)
    assert leave_out_of_ddp(module, ["weight"])
    assert module._ddp_params_and_buffers_to_ignore == ["weight"]


def test_weights_that_the_module_leaves_out_of_ddp_itself_stay_left_out():
    module = torch.nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert leave_out_of_ddp(module, ["weight"])
    assert module._ddp_params_and_buffers_to_ignore == ["bias", "weight"]
    take_back_into_ddp(module, ["weight"])
    assert module._ddp_params_and_buffers_to_ignore == ["bias"]
    assert module.bias._ddp_ignored
    assert not hasattr(module.weight, "_ddp_ignored")


@pytest.mark.parametrize("change", ["gone", "other arguments"])
def test_a_name_that_has_changed_is_reported_and_not_used(monkeypatch, change):
    if change == "gone":
        monkeypatch.delattr(DistributedDataParallel, lightning_internals._LEFT_OUT)
    else:
        monkeypatch.setattr(
            DistributedDataParallel,
            lightning_internals._LEFT_OUT,
            staticmethod(lambda module, names, more: None),
        )
    module = torch.nn.Linear(2, 2)
    with pytest.warns(RuntimeWarning, match="embeddings exchange whole tables"):
        assert not leave_out_of_ddp(module, ["weight"])
    assert not hasattr(module, "_ddp_params_and_buffers_to_ignore")

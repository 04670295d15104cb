"""How gradients travel between devices."""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from flatout import TextCNNConfig
from flatout.engine.precision import Precision
from flatout.run.context import RunContext
from flatout.run.run import run
from flatout.run.strategy import choose_strategy
from flatout.run_log import RunLog
from flatout.tasks import Classifier
from tests.refusals import refused


class Two:
    """Two ranks, as far as a strategy asks."""

    are_several = True
    world = 2
    local_world = 2


def chosen(asked: str, device: str) -> dict:
    task = Classifier(TextCNNConfig())
    context = RunContext(Two(), torch.device(device), RunLog(), began=0.0, begin=run)
    return choose_strategy(asked, task, Precision.fp32, context)


def test_gradients_are_sent_in_bf16_between_gpus_where_that_is_asked_for(capsys):
    assert vars(chosen("ddp_bf16", "cuda")["strategy"])["_ddp_comm_hook"] is bf16_compress_hook
    assert "gradients between devices: bf16 (asked for; half the traffic" in capsys.readouterr().out
    assert vars(chosen("ddp", "cuda")["strategy"])["_ddp_comm_hook"] is None


def test_gradients_in_bf16_want_gpus():
    with refused("trainer.strategy: ddp_bf16", "GPUs"):
        chosen("ddp_bf16", "cpu")

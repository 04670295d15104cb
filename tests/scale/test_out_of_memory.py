"""A rank that runs out of memory repeats its part; the others wait, and all train the weights they would have."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file

from flatout import (
    BiLSTMConfig,
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
)
from flatout.run.run import Result
from flatout.tasks import pieces
from tests.scarce import Scarce

SOAK = pytest.mark.soak(seconds=30)
pytestmark = pytest.mark.timeout(120)  # ranks that wait for each other for ever
MODELS: dict[str, Any] = {
    "bilstm": BiLSTMConfig(hidden=16, embedding=16, dropout=0.0),
    "encoder": TransformerConfig(hidden=32, layers=2, heads=4, dropout=0.0, attention_dropout=0.0, head_dropout=0.0),
}
MODELS["wide"] = replace(MODELS["encoder"], hidden=640, layers=1)  # its table of words is kept, and past DDP
MIDDLE = {
    "bilstm": "model.layers.0.ahead.weight_hh_l0",
    "encoder": "model.net.bert.encoder.layer.1.output.dense.weight",
    "wide": "model.net.bert.encoder.layer.0.attention.self.query.weight",
}


def trained(folder: Path, kind: str, scarce: Scarce | None = None, *, accumulate: int = 1, **given: Any) -> Result:
    headlines = HeadlinesConfig(rows=203, eval_rows=51, classes=4)
    return fit(
        TextDataConfig(sample=headlines, batch_size=16, accumulate=accumulate),
        MODELS[kind],
        optim=OptimConfig(lr=3e-3, eps=1e-3),
        precision="fp32",
        epochs=1,
        monitor=MonitorConfig(flush_every=1, progress=False),
        callbacks={} if scarce is None else {"scarce": scarce},
        trainer={"devices": 2} | given.pop("trainer", {}),
        folder=folder,
        **given,
    )


def assert_same(one: Result, other: Result) -> None:
    found, expected = (load_file(next((each.folder / "model").glob("*.safetensors"))) for each in (one, other))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert one.metrics == pytest.approx(other.metrics, abs=1e-5)


def said(result: Result) -> str:
    return (result.folder / "log.txt").read_text(encoding="utf-8")


# Where memory runs out, and from which step on: the first has other buckets than the later ones.
FAULTS = {
    "one bucket": ("bilstm", None, [("forward", 0), ("backward", 3), (MIDDLE["bilstm"], 0)]),
    "a bucket for each weight": ("encoder", 0.002, [("backward", 0), (MIDDLE["encoder"], 0), (MIDDLE["encoder"], 3)]),
}


@pytest.mark.parametrize("case", [next(iter(FAULTS)), *(pytest.param(name, marks=SOAK) for name in list(FAULTS)[1:])])
def test_one_rank_without_memory_changes_nothing_for_any(tmp_path, case):
    """In the forward pass, in a backward pass before anything is exchanged, and when some gradients are sent off."""
    kind, bucket_mb, faults = FAULTS[case]

    def strategy() -> dict[str, Any]:
        several = {"gradient_as_bucket_view": True, "bucket_cap_mb": bucket_mb}
        return {} if bucket_mb is None else {"trainer": {"strategy": DDPStrategy(**several)}}

    plain = trained(tmp_path / "plain", kind, **strategy())
    for number, (where, first) in enumerate(faults):
        scarce = Scarce(12, range(first, 100), where, rank=1)  # of sixteen rows: a half fits
        result = trained(tmp_path / f"{number}", kind, scarce, **strategy())
        assert_same(result, plain)
        assert said(result).count("micro-batch: 8 rows (was 16) (out of memory at step") == 1
        assert "; on another rank)" in said(result)
        for note in (tmp_path / "cache" / "micro-batches").iterdir():
            note.unlink()


@SOAK
def test_batches_that_were_added_up_are_kept_when_the_last_one_fails(tmp_path):
    plain = trained(tmp_path / "plain", "wide", accumulate=3)
    for number, where in enumerate(("forward", MIDDLE["wide"])):
        scarce = Scarce(12, range(1, 100), where, rank=0, is_last=True)
        result = trained(tmp_path / f"{number}", "wide", scarce, accumulate=3)
        assert_same(result, plain)
        assert result.summary["training"]["out_of_memory"] == 1
        for note in (tmp_path / "cache" / "micro-batches").iterdir():
            note.unlink()


class Unmendable(Scarce):
    """Fails when DDP's words for what it waits for are others than are known."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        pieces._WAITING = re.compile("other words")


def test_what_cannot_be_mended_ends_every_rank_and_the_run_goes_on_in_pieces(tmp_path):
    plain = trained(tmp_path / "plain", "encoder", checkpoint=CheckpointConfig(every_steps=1))
    given: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=1)}
    scarce = Unmendable(12, range(4, 100), MIDDLE["encoder"], rank=1)
    with pytest.raises(
        UserError, match=r"memory ran out at step 5 while ranks exchanged gradients \(CUDA out of memory"
    ):
        trained(tmp_path / "cut", "encoder", scarce, **given)
    result = trained(tmp_path / "cut", "encoder", scarce, resume=str(tmp_path / "cut"), **given)
    assert result.summary["training"]["resumed_from"] == 4
    assert "micro-batch: 8 rows of 16 (an earlier run like this one ran out of memory" in said(result)
    assert_same(result, plain)


@SOAK
def test_ranks_without_memory_in_turn_and_again(tmp_path):
    plain = trained(tmp_path / "plain", "encoder")
    result = trained(tmp_path / "scarce", "encoder", Scarce(3, range(2, 100), MIDDLE["encoder"]))
    assert_same(result, plain)
    assert said(result).count("micro-batch:") >= 1

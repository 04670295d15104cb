"""Other ways of training are raced on copies after transformers' Trainer has trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from flatout import attach
from flatout.perf.verdict import experiments
from flatout.perf.verdict.transformers_races import _WithoutPadding
from flatout.perf.verdict.transformers_trainer import in_transformers
from tests.perf.verdict.transformers_trainings import KINDS, trainer_of, weights_of


@pytest.fixture
def races(long_enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each training is long enough to race, whatever else this machine does."""
    monkeypatch.setattr("flatout.perf.verdict.transformers_races.starved", lambda evidence: None)
    monkeypatch.setattr("flatout.perf.verdict.transformers_trainer.hardware_of", lambda _: [])
    monkeypatch.setattr(experiments, "ROUND_S", 0.01)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak(seconds=10)) for kind in KINDS]
)
def test_races_on_copies_change_neither_weights_nor_random_numbers_nor_the_data(
    kind, races, tmp_path
):
    ends = []
    for is_judged in (False, True):
        trainer = trainer_of(kind, tmp_path, max_steps=50)
        found = attach(trainer) if is_judged else None
        trainer.train()
        assert all(weight.grad is None for weight in trainer.model.parameters())
        ends.append((weights_of(trainer), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert found is not None
    assert {"padding", "batch"} <= {tried.cause for tried in found.evidence.tried}
    assert found.evidence.not_tried == ""
    assert "predicted from the clock" not in found.verdict["sentence"]


class OwnLoss(Trainer):
    def compute_loss(self, *inputs: Any, **named: Any) -> Any:
        return super().compute_loss(*inputs, **named)


def test_a_loss_of_the_script_is_not_called_again_and_the_verdict_says_so(races, tmp_path):
    trainer = trainer_of("classification", tmp_path, max_steps=50)
    trainer.__class__ = OwnLoss
    found = attach(trainer)
    trainer.train()
    assert found.evidence.tried == []
    assert found.evidence.not_tried.endswith("raced: its compute_loss is the script's own")


def test_columns_of_padding_alone_are_left_out_on_either_side():
    ids = torch.tensor([[0, 5, 6, 0], [0, 7, 0, 0]])

    def make(rows: list[Any]) -> dict[str, Tensor]:
        return {"input_ids": ids, "labels": torch.tensor([1, 0])}

    batch = _WithoutPadding(make, lambda named: named["input_ids"] > 0)([])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 0]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "DataLoader(num_workers=2, persistent_workers=True)",
            "TrainingArguments(dataloader_num_workers=2, dataloader_persistent_workers=True)",
        ),
        ("DataLoader(batch_size=64)", "TrainingArguments(per_device_train_batch_size=64)"),
        (
            "DataLoader(batch_size=32) ++trainer.accumulate_grad_batches=1",
            "TrainingArguments(per_device_train_batch_size=32, gradient_accumulation_steps=1)",
        ),
    ],
)
def test_arguments_of_a_loader_have_the_names_of_the_trainer(words, said):
    assert in_transformers(words) == said

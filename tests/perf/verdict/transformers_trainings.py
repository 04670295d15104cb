"""Small trainings by transformers' Trainer, of random weights and made data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
)

LENGTH = 24
_SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}

_LARGER: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 384}


def bert(kind: type, **more: Any) -> nn.Module:
    return kind(BertConfig(**(_SMALL | more)))


def small_bart() -> nn.Module:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=60, d_model=16, max_position_embeddings=32, **heads, **layers, **tokens
        )
    )


@dataclass
class Rows(Dataset[Any]):
    """Rows of 4 to 12 tokens, padded to 24; `label` makes the target of a row."""

    label: Callable[[Tensor, int], Any]
    rows: int = 400
    slow_s: float = 0.0
    are_full: bool = False
    """Whether each row has 24 tokens instead, so that there is no padding."""

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.slow_s:  # a sleep of no time would still give the core away
            time.sleep(self.slow_s)
        length = LENGTH if self.are_full else 4 + number % 9
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:length] = 3 + (torch.arange(length) * (number + 7)) % 50
        mask = (torch.arange(LENGTH) < length).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": self.label(ids, number)}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, int], Any]]] = {
    "classification": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        lambda ids, number: number % 3,
    ),
    "a larger classification": (
        lambda: bert(
            BertForSequenceClassification,
            hidden_size=96,
            num_hidden_layers=3,
            intermediate_size=384,
        ),
        lambda ids, number: number % 2,
    ),
    "tags": (
        lambda: bert(BertForTokenClassification, num_labels=4),
        lambda ids, number: torch.where(ids > 0, ids % 4, -100),
    ),
    "regression": (
        lambda: bert(BertForSequenceClassification, num_labels=1),
        lambda ids, number: float(number % 7),
    ),
    "masked words": (
        lambda: bert(BertForMaskedLM),
        lambda ids, number: torch.where(ids % 5 == 1, ids, -100),
    ),
    "sequence to sequence": (
        small_bart,
        lambda ids, number: torch.where(ids > 0, ids, -100)[:12],
    ),
}


def trainer_of(
    kind: str,
    folder: Path | str,
    *callbacks: Any,
    slow_s: float = 0.0,
    are_full: bool = False,
    **more: Any,
) -> Any:
    """A Trainer of 50 steps of 8 rows on the CPU; `more`: arguments of it."""
    make_model, label = KINDS[kind]
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return Trainer(
        make_model(),
        TrainingArguments(**(settings | more)),
        train_dataset=Rows(label, slow_s=slow_s, are_full=are_full),
        eval_dataset=Rows(label, rows=16),
        callbacks=list(callbacks),
    )


def weights_of(trainer: Any) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

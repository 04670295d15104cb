"""Fine-tuning as it is usually done: transformers' own Trainer over padded batches. The bert bench
measures against it.

Every setting that is not named keeps the Trainer's default. Rows come tokenised: its usual loop
does not tokenise.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.step_times import wait_for_device


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids with their frame, and the class."""

    tokens: list[int]
    target: int


class Rows(Dataset[dict[str, Any]]):
    """Rows as the Trainer takes them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        return {"input_ids": row.tokens, "labels": row.target}


@dataclass(slots=True)
class Timeline:
    """What each step of a training took and held."""

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def tokens_per_s(self, warm: int) -> float:
        """Real tokens a second after the first `warm` steps."""
        return sum(self.tokens[warm : len(self.ends)]) / (self.ends[-1] - self.ends[warm - 1])


class _Watch(TrainerCallback):
    def __init__(self, timeline: Timeline, timed: Sequence[int]) -> None:
        self.timeline, self.timed = timeline, timed

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wait_for_device(len(self.timeline.ends) + 1, self.timed)
        self.timeline.ends.append(time.perf_counter())


class _Counting(TrainerCallback):
    """Runs one step inside a context."""

    def __init__(self, context: Any, step: int) -> None:
        self.context, self.step = context, step

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step:
            self.context.__enter__()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step + 1:
            self.context.__exit__(None, None, None)


class _Recording(Trainer):
    """The Trainer; the loss of each step is kept."""

    timeline: Timeline

    def compute_loss(self, *arguments: Any, **given: Any) -> Any:
        found = super().compute_loss(*arguments, **given)
        self.timeline.losses.append(
            float((found[0] if isinstance(found, tuple) else found).detach())
        )
        return found


def train(
    model: PreTrainedModel | nn.Module,
    rows: Sequence[Row],
    padding_id: int,
    steps: int,
    *,
    timed: Sequence[int] = (),
    counter: tuple[Any, int] | None = None,
    **settings: Any,
) -> Timeline:
    """Some steps of the Trainer; `settings` are TrainingArguments, `timed` steps after which a GPU
    is waited for.

    `counter`: a context that one step runs in, and the number of that step.
    """
    timeline = Timeline()

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(each["input_ids"]) for each in examples)
        tokens = torch.full((len(examples), longest), padding_id)
        mask = torch.zeros(len(examples), longest, dtype=torch.long)
        for number, each in enumerate(examples):
            tokens[number, : len(each["input_ids"])] = torch.tensor(each["input_ids"])
            mask[number, : len(each["input_ids"])] = 1
        timeline.tokens.append(int(mask.sum()))
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.tensor([each["labels"] for each in examples]),
        }

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen: dict[str, Any] = {
            "per_device_train_batch_size": 32,
            "max_steps": steps,
            "save_strategy": "no",
        }
        chosen |= {
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
            "output_dir": folder,
        }
        arguments = TrainingArguments(**(chosen | settings))
        kind = _Recording if settings.get("train_sampling_strategy") == "sequential" else Trainer
        trainer = kind(
            model=model,
            args=arguments,
            train_dataset=Rows(rows),
            data_collator=collate,
            callbacks=[_Watch(timeline, timed), *([_Counting(*counter)] if counter else [])],
        )
        if isinstance(trainer, _Recording):
            trainer.timeline = timeline
        trainer.train()
    return timeline

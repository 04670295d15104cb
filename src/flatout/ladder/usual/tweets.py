"""Fine-tuning of an encoder as usually written, with transformers and a plain loop.

The collate function tokenises each batch and pads it to the longest length allowed. Two workers
feed it. Products are fp32, AdamW has its defaults, gradients of small batches are accumulated, each
batch reads its loss and logs it.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from flatout.ladder.usual.program import Case, Stopwatch, UsualProgram

log = logging.getLogger("usual.tweets")


@dataclass(frozen=True, slots=True, kw_only=True)
class TweetsOptions:
    # in the loop, up front (a row at a time) or in parallel (all rows in one call)
    tokenise: str = "in the loop"
    padding: str = "maximum"  # maximum: the longest row allowed; batch: the longest of the batch
    batch: int = 8
    accumulate: int = 4  # batches whose gradients are added up before a step
    base_rows: int = 32  # rows a step that the learning rate was chosen for
    scale_lr: str = "none"  # none, or sqrt: by the root of the rows a step over base_rows
    workers: int = 2
    pinned: bool = False
    prefetch: int = 2  # batches that each worker makes in advance
    persistent: bool = False  # whether workers outlive an epoch
    precision: str = "fp32"
    checkpointing: bool = False  # whether activations are computed again in the backward pass
    fused: bool = False
    devices: int = 1  # 1, or 0: all of this machine, by DataParallel


class TweetsProgram(UsualProgram[TweetsOptions]):
    def __init__(self, case: Case, how: TweetsOptions) -> None:
        super().__init__(case, how)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if how.tokenise == "in parallel" else "false"
        train = case.read_texts("train")
        self.names = sorted(set(train["label"]))
        self.targets = [self.names.index(label) for label in train["label"]]
        self.texts = train["text"].tolist()
        folder = case.reading["pretrained"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=len(self.names), trust_remote_code=False
        )
        if how.checkpointing:
            old = self.model.gradient_checkpointing_enable
            getattr(self.model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        self.model.to(self.device)
        self.network = nn.DataParallel(self.model) if how.devices != 1 else self.model
        lr = case.lr
        if how.scale_lr == "sqrt":
            lr *= math.sqrt(how.batch * how.accumulate / how.base_rows)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=how.fused or None)
        # a list serves as a data set
        rows: Any = list(zip(self.encoded(), self.targets, strict=True))
        steps = case.epochs * math.ceil(len(rows) / (how.batch * how.accumulate))
        self.schedule = get_linear_schedule_with_warmup(
            self.optimizer, math.ceil(0.06 * steps), steps
        )
        has_workers = how.workers > 0
        self.loader: Any = DataLoader(
            rows,
            how.batch,
            shuffle=True,
            collate_fn=self.collate,
            pin_memory=how.pinned and torch.cuda.is_available(),
            num_workers=how.workers,
            prefetch_factor=how.prefetch if has_workers else None,
            persistent_workers=how.persistent and has_workers,
            multiprocessing_context="fork" if has_workers else None,
        )

    def encoded(self) -> list[Any]:
        """What the loader holds of each row: its text, or its ids."""
        cut = {"truncation": True, "max_length": self.case.reading["max_length"]}
        if self.how.tokenise == "in the loop":
            return self.texts
        if self.how.tokenise == "in parallel":
            return list(self.tokenizer(self.texts, **cut)["input_ids"])
        return [
            self.tokenizer(text, padding="max_length", **cut)["input_ids"] for text in self.texts
        ]

    def collate(self, rows: list[tuple[Any, int]]) -> dict[str, Any]:
        """A padded batch with its mask."""
        longest = self.case.reading["max_length"]
        padding = "max_length" if self.how.padding == "maximum" else "longest"
        targets = torch.tensor([target for _, target in rows])
        if isinstance(rows[0][0], str):
            cut = {"truncation": True, "max_length": longest, "return_tensors": "pt"}
            return {
                **self.tokenizer([text for text, _ in rows], padding=padding, **cut),
                "labels": targets,
            }
        filler = self.tokenizer.pad_token_id
        ids = list[list[int]]()
        for row, _ in rows:
            length = row.index(filler) if filler in row else len(row)
            ids.append(row[:length])
        batch = self.tokenizer.pad(
            {"input_ids": ids}, padding=padding, max_length=longest, return_tensors="pt"
        )
        return {**batch, "labels": targets}

    def train_epoch(self, watch: Stopwatch) -> None:
        self.model.train()
        how = self.how
        total = 0.0
        rows = 0
        tokens = 0
        computed = 0
        number = 0
        for number, batch in enumerate(watch.batches(self.loader), 1):
            mask = batch["attention_mask"]
            rows += len(mask)
            tokens += int(mask.sum())
            computed += mask.numel()
            batch = {
                name: values.to(self.device, non_blocking=how.pinned)
                for name, values in batch.items()
            }
            with torch.autocast(self.device.type, torch.bfloat16, enabled=how.precision == "bf16"):
                loss = self.network(**batch).loss.mean() / how.accumulate
            loss.backward()
            total += loss.item() * how.accumulate
            log.info(
                "batch %d: loss %.4f, mean %.4f",
                number,
                loss.item() * how.accumulate,
                total / number,
            )
            if number % how.accumulate == 0:
                self.update(self.model)
                watch.step(rows, tokens, computed)
                rows = 0
                tokens = 0
                computed = 0
        if number % how.accumulate:
            self.update(self.model)

    def update(self, model: nn.Module) -> None:
        super().update(model)
        self.schedule.step()

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        self.model.eval()
        test = self.case.read_texts("test")
        cut = {
            "truncation": True,
            "max_length": self.case.reading["max_length"],
            "return_tensors": "pt",
        }
        texts = test["text"].tolist()
        answers = list[str]()
        for start in range(0, len(texts), 64):
            batch = self.tokenizer(texts[start : start + 64], padding=True, **cut).to(self.device)
            likeliest = self.model(**batch).logits.argmax(-1)
            answers += [self.names[place] for place in likeliest.tolist()]
        return {"accuracy": float(np.mean(np.array(answers) == test["label"].to_numpy()))}


# The ladder finds both under these names in each usual program.
OPTIONS = TweetsOptions
PROGRAM = TweetsProgram

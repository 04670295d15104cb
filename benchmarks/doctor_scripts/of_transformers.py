"""Classify made texts with a small BERT and transformers' Trainer."""

import argparse
import time

import torch
from stopwatch import now_s, report
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--pad-to", type=int, default=0, help="0: the longest row of each batch")
parser.add_argument("--tokenise-ms", type=float, default=0.0, help="of each row, when collating")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--eval-steps", type=int, default=0)
parser.add_argument("--save-steps", type=int, default=0)
parser.add_argument("--sleep-ms", type=float, default=0.0, help="of a callback in each step")
parser.add_argument("--repeats", type=float, default=1.0, help="of the forward pass, as a mistake")
options = parser.parse_args()


class Texts(Dataset):
    def __init__(self, rows: int) -> None:
        lengths = torch.randint(6, 24, (rows,), generator=torch.Generator().manual_seed(0))
        words = torch.Generator().manual_seed(1)
        self.texts = [
            torch.randint(3, 500, (int(length),), generator=words).tolist() for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> dict:
        return {"text": self.texts[number], "label": self.texts[number][0] % 2}


def tokenise(text: list) -> torch.Tensor:
    until = time.thread_time() + options.tokenise_ms / 1000
    while time.thread_time() < until:
        pass
    return torch.tensor(text)


def collate(rows: list) -> dict:
    tokens = [tokenise(row["text"]) for row in rows]
    length = options.pad_to or max(len(row) for row in tokens)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for number, row in enumerate(tokens):
        ids[number, : len(row)] = row
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Waits(TrainerCallback):
    def on_step_end(self, *_, **__) -> None:
        time.sleep(options.sleep_ms / 1000)


class Model(BertForSequenceClassification):
    computed = 0.0

    def forward(self, *args, **named):
        self.computed += options.repeats - 1
        while self.computed >= 1:
            self.computed -= 1
            with torch.no_grad():
                super().forward(*args, **named)
        return super().forward(*args, **named)


torch.manual_seed(0)
model = Model(
    BertConfig(
        vocab_size=500,
        hidden_size=options.width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * options.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
arguments = TrainingArguments(
    "out",
    max_steps=options.steps,
    per_device_train_batch_size=options.batch_size,
    dataloader_num_workers=options.workers,
    dataloader_pin_memory=False,
    eval_strategy="steps" if options.eval_steps else "no",
    eval_steps=options.eval_steps or None,
    save_strategy="steps" if options.save_steps else "no",
    save_steps=options.save_steps or 500,
    save_total_limit=2,
    remove_unused_columns=False,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
    seed=1,
)
trainer = Trainer(
    model,
    arguments,
    data_collator=collate,
    train_dataset=Texts(4000),
    eval_dataset=Texts(32),
    callbacks=[Waits()] if options.sleep_ms else [],
)
began_s = now_s()
trainer.train()
report(model, options.steps * options.batch_size, began_s)

"""`bench doctor --plain`: bottlenecks in somebody's own module, loader and Trainer, and what
`Verdict` says of them.

Each training is a script as anybody writes it, in a process of its own. The fix is words of Python;
its arguments are put into the same script, and both scripts train in turn. Five healthy scripts
follow, in which nothing may be found.
"""

from __future__ import annotations

import ast
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.claim import Claim, Options, bounded
from flatout.callbacks import Verdict
from flatout.distributed.processes import wait_until_warm, warm_start
from flatout.distributed.ranks import cores_here
from flatout.engine import FastLoop
from flatout.errors import did_you_mean, require
from flatout.perf.measure import apart
from flatout.perf.measure.intervals import take_turns

_COST_STEPS = (100, 500)
_COST_MS = 20.0
_MOST_COST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training; what has the name of an argument of DataLoader or Trainer is that argument."""

    rows: int = 4000
    us_a_row: float = 0.0
    """What a row takes to read."""
    computes: bool = False
    """Whether reading it takes the processor; else it waits, as for a disk."""
    batch_size: int = 64
    num_workers: int = 0
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    module: str = "mlp"
    width: int = 256
    max_epochs: int = 8
    accumulate_grad_batches: int = 1
    precision: str = "32-true"
    val_check_interval: float | int = 1.0
    sleeps_ms: float = 0.0
    """Of a callback in each step."""
    every_n_train_steps: int | None = None
    """Of ModelCheckpoint."""
    threads: int = 0
    """0: all cores."""
    is_compiled: bool = False
    in_fast_loop: bool = False


PLANTED = {
    "work in Python for each row": (("data",), Script(us_a_row=150, computes=True, max_epochs=40)),
    "rows from a slow disk": (("data",), Script(us_a_row=200, max_epochs=30)),
    "one worker where four are needed": (
        ("data",),
        Script(us_a_row=400, num_workers=1, persistent_workers=True, max_epochs=20),
    ),
    "workers started for each short epoch": (
        ("data",),
        Script(rows=1000, num_workers=2, max_epochs=160),
    ),
    "batches of two rows": (("batch",), Script(rows=3000, batch_size=2, max_epochs=16)),
    "8 batches of 4 rows a step": (
        ("accumulation",),
        Script(batch_size=4, accumulate_grad_batches=8, max_epochs=24),
    ),
    "a callback that waits": (("callbacks",), Script(width=512, sleeps_ms=15, max_epochs=20)),
    "a validation every 5 steps": (("validation",), Script(val_check_interval=5, max_epochs=40)),
    "a checkpoint every 2 steps": (
        ("checkpoint",),
        Script(width=768, every_n_train_steps=2, max_epochs=16),
    ),
    "one thread": (("threads",), Script(width=2048, batch_size=256, threads=1, max_epochs=30)),
}
HEALTHY = {
    "a wide network": Script(width=1536, batch_size=256, max_epochs=40),
    "convolutions": Script(module="cnn", batch_size=128, max_epochs=16),
    "an LSTM": Script(module="lstm", batch_size=128, max_epochs=16),
    "an encoder of transformers": Script(module="bert", batch_size=128, rows=1500, max_epochs=12),
    "two workers that keep up": Script(
        width=1536, batch_size=256, num_workers=1, persistent_workers=True, max_epochs=12
    ),
}


class Rows(Dataset[Any]):
    """Numbers of two classes, each row as slow to read as asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.numbers = torch.randn(script.rows, 192, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Any:
        clock = time.thread_time if self.script.computes else time.perf_counter
        until = self.script.us_a_row / 1e6
        began = clock()
        while clock() - began < until:
            if not self.script.computes:
                time.sleep(until)
        row = self.numbers[number]
        if self.script.module == "bert":
            return {"input_ids": (100 * row.abs()).long()[:48], "labels": int(row.sum() > 0)}
        return row, int(row.sum() > 0)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.LazyLinear(2)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.layers(numbers.view(-1, 3, 8, 8)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.lstm(numbers.view(-1, 48, 4))[0][:, -1])


class Module(L.LightningModule):
    """A module as it stands in a thousand scripts."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        wide = script.width
        if script.module == "bert":
            sizes = {
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 256,
            }
            self.network: nn.Module = BertForSequenceClassification(
                BertConfig(vocab_size=1000, **sizes)
            )
        elif script.module == "cnn":
            self.network = Convolutions()
            self.network(torch.zeros(1, 192))  # its last layer learns its width
        elif script.module == "lstm":
            self.network = Recurrent()
        else:
            middle = [layer for _ in range(2) for layer in (nn.Linear(wide, wide), nn.ReLU())]
            self.network = nn.Sequential(
                nn.Linear(192, wide), nn.ReLU(), *middle, nn.Linear(wide, 2)
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            loss = self.network(**batch).loss
        else:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Sleeps(L.Callback):
    """Waits after every batch, as one that writes to a slow server."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.ms / 1000)


class Stopwatch(L.Callback):
    """Seconds of a training from its first epoch on."""

    began = 0.0
    seconds = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.began


def train(
    script: Script, *, judges: bool, seconds: float = 20.0, others: int = 0
) -> dict[str, Any]:
    """Rows a second of a training, and its verdict where it is judged; `seconds`: most that the
    verdict races.

    `others`: empty callbacks beside.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(script.threads or len(cores_here()))
    L.seed_everything(0, verbose=False)
    watch = Stopwatch()
    verdict = Verdict(seconds=seconds)
    data = Rows(script)
    loading = {
        name: getattr(script, name)
        for name in ("num_workers", "persistent_workers", "prefetch_factor")
    }
    loader = DataLoader(data, script.batch_size, shuffle=True, drop_last=True, **loading)
    validation = DataLoader(torch.utils.data.Subset(data, range(min(script.rows, 512))), 256)
    with tempfile.TemporaryDirectory() as folder:
        files = ModelCheckpoint(folder, every_n_train_steps=script.every_n_train_steps)
        trainer = L.Trainer(
            **{
                name: getattr(script, name)
                for name in ("accumulate_grad_batches", "precision", "val_check_interval")
            },
            max_epochs=script.max_epochs,
            accelerator="cpu",
            callbacks=[
                watch,
                files,
                *([Sleeps(script.sleeps_ms)] if script.sleeps_ms else []),
                *[FastLoop()][: int(script.in_fast_loop)],
                *(L.Callback() for _ in range(others)),
                *[verdict][: int(judges)],
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        module: Any = torch.compile(Module(script)) if script.is_compiled else Module(script)
        trainer.fit(module, loader, validation)
    rows = len(loader) * script.batch_size * script.max_epochs
    found = verdict.verdict or {
        "cause": "none",
        "sentence": verdict.why_none,
        "override": None,
        "predicted_gain": None,
    }
    return {"rate": rows / watch.seconds, "verdict": found}


def with_fix(script: Script, words: str) -> Script:
    """The script with the arguments that a fix names."""
    known = {each.name for each in fields(Script)}
    given = {
        name: ast.literal_eval(value)
        for name, value in re.findall(r"(\w+)=([\w.\"-]+)", words)
        if name in known
    }
    if threads := re.search(r"set_num_threads\((\d+)\)", words):
        given["threads"] = int(threads[1])
    if "leaving Sleeps out" in words:
        given["sleeps_ms"] = 0.0
    given |= {
        name: True
        for name, word in {"is_compiled": "compile(", "in_fast_loop": "FastLoop"}.items()
        if word in words
    }
    if "ModelCheckpoint" in words:
        given["every_n_train_steps"] = None
    require(bool(given), "fix", f"not one that this bench can put into a script: {words!r}")
    return replace(script, **given)


def rates_of(script: Script, words: str, rounds: int) -> list[list[float]]:
    """Rows a second of each round, as it was and with the fix; both train a quarter of what the
    judged run did.
    """
    shorter = replace(script, max_epochs=max(2, script.max_epochs // 4))
    sides = [
        lambda each=each: _apart(each, judges=False)["rate"]
        for each in (shorter, with_fix(shorter, words))
    ]
    return take_turns(sides, least=rounds)


def _apart(script: Script, *, judges: bool) -> dict[str, Any]:
    return apart.run(partial(train, script, judges=judges))


def claims(options: Options) -> Iterator[Claim]:
    from benchmarks.doctor import Diagnosed, or_broken, summary_of

    warm_start()
    wait_until_warm()
    began = time.perf_counter()
    rounds = options.choose_rounds(2, 1, 1)

    def diagnosed(name: str, causes: tuple[str, ...], script: Script) -> Diagnosed:
        found = _apart(script, judges=True)["verdict"]
        rates = None
        if found["override"] and found["predicted_gain"] is not None:
            rates = rates_of(script, found["override"], rounds)
        return Diagnosed(name, causes, found, rates)

    planted, healthy = [], []
    for name, (causes, script) in chosen(options, PLANTED).items():
        planted.append(or_broken(name, causes, partial(diagnosed, name, causes, script)))
        yield planted[-1].as_claim()
    for name, script in chosen(options, HEALTHY).items():
        healthy.append(or_broken(name, (), partial(diagnosed, name, (), script)))
        yield healthy[-1].as_claim()
    yield cost_claim()
    yield from summary_of(planted, healthy)
    minutes = (time.perf_counter() - began) / 60
    yield bounded(
        "the whole bench", minutes, "minutes", most=25, note=f"{rounds} rounds of each confirmation"
    )


def chosen(options: Options, scripts: dict[str, Any]) -> dict[str, Any]:
    """The scripts that were asked for."""
    if options.only is not None:
        hint = did_you_mean(options.only, [*PLANTED, *HEALTHY])
        found = any(options.only.lower() in name.lower() for name in (*PLANTED, *HEALTHY))
        require(found, "--only", f"no plant and no healthy run {options.only!r}", hint=hint)
        return {
            name: each for name, each in scripts.items() if options.only.lower() in name.lower()
        }
    return dict(list(scripts.items())[: 2 if options.quick else None])


def cost_claim() -> Claim:
    """What the verdict takes of the processor in each step of 20 ms: its hooks, and its thread's
    looks at the machine.

    Two lengths of a training are compared, so that what it takes once, to begin and to judge, is
    not counted. All six trainings take turns, and the median of each counts.
    """
    script = Script(batch_size=2, width=8, sleeps_ms=_COST_MS, max_epochs=1, threads=1)
    whats = ("nothing", "an empty callback", "the verdict")
    sides = {
        (what, steps): replace(script, rows=2 * steps) for what in whats for steps in _COST_STEPS
    }
    turns = [
        partial(apart.run, partial(processor_s, each, what)) for (what, _), each in sides.items()
    ]
    medians = map(statistics.median, take_turns(turns, least=3))
    spent = dict(zip(sides, medians, strict=True))
    fewer, more = _COST_STEPS
    step_us = {
        what: 1e6 * (spent[what, more] - spent[what, fewer]) / (more - fewer) for what in whats
    }
    share = 100 * (step_us["the verdict"] - step_us["nothing"]) / 1000 / _COST_MS
    note = f"µs of the processor in a step and a wait of {_COST_MS:g} ms, beside it: "
    note += ", ".join(f"{what} {found:.0f}" for what, found in step_us.items())
    return bounded(
        f"the verdict's cost of a step of {_COST_MS:g} ms", share, "%", most=_MOST_COST, note=note
    )


def processor_s(script: Script, what: str) -> float:
    """Seconds of processor time of a training, without what it takes to import and to judge."""
    beside: dict[str, Any] = {
        "judges": what == "the verdict",
        "others": int(what == "an empty callback"),
    }
    train(replace(script, rows=20), **beside)  # imports
    began = time.process_time()
    train(script, **beside, seconds=0)
    return time.process_time() - began

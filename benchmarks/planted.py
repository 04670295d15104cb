"""Runs with something planted that holds them back, and healthy runs with nothing; what applies on
this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flatout.distributed.ranks import cores_here
from flatout.engine.precision import Precision, bf16_is_native_on_cpu, choose_precision

_SMALL = ["model.embedding=64", "model.hidden=64", "data.sample.eval_rows=400"]
_MANY = [*_SMALL, "data.sample.rows=20000"]
_FEW = [*_SMALL, "data.sample.rows=8000"]
_TINY = [
    "data.sample.rows=8000",
    "data.sample.eval_rows=400",
    "model.embedding=8",
    "model.hidden=8",
]
_ENCODER = [
    "model=transformer",
    "data.sample.rows=2400",
    "data.sample.eval_rows=200",
    "data.batch_size=32",
]
_ENCODER += ["model.hidden=192", "model.layers=3"]
_WIDE = [
    "model=transformer",
    "data.sample.rows=3000",
    "data.sample.eval_rows=200",
    "data.batch_size=64",
]
_WIDE += ["model.hidden=384", "model.layers=2", "model.heads=6"]
_RANKS = ["trainer.devices=2", *_FEW]


def _plant(name: str, **settings: float) -> list[str]:
    words = [f"+callbacks.plant.{key}={value:g}" for key, value in settings.items()]
    return [f"+callbacks.plant._target_=benchmarks.plants.{name}", *words]


def _anywhere() -> str:
    return ""


def _needs_fast_bf16() -> str:
    return (
        "" if _is_chosen(Precision.bf16) else "bf16 is not native on this processor, or not faster"
    )


def _needs_slow_bf16() -> str:
    is_slow = bf16_is_native_on_cpu() and _is_chosen(Precision.fp32)
    return "" if is_slow else "bf16 is not native on this processor, or faster"


def _is_chosen(precision: Precision) -> bool:
    return choose_precision(Precision.auto, torch.device("cpu")).value is precision


def _needs_cores() -> str:
    return "" if len(cores_here()) > 1 else "there is a single core"


def _needs_gpu() -> str:
    return "" if torch.cuda.is_available() else "there is no GPU"


def _needs_group() -> str:
    folder = Path("/sys/fs/cgroup/cpu")
    return "" if folder.is_dir() and os.access(folder, os.W_OK) else "no control group can be made"


def _needs_compiler() -> str:
    return "" if shutil.which("cc") or shutil.which("gcc") else "there is no compiler"


@dataclass(frozen=True, slots=True)
class Planted:
    """A run with something in it that holds it back."""

    name: str
    causes: tuple[str, ...]
    """What the verdict may call it."""
    words: list[str]
    epochs: int = 2
    why_not: Callable[[], str] = field(default=_anywhere)
    """Why it does not apply on this machine; empty where it does."""
    around: str = ""
    """What to start around the run: a process, or a control group."""


PLANTED = [
    Planted("a slow source", ("data",), [*_MANY, *_plant("SlowSource", us_a_row=150)]),
    Planted(
        "a slow disk (throttled reads)",
        ("data",),
        [*_MANY, "data.feed=threaded", *_plant("SlowDisk", mb_per_s=0.25)],
    ),
    Planted(
        "work in Python for each row",
        ("data",),
        [*_MANY, "data.feed=resident", *_plant("RowByRow", us_a_row=100)],
    ),
    Planted(
        "sleep in the collate",
        ("data",),
        [*_MANY, "data.feed=workers", "data.workers=1", *_plant("SleepyCollate", ms=25)],
    ),
    Planted(
        "padding to the maximum",
        ("padding",),
        [*_ENCODER, "model.compute=padded", *_plant("PadsToMax", longest=64)],
    ),
    Planted("tiny batches", ("batch",), [*_FEW, "data.batch_size=4"], 1),
    Planted(
        "8 batches of 4 a step",
        ("accumulation",),
        [*_FEW, "data.batch_size=4", "data.accumulate=8"],
        1,
    ),
    Planted("numbers read each step", ("callbacks",), [*_FEW, *_plant("ReadsNorms", times=60)], 4),
    Planted("a callback that waits", ("callbacks",), [*_FEW, *_plant("Sleeps", ms=12)], 4),
    Planted("histograms logged each step", ("callbacks",), [*_FEW, *_plant("LogsHistograms")], 2),
    Planted("curves written each step", ("logging",), [*_TINY, "monitor.flush_every=1"], 10),
    Planted(
        "a validation every 5 steps", ("validation",), [*_FEW, "+trainer.val_check_interval=5"], 4
    ),
    Planted("a checkpoint every 2 steps", ("checkpoint",), [*_FEW, "checkpoint.every_steps=2"], 4),
    Planted(
        "fp32 where bf16 is faster", ("precision",), [*_WIDE, "precision=fp32"], 2, _needs_fast_bf16
    ),
    Planted(
        "bf16 where fp32 is faster", ("precision",), [*_WIDE, "precision=bf16"], 6, _needs_slow_bf16
    ),
    Planted("one thread", ("threads",), [*_WIDE, "threads=1"], 3, _needs_cores),
    Planted(
        "an optimizer that dominates",
        ("optimizer", "batch"),
        [*_FEW, "data.batch_size=8", "model.embedding=1024"],
        1,
    ),
    Planted(
        "torch.compile at each step",
        ("compile",),
        [*_FEW, *_plant("Recompiles")],
        2,
        _needs_compiler,
    ),
    Planted("another process on the cores", ("cpu",), [*_MANY], 2, around="process"),
    Planted("a container's limit", ("cpu",), [*_MANY], 2, _needs_group, around="group"),
    Planted(
        "two unequal ranks", ("ranks",), [*_RANKS, *_plant("SlowRank", ms=40)], 2, _needs_cores
    ),
    Planted(
        "gradient exchange that dominates",
        ("communication",),
        [
            *(
                "trainer.devices=2",
                "model=transformer",
                "model.hidden=768",
                "model.layers=1",
                "model.heads=12",
            ),
            *("data.batch_size=2", "data.sample.rows=400", "data.sample.eval_rows=100"),
        ],
        1,
        _needs_cores,
    ),
    Planted(
        "an unpinned, pageable copy", ("data",), [*_MANY, *_plant("PageableCopy")], 2, _needs_gpu
    ),
    Planted(
        "a metric that synchronises",
        ("reads", "callbacks"),
        [*_FEW, *_plant("ReadsNorms", times=1)],
        4,
        _needs_gpu,
    ),
    Planted(
        "small kernels, bound by the host", ("batch",), [*_FEW, "data.batch_size=8"], 1, _needs_gpu
    ),
]
QUICK = ("8 batches of 4 a step", "a callback that waits", "one thread")
_HEADLINES = ["data.sample.rows=12000", "data.sample.eval_rows=400"]
HEALTHY = {
    "BiLSTM": [*_HEADLINES, "trainer.max_epochs=5"],
    "BiLSTM, wide": [
        "data.sample.rows=4000",
        "data.sample.eval_rows=400",
        "model.hidden=256",
        "trainer.max_epochs=4",
    ],
    "TextCNN": ["model=textcnn", *_HEADLINES, "trainer.max_epochs=6"],
    "TextCNN, threaded feed": [
        "model=textcnn",
        "data.feed=threaded",
        *_HEADLINES,
        "trainer.max_epochs=6",
    ],
    "encoder": [*_WIDE, "trainer.max_epochs=2"],
    "encoder, two batches a step": [*_WIDE, "data.accumulate=2", "trainer.max_epochs=2"],
    "encoder, small": [*_ENCODER, "data.batch_size=128", "trainer.max_epochs=6"],
    "bit strings": ["+experiment=bloom_bigrams", "task.exposure=false", "trainer.max_epochs=4"],
    "tweets": [
        "data=tweets",
        "model=transformer",
        "model.hidden=192",
        "model.layers=2",
        "trainer.max_epochs=4",
    ],
    "sequences": ["+experiment=battery_soc", "trainer.max_epochs=15"],
}
"""Runs of different kinds that nothing holds back."""

"""Frozen layers computed once: epochs, a sweep and memory against full fine-tuning, frozen layers
and the Trainer.

A MiniLM where `--pretrained` names its folder, else a random encoder of its sizes; tweets in
batches of 32. Each epoch is a whole one of a run, validation included. Building the store is not in
the epochs: it is a row of its own. With `--data` the scores of several cuts follow, at equal epochs
and in the time that full fine-tuning takes. `--only` takes a part: epochs, sweep, memory, Trainer,
or scores such as "irony, equal epochs" and "irony, equal time, 4 layers".
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas
import psutil

from benchmarks.bert import _LR, _SHAPE, BertBench
from benchmarks.claim import Claim, Options, at_least, at_most, measured_apart, quiet, reaching
from benchmarks.quality import ENCODER_TASKS, Task, told
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig
from flatout.data.samples.tweets import TweetsConfig
from flatout.data.store.cache import Cache
from flatout.data.texts.settings import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.errors import require
from flatout.models.encoder.transformer import Compute, TransformerConfig
from flatout.run.launch import fit

_CUT = 4
_WAYS: dict[Any, str] = {
    0: "full fine-tuning",
    **{cut: f"{cut} layers read" for cut in (2, 3, 4, 5)},
    "all": "a head alone",
}
_STORED = "outputs of"
"""What the name of a store of outputs holds."""


def claims(options: Options) -> Iterator[Claim]:
    """Epochs, a sweep, the Trainer, memory; scores where there is data."""
    with tempfile.TemporaryDirectory() as folder:
        bench = ReuseBench(Path(folder), options)
        parts = {"epochs": bench.epochs, "sweep": bench.sweep, "memory": bench.memory}
        parts |= {} if options.tiny else {"Trainer": bench.trainer}
        if options.data is not None:
            require(
                options.pretrained is not None, "bench reuse", "scores need --pretrained FOLDER"
            )
            parts |= score_parts(options, options.data, Path(folder))
        chosen = [name for name in parts if (options.only or "") in name]
        require(bool(chosen), "--only", f"no part {options.only!r}", allowed="; ".join(parts))
        for name in chosen:
            yield from parts[name]()


class _Epochs(L.Callback):
    """Seconds of each epoch, and its tokens."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens = 0
        self.made = time.perf_counter()
        self.whole_s = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.tokens = 0
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += batch.num_tokens
        self.trained = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.whole_s = time.perf_counter() - self.made

    def tokens_per_s(self) -> float:
        """Of the last epoch, without its validation."""
        return self.tokens / (self.trained - self.began)


@dataclass(slots=True)
class _Trained:
    epochs: _Epochs
    building_s: float
    whole_s: float


class ReuseBench:
    """Runs on the same tweets whose layers are frozen or not, and read from a store or computed."""

    def __init__(self, folder: Path, options: Options, rows: int = 1_500) -> None:
        self.folder, self.options = folder, options
        sizes = {
            "rows": options.choose(rows, 320, 64),
            "eval_rows": options.choose(rows // 10, 40, 16),
        }
        shape = {"hidden": 32, "layers": 6, "heads": 4} if options.tiny else _SHAPE
        self.bench = BertBench(
            folder, options, {"sample": TweetsConfig(**sizes)}, max_length=128, shape=shape
        )
        self.model = TransformerConfig(pretrained=options.pretrained, **shape)
        self.bench.pretrained = options.pretrained

    def epochs(self) -> Iterator[Claim]:
        """Of full fine-tuning, of frozen layers with and without a store, and of a head alone."""
        ways: dict[str, dict[str, Any]] = {
            "full": {},
            "frozen": {"freeze_layers": _CUT, "reuse": False},
            "read": {"freeze_layers": _CUT, "reuse": True},
            "head": {"freeze_layers": "all", "reuse": True},
        }
        found: dict[str, list[_Trained]] = {name: [] for name in ways}
        for _ in range(self.options.choose_rounds(3, 1, 1)):
            for name, settings in ways.items():
                self.forget()
                found[name].append(self.train(epochs=2, **settings))
        second = {
            name: statistics.median(each.epochs.seconds[-1] for each in runs)
            for name, runs in found.items()
        }
        built = statistics.median(each.building_s for each in found["read"])
        note = f"{self.bench.rows_by_length.sum():,} tokens an epoch; built once in {built:.1f} s"
        name = f"an epoch that reads {_CUT} of 6 layers"
        yield at_least(
            f"{name}, against full fine-tuning",
            1 / second["read"],
            1 / second["full"],
            "epochs/s",
            2.8,
            note,
        )
        yield at_least(
            f"{name}, against computing them",
            1 / second["read"],
            1 / second["frozen"],
            "epochs/s",
            1.5,
        )
        first = statistics.median(
            each.building_s + each.epochs.seconds[0] for each in found["read"]
        )
        frozen = statistics.median(each.epochs.seconds[0] for each in found["frozen"])
        yield at_most(
            "the first epoch with its building, against computing", first, frozen, "s", 1.15
        )
        claim, note = (
            "a head alone, against full fine-tuning",
            "with its validation and the saving of all weights",
        )
        yield at_least(claim, 1 / second["head"], 1 / second["full"], "epochs/s", 30, note)

    def sweep(self) -> Iterator[Claim]:
        """Runs over the learning rate that share a store, and runs that compute, in turn; on fewer
        rows.
        """
        count, epochs = self.options.choose(8, 2, 1), self.options.choose(3, 2, 1)
        small = ReuseBench(self.folder, self.options, rows=400)
        frozen: dict[str, Any] = {"freeze_layers": _CUT}
        ways = {"read": frozen | {"reuse": True}, "frozen": frozen | {"reuse": False}, "full": {}}
        seconds = dict.fromkeys(ways, 0.0)
        built = 0.0
        small.forget()
        for lr in np.geomspace(2e-5, 1e-3, count):
            for name, settings in ways.items():
                trained = small.train(epochs=epochs, lr=float(lr), **settings)
                seconds[name], built = seconds[name] + trained.whole_s, built + trained.building_s
        rates_a_s = {name: 1 / spent for name, spent in seconds.items()}
        claim, note = (
            f"{count} trials of {epochs} epochs that read",
            f"{seconds['read']:.0f} s, {built:.0f} of them building",
        )
        yield at_least(
            f"{claim}, against full fine-tuning",
            rates_a_s["read"],
            rates_a_s["full"],
            "sweeps/s",
            2.5,
            note,
        )
        yield at_least(
            f"{claim}, against computing", rates_a_s["read"], rates_a_s["frozen"], "sweeps/s", 1.5
        )

    def trainer(self) -> Iterator[Claim]:
        """Tokens a second of training, with the same layers frozen in the Trainer at its best on a
        CPU.
        """
        self.forget()
        ours = self.train(epochs=2, freeze_layers=_CUT, reuse=True).epochs.tokens_per_s()
        steps = self.options.choose(30, 6, 1)
        net = self.bench._model(compute=Compute.padded, freeze_layers=_CUT).net
        grouped = {"train_sampling_strategy": "group_by_length"}
        rows = self.bench._in_random_order(steps)
        theirs = self.bench._theirs(net, steps + 3, rows, grouped).tokens_per_s(3)
        yield at_least("tokens a second, Trainer's best (grouped)", ours, theirs, "tokens/s", 2.0)

    def memory(self) -> Iterator[Claim]:
        """The most private memory of a run, in processes of their own; a mapped store is the
        disk's.
        """
        peaks = {}
        for reuse in (True, False):
            self.forget()
            given = {"folder": str(self.folder), "reuse": reuse, "options": _as_plain(self.options)}
            peaks[reuse] = float(measured_apart("benchmarks.reuse:train_apart", given)["peak_mb"])
        note = "building included; goal: no more, within 5 %"
        yield at_most(
            "private memory of a run that reads", peaks[True], peaks[False], "MB", 1.05, note
        )

    def train(self, *, epochs: int, lr: float = _LR, **settings: Any) -> _Trained:
        """A whole run."""
        watch = _Epochs()
        began = time.perf_counter()
        with quiet():
            result = fit(
                self.bench.config.data,
                replace(self.model, **settings),
                optim=OptimConfig(lr=lr),
                epochs=epochs,
                checkpoint=CheckpointConfig(patience=None),
                callbacks={"watch": watch},
                monitor=MonitorConfig(progress=False, verdict=False, rival=False),
                logger="none",
                output=str(self.folder / "runs"),
            )
        whole_s = time.perf_counter() - began
        said = (result.folder / "log.txt").read_text(encoding="utf-8")
        built = re.findall(r"cache: \w+ built in ([\d.]+) s", said.partition("reuse: True")[2])
        return _Trained(watch, float(built[0]) if built else 0.0, whole_s)

    def forget(self) -> None:
        """Remove stored outputs: the next run that wants some builds them."""
        _forget(Cache(self.bench.config.data.cache))


def _forget(cache: Cache) -> None:
    for entry in cache.entries():
        if _STORED in entry.name:
            cache.clear(entry.key)


def train_apart() -> None:
    """Train in this process and print its peak of private memory."""
    given = json.load(sys.stdin)
    bench = ReuseBench(Path(given["folder"]), Options(**given["options"]))
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            memory = psutil.Process().memory_info()
            peak = max(peak, memory.rss - memory.shared)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    bench.train(epochs=2, freeze_layers=_CUT, reuse=given["reuse"])
    ended.set()
    thread.join()
    print(json.dumps({"peak_mb": peak / 1e6}))


_SCORED_EPOCHS = 3
_RATE_OF_HEAD = 1e-3
_TRAINED_ROWS = {"train": 400, "validation": 150, "test": 500}
"""With `--quick`: so many rows of each split, drawn at random."""


@dataclass(frozen=True, slots=True)
class ScoreBench:
    """Test scores of full fine-tuning, of several cuts and of a head alone, on one set
    of tweets.
    """

    task: Task
    options: Options
    data: Path
    folder: Path

    timed: dict[Any, _Epochs] = field(default_factory=dict)
    """Of each cut, the times of its first run."""

    def equal_epochs(self, cut: Any) -> Iterator[Claim]:
        """Three epochs."""
        found = [self.train(cut, seed, _SCORED_EPOCHS) for seed in self.seeds()]
        self.timed.setdefault(cut, found[0][1])
        yield self.claim(cut, found)

    def equal_time(self, cut: Any) -> Iterator[Claim]:
        """As many epochs as fit into the seconds of full fine-tuning, with the building
        of a store.
        """
        for each in (0, cut):
            if each not in self.timed:
                self.timed[each] = self.train(each, 0, _SCORED_EPOCHS)[1]
        whole, short = self.timed[0], self.timed[cut]
        epochs = max(
            _SCORED_EPOCHS,
            round((whole.whole_s - short.whole_s) / short.seconds[-1]) + _SCORED_EPOCHS,
        )
        self.forget()
        note = f"full fine-tuning took {whole.whole_s:.0f} s"
        yield self.claim(cut, [self.train(cut, seed, epochs) for seed in self.seeds()], note)

    def seeds(self) -> range:
        return range(self.options.choose_rounds(3, 3, 1))

    def forget(self) -> None:
        """Remove stored outputs, so that their building counts again."""
        _forget(Cache(str(self.folder / "cache")))

    def claim(
        self, cut: Any, found: list[tuple[float, _Epochs]], more: str = "at equal epochs"
    ) -> Claim:
        """The mean over seeds."""
        values = [100 * score for score, _ in found]
        seconds = (
            f"{len(found[0][1].seconds)} epochs in"
            f" {' '.join(f'{watch.whole_s:.0f}' for _, watch in found)} s"
        )
        claim = f"{self.task.folder}, {_WAYS[cut]}: test {self.task.metric}"
        return reaching(
            claim,
            statistics.mean(values),
            "%",
            least=None,
            note=f"{told(values)}; {seconds}; {more}",
        )

    def train(self, cut: Any, seed: int, epochs: int) -> tuple[float, _Epochs]:
        """The test score of a run at the settings of its experiment, and its times."""
        watch = _Epochs()
        sentiment = "sentiment" in self.task.folder
        with quiet():
            result = fit(
                TextDataConfig(
                    **self.files(),
                    batch_size=32 if sentiment else 16,
                    max_length=96,
                    cache=str(self.folder / "cache"),
                ),
                TransformerConfig(pretrained=self.options.pretrained, freeze_layers=cut),
                optim=OptimConfig(lr=self.rate(cut), warmup=0.1, layer_decay=0.9),
                epochs=epochs,
                seed=seed,
                checkpoint=CheckpointConfig(metric=self.task.metric, patience=None),
                callbacks={"watch": watch},
                monitor=MonitorConfig(progress=False, verdict=False, rival=False),
                logger="none",
                output=str(self.folder / "runs"),
            )
        return float(result.metrics[f"test/{self.task.metric}"]), watch

    def rate(self, cut: Any) -> float:
        """That of the experiments; a head alone wants a larger one."""
        return _RATE_OF_HEAD if cut == "all" else 2e-4 if "emotion" in self.task.folder else 1e-4

    def files(self) -> dict[str, str]:
        """The splits, or with `--quick` some rows of each."""
        found = {
            name: self.data / self.task.folder / f"{name}{self.task.suffix}"
            for name in _TRAINED_ROWS
        }
        if self.options.quick:
            for name, path in found.items():
                found[name] = self.folder / f"{self.task.folder}-{name}.parquet"
                if not found[name].is_file():
                    rows = (
                        pandas.read_csv(path)
                        if path.suffix == ".csv"
                        else pandas.read_parquet(path)
                    )
                    rows.sample(min(len(rows), _TRAINED_ROWS[name]), random_state=0).to_parquet(
                        found[name]
                    )
        return {name: str(path.resolve()) for name, path in found.items()}


def score_parts(options: Options, data: Path, folder: Path) -> dict[str, Any]:
    """Parts of the scores by name, each of some minutes."""
    found: dict[str, Any] = {}
    for task in (task for task in ENCODER_TASKS if task.folder.startswith("tweeteval")):
        bench = ScoreBench(task, options, data, folder)
        found |= {
            f"{task.folder}, equal epochs, {way}": partial(bench.equal_epochs, cut)
            for cut, way in _WAYS.items()
        }
        timed = {cut: way for cut, way in _WAYS.items() if cut}
        found |= {
            f"{task.folder}, equal time, {way}": partial(bench.equal_time, cut)
            for cut, way in timed.items()
        }
    return found


def _as_plain(options: Options) -> dict[str, Any]:
    return {"quick": options.quick, "tiny": options.tiny, "pretrained": options.pretrained}

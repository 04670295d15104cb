"""Runs that are priced and then trained: how far off the price was, and whether its interval held.

Each row is measured in a process apart, and kept in the cache folder (`bench/price.jsonl`) under
the name of the machine. A bench that was stopped begins where it ended; delete the file to measure
all rows again. `--only` takes rows by a part of their names, `--data` names the folder of published
sets. Rows that were measured beside other processes say so, and count apart.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claim import Claim, Options, bounded, measured_apart, not_here, reaching
from flatout.callbacks.clock import Clock
from flatout.cli.price import begin, open_store, quote_run
from flatout.cli.train import start_measuring
from flatout.config import RunConfig
from flatout.data.store.cache import default_cache_folder
from flatout.distributed.processes import warm_start
from flatout.errors import require
from flatout.perf.notes import machine_name
from flatout.price.costs import PlannedLengths
from flatout.price.energy import EnergyMeter
from flatout.price.expected_end import BUSY, ExpectedEnd
from flatout.price.pace import Work

_NEAR = 0.1  # of the time, and of the memory
_MEMORY_BELOW = 0.03
# Of 90 % intervals: fewer are too narrow, more too wide.
_LEAST_HELD = 0.85
_MOST_HELD = 0.975
_MODELS = {
    "BiLSTM": "model=bilstm model.hidden=64",
    "TextCNN": "model=textcnn",
    "encoder": "model=transformer model.hidden=64 model.layers=2 model.heads=4",
}
# Headlines and epochs of a long run, and of one with many rows.
_SIZES = {
    "BiLSTM": ((20_000, 24), (60_000, 8)),
    "TextCNN": ((20_000, 8), (60_000, 3)),
    "encoder": ((10_000, 8), (30_000, 3)),
}
_ROWS_OF_ONE_EPOCH = {"BiLSTM": 320_000, "TextCNN": 160_000, "encoder": 80_000}
_EPOCHS_OF_TWEETS = {"BiLSTM": 24, "TextCNN": 10, "encoder": 8}
_EXPERIMENTS = (
    ("bloom_bigrams", 6),
    ("bloom_bigrams", 12),
    ("minhash_bigrams", 8),
    ("twostep_bigrams", 2),
    ("battery_soc", 100),
    ("battery_soc", 250),
    ("battery_voltage", 150),
    ("tweets_ner", 3),
    ("tweets_ner", 6),
    ("mlm_tiny", 2),
    ("mlm_tiny", 4),
)
# The price is that of all epochs, and patience may end a run earlier. One thread, as equal runs of
# two threads on two virtual cores took 6.9 to 8.8 s within minutes, and those of one 8.3 to 8.5 s.
_OF_ALL = ("checkpoint.patience=null", "threads=1", "logger=none")
_BUDGETS_S = (30, 40, 50, 60)
_OF_BUDGETS = {
    "BiLSTM": _MODELS["BiLSTM"],
    "TextCNN": _MODELS["TextCNN"],
    "encoder, tweets": f"data=tweets {_MODELS['encoder']}",
    "battery_soc": "experiment=battery_soc",
    "bloom_bigrams": "experiment=bloom_bigrams data.sample.rows=6000",
}
_LONGEST_ESTIMATE_S = 30.0
_QUICK_S = 3.0
_QUICK_SHARE = 0.05
_COST_OF_ESTIMATE = 0.1  # percent; no clock of a training shows less
_ENDS_NEAR = 0.03  # of a budget
_RATE_AT_ITS_END = 0.05  # of its highest value
_EPOCHS_OF_PUBLISHED = {"subj": 8, "tweeteval_emotion": 15, "cr": 15}


def _built_in() -> dict[str, str]:
    """Runs of half a minute to a minute: what takes some seconds nobody prices, and equal runs of
    that length differ by a fifth.
    """
    rows = {}
    for model, words in _MODELS.items():
        for size, epochs in _SIZES[model]:
            for batch in (64, 256):
                name = f"{model}, {size:,} headlines, batches of {batch}"
                sample = f"data.sample.rows={size} data.batch_size={batch}"
                rows[name] = f"{words} {sample} trainer.max_epochs={epochs}"
        epochs = _EPOCHS_OF_TWEETS[model]
        rows[f"{model}, tweets"] = (
            f"data=tweets {words} data.batch_size=64 trainer.max_epochs={epochs}"
        )
        sample = f"data.sample.rows={_ROWS_OF_ONE_EPOCH[model]}"
        rows[f"{model}, one epoch"] = f"{words} {sample} trainer.max_epochs=1"
    for experiment, epochs in _EXPERIMENTS:
        words = f"experiment={experiment} trainer.max_epochs={epochs}"
        rows[f"{experiment}, {epochs} epochs"] = words
    return rows


def _published(folder: Path) -> dict[str, str]:
    rows = {}
    for name, epochs in _EPOCHS_OF_PUBLISHED.items():
        files = " ".join(
            f"data.{split}={folder / name / split}.csv" for split in ("train", "validation", "test")
        )
        for model, words in _MODELS.items():
            rows[f"{name}, {model}"] = f"{files} {words} trainer.max_epochs={epochs}"
    forecast = f"experiment=etth1_forecast data.source={folder / 'etth1' / 'ETTh1.csv'}"
    rows["etth1, 40 epochs"] = f"{forecast} trainer.max_epochs=40"
    rows["etth1, 100 epochs"] = f"{forecast} trainer.max_epochs=100"
    return rows


def _budgeted() -> dict[str, str]:
    """Runs whose length a budget plans."""
    return {
        f"budget={seconds}s, {name}": f"{words} budget={seconds}s"
        for seconds in _BUDGETS_S
        for name, words in _OF_BUDGETS.items()
    }


def claims(options: Options) -> Iterator[Claim]:
    """A row for each run, then how many held; the same of runs with a budget."""
    rows = _built_in()
    if options.data is not None:
        rows |= _published(options.data)
    budgeted = _budgeted()
    names = [name for name in (rows | budgeted) if (options.only or "") in name]
    allowed = ", ".join(rows | budgeted)
    require(bool(names), "--only", f"no row with {options.only!r}", allowed=allowed)
    names = names[: options.choose(len(names), 3, 1)]
    priced = [name for name in names if name in rows]
    if priced:
        yield from _price(priced, rows, options)
    budgets = [name for name in names if name in budgeted]
    if budgets:
        yield from _keep_budgets(budgets, budgeted, options)


def _price(names: Sequence[str], words: dict[str, str], options: Options) -> Iterator[Claim]:
    """A row for each run that is priced and trained, then how many held."""
    measured = []
    # in two processes, as a user does it: what the first holds is none of the second
    functions = ("price_row", "train_row")
    for row in _measure(names, words, functions, options):
        measured.append(row)
        yield _claim_of(row)
    quiet = [row for row in measured if row["busy"] < BUSY]
    busy = [row for row in measured if row["busy"] >= BUSY]
    yield from _sums(quiet, "")
    yield from _sums(busy, ", beside other processes")
    yield _cost_of_estimate()


def _cost_of_estimate() -> Claim:
    """What the expected end takes of each second: a note of the steps, and what is left."""
    steps = 4_000
    work = Work(steps, np.arange(steps + 1, dtype=np.float64))
    end = ExpectedEnd(
        measure_lengths=lambda: PlannedLengths(work, validations=10),
        clock=Clock(),
        meter=EnergyMeter(None),
        began=time.perf_counter(),
        say=lambda text: None,
    )
    seconds = []
    for step in range(1, 1_000):  # more than it keeps, so that its list is full
        began = time.perf_counter()
        end.note(step)
        end.time_left()
        seconds.append(time.perf_counter() - began)
    share = 100 * statistics.median(seconds[-100:])
    claim = "the expected end in training, of each second"
    return bounded(claim, share, "%", most=_COST_OF_ESTIMATE)


def _keep_budgets(names: Sequence[str], words: dict[str, str], options: Options) -> Iterator[Claim]:
    """A row for each run with a budget, then how many ended near it with their rate at its end."""
    num_kept = 0
    for row in _measure(names, words, ("train_row",), options):
        budget_s = float(row["name"].partition("s,")[0].removeprefix("budget="))
        ratio = row["took_s"] / budget_s
        is_kept = abs(ratio - 1) <= _ENDS_NEAR and row["rate_share"] <= _RATE_AT_ITS_END
        num_kept += is_kept
        others = f", other processes take {row['busy']:.0%}" if row["busy"] >= BUSY else ""
        note = f"the rate ends at {row['rate_share']:.1%} of its highest{others}"
        yield Claim(row["name"], row["took_s"], budget_s, "s", ratio, "0.97–1.03", is_kept, note)
    claim = f"budgets of {len(names)} kept within 3 %, the rate at its end"
    yield reaching(claim, num_kept, "", least=len(names))


def _measure(
    names: Sequence[str], words: dict[str, str], functions: Sequence[str], options: Options
) -> Iterator[dict[str, Any]]:
    """The row of each name, kept from an earlier bench or measured now."""
    path = default_cache_folder() / "bench" / "price.jsonl"
    kept = _read_kept(path)
    for name in names:
        row = kept.get(name)
        if row is None:
            settings = [*words[name].split(), *_OF_ALL]
            if options.tiny:
                settings = [*settings, "data.sample.rows=200", "trainer.max_epochs=1"]
            row = {"busy": 0.0}
            for function in functions:
                found = measured_apart(f"benchmarks.price:{function}", {"words": settings})
                row |= found | {"busy": max(row["busy"], found["busy"])}
            row |= {"name": name, "machine": machine_name()}
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
        yield row


def _read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """Rows that were measured on this machine, by name."""
    if not path.is_file():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row for row in rows if row["machine"] == machine_name()}


def price_row() -> None:
    """Price a run, by words on standard input; the figures are the last line."""

    def measure(config: RunConfig, figures: dict[str, Any]) -> None:
        open_store(config)  # it is built once, and no part of an estimate
        began = time.perf_counter()
        quote = quote_run(config, set(), None, 1)
        figures["estimate_s"] = time.perf_counter() - began
        expected = quote.expected
        figures.update(
            expected_s=expected.value_s,
            low_s=expected.low_s,
            high_s=expected.high_s,
            raw_s=expected.raw_s,
            parts_s=expected.parts_s,
            expected_gb=quote.host_peak_gb,
            expected_kwh=quote.kwh,
            busy=quote.busy,
        )

    _print_figures(measure)


def train_row() -> None:
    """Train a run, by words on standard input; what it took is the last line."""

    def measure(config: RunConfig, figures: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            summary = begin(replace(config, output=folder), run).summary
            figures["rate_share"] = _final_rate_share(run)
        price = summary["price"]
        figures.update(
            took_s=price["took_s"],
            first_s=price.get("expected_s"),
            took_parts_s=price["took_parts_s"],
            took_gb=price["host_peak_gb"],
            took_kwh=price["kwh"],
            busy=price["busy"],
        )

    _print_figures(measure)


def _final_rate_share(run: Path) -> float:
    """The last learning rate of a run over its highest."""
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        rates = [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]
    return rates[-1] / max(rates)


def _print_figures(measure: Callable[[RunConfig, dict[str, Any]], None]) -> None:
    words = json.load(sys.stdin)["words"]
    warm_start()
    figures: dict[str, Any] = {}

    def measure_settings(config: RunConfig, overrides: Sequence[str]) -> None:
        with redirect_stdout(sys.stderr):
            measure(config, figures)

    start_measuring(words, measure_settings)
    print(json.dumps(figures))


def _holds(row: dict[str, Any]) -> bool:
    return bool(row["low_s"] <= row["took_s"] <= row["high_s"])


def _claim_of(row: dict[str, Any]) -> Claim:
    ratio = row["expected_s"] / row["took_s"]
    interval = f"interval {row['low_s']:.1f}–{row['high_s']:.1f} s"
    held = "holds it" if _holds(row) else "misses it"
    memory = f"memory {row['expected_gb']:.2f} of {row['took_gb']:.2f} GB"
    energy = ""
    if row.get("took_kwh"):
        energy = f", energy {row['expected_kwh']:.3g} of {row['took_kwh']:.3g} kWh"
    others = f", other processes take {row['busy']:.0%}" if row["busy"] >= BUSY else ""
    note = f"{interval} {held}, {memory}{energy}{others}"
    is_near = abs(ratio - 1) <= _NEAR
    return Claim(
        row["name"], row["expected_s"], row["took_s"], "s", ratio, "0.9–1.1", is_near, note
    )


def _sums(rows: list[dict[str, Any]], where: str) -> Iterator[Claim]:
    """How many rows came near, and how many intervals held."""
    if not rows:
        yield not_here(f"runs within ±10 %{where}", "no row was measured so")
        return
    count = len(rows)
    near = sum(abs(row["expected_s"] / row["took_s"] - 1) <= _NEAR for row in rows)
    yield reaching(f"runs of {count} within ±10 %{where}", near, "", least=0.9 * count)
    hold = sum(map(_holds, rows))
    least = math.ceil(_LEAST_HELD * count)
    most = math.floor(_MOST_HELD * count)
    claim = f"intervals of {count} that hold{where}"
    yield Claim(claim, hold, None, "", None, f"{least} to {most}", least <= hold <= most)
    widths = [(row["high_s"] - row["low_s"]) / row["expected_s"] for row in rows]
    width = statistics.median(widths)
    yield bounded(f"median width of an interval{where}", 100 * width, "%", most=25)
    ratios = [row["expected_gb"] / row["took_gb"] for row in rows]
    near = sum(abs(ratio - 1) <= _NEAR for ratio in ratios)
    yield reaching(f"peak memory of {count} within ±10 %{where}", near, "", least=0.9 * count)
    below = sum(ratio < 1 - _MEMORY_BELOW for ratio in ratios)
    yield bounded(f"peak memory below by more than 3 %{where}", below, "", most=0)
    timed = [row for row in rows if "estimate_s" in row]
    if not timed:
        return
    longest_s = max(row["estimate_s"] for row in timed)
    claim = f"time to the estimate, the longest of {len(timed)}{where}"
    yield bounded(claim, longest_s, "s", most=_LONGEST_ESTIMATE_S)
    quick = sum(row["estimate_s"] <= max(_QUICK_S, _QUICK_SHARE * row["took_s"]) for row in timed)
    claim = f"estimates of {len(timed)} within 5 % of their run, or 3 s{where}"
    yield reaching(claim, quick, "", least=len(timed))

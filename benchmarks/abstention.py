"""Whether answers that are given at an error are wrong as seldom as promised, on rows that nothing
has seen.

A small model is trained on each set. Its answers to the rows that training never saw, the set's own
validation and test rows, are drawn into halves twenty times: one half calibrates, the other stands
for fresh rows. Training a model again for each draw would only move the errors, not the promise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks.claim import Claim, Options, not_here, quiet, reaching
from flatout import HeadlinesConfig, MonitorConfig, TextDataConfig, TweetsConfig, fit
from flatout.data.samples.headlines import HeadlinesTable
from flatout.data.samples.tweets import TweetsTable
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table
from flatout.errors import UserError
from flatout.inference.run_predictor import FileOptions
from flatout.inference.text import Predictor
from flatout.models.textcnn import TextCNNConfig
from flatout.tasks.abstention import HeldOutAnswers

SETS = (
    "subj",
    "ag_news",
    "cr",
    "tweeteval_emotion",
    "tweeteval_sentiment",
    "newsgroups20",
    "huffpost41",
)
ERRORS = (0.01, 0.05, 0.1, 0.2)
_DRAWS = 20
_LEAST = 0.95  # of the draws, that keep the promise
_CONFIDENCE = 0.95  # of the interval of an error on fresh rows
_ASIDE = 0.15  # of the training rows, for files of the same source
_SAMPLES: dict[str, tuple[Any, Any]] = {
    "sample headlines": (HeadlinesConfig, HeadlinesTable),
    "sample tweets": (TweetsConfig, TweetsTable),
}


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """A set of labelled texts, in parts that have no row in common."""

    name: str
    trained: dict[str, list[Any]]  # the columns of most training rows
    aside: list[str]  # the texts of the others, which no run sees
    unseen: list[Table]  # its validation and test rows

    @classmethod
    def of(cls, name: str, train: Table, unseen: list[Table]) -> LabelledSet:
        rows = pa.Table.from_batches(train.blocks(["text", "label"]))
        is_aside = np.random.default_rng(0).random(rows.num_rows) < _ASIDE
        aside = rows["text"].filter(pa.array(is_aside)).to_pylist()
        return cls(name, rows.filter(pa.array(~is_aside)).to_pydict(), aside, unseen)


def claims(options: Options) -> Iterator[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        for labelled in read_sets(options):
            predictor = _train(Path(folder, labelled.name), labelled.trained, options)
            held_out = score(predictor, labelled.unseen)
            for error in ERRORS:
                yield _judge(labelled.name, held_out, error)


def read_sets(options: Options) -> Iterator[LabelledSet]:
    if options.data is None:
        rows = options.choose(8_000, 2_000, 200)
        for name, (config, table) in _SAMPLES.items():
            sample = config(rows=rows, eval_rows=rows)
            yield LabelledSet.of(name, table(sample, "train"), [table(sample, "test")])
        return
    for name in SETS:
        files = {path.stem: str(path) for path in (options.data / name).glob("*.*")}
        if "train" in files:
            unseen = [files[split] for split in ("validation", "test") if split in files]
            tables = [open_table(file, where="--data") for file in (files["train"], *unseen)]
            yield LabelledSet.of(name, tables[0], tables[1:])


def _train(folder: Path, rows: dict[str, list[Any]], options: Options) -> Predictor:
    """A small network on a set; its validation rows are taken from the training rows."""
    data = TextDataConfig(train=rows, batch_size=32, max_length=128, cache=str(folder / "cache"))
    epochs = options.choose(4, 2, 1)
    quiet_run = MonitorConfig(progress=False, verdict=False, rival=False)
    with quiet():
        result = fit(
            data,
            TextCNNConfig(),
            epochs=epochs,
            output=str(folder),
            monitor=quiet_run,
            logger="none",
        )
    assert isinstance(result.predictor, Predictor)
    return result.predictor


def score(predictor: Predictor, tables: list[Table]) -> HeldOutAnswers:
    """The answers to all rows of some tables."""
    parts = []
    for table in tables:
        scored = predictor.score_table(table, FileOptions(), [predictor], lambda rows: None)
        assert scored.held_out is not None
        parts.append(scored.held_out)
    return HeldOutAnswers.joined(parts)


def _judge(name: str, held_out: HeldOutAnswers, error: float) -> Claim:
    """How many draws keep the promise of this error, of those in which it is given."""
    title = f"{name}: draws in which at most {error:.0%} is wrong"
    answered = []
    errors = []
    missed = []
    kept = 0
    for seed in range(_DRAWS):
        order = np.random.default_rng(seed).permutation(len(held_out.rows))
        half = len(order) // 2
        fresh = _take(held_out, order[half:])
        try:
            chosen = _take(held_out, order[:half]).choose(error)
        except UserError as refused:
            reason = str(refused)
            continue
        is_given = fresh.sureness > chosen.above
        wrong = int(fresh.wrong[is_given].sum())
        interval = binomtest(wrong, int(is_given.sum())).proportion_ci(_CONFIDENCE)
        kept += interval.low <= error
        answered.append(is_given.mean())
        errors.append(wrong / is_given.sum())
        if not is_given.all():
            missed.append((fresh.truth[~is_given] < chosen.possible_from).mean())
    if not errors:
        return not_here(title, reason.partition(". It takes")[0])
    refused_draws = _DRAWS - len(errors)
    over = sum(value > error for value in errors)
    note = (
        f"{np.mean(answered):.0%} answered, {np.mean(errors):.2%} of them wrong (most"
        f" {max(errors):.2%}, above {error:.0%} in {over} draws); refused in {refused_draws}"
    )
    if missed:
        share = f"{np.mean(missed):.1%} (most {max(missed):.1%})"
        note += f"; of the others the right class is not among the possible ones in {share}"
    # a draw in which nothing is promised breaks no promise
    return reaching(title, kept + refused_draws, f"of {_DRAWS}", least=_LEAST * _DRAWS, note=note)


def _take(held_out: HeldOutAnswers, rows: NDArray[np.int64]) -> HeldOutAnswers:
    rows = np.sort(rows)
    return HeldOutAnswers(
        held_out.sureness[rows], held_out.wrong[rows], held_out.truth[rows], held_out.rows[rows]
    )

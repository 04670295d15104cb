"""First runs: a model with nothing set but the columns, against its rival, on published sets.

The model is a BiLSTM, or with `--pretrained FOLDER` that encoder. Each cell is a set cut to some
training rows, and a mean over seeds: other rows, another start. The rival is the linear model that
every run is compared with, on the same rows. An encoder is compared with eight settings of rate,
batch and epochs, too, unless `--quick` leaves these out. `--data` names the folder of the sets,
`--rounds` the seeds, `--only` cells by a part of their names.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from benchmarks.claim import Claim, Options, quiet
from flatout import BiLSTMConfig, OptimConfig, Result, TextDataConfig, TransformerConfig, fit
from flatout.config import MonitorConfig
from flatout.errors import UserError

SETS = (
    "ag_news",
    "cr",
    "huffpost41",
    "newsgroups20",
    "subj",
    "tweeteval_emotion",
    "tweeteval_irony",
    "tweeteval_sentiment",
)
_ROWS = (250, 500, 1_000, 2_000, 5_000, None)
"""Training rows of a cell, validation rows among them; None: all."""
_MOST_TESTED = 2_000  # rows of a test split, drawn once
_MARGIN = 0.5  # points by which a run may be below its rival
# shares of the cells, of a BiLSTM and of an encoder
_GOALS = {"not below": 44 / 48, "above": 30 / 48}
_GOALS_OF_ENCODER = {"above": 27 / 30, "near": 24 / 30}
_ENCODER_SETS = (
    "ag_news",
    "cr",
    "huffpost41",
    "subj",
    "tweeteval_emotion",
    "tweeteval_irony",
)
_ENCODER_ROWS = (250, 500, 1_000, 2_000, 5_000)
_NEAR = 1.0  # points by which an encoder may be below the best of the typed settings


@dataclass(frozen=True, slots=True)
class Typed:
    """Settings that a user may have typed instead of none."""

    rate: float
    batch: int
    epochs: int


_TYPED = [Typed(*each) for each in itertools.product((5e-5, 2e-4), (16, 32), (5, 15))]


@dataclass(frozen=True, slots=True)
class Cell:
    """A set, and how many of its training rows are used."""

    name: str
    rows: int | None

    @property
    def title(self) -> str:
        rows = "all" if self.rows is None else f"{self.rows:,}"
        return f"{self.name}, {rows} rows"


def claims(options: Options) -> Iterator[Claim]:
    """Each cell's accuracy times 100 beside the rival's; then how many cells reach a goal.

    An encoder's cell has a second row: the best of the typed settings, by the same test rows.
    """
    pretrained = options.pretrained
    cells = [Cell(name, rows) for rows in _ROWS for name in SETS]
    if pretrained is not None:
        cells = [Cell(name, rows) for rows in _ENCODER_ROWS for name in _ENCODER_SETS]
    wanted = [cell for cell in cells if (options.only or "") in cell.title]
    if not wanted:
        allowed = ", ".join(cell.title for cell in cells)
        raise UserError("--only", f"no row with {options.only!r}", allowed=allowed)
    folder = options.data
    names = dict.fromkeys(cell.name for cell in wanted)
    if folder is None or not all((folder / name).is_dir() for name in names):
        hint = f"Set --data to a folder that holds {', '.join(names)}."
        raise UserError("bench defaults", "needs published data sets", hint=hint)
    rounds = options.choose_rounds(3 if pretrained is None else 2, 1, 1)
    leads = []
    gaps = []
    for cell in wanted:
        first = [_scores(_train(cell, folder, seed, pretrained)) for seed in range(rounds)]
        claim, lead = _compare(cell, first)
        leads.append(lead)
        yield claim
        if pretrained is not None and not options.quick:
            claim, gap = _compare_with_typed(cell, folder, first, pretrained)
            gaps.append(gap)
            yield claim
    margins = f"not below: by at most {_MARGIN} points"
    if pretrained is None:
        yield _count("not below the rival", leads, -_MARGIN, _GOALS["not below"], margins)
        yield _count("above the rival", leads, 1e-9, _GOALS["above"], margins)
        return
    yield _count("above the rival", leads, 1e-9, _GOALS_OF_ENCODER["above"], margins)
    if gaps:
        note = f"near: by at most {_NEAR} point below the best of {len(_TYPED)} settings"
        yield _count("near the best settings", gaps, -_NEAR, _GOALS_OF_ENCODER["near"], note)


def _count(what: str, leads: Sequence[float], least: float, share: float, note: str) -> Claim:
    """How many cells lead by `least` points or more; `share` of them should."""
    count = sum(lead >= least for lead in leads)
    goal = share * len(leads)
    return Claim(
        f"cells {what}",
        count,
        None,
        "",
        None,
        f"≥ {goal:.0f}",
        count >= round(goal),
        f"of {len(leads)} cells; {note}",
    )


def _compare(cell: Cell, pairs: Sequence[tuple[float, float]]) -> tuple[Claim, float]:
    """The claim of a cell, and the points by which its runs lead."""
    ours = statistics.mean(run for run, _ in pairs)
    theirs = statistics.mean(rival for _, rival in pairs)
    shown = ", ".join(f"{run:.1f} / {rival:.1f}" for run, rival in pairs)
    lead = ours - theirs
    return (
        Claim(
            cell.title,
            ours,
            theirs,
            "",
            ours / theirs,
            f"≥ rival - {_MARGIN}",
            lead >= -_MARGIN,
            f"{lead:+.1f} points; seeds: {shown}",
        ),
        lead,
    )


def _compare_with_typed(
    cell: Cell, folder: Path, first: Sequence[tuple[float, float]], pretrained: str
) -> tuple[Claim, float]:
    """The claim of an encoder's cell against typed settings, and the points by which it leads."""
    ours = statistics.mean(run for run, _ in first)
    means: dict[Typed, float] = {}
    for typed in _TYPED:
        runs = [_train(cell, folder, seed, pretrained, typed) for seed in range(len(first))]
        means[typed] = statistics.mean(100 * run.metrics["test/accuracy"] for run in runs)
    best = max(means, key=lambda typed: means[typed])
    lead = ours - means[best]
    return (
        Claim(
            f"{cell.title}: against the best of {len(means)} settings",
            ours,
            means[best],
            "",
            ours / means[best],
            f"≥ best - {_NEAR}",
            lead >= -_NEAR,
            f"{lead:+.1f} points; best: {best}",
        ),
        lead,
    )


def _scores(run: Result) -> tuple[float, float]:
    """Test accuracies of a run and of its rival, times 100."""
    rival = run.summary["rival"]["metrics"]["test/accuracy"]
    return 100 * run.metrics["test/accuracy"], 100 * rival


def _train(
    cell: Cell, folder: Path, seed: int, pretrained: str | None, typed: Typed | None = None
) -> Result:
    """A run with nothing set, and its rival; or one of typed settings, without."""
    with tempfile.TemporaryDirectory() as place:
        files = {}
        for split, table in _splits(cell, folder, seed).items():
            files[split] = f"{place}/{split}.parquet"
            pq.write_table(table, files[split])
        data = TextDataConfig(train=files["train"], test=files["test"], cache=f"{place}/cache")
        model = BiLSTMConfig() if pretrained is None else TransformerConfig(pretrained=pretrained)
        settings: dict[str, Any] = {}
        if typed is not None:
            data = replace(data, batch_size=typed.batch)
            settings = {"epochs": typed.epochs, "optim": OptimConfig(lr=typed.rate)}
        rival = "always" if typed is None else False
        settings["monitor"] = MonitorConfig(progress=False, verdict=False, rival=rival)
        with quiet():
            return fit(data, model, folder=Path(place, "run"), seed=seed, **settings)


def _splits(cell: Cell, folder: Path, seed: int) -> dict[str, pa.Table]:
    """Training rows of a cell, drawn by the seed, and test rows, the same for all cells."""
    train = _read(folder / cell.name, "train")
    test = _read(folder / cell.name, "test")
    order = np.random.default_rng(seed).permutation(len(train))
    tested = np.random.default_rng(0).permutation(len(test))
    return {"train": train.take(order[: cell.rows]), "test": test.take(tested[:_MOST_TESTED])}


def _read(place: Path, split: str) -> pa.Table:
    """Texts and labels of a split that have words."""
    (file,) = place.glob(f"{split}.*")
    if file.suffix == ".parquet":
        table = pq.read_table(file)
    elif file.suffix == ".csv":
        newlines = pacsv.ParseOptions(newlines_in_values=True)
        table = pacsv.read_csv(file, parse_options=newlines)
    else:
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        table = pa.Table.from_pylist(rows)
    labels = table["label"].cast(pa.string())
    table = pa.table({"text": table["text"], "label": labels})
    return table.filter(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(table["text"])), 0))

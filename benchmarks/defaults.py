"""First runs: a BiLSTM with nothing set but the columns, against its rival, on published sets.

Each cell is a set cut to some training rows, and a mean over seeds: other rows, another start. The
rival is the linear model that every run is compared with, on the same rows. `--data` names the
folder of the sets, `--rounds` the seeds, `--only` cells by a part of their names.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from benchmarks.claim import Claim, Options, quiet
from flatout import BiLSTMConfig, TextDataConfig, fit
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
_GOALS = {"not below": 44 / 48, "above": 30 / 48}  # shares of the cells


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
    """Each cell's accuracy times 100 beside the rival's; then the cells not below it, and above."""
    cells = [Cell(name, rows) for rows in _ROWS for name in SETS]
    wanted = [cell for cell in cells if (options.only or "") in cell.title]
    if not wanted:
        allowed = ", ".join(cell.title for cell in cells)
        raise UserError("--only", f"no row with {options.only!r}", allowed=allowed)
    folder = options.data
    names = dict.fromkeys(cell.name for cell in wanted)
    if folder is None or not all((folder / name).is_dir() for name in names):
        hint = f"Set --data to a folder that holds {', '.join(names)}."
        raise UserError("bench defaults", "needs published data sets", hint=hint)
    leads = []
    for cell in wanted:
        claim, lead = _compare(cell, folder, options.choose_rounds(3, 1, 1))
        leads.append(lead)
        yield claim
    counts = {
        "not below": sum(lead >= -_MARGIN for lead in leads),
        "above": sum(lead > 0 for lead in leads),
    }
    for name, count in counts.items():
        least = _GOALS[name] * len(leads)
        goal = f"≥ {least:.0f}"
        note = f"of {len(leads)} cells; not below: by at most {_MARGIN} points"
        yield Claim(
            f"cells {name} the rival", count, None, "", None, goal, count >= round(least), note
        )


def _compare(cell: Cell, folder: Path, seeds: int) -> tuple[Claim, float]:
    """The claim of a cell, and the points by which its runs lead."""
    pairs = [_scores(cell, folder, seed) for seed in range(seeds)]
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


def _scores(cell: Cell, folder: Path, seed: int) -> tuple[float, float]:
    """Test accuracies of a run and of its rival, times 100."""
    with tempfile.TemporaryDirectory() as place:
        files = {}
        for split, table in _splits(cell, folder, seed).items():
            files[split] = f"{place}/{split}.parquet"
            pq.write_table(table, files[split])
        data = TextDataConfig(train=files["train"], test=files["test"], cache=f"{place}/cache")
        monitor = MonitorConfig(progress=False, verdict=False, rival="always")
        with quiet():
            result = fit(
                data, BiLSTMConfig(), folder=Path(place, "run"), seed=seed, monitor=monitor
            )
        rival = result.summary["rival"]["metrics"]["test/accuracy"]
        return 100 * result.metrics["test/accuracy"], 100 * rival


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

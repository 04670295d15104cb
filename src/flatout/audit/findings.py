"""What an audit found: at most five findings by what they are worth, each with the next step; lines
and page of it.

And which rows to label next: those that the quick model is least sure of, and that differ from each
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flatout.audit.labels import mixed_up
from flatout.audit.measure import AuditMeasurement, Interval

_MOST = 5
SUSPECTS = "suspects.csv"
_LEAST_WORTH = 0.003
_LEAST_SLICE = 30
_FAR = 3.0
UNKNOWN = 0.5


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One reason why the score is not higher."""

    what: str
    worth: float  # share of the rows that it is worth, by what was measured
    step: str
    is_problem: bool = True  # False: a way to a better score, though nothing is wrong

    def line(self) -> str:
        return f"{100 * self.worth:.1f} points  {self.what}. {self.step}"


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows that have something in common, and how many of them are answered as labelled."""

    name: str
    rows: int
    score: float
    distance: float  # standard errors from the score of all rows


def find(measured: AuditMeasurement, suspects: str = SUSPECTS) -> list[AuditFinding]:
    """The findings worth most, the first one first; `suspects` is where these are written."""
    found = [each for each in _all(measured, suspects) if each.worth >= _LEAST_WORTH]
    return sorted(found, key=lambda each: -each.worth)[:_MOST]


def _all(measured: AuditMeasurement, suspects: str) -> Iterator[AuditFinding]:
    rows = measured.rows
    bound = measured.forecast
    low = measured.noise[1]
    between = mixed_up(rows.labels, measured.suspects, 1)
    mixed = "".join(
        f", most between {rows.classes[a]} and {rows.classes[b]}" for a, b, _ in between
    )
    what = f"{len(measured.suspects.places):,} suspects, {wrong_share(measured.noise)}{mixed}"
    gain, least, _ = measured.without_suspects
    decide = f"take out the rows that are right, train with data.exclude={suspects}"
    step = (
        f"Read {suspects} from the top,"
        f" {'and correct the tags in your file' if rows.is_tagged else decide}"
    )
    # no more is won than wrong rows are named
    low = min(low, len(measured.suspects.places) / len(rows))
    won = gain if rows.is_tagged and least > 0 else least
    yield AuditFinding(what, max(low, won) if measured.noise[2] < UNKNOWN else low, step)
    if bound.low > 0 and not bound.is_useless:
        label = "Label the rows that python -m flatout audit unlabelled=FILE top=200 names"
        yield AuditFinding(
            bound.line(),
            bound.gain,
            "Tag more sentences" if rows.is_tagged else label,
            is_problem=False,
        )
    long, lost, least_lost, _ = measured.cut
    if least_lost > 0:
        yield AuditFinding(
            f"{long:,} texts are cut by data.max_length", lost, "Set a greater data.max_length"
        )
    if rows.conflicts:
        what = f"{rows.conflicts:,} rows have a text that has another label elsewhere"
        yield AuditFinding(
            what, rows.conflicts / len(rows) / 2, "Set data.clean.conflicts=drop, or correct them"
        )
    for each in slices(measured)[:2]:
        if each.distance < -_FAR:
            what = (
                f"{each.name}: {100 * each.score:.1f} % of {each.rows:,} rows are answered as"
                " labelled"
            )
            worth = (measured.score[0] - each.score) * each.rows / len(rows)
            yield AuditFinding(what, worth, "Look at such rows first; label more of them")


def slices(measured: AuditMeasurement) -> list[Slice]:
    """Scores by length, split, file and column, the worst first."""
    rows = measured.rows
    words = np.array([len(text.split()) for text in measured.rows.texts])
    edges = np.unique(np.quantile(words, [0.25, 0.5, 0.75]).astype(int))
    ends = [0, *(edges + 1).tolist(), int(words.max()) + 1]
    names = np.array([f"{first} to {last - 1} words" for first, last in itertools.pairwise(ends)])
    by = {"split": rows.splits, "file": rows.files, "column": rows.column}
    by |= (
        {} if rows.is_tagged else {"length": names[np.searchsorted(edges + 1, words, side="right")]}
    )
    found = []
    known = set[bytes]()
    for name, values in by.items():
        kinds, first, inverse = np.unique(
            values.astype(str), return_index=True, return_inverse=True
        )
        is_new = (parting := first[inverse].tobytes()) not in known  # files are often splits
        known.add(parting)
        for number, kind in enumerate(kinds if is_new and len(kinds) > 1 else []):
            of_kind = measured.is_right[inverse == number]
            if len(of_kind) >= _LEAST_SLICE:
                error = np.sqrt(measured.score[0] * (1 - measured.score[0]) / len(of_kind)) or 1.0
                distance = float((of_kind.mean() - measured.score[0]) / error)
                found.append(Slice(f"{name} {kind}", len(of_kind), float(of_kind.mean()), distance))
    return sorted(found, key=lambda each: each.distance)


def wrong_share(noise: Interval) -> str:
    """The share of wrong labels in words; where the model knows little, or rows are few, it has no
    bound.
    """
    rate, low, high = noise
    known = f"{100 * rate:.1f} % of the labels look wrong ({span(low, high)})"
    return known if high < UNKNOWN else "how many labels are wrong cannot be known from these rows"


def span(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"

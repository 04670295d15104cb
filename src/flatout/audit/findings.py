"""What an audit found: at most five findings by what they are worth, each with the next step; lines
and page of it.

And which rows to label next: those that the quick model is least sure of, and that differ from each
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from flatout.audit.labels import mixed_up
from flatout.audit.measure import AuditMeasurement, Interval
from flatout.audit.quick_model import Features, Head
from flatout.audit.rows import AuditRows, small_classes
from flatout.data.problem import Problem
from flatout.data.tokens.subwords import PAIR
from flatout.errors import printable
from flatout.files import write_atomically, write_table
from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_text, tile

SUSPECTS = "suspects.csv"
_MOST = 5
_LEAST_WORTH = 0.003
_LEAST_SLICE = 30
_FAR = 3.0
_UNKNOWN = 0.5
_POOL = 10  # of so many times the rows asked for, the least sure ones, those that differ are chosen
_SHOWN = 20  # rows of a table on the page


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
    yield AuditFinding(what, max(low, won) if measured.noise[2] < _UNKNOWN else low, step)
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


def lines(measured: AuditMeasurement, num_folds: int) -> Iterator[str]:
    """What is printed: score and luck, labels, rows, more rows."""
    rows, (score, low, high) = measured.rows, measured.score
    yield f"score:  {100 * score:.1f} % of the rows answered as labelled ({_span(low, high)})"
    test = rows.of_splits.get("test") or len(rows) // num_folds
    luck = f"{196 * np.sqrt(2 * score * (1 - score) / test):.1f} points by chance"
    folds = _span(measured.fold_scores.min(), measured.fold_scores.max())
    again = _span(*sorted(measured.dealt_again))
    yield (
        f"luck:   folds from {folds} %, dealt again {again} %; two test sets of {test:,} rows"
        f" differ by {luck}"
    )
    yield f"labels: {len(measured.suspects.places):,} suspects; {wrong_share(measured.noise)}"
    for given, likely, count in mixed_up(rows.labels, measured.suspects):
        yield f"        {rows.classes[given]}, likely {rows.classes[likely]}: {count:,} rows"
    gain, least, most = measured.without_suspects
    yield (
        f"        without the suspects in training: {100 * gain:+.1f} points ({_span(least, most)})"
    )
    long, lost, *_ = measured.cut
    if not rows.is_tagged:
        yield (
            f"rows:   {long:,} texts are longer than data.max_length; the cut costs"
            f" {100 * lost:.1f} points"
        )
    if small := small_classes(rows, num_folds):
        named = ", ".join(small[:5]) + (", …" if len(small) > 5 else "")
        yield f"        classes with fewer rows than folds, judged from little: {named}"
    yield f"more:   {measured.forecast.line()}"


def wrong_share(noise: Interval) -> str:
    """The share of wrong labels in words; where the model knows little, or rows are few, it has no
    bound.
    """
    rate, low, high = noise
    known = f"{100 * rate:.1f} % of the labels look wrong ({_span(low, high)})"
    return known if high < _UNKNOWN else "how many labels are wrong cannot be known from these rows"


def write_suspects(measured: AuditMeasurement, path: Path) -> None:
    """The suspects as a table, the surest first, with what words and encoder say; `data.exclude`
    reads it.
    """
    rows, found = measured.rows, measured.suspects
    table: list[list[object]] = [
        ["row", "file", "split", "text", "given", "likely", "sure", *measured.views, "place"]
    ]
    for place, likely, sure in zip(found.places, found.likely, found.sure, strict=True):
        where = [
            rows.rows[place],
            rows.files[place],
            rows.splits[place],
            beginning(rows.shown[place]),
        ]
        views = [
            rows.classes[of_rows[place]] if of_rows[place] >= 0 else ""
            for of_rows in measured.views.values()
        ]
        said = [rows.classes[rows.labels[place]], rows.classes[likely], f"{sure:.3f}", *views]
        table.append([*where, *said, rows.places[place]])
    write_table(path, table)


def write_next_rows(rows: AuditRows, texts: list[str], file: str, top: int, path: Path) -> int:
    """Write which texts of a file to label next, the first one first; how many they are."""
    reader = Features()
    head = Head(Problem.single, len(rows.classes)).fit(reader.fit(list(rows.texts)), rows.labels)
    features = reader.read(texts)
    answers = head.predict(features)
    best = np.sort(answers, axis=1)
    unsure = 1 - (best[:, -1] - best[:, -2])
    unsure[[not text.strip() for text in texts]] = -1  # nothing to label there
    table: list[list[object]] = [["row", "file", "text", "likely", "unsure"]]
    for place in choose_rows(features, unsure, top):
        likely = rows.classes[answers[place].argmax()]
        table.append([place + 1, file, beginning(texts[place]), likely, f"{unsure[place]:.3f}"])
    write_table(path, table)
    return len(table) - 1


def choose_rows(features: csr_matrix, unsure: NDArray[np.float64], top: int) -> list[int]:
    """Rows one after the other: the least sure, less as far as it is like one that is chosen
    already.
    """
    pool = np.argsort(-unsure, kind="stable")[: min(_POOL * top, int((unsure >= 0).sum()))]
    norms = np.sqrt(np.asarray(features[pool].multiply(features[pool]).sum(axis=1)).ravel())
    near = np.zeros(len(pool))
    found = list[int]()
    for _ in range(min(top, len(pool))):
        worth = unsure[pool] * (1 - near)
        worth[found] = -1
        found.append(int(worth.argmax()))
        like = np.asarray((features[pool] @ features[pool[found[-1:]]].T).toarray()).ravel()
        near = np.maximum(near, like / np.maximum(1e-12, norms * norms[found[-1]]))
    return [int(pool[place]) for place in found]


def beginning(text: str) -> str:
    """The first characters of a text, on one line; of a pair, a bar between its two."""
    return printable(text[:120].replace(PAIR, " | "))


def write_audit_page(
    measured: AuditMeasurement, findings: list[AuditFinding], title: str, command: str, path: Path
) -> None:
    rows, found = measured.rows, measured.suspects
    points = [
        list(zip(measured.sizes.tolist(), scores, strict=True))
        for scores in (1 - measured.errors).tolist()
    ]
    curves = [Curve(f"fold {number}", of_fold) for number, of_fold in enumerate(points, 1)]
    unlike = np.argsort(measured.closeness, kind="stable")[: _SHOWN // 2]
    page = render_text(
        "audit.html",
        title=title,
        command=command,
        figures=_tiles(measured),
        findings=[[f"{100 * each.worth:.1f}", each.what, each.step] for each in findings],
        suspects=[
            [*_row(measured, place), rows.classes[likely], f"{sure:.3f}"]
            for place, likely, sure in zip(
                found.places[:_SHOWN], found.likely, found.sure, strict=False
            )
        ],
        mixed=[
            [rows.classes[a], rows.classes[b], f"{num:,}"]
            for a, b, num in mixed_up(rows.labels, found, 10)
        ],
        charts_of_rows=[
            line_chart("score by rows trained on", curves, x_label="rows", doublings=True)
        ],
        forecast=measured.forecast.line(),
        slices=[
            [each.name, f"{each.rows:,}", f"{100 * each.score:.1f} %"]
            for each in slices(measured)[:_SHOWN]
        ],
        unlike=[[*_row(measured, place), f"{measured.closeness[place]:.3f}"] for place in unlike],
    )
    write_atomically(path, page)


def _span(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _row(measured: AuditMeasurement, place: int) -> list[str]:
    rows = measured.rows
    where = rows.places[place] if len(rows.places[place]) < 40 else f"…{rows.places[place][-39:]}"
    return [where, beginning(rows.shown[place]), rows.classes[rows.labels[place]]]


def _tiles(measured: AuditMeasurement) -> list[dict[str, str]]:
    score, low, high = measured.score
    noise = measured.noise
    gain = measured.forecast
    return [
        tile(f"{100 * score:.1f} %", "answered as labelled", _span(low, high)),
        tile(
            f"{100 * noise[0]:.1f} %" if noise[2] < _UNKNOWN else "?",
            "labels that look wrong",
            _span(*noise[1:]),
        ),
        tile(
            f"{100 * gain.gain:+.1f}",
            f"points by {gain.more:,} more rows",
            _span(gain.low, gain.high),
        ),
        tile(f"{len(measured.rows):,}", "rows"),
    ]

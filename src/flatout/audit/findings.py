"""Why the score of texts is not higher: findings with what each is worth, and the next step.

Each finding is measured in points of the score, so findings of different kinds can be put in order.
There are wrong labels, too few rows, cut texts, conflicting labels, and slices of rows that do
badly. Open this file to add a reason, or to change when one is named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.audit.labels import Suspects, count_mixed_pairs, find_rare_suspects
from flatout.audit.measure import AuditMeasurement, Interval
from flatout.audit.rows import AuditRows, Objects
from flatout.data.checks.findings import counted
from flatout.tasks.score_intervals import LEAST_ROWS

SUSPECTS = "suspects.csv"
_MOST_FINDINGS = 5
_LEAST_WORTH = 0.003  # share of the score; a finding that is worth less is left out
_LEAST_SLICE = 30  # rows; the score of fewer is mostly chance
_MOST_SLICES = 2  # among the findings
_MOST_RARE = 3  # classes that are named
_FAR = 3.0  # standard errors below the score of all rows, from which a slice is a finding
_UNKNOWN = 0.5  # upper bound of the share of wrong labels from which it says nothing


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One reason why the score is not higher."""

    what: str
    worth: float  # share of the rows that it is worth, by what was measured
    step: str  # what to do about it
    is_problem: bool = True  # False: a way to a better score, though nothing is wrong

    def line(self) -> str:
        return f"{100 * self.worth:.1f} points  {self.what}. {self.step}"


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows that have something in common, and how many of them are answered as labelled."""

    name: str  # such as "split test" or "length 4 to 9 words"
    rows: int
    score: float
    distance: float  # standard errors above the score of all rows; below it negative


def find_findings(measured: AuditMeasurement, suspects: str = SUSPECTS) -> list[AuditFinding]:
    """The findings worth most, the first one first; `suspects` is the file these are written to."""
    findings = [
        _judge_labels(measured, suspects),
        *_judge_more_rows(measured),
        *_judge_cut(measured),
        *_judge_conflicts(measured),
        *_judge_slices(measured),
    ]
    worthy = [finding for finding in findings if finding.worth >= _LEAST_WORTH]
    return sorted(worthy, key=lambda finding: -finding.worth)[:_MOST_FINDINGS]


def _judge_labels(measured: AuditMeasurement, suspects: str) -> AuditFinding:
    rows = measured.rows
    mixed = ""
    for given, likely, _ in count_mixed_pairs(rows.labels, measured.suspects, 1):
        mixed = f", most between {rows.classes[given]} and {rows.classes[likely]}"
    share = describe_noise(measured.noise)
    decide = f"take out the rows that are right, train with data.exclude={suspects}"
    if rows.is_tagged:
        decide = "and correct the tags in your file"
    rare = describe_rare_suspects(rows, measured.suspects)
    if rare:
        decide = f"{decide}. {rare}"
    return AuditFinding(
        what=f"{counted(len(measured.suspects.rows), 'suspect')}, {share}{mixed}",
        worth=_worth_of_labels(measured),
        step=f"Read {suspects} from the top, {decide}",
    )


def describe_rare_suspects(rows: AuditRows, suspects: Suspects) -> str:
    """A warning if suspects pile up in rare classes of texts; else empty."""
    rare_classes = [] if rows.is_tagged else find_rare_suspects(rows.labels, suspects)
    if not rare_classes:
        return ""
    named = ", ".join(
        f"{num_suspects} of the {num_rows} rows of {rows.classes[number]}"
        for number, num_suspects, num_rows in rare_classes[:_MOST_RARE]
    )
    return f"Suspects pile up in rare classes ({named}): most of these may be right"


def _worth_of_labels(measured: AuditMeasurement) -> float:
    """The share of rows that right labels would win, at the careful end of what was measured."""
    # Each wrong label costs its row. No more is won than there are suspects.
    wrong = min(measured.noise[1], measured.suspect_share)
    if not is_noise_known(measured.noise):
        return wrong
    # Or what models gained that did not learn from suspects. Of tags the measured gain counts where
    # it is surely one, and its lower bound otherwise.
    gain, least, _ = measured.without_suspects
    is_sure_gain = measured.rows.is_tagged and least > 0
    return max(wrong, gain if is_sure_gain else least)


def _judge_more_rows(measured: AuditMeasurement) -> Iterator[AuditFinding]:
    forecast = measured.forecast
    if forecast.low <= 0 or forecast.is_useless:
        return
    step = "Label the rows that python -m flatout audit unlabelled=FILE top=200 names"
    if measured.rows.is_tagged:
        step = "Tag more sentences"
    yield AuditFinding(forecast.line(), forecast.gain, step, is_problem=False)


def _judge_cut(measured: AuditMeasurement) -> Iterator[AuditFinding]:
    cut = measured.cut
    if cut.low > 0:
        what = f"{cut.num_long:,} texts are cut by data.max_length"
        yield AuditFinding(what, cut.lost, "Set a greater data.max_length")


def _judge_conflicts(measured: AuditMeasurement) -> Iterator[AuditFinding]:
    rows = measured.rows
    if not rows.conflicts:
        return
    # Of two rows with one text and different labels, one is answered wrongly.
    worth = rows.conflicts / len(rows) / 2
    what = f"{rows.conflicts:,} rows have a text that has another label elsewhere"
    yield AuditFinding(what, worth, "Set data.clean.conflicts=drop, or correct them")


def _judge_slices(measured: AuditMeasurement) -> Iterator[AuditFinding]:
    score = measured.score[0]
    for rows in find_slices(measured)[:_MOST_SLICES]:
        if rows.distance >= -_FAR:
            continue
        share = f"{100 * rows.score:.1f} % of {rows.rows:,} rows are answered as labelled"
        # what the score gains when the slice does as well as all rows
        worth = (score - rows.score) * rows.rows / len(measured.rows)
        what = f"{rows.name}: {share}"
        yield AuditFinding(what, worth, "Look at such rows first; label more of them")


def find_slices(measured: AuditMeasurement) -> list[Slice]:
    """Scores by split, file, column and length, the worst first."""
    rows = measured.rows
    values_by = {"split": rows.splits, "file": rows.files, "column": rows.column}
    if not rows.is_tagged:
        values_by["length"] = _name_lengths(rows.texts)
    slices = list[Slice]()
    partitions = set[bytes]()
    for name, values in values_by.items():
        kinds, first, inverse = np.unique(
            values.astype(str), return_index=True, return_inverse=True
        )
        # Files are often the splits. Two names for the same rows would be the same slices twice.
        # Each row's first row of its kind is the same array for both, whatever the kinds are named.
        partition = first[inverse].tobytes()
        if partition in partitions or len(kinds) < 2:
            continue
        partitions.add(partition)
        for number, kind in enumerate(kinds):
            is_right = measured.is_right[inverse == number]
            if len(is_right) >= _LEAST_SLICE:
                slices.append(_measure_slice(f"{name} {kind}", is_right, measured.score[0]))
    return sorted(slices, key=lambda rows: rows.distance)


def _measure_slice(name: str, is_right: NDArray[np.bool_], score_of_all: float) -> Slice:
    score = float(is_right.mean())
    error = np.sqrt(score_of_all * (1 - score_of_all) / len(is_right)) or 1.0
    return Slice(name, len(is_right), score, float((score - score_of_all) / error))


def _name_lengths(texts: Objects) -> Objects:
    """The quarter of the lengths that each text is in: "1 to 4 words" and so on."""
    lengths = np.array([len(text.split()) for text in texts])
    quartiles = np.quantile(lengths, [0.25, 0.5, 0.75])
    begins = np.unique(quartiles.astype(int)) + 1  # of the second, third and last quarter
    bounds = [0, *begins.tolist(), int(lengths.max()) + 1]
    names = [f"{begin} to {end - 1} words" for begin, end in itertools.pairwise(bounds)]
    return np.array(names, object)[np.searchsorted(begins, lengths, side="right")]


def is_noise_known(noise: Interval) -> bool:
    """Whether the share of wrong labels has a bound that says anything.

    It has none where rows are few, or where the model knows little of the labels.
    """
    return noise[2] < _UNKNOWN


def describe_noise(noise: Interval) -> str:
    """The share of wrong labels in words."""
    rate, low, high = noise
    if not is_noise_known(noise):
        return "how many labels are wrong cannot be known from these rows"
    return f"{100 * rate:.1f} % of the labels look wrong ({describe_span(low, high)})"


def describe_span(low: float, high: float) -> str:
    """Two shares as percentages: (0.1, 0.25) → "10.0 to 25.0"; NaN where they are not known."""
    if math.isnan(low):
        return f"no interval: fewer than {LEAST_ROWS} rows or groups"
    return f"{100 * low:.1f} to {100 * high:.1f}"

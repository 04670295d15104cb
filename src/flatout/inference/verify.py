"""Holds the forms of a model to its reference, row by row: answers that changed, the largest
difference, and a guess.

An answer has words (labels, tags) and numbers (probabilities, values). A row has changed where a
word differs, or where a number of a form in fp32 is further away than rounding takes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.tables.output import told
from flatout.inference.forms import Form, alone

# most that numbers in fp32 may differ; as a share of the largest one, where that is above 1
_APART = 1e-3
_BIAS = 0.02  # most that numbers of fewer bits may be off on average: more is no rounding
_SAME_ORDER = 0.99
_MOST_NAMED = 100
_MOST_ASKED = 50
Parted = tuple[Any, list[float]]  # an answer as its words and its numbers


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of one form."""

    name: str
    rows: int
    same: int
    changed: list[int]  # numbers of the rows, from 1: the first of them
    largest_difference: float
    looks_like: str  # a guess at the cause; empty where there is none
    is_off: bool  # whether numbers are off on average, though no answer need have changed

    def holds(self, allowed: int) -> bool:
        return self.rows - self.same <= allowed and not self.is_off

    def line(self, width: int) -> str:
        """The line that is printed, with the changed rows below."""
        counted = f"same answer in {self.same:,} of {self.rows:,} rows"
        said = f"{self.name:{width}}  {counted}; largest difference {self.largest_difference:.1e}"
        if self.changed:
            more = ", …" if self.rows - self.same > 10 else ""
            said += f"\n    changed: rows {', '.join(map(str, self.changed[:10]))}{more}"
        return said + (f"\n    looks like: {self.looks_like}" if self.looks_like else "")


def verify(form: Form, rows: list[Any], reference: Sequence[Parted]) -> Verified:
    """Ask a form, and compare."""
    found = [parted(answer) for answer in form.answers(rows)]
    pairs = list(zip(found, reference, strict=True))
    largest = max((abs(number) for _, numbers in reference for number in numbers), default=0.0)
    apart = np.array([_apart(one, other) for one, other in pairs]) / max(1.0, largest)
    is_other = np.array([one[0] != other[0] for one, other in pairs])
    # NaN is within no distance
    is_other |= ~(apart <= _APART) if form.is_exact else ~np.isfinite(apart)
    changed = np.flatnonzero(is_other)
    means = [
        np.mean([number for _, numbers in side for number in numbers] or [0.0])
        for side in (found, reference)
    ]
    is_off = not abs(means[0] - means[1]) / max(1.0, largest) <= _BIAS
    looks = _look(form, rows, pairs, changed) if len(changed) or is_off else ""
    named = (changed[:_MOST_NAMED] + 1).tolist()
    same = len(rows) - len(changed)
    return Verified(form.name, len(rows), same, named, float(apart.max(initial=0.0)), looks, is_off)


def write_certificate(
    file: Path, about: dict[str, Any], done: Sequence[Verified], allowed: int
) -> None:
    """Write what came of each form as JSON."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    forms = [{**asdict(each), "holds": each.holds(allowed)} for each in done]
    found = {
        **about,
        "holds": all(each["holds"] for each in forms),
        "forms": forms,
        "versions": versions,
    }
    with told(file):
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


def parted(answer: Any) -> Parted:
    """The words of an answer, and its numbers."""
    numbers: list[float] = []
    return _words(answer, numbers), numbers


def _words(answer: Any, numbers: list[float]) -> Any:
    if isinstance(answer, float | np.ndarray):
        numbers += np.ravel(answer).tolist()
        return None
    if is_dataclass(answer):
        return tuple(_words(getattr(answer, each.name), numbers) for each in fields(answer))
    return (
        tuple(_words(each, numbers) for each in answer)
        if isinstance(answer, list | tuple)
        else answer
    )


def _apart(one: Parted, other: Parted) -> float:
    return (
        math.inf
        if len(one[1]) != len(other[1])
        else float(np.abs(np.subtract(one[1], other[1])).max(initial=0.0))
    )


def _look(form: Form, rows: list[Any], pairs: list[tuple[Parted, Parted]], changed: Any) -> str:
    named = {(other[0], one[0]) for one, other in pairs}
    if any(len(one[1]) != len(other[1]) for one, other in pairs):
        return "another number of values in a row"
    if all(one == other for one, other in named):
        numbers = np.array(
            [(a, b) for one, other in pairs for a, b in zip(one[1], other[1], strict=True)]
        )
        away = numbers - numbers.mean(axis=0)
        if away[:, 0] @ away[:, 1] > _SAME_ORDER * np.sqrt((away**2).sum(axis=0).prod()):
            return "another temperature or unit: words stay, and numbers keep their order"
    elif len(named) == len({one for one, _ in named}) == len({other for _, other in named}):
        return "labels in another order: each stands for one other"
    few = changed[:_MOST_ASKED].tolist()
    again = [
        parted(answer)
        for answer in Form("", form.predictor, alone).answers([rows[place] for place in few])
    ]
    expected = [pairs[place][1] for place in few]
    if few and all(
        one[0] == was[0] and _apart(one, was) <= _APART
        for one, was in zip(again, expected, strict=True)
    ):
        return "the rows beside a row: alone each has the answer of the reference (a mask, padding)"
    lengths = np.array([len(row.split() if isinstance(row, str) else row) for row in rows])
    others = np.delete(lengths, changed)
    if few and len(others) and lengths[changed].min() > np.quantile(others, 0.9):
        return f"long rows, from {lengths[changed].min()} words on: another truncation, or a window"
    return "rows of any length, alone too: positions, tokens or weights"

"""Compare the forms of a model (exported, quantised, other precision) with its reference.

Every form answers the same rows. An answer has words (labels, tags) and numbers (probabilities,
values). A row has changed if a word differs, or if a number of a form in fp32 is further away than
rounding takes it:

    reference    "sport", 0.8000
    form a       "sport", 0.8003     the same answer
    form b       "sport", 0.8400     changed, if it computes in fp32
    form c       "money", 0.5100     changed

If rows have changed, a guess at the cause is made. Open this file to change what counts as the same
answer, or to add a guess.
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
from numpy.typing import NDArray

from flatout.data.tables.output import explain_disk_errors
from flatout.inference.forms import Form, alone

_FARTHEST = 1e-3  # between numbers in fp32; a share of the largest number where that is above 1
_BIAS = 0.02  # most that numbers of fewer bits may be off on average: more is no rounding
_SAME_ORDER = 0.99  # correlation from which on numbers have the same order
_MOST_NAMED = 100  # changed rows in the certificate
_MOST_PRINTED = 10  # changed rows on the screen
_MOST_ASKED = 50  # changed rows that are asked once more, each alone
_LONG_ROWS = 0.9  # quantile of the lengths of unchanged rows; longer rows are long


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """An answer as its words, in the structure of the answer, and all its numbers in order."""

    words: object
    numbers: list[float]

    @classmethod
    def of(cls, answer: object) -> SplitAnswer:
        numbers: list[float] = []
        words = _words(answer, numbers)
        return cls(words, numbers)

    def distance_to(self, other: SplitAnswer) -> float:
        """The largest difference of two numbers; infinite where there are more of them in one."""
        if len(self.numbers) != len(other.numbers):
            return math.inf
        differences = np.subtract(self.numbers, other.numbers)
        return float(np.abs(differences).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Verified:
    """How one form's answers compare with the reference."""

    name: str
    rows: int
    same: int
    changed: list[int]  # numbers of the rows, from 1: the first of them
    largest_difference: float
    looks_like: str  # a guess at the cause; empty where there is none
    is_off: bool  # whether numbers are off on average, though no answer need have changed

    def holds(self, allowed: int) -> bool:
        """Whether at most `allowed` rows have changed, and numbers are right on average."""
        return self.rows - self.same <= allowed and not self.is_off

    def line(self, width: int) -> str:
        """The line that is printed, with the changed rows below; the name fills `width`."""
        lines = [
            f"{self.name:{width}}  same answer in {self.same:,} of {self.rows:,} rows; largest"
            f" difference {self.largest_difference:.1e}"
        ]
        if self.changed:
            more = ", …" if self.rows - self.same > _MOST_PRINTED else ""
            numbers = ", ".join(map(str, self.changed[:_MOST_PRINTED]))
            lines.append(f"    changed: rows {numbers}{more}")
        if self.looks_like:
            lines.append(f"    looks like: {self.looks_like}")
        return "\n".join(lines)


def verify(form: Form, rows: list[Any], reference: Sequence[SplitAnswer]) -> Verified:
    """Ask a form for all rows, and compare its answers with those of the reference."""
    answers = [SplitAnswer.of(answer) for answer in form.answers(rows)]
    pairs = list(zip(answers, reference, strict=True))
    numbers = _all_numbers(answers)
    expected_numbers = _all_numbers(reference)
    unit = max(1.0, max(map(abs, expected_numbers.tolist()), default=0.0))

    distances = [answer.distance_to(expected) for answer, expected in pairs]
    relative = np.array(distances) / unit
    is_changed = np.array([answer.words != expected.words for answer, expected in pairs])
    # NaN is within no distance, so both tests are of what is allowed.
    is_allowed = relative <= _FARTHEST if form.is_exact else np.isfinite(relative)
    is_changed |= ~is_allowed
    changed = np.flatnonzero(is_changed)
    bias = abs(_mean(numbers) - _mean(expected_numbers)) / unit
    is_off = not bias <= _BIAS
    return Verified(
        name=form.name,
        rows=len(rows),
        same=len(rows) - len(changed),
        changed=(changed[:_MOST_NAMED] + 1).tolist(),
        largest_difference=float(relative.max(initial=0.0)),
        looks_like=_guess_cause(form, rows, pairs, changed) if len(changed) or is_off else "",
        is_off=is_off,
    )


def _all_numbers(answers: Sequence[SplitAnswer]) -> NDArray[np.float64]:
    numbers: list[float] = []
    for answer in answers:
        numbers += answer.numbers
    return np.array(numbers, dtype=np.float64)


def _mean(numbers: NDArray[np.float64]) -> float:
    return float(numbers.mean()) if len(numbers) else 0.0


def write_certificate(
    file: Path, about: dict[str, Any], results: Sequence[Verified], allowed: int
) -> None:
    """Write the results of all forms as JSON, under the facts `about` the run and its rows."""
    forms = [{**asdict(result), "holds": result.holds(allowed)} for result in results]
    certificate = {
        **about,
        "holds": all(result.holds(allowed) for result in results),
        "forms": forms,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    with explain_disk_errors(file):
        text = json.dumps(certificate, indent=1, ensure_ascii=False)
        file.write_text(text, encoding="utf-8")


def _words(answer: object, numbers: list[float]) -> object:
    """The words of an answer in its structure; numbers are appended to `numbers`."""
    if isinstance(answer, float | np.ndarray):
        numbers += np.ravel(answer).tolist()
        return None
    if is_dataclass(answer):
        values = [getattr(answer, field.name) for field in fields(answer)]
        return tuple(_words(value, numbers) for value in values)
    if isinstance(answer, list | tuple):
        return tuple(_words(value, numbers) for value in answer)
    return answer


Pairs = list[tuple[SplitAnswer, SplitAnswer]]  # of each row the form's answer and the reference's


def _guess_cause(form: Form, rows: list[Any], pairs: Pairs, changed: NDArray[np.int64]) -> str:
    """The mistake of an export that usually makes such errors."""
    # From the surest sign to the least sure one: each guess rules out those below it.
    if any(len(answer.numbers) != len(expected.numbers) for answer, expected in pairs):
        return "another number of values in a row"
    if all(answer.words == expected.words for answer, expected in pairs):
        if _keep_order(pairs):
            return "another temperature or unit: words stay, and numbers keep their order"
    elif _are_renamed(pairs):
        return "labels in another order: each stands for one other"
    few = changed[:_MOST_ASKED].tolist()
    if few and _are_right_alone(form, [rows[row] for row in few], [pairs[row][1] for row in few]):
        return "the rows beside a row: alone each has the answer of the reference (a mask, padding)"
    lengths = np.array([_length(row) for row in rows])
    unchanged = np.delete(lengths, changed)
    if few and len(unchanged):
        shortest = lengths[changed].min()
        if shortest > np.quantile(unchanged, _LONG_ROWS):
            return f"long rows, from {shortest} words on: another truncation, or a window"
    return "rows of any length, alone too: positions, tokens or weights"


def _keep_order(pairs: Pairs) -> bool:
    """Whether the numbers of both sides are nearly a multiple of each other, about their means."""
    answered: list[float] = []
    expected: list[float] = []
    for answer, reference in pairs:
        answered += answer.numbers
        expected += reference.numbers
    numbers = np.array([answered, expected]).T
    away = numbers - numbers.mean(axis=0)
    product = away[:, 0] @ away[:, 1]
    return bool(product > _SAME_ORDER * np.sqrt((away**2).sum(axis=0).prod()))


def _are_renamed(pairs: Pairs) -> bool:
    """Whether every answer of the reference always became the same other answer."""
    renamings = {(expected.words, answer.words) for answer, expected in pairs}
    before = {expected for expected, _ in renamings}
    after = {answer for _, answer in renamings}
    return len(renamings) == len(before) == len(after)


def _are_right_alone(form: Form, rows: list[Any], expected: list[SplitAnswer]) -> bool:
    """Whether each row has the reference's answer if no other row is in its batch."""
    one_by_one = Form("", form.predictor, alone)
    for answer, reference in zip(one_by_one.answers(rows), expected, strict=True):
        split = SplitAnswer.of(answer)
        if split.words != reference.words or not split.distance_to(reference) <= _FARTHEST:
            return False
    return True


def _length(row: str | Sequence[object]) -> int:
    return len(row.split() if isinstance(row, str) else row)

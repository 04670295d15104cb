"""Scales of a sweep's charts: where a result or the value of a parameter stands on its axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

STEPS = (1, 2, 5, 10)
"""Ticks lie so far apart, times a power of ten."""
_FAR = 5
_FEW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The values of one axis: numbers between two ends, or words at equal distances."""

    low: float
    high: float
    words: Sequence[str] = ()
    """In their order; empty for numbers."""
    names: Sequence[str] = ()
    """What is written for each word."""
    is_log: bool = False

    def place(self, value: Any) -> float | None:
        """Where a value stands in the axis' own numbers, never beyond its ends; None for an unknown word."""
        if not self.words:
            return self.clip(value)
        return self.words.index(written(value)) if written(value) in self.words else None

    def clip(self, value: float) -> float:
        return min(max(float(value), self.low), self.high)

    def share(self, value: Any) -> float | None:
        """Where a value stands between the ends, 0 and 1."""
        place = self.place(value)
        if place is None:
            return None
        low, place, high = (math.log10(each) if self.is_log else each for each in (self.low, place, self.high))
        return (place - low) / (high - low)

    def count_beyond(self, values: Sequence[float]) -> int:
        near = 1e-6 * (self.high - self.low)
        return sum(not self.low - near <= value <= self.high + near for value in values)


def metric_scale(values: Sequence[float], mode: str) -> Scale:
    """A scale of results; those far worse than most lie beyond its end and do not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    reach = _FAR * (high - low)
    if len(ordered) < 8 or reach == 0:
        return number_scale(ordered)
    return number_scale([y for y in ordered if (y >= low - reach if mode == "max" else y <= high + reach)])


def number_scale(values: Sequence[float], *, log: bool = False) -> Scale:
    """A scale that ends at round numbers; `log`, for numbers above 0: equal distances are factors."""
    from matplotlib.ticker import MaxNLocator

    low, high = float(min(values)), float(max(values))
    if log:
        margin = max((high / low) ** 0.04, 1.01)
        return Scale(low=low / margin, high=high * margin, is_log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = max(0.5, abs(low) * 1e-9)
        low, high = low - margin, high + margin
    are_counts = all(float(value).is_integer() for value in values)
    ticks = MaxNLocator(nbins=7 if are_counts else 6, integer=are_counts, steps=STEPS).tick_values(low, high)
    return Scale(low=float(ticks[0]), high=float(ticks[-1]))


def value_scale(values: Sequence[Any], *, log: bool) -> Scale:
    """A scale of a parameter's values: of numbers, or of a few values that recur, as they are written."""
    texts = {written(value): value for value in values}
    are_numbers, are_few = all(map(is_number, values)), len(texts) <= _FEW and len(values) >= 2 * len(texts)
    if are_numbers and not are_few and len(texts) > 1:
        return number_scale(values, log=log and min(values) > 0)
    words = sorted(texts, key=texts.__getitem__ if are_numbers else _natural)
    names = [f"{texts[word]:g}" if are_numbers else word for word in words]
    return Scale(low=-0.5, high=len(words) - 0.5, words=words, names=names)


def written(value: Any) -> str:
    """A value as you write it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return repr(float(value)) if isinstance(value, float) else str(value)


def shortened(text: str, letters: int) -> str:
    """Both ends of a text that is too long: what names have in common often stands at one of them."""
    tail = max(letters - 1, 2) // 2
    return text if len(text) <= letters else f"{text[: max(letters - 1 - tail, 1)]}…{text[-tail:]}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that has a place on an axis; true and false are not."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(abs(value) < 1e300)


def _natural(text: str) -> str:
    """Sort key of a text as you expect it: [8] before [16], [16] before [16,8]."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text.strip("[]"))

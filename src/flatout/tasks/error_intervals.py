"""Intervals of estimates and forecasts, so that a chosen share of answers lies outside at most.

The validation rows say how far answers were from the truth. Answers of one recording are alike, so
a recording counts once: as the share of its answers that lie outside. The half width of each target
is the smallest whose mean share, with its bound, is at most the error that was asked for. That is
risk control as in Bates and others, Distribution-free risk-controlling prediction sets, 2021.

Where all validation rows are of one recording, stretches of it count instead of recordings.

Shapes: N answers, A numbers of an answer (targets, or steps ahead times targets).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatout.errors import UserError
from flatout.files import write_atomically
from flatout.tasks.abstention import CALIBRATE, KeptArrays, are_numbers

Array = NDArray[Any]
SHOWN = (0.2, 0.1, 0.05, 0.01)  # errors whose widths are shown
_RISK = 0.05
_MOST_ANSWERS = 20_000
_MOST_COLLECTED = 100_000


@dataclass(frozen=True, slots=True)
class HeldOutErrors(KeptArrays):
    """How far answers to rows were from the truth that were not trained on."""

    FILE: ClassVar[str] = "intervals.npz"
    distances: Array  # [N, A] in the targets' units; NaN where nothing was measured
    units: Array  # [N] number of the recording, or of the stretch of the only one

    def fit(self) -> bool:
        are_rows = self.distances.ndim == 2 and self.units.shape == self.distances.shape[:1]
        return are_rows and are_numbers(self.distances, self.units)

    @classmethod
    def of(cls, distances: Array, recordings: Array, rows: Array, span: int) -> HeldOutErrors:
        """`rows`: the number of each answer's row; `span`: rows of a stretch of one recording."""
        is_single = len(np.unique(recordings)) < 2
        units = rows // max(1, span) if is_single else recordings
        every = slice(None, None, -(-len(units) // _MOST_ANSWERS) or 1)
        return cls(distances[every].astype(np.float32), units[every].astype(np.int64))

    def write(self, folder: Path) -> None:
        KeptArrays.write(self, folder)
        write_atomically(folder / "intervals.json", json.dumps(self.facts(), indent=1))

    def facts(self) -> list[dict[str, Any]]:
        """The half widths at some errors, as far as they can be promised."""
        facts = []
        for error in SHOWN:
            widths = [self._width(column, error) for column in self.distances.T]
            if None not in widths:
                facts.append({"error": error, "half_widths": widths})
        return facts

    def choose(self, error: float) -> Array:
        """`[A]` the half width of each number's interval; refused where none can be promised."""
        widths = [self._width(column, error) for column in self.distances.T]
        if None in widths:
            count = len(np.unique(self.units))
            needed = math.ceil(math.log(_RISK / math.e) / math.log1p(-error))
            raise UserError(
                "--at-error",
                f"{error:.3g} cannot be promised by {count:,} validation recordings (or stretches"
                " of a single one)",
                hint=f"It takes {needed:,}, as answers of one are alike. {CALIBRATE}",
            )
        return np.array(widths, np.float64)

    def _width(self, distances: Array, error: float) -> float | None:
        """The half width of one number; None where its units are too few.

        Take three units of 2, 1 and 1 answers, of which one unit may be wrong in all. Distances
        5 (half a unit), 4 (a whole one), 3, 2: above 4 lies half a unit, above 3 one and a half. So
        the width is 4.
        """
        is_known = ~np.isnan(distances)
        _, unit_of, counts = np.unique(
            self.units[is_known], return_inverse=True, return_counts=True
        )
        most_wrong = _most_wrong(len(counts), error)
        if most_wrong is None:
            return None
        order = np.argsort(distances[is_known])[::-1]
        weights = (1 / counts)[unit_of]
        wrong = np.cumsum(weights[order])
        first = min(int(np.searchsorted(wrong, most_wrong + 1e-9, side="right")), len(order) - 1)
        return float(distances[is_known][order][first])


def _most_wrong(count: int, error: float) -> int | None:
    """The most units of `count` that may be wrong while the bound is at most `error`.

    None where no bound is as low.
    """
    from scipy.special import betaincinv  # half a second of imports, which few need

    wrong = np.arange(count)
    # Bentkus (2004): the mean of units that are wrong in part has at most e times the tail of the
    # count.
    bounds = betaincinv(wrong + 1, count - wrong, 1 - _RISK / math.e)
    allowed = np.flatnonzero(bounds <= error)
    return int(allowed[-1]) if len(allowed) else None


class ErrorCollector:
    """Collects the distances of a validation or of a file, batch after batch.

    A forecast has hundreds of numbers for each of millions of windows, so of very many answers only
    every second is kept, then every fourth, and so on.
    """

    def __init__(self, most: int = _MOST_COLLECTED) -> None:
        """`most`: answers that are kept at a time."""
        self._most = most
        self._apart = 1
        self._passed = 0  # answers that were added, and maybe not collected
        self._count = 0
        self._distances: list[Array] = []
        self._rows: list[Array] = []

    def add(self, distances_NA: Tensor, rows_N: Array) -> None:
        """`rows_N`: the number of each answer's row."""
        every = slice(-self._passed % self._apart, None, self._apart)
        self._passed += len(rows_N)
        self._distances.append(distances_NA[every].cpu().numpy())
        self._rows.append(rows_N[every])
        self._count += len(self._rows[-1])
        while self._count > self._most:
            self._keep_every_second()

    def _keep_every_second(self) -> None:
        # Of answers 0 4 8 12, which are 4 apart, stay 0 and 8. The next are 8 apart, from 16 on.
        self._apart *= 2
        self._distances = [np.concatenate(self._distances)[::2]]
        self._rows = [np.concatenate(self._rows)[::2]]
        self._count = len(self._rows[0])

    def held_out(self, recording_of_rows: Array, span: int) -> HeldOutErrors | None:
        """What was collected; None if nothing was. `span`: see `HeldOutErrors.of`."""
        if not self._rows:
            return None
        rows = np.concatenate(self._rows)
        distances = np.concatenate(self._distances)
        return HeldOutErrors.of(distances, recording_of_rows[rows], rows, span)


class Coverage:
    """Counts how many answers of a file lie outside of the intervals that validation rows gave."""

    def __init__(self, facts: Sequence[dict[str, Any]]) -> None:
        self._facts = facts
        self._outside = np.zeros(len(facts))
        self._count = 0

    @classmethod
    def of(cls, errors: HeldOutErrors | None) -> Coverage:
        return cls([] if errors is None else errors.facts())

    def add(self, distances: Array) -> None:
        """`distances`: `[N, K]` of answers from truths; of a forecast step after step."""
        is_known = ~np.isnan(distances)
        self._count += int(is_known.sum())
        for number, fact in enumerate(self._facts):
            widths = np.reshape(fact["half_widths"], (-1, distances.shape[1]))
            by_step = distances.reshape(-1, *widths.shape)
            self._outside[number] += (by_step > widths).sum()

    def facts(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each error the half width of each target, and the share that lies outside.

        The widths of a forecast are means over the steps ahead.
        """
        facts = []
        for fact, outside in zip(self._facts, self._outside, strict=True):
            means = np.reshape(fact["half_widths"], (-1, len(names))).mean(0)
            widths = {name: float(width) for name, width in zip(names, means, strict=True)}
            share = float(outside / max(1, self._count))
            facts.append({"error": fact["error"], "half_widths": widths, "outside": share})
        return facts

    def lines(self, names: Sequence[str]) -> list[str]:
        """A line for each error: `intervals at 5 %: volt ±0.02; 4.8% of these answers outside`."""
        lines = []
        for fact in self.facts(names):
            widths = fact["half_widths"].items()
            shown = ", ".join(f"{name} ±{width:.3g}" for name, width in widths)
            error = f"{100 * fact['error']:.3g} %"
            outside = f"{fact['outside']:.1%} of these answers outside"
            lines.append(f"intervals at {error}: {shown}; {outside}")
        return lines

"""The audit of recordings and bit strings: ridge regression in folds, what it answers worst, and
what more rows bring.

A row is a recording or a bit string, whatever its split. Products are added up once for each fold
and each part of the learning curve, so a model of other folds is one solve. The penalty is the best
one of the first fold.

Shapes: N samples, D inputs, O answers, R rows; a bit string is one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flatout.audit.forecast import PARTS, Floats, Forecast, forecast, round_number
from flatout.audit.number_rows import NumberRows
from flatout.audit.ridge_folds import RidgeFolds
from flatout.models.series import PENALTIES
from flatout.tasks.score_intervals import bootstrap

_LEAST_FOR_CURVE = 16
_NAMED = 3


@dataclass(frozen=True, slots=True)
class MeasuredNumbers:
    """What the folds found: scores, and losses, which are the score's square where it is a root
    mean square.
    """

    rows: NumberRows
    loss_R: Floats  # the mean of each row's samples
    answers_NO: Tensor
    interval: str  # of 95 %, in words; empty where rows are too few for one, or all alike
    sizes: Floats
    curve: Floats  # a row for each fold, a column for each size
    forecast: Forecast | None  # None: too few rows for one

    @property
    def order(self) -> list[int]:
        """Rows, the worst first: of classes those whose own one is the furthest behind the one that
        is answered.
        """
        rows, worst_R = self.rows, self.loss_R
        if rows.classes:
            behind_N = self.answers_NO.amax(1) - (self.answers_NO * rows.answers_NO).sum(1)
            worst_R = behind_N[torch.argsort(rows.row_N)].numpy()
        return np.argsort(-worst_R, kind="stable").tolist()

    def classes_of(self, row: int) -> list[str]:
        """The class given and the one that is answered; none where answers are numbers."""
        rows = self.rows
        sides = (rows.answers_NO, self.answers_NO) if rows.classes else ()
        return [rows.classes[int(side_NO[rows.row_N == row].argmax())] for side_NO in sides]

    def lines(self) -> Iterator[str]:
        """What is printed: score and luck, the worst rows, more rows."""
        rows = self.rows
        of_folds = self.curve[:, -1]
        score = (
            f"{rows.shown(self.loss_R.mean()):.4g}{f' ({self.interval})' if self.interval else ''}"
        )
        yield f"score:  {rows.score} {score}, {rows.model}, out of fold"
        yield f"luck:   folds from {of_folds.min():.4g} to {of_folds.max():.4g}"
        named = [each for each in self.order[:_NAMED] if self.loss_R[each]]
        said = [
            "(given {}, likely {})".format(*self.classes_of(each)) for each in named if rows.classes
        ]
        said = said or [f"{rows.shown(self.loss_R[each]):.3g}" for each in named]
        worst = ", ".join(
            f"{rows.names[each]} {words}" for each, words in zip(named, said, strict=True)
        )
        yield f"rows:   the worst are {worst}" if worst else "rows:   all are answered rightly"
        tenth = self.order[: -(-len(rows.names) // 10)]
        share = self.loss_R[tenth].sum() / max(self.loss_R.sum(), 1e-12)
        lost = "squared error" if rows.unit else "loss"
        part = f"a tenth of the {len(rows.names):,} {rows.what} makes {share:.0%} of the {lost}"
        wrong = (
            f"{int(self.loss_R.sum()):,} of the {len(rows.names):,} {rows.what} are answered"
            " otherwise"
        )
        yield f"        {wrong if rows.classes else part}"
        if not rows.classes and 2 * self.loss_R[tenth[0]] > self.loss_R.sum():
            others = np.delete(self.loss_R, tenth[0])
            yield (
                f"        {rows.names[tenth[0]]} alone makes most of it:"
                f" {rows.shown(others.mean()):.4g} without it"
            )
        yield f"more:   {self.more_line()}"

    def more_line(self) -> str:
        found, rows = self.forecast, self.rows
        if found is None:
            return (
                f"{len(rows.names)} {rows.what} are too few for a forecast: {_LEAST_FOR_CURVE} or"
                " more"
            )
        most = (
            f"{rows.score} better by {found.high * (rows.unit or 1):.3g} at most, by {found.more:,}"
            f" more {rows.what}"
        )
        return f"rows of this kind will not help: {most}" if found.is_useless else most


def measure_numbers(rows: NumberRows, num_folds: int) -> MeasuredNumbers:
    """Run every fold on all rows and on parts of them, with a penalty that is chosen by the first
    fold.
    """
    count = len(rows.names)
    folds = RidgeFolds(rows, num_folds)
    fold_R = folds.fold_R.numpy()
    parts = range(len(PARTS))
    by_part = list[Floats]()
    for part in parts if count >= _LEAST_FOR_CURVE else parts[-1:]:
        tried = [folds.losses(penalty, part, judged=0)[0].sum() for penalty in PENALTIES]
        loss_R, answers_NO = folds.losses(PENALTIES[int(np.argmin(tried))], part)
        by_part.append(loss_R)
    means = np.array(
        [[each[fold_R == fold].mean() for each in by_part] for fold in range(num_folds)]
    )
    sizes = np.array(PARTS) * count * (1 - 1 / num_folds)
    now = sum("train" in each for each in rows.splits)
    errors = means**0.5 if rows.unit else means
    ahead = None
    if len(by_part) > 1:
        whole = max(1.0, float(errors.max()))  # laws know shares of 1 at most
        of_one = forecast(sizes, errors / whole, now, round_number(now / 2), None)
        most = float(errors[:, -1].mean())  # what there is to gain
        ahead = replace(
            of_one,
            **{name: min(most, whole * getattr(of_one, name)) for name in ("gain", "low", "high")},
        )
    of_rows = torch.from_numpy(np.stack([loss_R, np.ones(count)], axis=1))
    sums = (
        torch.zeros(int(folds.group_R.max()) + 1, 2).double().index_add(0, folds.group_R, of_rows)
    )
    drawn = bootstrap(sums, lambda sums: {"score": rows.shown(sums[:, 0] / sums[:, 1])}).get(
        "score"
    )
    interval = "" if drawn is None else f"{drawn[0]:.4g} to {drawn[1]:.4g}"
    return MeasuredNumbers(rows, loss_R, answers_NO, interval, sizes, rows.shown(means), ahead)

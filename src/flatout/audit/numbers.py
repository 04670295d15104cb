"""What an audit of recordings or bit strings measures: scores in folds, and what more rows bring.

Each row is answered by a ridge regression of the other folds. Four models are trained for that: on
an eighth, a quarter, a half and all of their rows. Their errors give the forecast. The penalty of
each part is the one with the least loss on the first fold, which counts in the score too: so the
score is slightly too good. Open this file when a figure of such an audit is wrong; `number_report`
prints the figures, and `forecast` has the parts of the curve. Texts are measured in `measure`.

Shapes: R rows, N samples, O numbers of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.audit.forecast import PARTS, Floats, Forecast, forecast, round_number
from flatout.audit.number_rows import NumberRows
from flatout.audit.ridge_folds import RidgeFolds
from flatout.baselines.ridge import PENALTIES
from flatout.tasks.score_intervals import bootstrap

LEAST_FOR_CURVE = 16  # rows; an eighth of fewer teaches a model nothing, so there is no forecast


@dataclass(frozen=True, slots=True)
class MeasuredNumbers:
    """What an audit of recordings or bit strings has measured."""

    rows: NumberRows
    loss_R: Floats  # mean loss of each row's samples, out of fold
    predicted_NO: Tensor  # answer to each sample, out of fold
    interval: str  # of the score, 95 %, in words; empty where rows are few or all alike
    sizes: Floats  # numbers of rows that models learned from
    curve: Floats  # scores: a row for each fold, a column for each of `sizes`
    forecast: Forecast | None  # None: fewer than LEAST_FOR_CURVE rows

    @property
    def score(self) -> float:
        """The score of all rows."""
        return self.rows.score_of(float(self.loss_R.mean()))

    @property
    def order(self) -> list[int]:
        """Numbers of the rows, the worst first.

        Where rows have a class, the worst is the surest mistake: its own class is furthest behind
        the one that is answered.
        """
        badness_R = self.loss_R
        if self.rows.classes:
            of_own_class_N = (self.predicted_NO * self.rows.answers_NO).sum(1)
            behind_N = self.predicted_NO.amax(1) - of_own_class_N
            # a row has one sample here, and samples may stand in another order than rows
            badness_R = behind_N[torch.argsort(self.rows.row_N)].numpy()
        return np.argsort(-badness_R, kind="stable").tolist()

    def classes_of(self, row: int) -> list[str]:
        """The given class of a row and the one that is answered; none where answers are numbers."""
        rows = self.rows
        if not rows.classes:
            return []
        is_of_row_N = rows.row_N == row
        given = int(rows.answers_NO[is_of_row_N].argmax())
        likely = int(self.predicted_NO[is_of_row_N].argmax())
        return [rows.classes[given], rows.classes[likely]]


def measure_numbers(rows: NumberRows, num_folds: int) -> MeasuredNumbers:
    """Answer all rows in folds, by models of all other rows and of parts of them.

    `num_folds` is the setting `folds` of `flatout audit`, the same for texts, recordings and bits.
    """
    num_rows = len(rows.names)
    folds = RidgeFolds(rows, num_folds)
    parts = range(len(PARTS))
    if num_rows < LEAST_FOR_CURVE:
        parts = parts[-1:]
    losses_by_part = list[Floats]()
    for part in parts:
        penalty = _choose_penalty(folds, part)
        # The last part is all rows: its answers are the ones that stay behind the loop.
        whole_loss_R, whole_predicted_NO = folds.losses(penalty, part)
        losses_by_part.append(whole_loss_R)
    mean_losses = _average_folds(losses_by_part, folds)
    sizes = np.array([PARTS[part] for part in parts]) * num_rows * (1 - 1 / folds.num_folds)
    return MeasuredNumbers(
        rows=rows,
        loss_R=whole_loss_R,
        predicted_NO=whole_predicted_NO,
        interval=_find_interval(rows, whole_loss_R, folds.group_R),
        sizes=sizes,
        curve=rows.score_of(mean_losses),
        forecast=_forecast_gain(rows, sizes, mean_losses) if len(parts) > 1 else None,
    )


def _choose_penalty(folds: RidgeFolds, part: int) -> float:
    """The penalty with the least loss on the first fold."""
    losses = [folds.first_fold_loss(penalty, part) for penalty in PENALTIES]
    return PENALTIES[int(np.argmin(losses))]


def _average_folds(losses_by_part: list[Floats], folds: RidgeFolds) -> Floats:
    """Mean losses: a row for each fold, a column for each part of the curve."""
    fold_R = folds.fold_R.numpy()
    means = np.empty((folds.num_folds, len(losses_by_part)))
    for fold in range(folds.num_folds):
        for column, loss_R in enumerate(losses_by_part):
            means[fold, column] = loss_R[fold_R == fold].mean()
    return means


def _forecast_gain(rows: NumberRows, sizes: Floats, mean_losses: Floats) -> Forecast:
    """The gain of half as many more training rows; never more than the error that is left.

    It is an error of scaled values where rows have a unit. So `number_report` puts it into words:
    `Forecast.line` would call it points.
    """
    # losses of numbers with a unit are squared errors
    errors = mean_losses**0.5 if rows.unit else mean_losses
    # `forecast` wants errors of at most 1, as shares of wrong answers are.
    largest = max(1.0, float(errors.max()))
    num_train = sum("train" in names.split() for names in rows.splits)
    more = round_number(num_train / 2)
    scaled = forecast(sizes, errors / largest, num_train, more, None)
    most = float(errors[:, -1].mean())
    return Forecast(
        more=scaled.more,
        gain=min(most, largest * scaled.gain),
        low=min(most, largest * scaled.low),
        high=min(most, largest * scaled.high),
    )


def _find_interval(rows: NumberRows, loss_R: Floats, group_R: Tensor) -> str:
    """The 95 % interval of the score in words, by a bootstrap of whole groups; "" for none."""
    of_rows = np.stack([loss_R, np.ones(len(loss_R))], axis=1)
    of_groups = torch.zeros(int(group_R.max()) + 1, 2).double()
    of_groups.index_add_(0, group_R, torch.from_numpy(of_rows))

    def scores_of(sums: Tensor) -> dict[str, Tensor]:
        return {"score": rows.score_of(sums[:, 0] / sums[:, 1])}

    intervals = bootstrap(of_groups, scores_of)
    if "score" not in intervals:
        return ""
    low, high = intervals["score"]
    return f"{low:.4g} to {high:.4g}"

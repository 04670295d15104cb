"""The audit of recordings and bit strings: ridge regression in folds, what it answers worst, and
what more rows bring.

A row is a recording or a bit string, whatever its split. Products are added up once for each fold
and each part of the learning curve, so a model of other folds is one solve. The penalty is the best
one of the first fold.

Shapes: N samples, D inputs, O answers, R rows; a bit string is one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.audit.measure import PARTS, Floats, Forecast, forecast, round_number
from flatout.bits.ridge import inputs_of
from flatout.bits.scores import GramMetrics, record_scores
from flatout.data.checks.findings import counted
from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.store_data import StoreData
from flatout.errors import require
from flatout.files import write_atomically, write_table
from flatout.models.series import PENALTIES, Sums, ridge_sums, solve_ridge
from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_text, tile
from flatout.tasks.score_intervals import bootstrap
from flatout.tasks.sequence_baselines import labels_of, numbers_of, window_rows

WORST = "worst.csv"
_LEAST_FOR_CURVE = 16
_SHOWN = 20
_NAMED = 3
_MOST_BITS = 2048


@dataclass(frozen=True, slots=True)
class NumberRows:
    """Samples as a linear model reads them, and the row that each belongs to."""

    what: str  # "recordings" or "bit strings"
    score: str
    model: str
    names: list[str]
    splits: list[str]
    inputs_ND: Tensor
    answers_NO: Tensor
    row_N: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]  # of answers and truths, what each sample loses
    # of a root mean square, the spread of what is answered; 0: the score is what is not lost
    unit: float = 0.0
    classes: Sequence[str] = ()  # where each row has one
    # rows that stay in one fold; none, or one for all: each is by itself
    groups: Sequence[str] = ()

    def shown(self, loss: Any) -> Any:
        """The score of a mean loss."""
        return self.unit * loss**0.5 if self.unit else 1 - loss


def read_number_rows(data: StoreData[Any, Any], most: int) -> NumberRows:
    """All rows of a store that is open; of bit strings at most so many, drawn at random."""
    if isinstance(data.info, SequenceInfo):
        return _of_recordings(data.info)
    info = data.info
    random = np.random.default_rng(0)
    share = most / sum(split.num_rows for split in data.store.splits.values())
    found = list[tuple[Tensor, Tensor]]()
    names = list[str]()
    splits = list[str]()
    for name, split in data.store.splits.items():
        for batch in getattr(data.feeds, name).afresh():
            kept = np.flatnonzero(random.random(batch.num_real) < share)
            inputs_BD = inputs_of(batch, info.num_inputs, is_set=info.is_set)
            found.append(
                (
                    inputs_BD[kept],
                    batch.multi_hot(info.labels.num_targets)[kept, : info.labels.num_outputs],
                )
            )
            names += [
                f"row {number + 1}"
                for number in split.fixed("rows")[batch.rows.numpy()[kept]].tolist()
            ]
            splits += [name] * len(kept)
    inputs_ND, answers_NO = (torch.cat(each) for each in zip(*found, strict=True))
    if inputs_ND.shape[1] > _MOST_BITS:
        inputs_ND = inputs_ND[:, inputs_ND.sum(0).topk(_MOST_BITS).indices]
    about = ("bit strings", "Dice", f"ridge on {inputs_ND.shape[1]:,} inputs", names, splits)
    return NumberRows(*about, inputs_ND, answers_NO, torch.arange(len(names)), _dice_lost)


def _of_recordings(info: SequenceInfo) -> NumberRows:
    segments = info.segments
    targets = info.targets
    is_class = False
    factor = 1.0
    if info.shape.labels:
        is_class = info.labels.problem is Problem.single
        model = "ridge on means and ends"
        inputs_ND, answers_NO = (
            torch.cat([of(info, each) for each in segments]) for of in (numbers_of, labels_of)
        )
        number_N = torch.cat(
            [torch.from_numpy(info.recording_of_rows(split)).long() for split in segments]
        )
    else:
        wide, inputs_ND, answers_NO, number_N = window_rows(info)
        model = f"ridge on {wide} samples"
        factor = info.scaler.of_targets(1)[1][0]
    several = len(targets) > 1
    # By quartiles, as a recording in another unit would move a mean and a deviation of all.
    low_D, middle_D, high_D = torch.from_numpy(
        np.quantile(inputs_ND.numpy(), (0.25, 0.5, 0.75), axis=0)
    )
    inputs_ND = (inputs_ND - middle_D) / torch.where(
        high_D > low_D, high_D - low_D, inputs_ND.std(0).clamp(min=1e-9)
    )
    spread = 1.0 if several or is_class else max(1e-9, float(answers_NO.std()))
    unit = 0.0 if is_class else 1.0 if several else factor * spread
    kept, row_N = torch.unique(number_N, return_inverse=True)  # short recordings have no window
    score = (
        f"rmse of {f'{len(targets)} scaled targets' if several else targets[0]}"
        if unit
        else "accuracy"
    )
    names = info.recording_names
    of_split = {split: set(own.recording.tolist()) for split, own in segments.items()}
    splits = [
        " ".join(split for split in of_split if number in of_split[split])
        for number in kept.tolist()
    ]
    groups = [info.facts["parts"][number] for number in kept.tolist()] if info.config.group else []
    about = ("recordings", score, model, [names[number] for number in kept.tolist()], splits)
    loss, classes = _squares if unit else _wrong, info.labels.classes if is_class else ()
    return NumberRows(*about, inputs_ND, answers_NO / spread, row_N, loss, unit, classes, groups)


def _squares(answers_NO: Tensor, truths_NO: Tensor) -> Tensor:
    return (answers_NO - truths_NO).square().mean(1)


def _wrong(answers_NO: Tensor, truths_NO: Tensor) -> Tensor:
    return (answers_NO.argmax(1) != truths_NO.argmax(1)).double()


def _dice_lost(scores_NO: Tensor, truths_NO: Tensor) -> Tensor:
    metrics = GramMetrics(is_alone=True)
    metrics.update(scores_NO, truths_NO)
    metrics.compute()  # finds the threshold
    is_on_NO = (scores_NO >= metrics.threshold).float()
    return (
        1 - record_scores(*(part.sum(1) for part in (is_on_NO * truths_NO, is_on_NO, truths_NO)))[0]
    )


class _Folds:
    """Sums over the samples of each fold and each part of the curve, and models of them."""

    def __init__(self, rows: NumberRows, num_folds: int) -> None:
        count = len(rows.names)
        groups, group_R = np.unique(
            rows.groups if len(set(rows.groups)) > 1 else range(count), return_inverse=True
        )
        require(
            len(groups) >= num_folds,
            "folds",
            (
                f"{counted(len(groups), 'group' if len(groups) < count else rows.what[:-1])} for"
                f" {num_folds} folds"
            ),
            hint="Set folds to fewer, or name more data.",
        )
        rank_G = np.random.default_rng(0).permutation(len(groups))
        by_group = np.argsort(group_R, kind="stable")
        nth_R = np.empty(count, np.int64)
        own_R = rank_G[group_R]
        nth_R[by_group] = np.arange(count) - np.searchsorted(group_R[by_group], group_R[by_group])
        # whole groups behind a row of two, so that no fold lacks rows of a part
        is_later_R = (nth_R > 0) | (own_R > 1)
        rank_R = torch.from_numpy(np.argsort(np.lexsort((nth_R, own_R, is_later_R))))
        self.rows = rows
        self.num_folds = num_folds
        self.fold_R = torch.from_numpy(own_R % num_folds)
        self.group_R = torch.from_numpy(group_R)
        self.fold_N = self.fold_R[rows.row_N]
        ends = torch.tensor(PARTS[:-1]) * count
        part_N = torch.bucketize(rank_R.float(), ends, right=True)[rows.row_N]
        self._cells: dict[tuple[int, int], Sums] = {}
        for fold, part in itertools.product(range(num_folds), range(len(PARTS))):
            own_N = (self.fold_N == fold) & (part_N == part)
            self._cells[fold, part] = ridge_sums(
                rows.inputs_ND[own_N].double(), rows.answers_NO[own_N].double()
            )

    def losses(self, penalty: float, part: int, judged: int | None = None) -> tuple[Floats, Tensor]:
        """Mean loss of each row of all folds or one, by models of a part of the others; and what
        these answer.
        """
        rows = self.rows
        answers_NO = torch.empty_like(self.rows.answers_NO, dtype=torch.float32)
        for fold in range(self.num_folds) if judged is None else (judged,):
            cells = [
                sums for (own, its), sums in self._cells.items() if own != fold and its <= part
            ]
            weight_DO, mean_D, mean_O = solve_ridge(
                tuple(sum(each) for each in zip(*cells, strict=True)), penalty
            )
            is_judged_N = self.fold_N == fold
            inputs_ND = (rows.inputs_ND[is_judged_N] - mean_D).float()
            answers_NO[is_judged_N] = inputs_ND @ weight_DO.float() + mean_O.float()
        kept_N = slice(None) if judged is None else self.fold_N == judged
        loss_N = rows.loss(answers_NO[kept_N], rows.answers_NO[kept_N]).double()
        row_N = rows.row_N[kept_N]
        sums_R = torch.zeros(len(rows.names)).double().index_add(0, row_N, loss_N)
        return (sums_R / torch.bincount(rows.row_N)).numpy(), answers_NO


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
    folds = _Folds(rows, num_folds)
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


def write_numbers(
    measured: MeasuredNumbers, title: str, command: str, table: Path, page: Path
) -> None:
    """Write all rows as CSV, the worst first, and the page."""
    rows, order = measured.rows, measured.order
    scores = [f"{rows.shown(loss):.6g}" for loss in measured.loss_R]
    found = [
        [rows.names[each], rows.splits[each], scores[each], *measured.classes_of(each)]
        for each in order
    ]
    heads = [
        rows.what.rstrip("s"),
        "split",
        rows.score,
        *(["given", "likely"] if rows.classes else []),
    ]
    write_table(table, [heads, *found])
    note = ", ".join(filter(None, (measured.interval, rows.model)))
    score = tile(f"{rows.shown(measured.loss_R.mean()):.4g}", rows.score, note)
    curves = [
        Curve(f"fold {number}", list(zip(measured.sizes.tolist(), of_fold, strict=True)))
        for number, of_fold in enumerate(measured.curve.tolist() if measured.forecast else (), 1)
    ]
    chart = line_chart(
        f"{rows.score} by rows trained on", curves, x_label=rows.what, doublings=True
    )
    shown: dict[str, Any] = {"title": title, "command": command, "forecast": measured.more_line()}
    shown |= {
        "figures": [score, tile(f"{len(rows.names):,}", rows.what)],
        "charts_of_rows": [chart] if chart else [],
    }
    write_atomically(page, render_text("audit.html", worst=[heads, found[:_SHOWN]], **shown))

"""Recordings and bit strings as a linear model reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.bits.ridge import inputs_of
from flatout.bits.scores import GramMetrics, record_scores
from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.store_data import StoreData
from flatout.tasks.sequence_baselines import labels_of, numbers_of, window_rows

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

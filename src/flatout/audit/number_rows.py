"""Recordings and bit strings as inputs and answers of ridge regression, for an audit of them.

A row of the audit is a recording or a bit string, whatever its split. A recording gives many
samples (its windows), or one (its means, where a whole recording has a label). A bit string is one
sample. Open this file when another kind of data should be audited by ridge regression.

Shapes: N samples, D inputs, O answers, R rows, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.bits.info import BitInfo
from flatout.bits.ridge import inputs_of
from flatout.bits.scores import GramMetrics, record_scores
from flatout.data.batches.store_data import StoreData
from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.tasks.sequence_baselines import labels_of, numbers_of, window_rows

_MOST_BITS = 2048  # inputs of the ridge, the commonest bits: a solve costs their cube
_LEAST_SPREAD = 1e-9  # so that nothing is divided by the spread of a constant column
Value = TypeVar("Value", float, NDArray[np.float64], Tensor)


@dataclass(frozen=True, slots=True)
class NumberRows:
    """Samples of recordings or bit strings, and the row that each sample belongs to."""

    kind: str  # what the rows are: "recordings" or "bit strings"
    score: str  # name of the score, such as "rmse of soc"
    model: str  # name of the model, such as "ridge on 16 samples"
    names: list[str]  # of each row
    splits: list[str]  # of each row; several names where its samples are in several splits
    inputs_ND: Tensor
    answers_NO: Tensor
    row_N: Tensor  # number of each sample's row
    loss: Callable[[Tensor, Tensor], Tensor]  # (answers, truths) to the loss of each sample
    # unit of a root mean square in the data's own scale; 0: the score is 1 less the mean loss
    unit: float = 0.0
    classes: Sequence[str] = ()  # names of the answers, where each row has one class
    # group of each row: rows of one group stay in one fold. Empty, or all alike: no groups
    groups: Sequence[str] = ()

    def score_of(self, mean_loss: Value) -> Value:
        """The score that belongs to a mean loss, in the form that reports show."""
        return self.unit * mean_loss**0.5 if self.unit else 1 - mean_loss


def read_number_rows(data: StoreData[Any, Any], most: int) -> NumberRows:
    """Read all rows of an open store: every recording, or about `most` bit strings at random."""
    info = data.info
    if isinstance(info, SequenceInfo):
        return _read_recordings(info)
    return _read_bit_strings(data, info, most)


def _read_bit_strings(data: StoreData[Any, Any], info: BitInfo, most: int) -> NumberRows:
    random = np.random.default_rng(0)
    num_rows = sum(split.num_rows for split in data.store.splits.values())
    share = most / num_rows
    inputs = list[Tensor]()
    answers = list[Tensor]()
    names = list[str]()
    splits = list[str]()
    for name, split in data.store.splits.items():
        numbers = split.fixed("rows")
        for batch in getattr(data.feeds, name).all_rows():
            drawn = np.flatnonzero(random.random(batch.num_real) < share)
            inputs_BD = inputs_of(batch, info.num_inputs, is_set=info.is_set)
            grams_BG = batch.multi_hot(info.labels.num_targets)
            inputs.append(inputs_BD[drawn])
            answers.append(grams_BG[drawn, : info.labels.num_outputs])
            for number in numbers[batch.rows.numpy()[drawn]].tolist():
                names.append(f"row {number + 1}")
                splits.append(name)
    inputs_ND = torch.cat(inputs)
    if inputs_ND.shape[1] > _MOST_BITS:
        commonest = inputs_ND.sum(0).topk(_MOST_BITS).indices
        inputs_ND = inputs_ND[:, commonest]
    return NumberRows(
        kind="bit strings",
        score="Dice",
        model=f"ridge on {inputs_ND.shape[1]:,} inputs",
        names=names,
        splits=splits,
        inputs_ND=inputs_ND,
        answers_NO=torch.cat(answers),
        row_N=torch.arange(len(names)),
        loss=_lose_dice,
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of all recordings before they are scaled."""

    model: str
    inputs_ND: Tensor
    answers_NO: Tensor
    recording_N: Tensor  # number of each sample's recording
    target_unit: float  # size of 1 in the answers, in the unit of the first target


def _read_labelled(info: SequenceInfo) -> _Samples:
    """One sample for each recording: means, spreads, ends; its answer is the recording's label."""
    recordings = [torch.from_numpy(info.recording_of_rows(split)) for split in info.segments]
    return _Samples(
        model="ridge on means and ends",
        inputs_ND=torch.cat([numbers_of(info, split) for split in info.segments]),
        answers_NO=torch.cat([labels_of(info, split) for split in info.segments]),
        recording_N=torch.cat(recordings).long(),
        target_unit=1.0,
    )


def _read_windows(info: SequenceInfo) -> _Samples:
    """A sample for each window of each recording."""
    num_samples, inputs_ND, answers_NO, recording_N = window_rows(info)
    _, units = info.scaler.of_targets(1)
    return _Samples(
        model=f"ridge on {num_samples} samples",
        inputs_ND=inputs_ND,
        answers_NO=answers_NO,
        recording_N=recording_N,
        target_unit=units[0],
    )


def _read_recordings(info: SequenceInfo) -> NumberRows:
    has_labels = bool(info.shape.labels)
    is_class = has_labels and info.labels.problem is Problem.single
    has_several_targets = len(info.targets) > 1
    samples = _read_labelled(info) if has_labels else _read_windows(info)
    # Recordings shorter than a window have no sample, so they are no row.
    recordings, row_N = torch.unique(samples.recording_N, return_inverse=True)
    numbers = recordings.tolist()
    spread = 1.0  # of the answers, which are divided by it
    if is_class:
        score = "accuracy"
        unit = 0.0
    elif has_several_targets:
        score = f"rmse of {len(info.targets)} scaled targets"
        unit = 1.0
    else:
        score = f"rmse of {info.targets[0]}"
        spread = max(_LEAST_SPREAD, float(samples.answers_NO.std()))
        unit = samples.target_unit * spread
    groups = list[str]()
    if info.config.group:
        groups = [info.facts["parts"][number] for number in numbers]
    names = info.recording_names
    return NumberRows(
        kind="recordings",
        score=score,
        model=samples.model,
        names=[names[number] for number in numbers],
        splits=_name_splits(info, numbers),
        inputs_ND=_scale_by_quartiles(samples.inputs_ND),
        answers_NO=samples.answers_NO / spread,
        row_N=row_N,
        loss=_count_wrong if is_class else _mean_squares,
        unit=unit,
        classes=info.labels.classes if is_class else (),
        groups=groups,
    )


def _name_splits(info: SequenceInfo, numbers: list[int]) -> list[str]:
    """The splits that each of these recordings is in: "train", or "train test" where it is cut."""
    names_of = {number: list[str]() for number in numbers}
    for split, segments in info.segments.items():
        for number in set(segments.recording.tolist()) & set(numbers):
            names_of[number].append(split)
    return [" ".join(names_of[number]) for number in numbers]


def _scale_by_quartiles(inputs_ND: Tensor) -> Tensor:
    """Each column less its median, over the distance of its quartiles."""
    # One recording in another unit would move a mean and a deviation of all, and hide itself.
    quartiles = np.quantile(inputs_ND.numpy(), (0.25, 0.5, 0.75), axis=0)
    low_D, middle_D, high_D = torch.from_numpy(quartiles)
    # A column that is mostly one value has equal quartiles; its deviation stands in.
    deviation_D = inputs_ND.std(0).clamp(min=_LEAST_SPREAD)
    distance_D = torch.where(high_D > low_D, high_D - low_D, deviation_D)
    return (inputs_ND - middle_D) / distance_D


def _mean_squares(answers_NO: Tensor, truths_NO: Tensor) -> Tensor:
    return (answers_NO - truths_NO).square().mean(1)


def _count_wrong(answers_NO: Tensor, truths_NO: Tensor) -> Tensor:
    """1 for each sample whose largest answer is not its class, else 0."""
    return (answers_NO.argmax(1) != truths_NO.argmax(1)).double()


def _lose_dice(scores_NO: Tensor, truths_NO: Tensor) -> Tensor:
    """1 less each sample's Dice, at the threshold with the best mean Dice of these samples."""
    metrics = GramMetrics(is_alone=True)
    metrics.update(scores_NO, truths_NO)
    metrics.compute()  # finds the threshold
    is_on_NO = (scores_NO >= metrics.threshold).float()
    num_right = (is_on_NO * truths_NO).sum(1)
    dice, *_ = record_scores(num_right, is_on_NO.sum(1), truths_NO.sum(1))
    return 1 - dice

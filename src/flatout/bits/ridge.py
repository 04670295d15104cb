"""Ridge regression from encodings to grams: the baseline beside every result, and where detectors start.

It has a closed form, needs one pass over the batches and a solve, and on Bloom filters it is very good: a gram's bits
are always on together, which a linear function sees. The strength of the penalty is chosen on the validation records.
Sums are kept in blocks of memory of inputs x inputs, so any number of records will do; beyond some hundred thousand
they change nothing, so no more are read.

Shapes: N records, D inputs, G grams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.bits.scores import GramMetrics
from flatout.data.batch import FlatBatch, multi_hot
from flatout.data.feed import Feed

MOST_RECORDS = 131_072
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Ridge:
    """A linear function from inputs to a score for each gram, near 1 where it is there and near 0 where not."""

    weight: Tensor
    """[D, G]"""
    bias: Tensor
    """[G]"""
    penalty: float
    threshold: float
    """Score above which a gram counts as there; the best on the validation records."""
    dice: float
    """Mean Dice on the validation records."""
    num_records: int
    """Training records read."""

    def scores(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias


def dense_inputs(batch: FlatBatch, num_inputs: int, is_set: bool) -> Tensor:
    """`[B, D]` zeros and ones of a batch's encodings."""
    return multi_hot(batch.tokens, batch.offsets, num_inputs) if is_set else batch.bits(torch.float32)


def input_blocks(feed: Feed, num_inputs: int, is_set: bool, num_grams: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs `[B, D]` and grams `[B, G]` of each batch of a feed, as zeros and ones."""
    for batch in feed.afresh():
        assert batch.targets is not None and batch.target_offsets is not None
        yield (
            dense_inputs(batch, num_inputs, is_set),
            multi_hot(batch.targets, batch.target_offsets, num_grams),
        )


class RidgeSums:
    """What a closed form needs to know of the training records, and of the validation records for the penalty."""

    def __init__(
        self, train: Feed, *, num_inputs: int, is_set: bool, num_grams: int, most_records: int = MOST_RECORDS
    ) -> None:
        self.num_inputs, self.is_set, self.num_grams = num_inputs, is_set, num_grams
        device = train.device
        self.inputs_DD = torch.zeros(num_inputs, num_inputs, device=device)
        self.grams_DG = torch.zeros(num_inputs, num_grams, device=device)
        self.sum_D, self.sum_G = torch.zeros(num_inputs, device=device), torch.zeros(num_grams, device=device)
        self.num_records = 0
        for inputs_ND, grams_NG in input_blocks(train, num_inputs, is_set, num_grams):
            left = most_records - self.num_records
            inputs_ND, grams_NG = inputs_ND[:left], grams_NG[:left]
            self.inputs_DD.addmm_(inputs_ND.T, inputs_ND)
            self.grams_DG.addmm_(inputs_ND.T, grams_NG)
            self.sum_D += inputs_ND.sum(0)
            self.sum_G += grams_NG.sum(0)
            self.num_records += len(inputs_ND)
            if self.num_records >= most_records:
                break

    def solve(self, penalty: float, grams: slice) -> tuple[Tensor, Tensor]:
        """Weights `[D, G]` and bias `[G]` for some of the grams; double precision, since inputs are near dependent."""
        count = self.num_records
        mean_D, mean_G = self.sum_D.double() / count, self.sum_G[grams].double() / count
        products_DD = self.inputs_DD.double() - count * torch.outer(mean_D, mean_D)
        products_DD.diagonal().add_(penalty)
        products_DG = self.grams_DG[:, grams].double() - count * torch.outer(mean_D, mean_G)
        weight_DG = torch.cholesky_solve(products_DG, torch.linalg.cholesky(products_DD))
        return weight_DG.float(), (mean_G - mean_D @ weight_DG).float()

    def best(self, validation: Feed, grams: slice) -> Ridge:
        """The penalty and the threshold that read most off the validation records."""
        found: list[Ridge] = []
        held = list(input_blocks(validation, self.num_inputs, self.is_set, self.num_grams))
        for penalty in PENALTIES:
            weight, bias = self.solve(penalty, grams)
            metrics = GramMetrics()
            for inputs_ND, grams_NG in held:
                metrics.update(inputs_ND @ weight + bias, grams_NG[:, grams])
            values = metrics.compute()
            found.append(Ridge(weight, bias, penalty, metrics.threshold, values["dice"], self.num_records))
            if len(found) > 1 and found[-1].dice < found[-2].dice:
                break  # the score rises to one best penalty and falls from there
        return max(found, key=lambda ridge: ridge.dice)

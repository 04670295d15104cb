"""Ridge regression from encodings to grams: the baseline beside every result, and where detectors start.

It has a closed form, needs one pass over the batches and a solve, and on Bloom filters it is very good: a gram's bits
are always on together, which a linear function sees. The strength of the penalty is chosen on the validation records.
Sums are kept in blocks of memory of inputs x inputs, so any number of records will do; beyond some hundred thousand
they change nothing, so no more are read.

Shapes: N records, D inputs, G grams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.bits.scores import GramMetrics
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch, multi_hot

MOST_RECORDS = 131_072
_MOST_INPUTS_IN_DOUBLE, _MOST_TO_CHOOSE_BY = 2_048, 8_192
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


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


def neighbours(penalty: float) -> tuple[float, ...]:
    """A penalty of the list with the ones before and after it."""
    place = PENALTIES.index(penalty)
    return PENALTIES[max(0, place - 1) : place + 2]


class RidgeSums:
    """What a closed form needs to know of the training records; more of them can be added at any time."""

    def __init__(self, *, num_inputs: int, is_set: bool, num_grams: int, device: torch.device) -> None:
        self.num_inputs, self.is_set, self.num_grams = num_inputs, is_set, num_grams
        self.inputs_DD = torch.zeros(num_inputs, num_inputs, device=device)
        self.grams_DG = torch.zeros(num_inputs, num_grams, device=device)
        self.sum_D, self.sum_G = torch.zeros(num_inputs, device=device), torch.zeros(num_grams, device=device)
        self.num_records = 0

    def blocks(self, feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs `[B, D]` and grams `[B, G]` of each batch of a feed, as zeros and ones."""
        for batch in feed.afresh():
            assert batch.targets is not None and batch.target_offsets is not None
            inputs_BD = dense_inputs(batch, self.num_inputs, self.is_set)
            yield inputs_BD, multi_hot(batch.targets, batch.target_offsets, self.num_grams)

    def read(self, train: Feed, sizes: Sequence[int] = (MOST_RECORDS,)) -> Iterator[int]:
        """Add training records; says how many there are at each of the sizes, and at the end of the records."""
        waiting = sorted(sizes)
        for inputs_ND, grams_NG in self.blocks(train):
            start = 0
            while start < len(inputs_ND):
                stop = min(len(inputs_ND), start + waiting[0] - self.num_records)
                self._add(inputs_ND[start:stop], grams_NG[start:stop])
                start = stop
                if self.num_records == waiting[0]:
                    yield waiting.pop(0)
                    if not waiting:
                        return
        yield self.num_records

    def _some(self, validation: Feed) -> list[tuple[Tensor, Tensor]]:
        """The first thousands of the validation records, which are enough to choose by."""
        held: list[tuple[Tensor, Tensor]] = []
        for block in self.blocks(validation):
            held.append(block)
            if sum(len(inputs_ND) for inputs_ND, _ in held) >= _MOST_TO_CHOOSE_BY:
                break
        return held

    def _add(self, inputs_ND: Tensor, grams_NG: Tensor) -> None:
        self.inputs_DD.addmm_(inputs_ND.T, inputs_ND)
        self.grams_DG.addmm_(inputs_ND.T, grams_NG)
        self.sum_D += inputs_ND.sum(0)
        self.sum_G += grams_NG.sum(0)
        self.num_records += len(inputs_ND)

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Weights `[D, G]` and bias `[G]`; inputs are nearly dependent, so in double precision where that is quick."""
        count, wide = self.num_records, torch.float64
        mean_D, mean_G = self.sum_D.to(wide) / count, self.sum_G.to(wide) / count
        products_DD = self.inputs_DD.to(wide) - count * torch.outer(mean_D, mean_D)
        products_DD.diagonal().add_(penalty)
        products_DG = self.grams_DG.to(wide) - count * torch.outer(mean_D, mean_G)
        weight_DG = _solved(products_DD, products_DG, narrow=self.num_inputs > _MOST_INPUTS_IN_DOUBLE).to(wide)
        return weight_DG.float(), (mean_G - mean_D @ weight_DG).float()

    def best(
        self, validation: Feed, parts: Sequence[slice], penalties: Sequence[float] = PENALTIES
    ) -> tuple[Ridge, ...]:
        """For each part of the grams the penalty and the threshold that read most off the validation records."""
        found: list[list[Ridge]] = [[] for _ in parts]
        held = self._some(validation)
        for penalty in penalties:
            weight, bias = self.solve(penalty)
            for part, rising in zip(parts, found, strict=True):
                metrics = GramMetrics()
                for inputs_ND, grams_NG in held:
                    metrics.update(inputs_ND @ weight[:, part] + bias[part], grams_NG[:, part])
                dice = metrics.compute()["dice"]
                about = (penalty, metrics.threshold, dice, self.num_records)
                rising.append(Ridge(weight[:, part], bias[part], *about))
            if all(len(rising) > 2 and rising[-1].dice < rising[-2].dice < rising[-3].dice for rising in found):
                break  # scores rise to one best penalty and fall from there
        return tuple(max(rising, key=lambda ridge: ridge.dice) for rising in found)


def _solved(products_DD: Tensor, products_DG: Tensor, *, narrow: bool) -> Tensor:
    """The solution, in single precision if asked for and if that holds."""
    if narrow:
        factor, failed = torch.linalg.cholesky_ex(products_DD.float())
        if not failed:
            return torch.cholesky_solve(products_DG.float(), factor)
    return torch.cholesky_solve(products_DG, torch.linalg.cholesky(products_DD))


def finished_answers(model: nn.Module, num_outputs: int, batch: FlatBatch) -> Tensor:
    """`[B, C]` logits of the answers, after the vote of ridge where the network has one."""
    logits = model(batch)[:, :num_outputs].float()
    blended = getattr(model, "blended", None)
    return logits if blended is None else blended(logits, batch)

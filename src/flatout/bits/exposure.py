"""How much an encoding gives away, as numbers: what the exposure report and `flatout compare` show.

Everything is measured on records that took no part in training. Three questions: how much of a record's 2-grams can be
read, how many known pairs of text and encoding that takes, and how many records are thereby known by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.bits.reconstruct import Rates
from flatout.bits.ridge import MOST_RECORDS, PENALTIES, Ridge, RidgeSums, neighbours
from flatout.bits.scores import GramMetrics
from flatout.data.batches.feed import Feed

_SIZES, _FEWEST = 6, 64
_FREQUENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 1 << 40)
_GRAMS_SHOWN = 24
_LEAST_SUPPORT = 5
_NOTHING, _LITTLE, _MUCH = 0.1, 0.35, 0.8


@dataclass(frozen=True, slots=True)
class GramCounts:
    """Over the records looked at: how often each gram was there, answered, and rightly so. Each `[C]`."""

    there: NDArray[np.int64]
    answered: NDArray[np.int64]
    found: NDArray[np.int64]

    @property
    def dice(self) -> NDArray[np.float64]:
        return 2 * self.found / np.maximum(self.there + self.answered, 1)


def count_grams(probabilities: Tensor, targets: Tensor, threshold: float) -> GramCounts:
    """Counts of each gram, from `[N, C]` probabilities and targets."""
    answered, there = probabilities >= threshold, targets > 0
    counts = (there.sum(0), answered.sum(0), (answered & there).sum(0))
    return GramCounts(*(count.cpu().numpy() for count in counts))


def by_frequency(counts: GramCounts, train_counts: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Dice of grams, gathered by how many training records hold them."""
    rows = []
    for low, high in zip((0, *_FREQUENCIES), _FREQUENCIES, strict=False):
        chosen = (train_counts >= low) & (train_counts < high) & (counts.there > 0)
        if chosen.any():
            there, answered, found = (values[chosen].sum() for values in (counts.there, counts.answered, counts.found))
            dice = 2 * found / max(1, there + answered)
            rows.append({"from": low, "to": high - 1, "grams": int(chosen.sum()), "dice": float(dice)})
    return rows


def most_and_least(names: tuple[str, ...], counts: GramCounts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The grams that leak most and least, among those some records hold."""
    chosen = np.flatnonzero(counts.there >= _LEAST_SUPPORT)
    dice = counts.dice
    order = chosen[np.lexsort((-counts.there[chosen], -dice[chosen]))]

    def rows(places: NDArray[np.int64]) -> list[dict[str, Any]]:
        return [{"gram": names[i], "dice": float(dice[i]), "records": int(counts.there[i])} for i in places]

    return rows(order[:_GRAMS_SHOWN]), rows(order[::-1][:_GRAMS_SHOWN])


class LearningCurve:
    """Dice on the test records after training on fewer and fewer known pairs of text and encoding.

    Ridge regression is solved again for every size. The network keeps its composer, which needs texts but no
    encodings, and has its detectors solved again.
    """

    def __init__(self, model: Any, *, num_inputs: int, is_set: bool, num_labels: int, num_targets: int) -> None:
        self.model = copy.deepcopy(model)
        self.num_inputs, self.is_set = num_inputs, is_set
        self.num_labels, self.num_targets = num_labels, num_targets

    def points(self, train: Feed, validation: Feed, test: Feed, steepness: float) -> Iterator[dict[str, float]]:
        """From few records to all of them."""
        total = min(train.split.num_rows, MOST_RECORDS)
        sizes = sorted({min(total, max(_FEWEST, total >> halvings)) for halvings in range(_SIZES)})
        sums = RidgeSums(
            num_inputs=self.num_inputs, is_set=self.is_set, num_grams=self.num_targets, device=train.device
        )
        parts = (slice(0, self.num_labels), slice(self.num_labels, self.num_targets))
        refits = self.model.detectors is not None and self.model.starts_at_ridge and not self.model.trains_detectors
        penalties: tuple[float, ...] = PENALTIES
        for size in sums.read(train, sizes):
            answers, hashed = sums.best(validation, parts, penalties)
            penalties = tuple(sorted({*neighbours(answers.penalty), *neighbours(hashed.penalty)}))
            point = {"records": float(size), "ridge": self._ridge_dice(sums, answers, test)}
            if refits:
                self.model.start_detectors(steepness * hashed.weight, steepness * (hashed.bias - hashed.threshold))
                point["model"] = self._model_dice(validation, test)
            yield point

    def _ridge_dice(self, sums: RidgeSums, ridge: Ridge, test: Feed) -> float:
        metrics = GramMetrics(ridge.threshold)
        for inputs_ND, grams_NG in sums.blocks(test):
            metrics.update(ridge.scores(inputs_ND), grams_NG[:, : self.num_labels])
        return metrics.compute()["dice"]

    @torch.inference_mode()
    def _model_dice(self, validation: Feed, test: Feed) -> float:
        self.model.eval()
        metrics = GramMetrics()
        for feed in (validation, test):
            metrics.reset()
            for batch in feed.afresh():
                targets = batch.multi_hot(self.num_labels)
                metrics.update(self.model(batch)[:, : self.num_labels].float().sigmoid(), targets)
            values = metrics.compute()
            metrics.given = metrics.threshold
        return values["dice"]


def conclusion(dice: float, trivial: float, rates: Rates, with_names: Rates | None) -> list[str]:
    """What the numbers mean, in plain words."""
    gained = (dice - trivial) / max(1e-9, 1 - trivial)
    if gained < _NOTHING:
        first = "Hardly anything more than common knowledge could be read off these encodings by this attack."
    elif gained < _LITTLE:
        first = "Some of the plain text can be read off these encodings."
    elif gained < _MUCH:
        first = "Much of the plain text can be read off these encodings."
    else:
        first = "Nearly all of the plain text can be read off these encodings."
    lines = [
        f"{first} Of an unseen record's 2-grams, a Dice of {dice:.3f} was reached; guessing the commonest ones for"
        f" everybody reaches {trivial:.3f}.",
        f"{rates.at_1:.1%} of {rates.num_records:,} unseen records were rebuilt letter by letter at the first try,"
        f" {rates.at_10:.1%} within ten; {rates.wrong:.1%} of the first tries were another text.",
    ]
    if with_names is not None:
        lines.append(
            f"With a list of names, {with_names.at_1:.1%} were right at the first try and {with_names.at_10:.1%} within"
            " ten."
        )
    return [*lines, _CAUTION]


_CAUTION = (
    "This measures one attack: by one who knows the plain text of as many encoded records as were trained on. A low"
    " figure is no proof of safety against others."
)

"""Ridge regression from encodings to grams.

It is the baseline of a run, the start of the network's detectors, and a vote in the end. It has a
closed form (`baselines/ridge.py`): one pass over the batches and a solve for each penalty, among
which the validation records choose. On Bloom filters it is very good, as the bits of a gram are
always on together, which a linear function sees. Records beyond some hundred thousand change
nothing, and are not read.

Shapes: N records, D inputs, G grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.baselines.ridge import RidgeSums
from flatout.bits.info import BitInfo, GramLabels
from flatout.bits.scores import GramMetrics
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch, multi_hot
from flatout.models.bit_mlp import BitMLP
from flatout.run_log import RunLog

MOST_RECORDS = 131_072
_MOST_TO_CHOOSE_BY = 8_192
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
COMMONEST = 20
# name of the trivial baseline: the same grams for every record
EVERYBODY = f"dice of the {COMMONEST} commonest"
# a detector's logits a unit of ridge's score: 0 for an absent gram, 1 for a present one
_STEEPNESS = 15.0
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Ridge:
    """A linear function from inputs to a score a gram: near 1 if it is there, else near 0."""

    weight: Tensor  # [D, G]
    bias: Tensor  # [G]
    penalty: float
    threshold: float  # score above which a gram counts as there; the best on the validation records
    dice: float  # mean Dice on the validation records
    num_records: int  # training records read

    def scores(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias

    def penalties_near(self) -> tuple[float, ...]:
        """Its penalty with the ones before and after it."""
        place = PENALTIES.index(self.penalty)
        return PENALTIES[max(0, place - 1) : place + 2]


class GramSums:
    """Sums over training records that ridge regression needs; more records can be added."""

    def __init__(self, info: BitInfo, labels: GramLabels, device: torch.device) -> None:
        self.num_inputs = info.num_inputs
        self.is_set = info.is_set
        self.num_grams = labels.num_targets
        self.sums = RidgeSums.zeros(self.num_inputs, self.num_grams, torch.float32, device)

    @property
    def num_records(self) -> int:
        return self.sums.num_rows

    def blocks(self, feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs `[B, D]` and grams `[B, G]` of each batch of a feed, as zeros and ones."""
        for batch in feed.all_rows():
            yield (
                inputs_of(batch, self.num_inputs, is_set=self.is_set),
                batch.multi_hot(self.num_grams),
            )

    def read(self, train: Feed, sizes: Sequence[int] = (MOST_RECORDS,)) -> Iterator[int]:
        """Add training records, and yield their number at each of the sizes and at the end.

        Between two yields the sums may be solved, as for a learning curve.
        """
        waiting = sorted(sizes)
        for inputs_ND, grams_NG in self.blocks(train):
            start = 0
            while start < len(inputs_ND):
                stop = min(len(inputs_ND), start + waiting[0] - self.num_records)
                self.sums.add(inputs_ND[start:stop], grams_NG[start:stop])
                start = stop
                if self.num_records == waiting[0]:
                    yield waiting.pop(0)
                    if not waiting:
                        return
        yield self.num_records

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Weights `[D, G]` and bias `[G]` for one penalty."""
        weight_DG, bias_G = self.sums.solve_map(penalty)
        return weight_DG.float(), bias_G.float()

    def best(
        self, validation: Feed, parts: Sequence[slice], penalties: Sequence[float] = PENALTIES
    ) -> list[Ridge]:
        """The ridge with the best Dice on the validation records, for each part of the grams.

        Each part has a penalty and a threshold of its own.
        """
        best_of_parts: list[Ridge | None] = [None for _ in parts]
        dice_of_parts: list[list[float]] = [[] for _ in parts]  # of each penalty so far
        held: list[tuple[Tensor, Tensor]] = []
        for block in self.blocks(validation):
            held.append(block)
            if sum(len(inputs_ND) for inputs_ND, _ in held) >= _MOST_TO_CHOOSE_BY:
                break  # some thousand records are enough to choose by
        for penalty in penalties:
            weight_DG, bias_G = self.solve(penalty)
            for index, part in enumerate(parts):
                weight = weight_DG[:, part]
                bias = bias_G[part]
                metrics = GramMetrics()
                for inputs_ND, grams_NG in held:
                    metrics.update(inputs_ND @ weight + bias, grams_NG[:, part])
                dice = metrics.compute()["dice"]
                dice_of_parts[index].append(dice)
                best = best_of_parts[index]
                if best is None or dice > best.dice:
                    # A copy, as a slice would keep the weights of all grams: 0.1 GB a penalty.
                    best_of_parts[index] = Ridge(
                        weight.clone(), bias, penalty, metrics.threshold, dice, self.num_records
                    )
            # Scores rise to one best penalty and fall from there.
            if all(
                len(rising) > 2 and rising[-1] < rising[-2] < rising[-3] for rising in dice_of_parts
            ):
                break
        return [ridge for ridge in best_of_parts if ridge is not None]


def inputs_of(batch: FlatBatch, num_inputs: int, *, is_set: bool) -> Tensor:
    """`[B, D]` of zeros and ones."""
    return (
        multi_hot(batch.tokens, batch.offsets, num_inputs) if is_set else batch.bits(torch.float32)
    )


def start_at_ridge(
    network: nn.Module, labels: GramLabels, info: BitInfo, feeds: Feeds, log: RunLog
) -> dict[str, Any]:
    """Solve ridge regression, start a network's detectors there, and return the baseline."""
    sums = GramSums(info, labels, feeds.train.device)
    next(sums.read(feeds.train))
    baseline, hashed = sums.best(feeds.validation, labels.parts)
    evidence = (
        f"Dice {baseline.dice:.4f} on the validation records, from {baseline.num_records:,} records"
    )
    penalties = ", ".join(f"{penalty:g}" for penalty in PENALTIES)
    log.decision("ridge penalty", baseline.penalty, f"the best of {penalties}", evidence)
    if isinstance(network, BitMLP):
        # The network answers at one half, ridge at its threshold: the bias moves one to the other.
        if network.ridge is not None:
            network.start_at(
                network.ridge, baseline.weight, baseline.bias + (0.5 - baseline.threshold)
            )
        if network.detectors is not None and network.starts_at_ridge:
            start_detectors(network, hashed)
            evidence = f"Dice {hashed.dice:.4f} of the hashed grams on the validation records"
            log.decision("detectors", "ridge", "solved in closed form", evidence)
    return {
        "baseline": {
            "name": "ridge regression",
            "metrics": _baselines(labels, sums, baseline, feeds),
        }
    }


def start_detectors(network: BitMLP, hashed: Ridge) -> None:
    assert network.detectors is not None, "this model has no detectors"
    network.start_at(
        network.detectors, _STEEPNESS * hashed.weight, _STEEPNESS * (hashed.bias - hashed.threshold)
    )


@torch.inference_mode()
def choose_ridge_share(
    network: nn.Module,
    answers: Callable[[FlatBatch], Tensor],
    num_labels: int,
    validation: Feed,
    log: RunLog,
) -> None:
    """Give ridge regression the vote with which the validation records are answered best."""
    if not isinstance(network, BitMLP) or network.ridge is None:
        return
    dice_of_share: dict[float, float] = {}
    for share in _SHARES:
        network.ridge_share.fill_(share)
        metrics = GramMetrics(is_alone=True)
        for batch in validation.all_rows():
            metrics.update(answers(batch).sigmoid(), batch.multi_hot(num_labels))
        dice_of_share[share] = metrics.compute()["dice"]
    best = max(_SHARES, key=lambda share: dice_of_share[share])  # the smallest of equals
    network.ridge_share.fill_(best)
    evidence = ", ".join(f"{share:g}: {dice:.4f}" for share, dice in dice_of_share.items())
    log.decision("ridge's vote", best, "best Dice on the validation records", evidence)


def _baselines(labels: GramLabels, sums: GramSums, ridge: Ridge, feeds: Feeds) -> dict[str, float]:
    """Scores of ridge, and of the same commonest grams for every record, on both splits."""
    everybody = torch.zeros(labels.num_outputs)
    everybody[torch.tensor(labels.counts).argsort(descending=True)[:COMMONEST]] = 1.0
    scores: dict[str, float] = {}
    for split, feed in (("val", feeds.validation), ("test", feeds.test)):
        if feed is None:
            continue
        by_ridge = GramMetrics(ridge.threshold, is_alone=True)
        by_all = GramMetrics(0.5, is_alone=True)
        for inputs_ND, grams_NG in sums.blocks(feed):
            targets = grams_NG[:, : labels.num_outputs]
            by_ridge.update(ridge.scores(inputs_ND), targets)
            by_all.update(everybody.to(targets.device).expand(len(targets), -1), targets)
        scores |= {f"{split}/{name}": value for name, value in by_ridge.compute().items()}
        scores[f"{split}/{EVERYBODY}"] = by_all.compute()["dice"]
    return scores


def finished_answers(model: nn.Module, num_outputs: int, batch: FlatBatch) -> Tensor:
    """`[B, C]` logits of the answers, after the vote of ridge where the network has one."""
    logits = model(batch)[:, :num_outputs].float()
    return model.blended(logits, batch) if isinstance(model, BitMLP) else logits

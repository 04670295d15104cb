"""What ridge regression gives a decoder: a baseline, the start of its detectors, and a vote in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.bits.grams import GramIndex
from flatout.bits.info import BitInfo, GramLabels
from flatout.bits.recombine import Recombined, recombined_texts
from flatout.bits.ridge import PENALTIES, Ridge, RidgeSums
from flatout.bits.scores import GramMetrics
from flatout.bits.targets import targets_of
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.models.bit_mlp import BitMLP
from flatout.run_log import RunLog

COMMONEST = 20
EVERYBODY = f"dice of the {COMMONEST} commonest"
"""Name of the trivial baseline: the same grams for every record."""
STEEPNESS = 15.0
"""Logits of a detector for each unit of ridge's score, which is 0 for an absent gram and 1 for a present one."""
_RECOMBINED, _TEXTS_READ = 65_536, 131_072
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def start_at_ridge(network: nn.Module, labels: GramLabels, info: BitInfo, feeds: Feeds, log: RunLog) -> dict[str, Any]:
    """Solve ridge regression and start a network's detectors there; the baseline's figures."""
    num_labels, num_targets = labels.num_outputs, labels.num_targets
    device = feeds.train.device
    sums = RidgeSums(num_inputs=info.num_inputs, is_set=info.is_set, num_grams=num_targets, device=device)
    next(sums.read(feeds.train))
    baseline, hashed = sums.best(feeds.validation, (slice(0, num_labels), slice(num_labels, num_targets)))
    evidence = f"Dice {baseline.dice:.4f} on the validation records, from {baseline.num_records:,} records"
    penalties = ", ".join(f"{penalty:g}" for penalty in PENALTIES)
    log.decision("ridge penalty", baseline.penalty, f"the best of {penalties}", evidence)
    if isinstance(network, BitMLP):
        if network.ridge is not None:
            network.take_ridge(baseline.weight, baseline.bias + (0.5 - baseline.threshold))
        if network.detectors is not None and network.starts_at_ridge:
            network.start_detectors(STEEPNESS * hashed.weight, STEEPNESS * (hashed.bias - hashed.threshold))
            evidence = f"Dice {hashed.dice:.4f} of the hashed grams on the validation records"
            log.decision("detectors", "ridge", "solved in closed form", evidence)
    return {"baseline": {"name": "ridge regression", "metrics": _baselines(labels, sums, baseline, feeds)}}


def recombine_training_texts(labels: GramLabels, info: BitInfo, device: torch.device, seed: int) -> Recombined:
    """Texts of people that do not exist, made of the training records' fields."""
    texts = info.texts("train").slice(0, _TEXTS_READ)
    index = GramIndex(labels.hashed, is_frozen=True)
    ids, lengths = targets_of(recombined_texts(texts, _RECOMBINED, seed), index)
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths, dtype=np.int64)))
    return Recombined(torch.from_numpy(ids).to(device), offsets.to(device), labels.num_targets)


def choose_ridge_share(
    network: nn.Module, answers: Callable[[FlatBatch], Tensor], num_labels: int, validation: Feed, log: RunLog
) -> None:
    """How large a vote ridge regression gets, by the validation records."""
    if not isinstance(network, BitMLP) or network.ridge is None:
        return
    found: dict[float, float] = {}
    for share in _SHARES:
        network.ridge_share.fill_(share)
        found[share] = _dice_of(answers, num_labels, validation)
    best = max(_SHARES, key=lambda share: found[share])  # the smallest of equals
    network.ridge_share.fill_(best)
    evidence = ", ".join(f"{share:g}: {dice:.4f}" for share, dice in found.items())
    log.decision("ridge's vote", best, "best Dice on the validation records", evidence)


@torch.inference_mode()
def _dice_of(answers: Callable[[FlatBatch], Tensor], num_labels: int, validation: Feed) -> float:
    metrics = GramMetrics(is_alone=True)
    for batch in validation.afresh():
        metrics.update(answers(batch).sigmoid(), batch.multi_hot(num_labels))
    return metrics.compute()["dice"]


def _baselines(labels: GramLabels, sums: RidgeSums, ridge: Ridge, feeds: Feeds) -> dict[str, float]:
    """Ridge and the commonest grams for everybody, on the validation and the test records."""
    commonest = torch.tensor(labels.counts).argsort(descending=True)[:COMMONEST]
    everybody = torch.zeros(labels.num_outputs)
    everybody[commonest] = 1.0
    found: dict[str, float] = {}
    for split, feed in (("val", feeds.validation), ("test", feeds.test)):
        if feed is None:
            continue
        by_ridge, by_all = GramMetrics(ridge.threshold, is_alone=True), GramMetrics(0.5, is_alone=True)
        for inputs_ND, grams_NG in sums.blocks(feed):
            targets = grams_NG[:, : labels.num_outputs]
            by_ridge.update(ridge.scores(inputs_ND), targets)
            by_all.update(everybody.to(targets.device).expand(len(targets), -1), targets)
        found |= {f"{split}/{name}": value for name, value in by_ridge.compute().items()}
        found[f"{split}/{EVERYBODY}"] = by_all.compute()["dice"]
    return found

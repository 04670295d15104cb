"""Score each layer of an encoder by a linear head on its states: a cheap look at where to freeze.

One pass over some rows gives the states after every layer. For each layer a logistic regression
learns the classes from each row's first token and the mean over its tokens, and is judged on
validation rows. The score shows what a layer already knows of the classes, not what training the
layers above would reach. Freezing less than the first good layer computes more than needed;
freezing more leaves fewer layers that can learn.

Shapes: T tokens, B rows of a batch, N rows, H numbers a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.baselines.softmax import classify
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.store import StoreSplit
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.network import Transformer, means_of_rows

_PASS_ROWS = 64  # rows that go through the network at once
_MOST_BYTES = 1 << 29  # of states that are held at once; reading stops where they take more


@dataclass(frozen=True, slots=True)
class LayerScore:
    """How well rows are classified from the states after some layers."""

    layers: int  # 0: the embeddings
    accuracy: float  # on validation rows
    error: float  # standard error of the accuracy

    @classmethod
    def of(cls, layers: int, is_right: Tensor) -> LayerScore:
        """The score from `[N]` whether each answer is right."""
        accuracy = float(is_right.float().mean())
        error = (accuracy * (1 - accuracy) / len(is_right)) ** 0.5
        return cls(layers, accuracy, error)


def score_layers(
    network: Transformer,
    splits: Sequence[StoreSplit],
    most: Sequence[int],
    device: torch.device,
    precision: Precision,
) -> list[LayerScore]:
    """A score for the embeddings and for each layer.

    `splits` are the one to learn from and the one to judge by, of which at most `most` rows are
    read.
    """
    network.to(device).is_narrow = False  # the means of the last layer want all of its tokens
    train_split, judged_split = splits
    most_train, most_judged = most
    vectors, classes = _read_vectors(network, train_split, most_train, device, precision)
    judged, judged_classes = _read_vectors(network, judged_split, most_judged, device, precision)
    scores = list[LayerScore]()
    for layers, (own_vectors, own_judged) in enumerate(zip(vectors, judged, strict=True)):
        answers = classify(own_vectors, classes, own_judged)
        scores.append(LayerScore.of(layers, answers == judged_classes))
    return scores


def choose_cut(scores: Sequence[LayerScore]) -> LayerScore:
    """The first layer whose accuracy is within a standard error of the best layer's.

    At least one layer stays below the cut, and one above it to train. Accuracies 0.3 (embeddings),
    0.70, 0.80, 0.81, 0.79 with an error of 0.02: the cut is after layer 2.
    """
    best = max(scores[1:], key=lambda score: score.accuracy)
    least_accuracy = best.accuracy - best.error
    first_good = next(score for score in scores[1:] if score.accuracy >= least_accuracy)
    return scores[max(1, min(first_good.layers, len(scores) - 2))]


def _read_vectors(
    network: Transformer, split: StoreSplit, most: int, device: torch.device, precision: Precision
) -> tuple[list[Tensor], Tensor]:
    """`[N, 2 H]` vectors after each layer for rows drawn at random, and their classes.

    One pass through the network gives those of all layers.
    """
    feed = Feed(split, PlanSettings(rows_per_batch=_PASS_ROWS), device=device)
    num_layers = len(network.in_order())
    classes = list[Tensor]()
    vectors: list[list[Tensor]] = [[] for _ in range(num_layers + 1)]
    num_rows = 0
    num_bytes = 0
    network.eval()
    for batch in feed:
        outputs: list[Tensor] = []
        with torch.no_grad(), arithmetic(precision, feed.device):
            network.run_layers(batch, stop=num_layers, outputs=outputs)
            for of_layer, states_TH in zip(vectors, outputs, strict=True):
                of_layer.append(_vectors_of_rows(states_TH, batch).cpu())
                num_bytes += of_layer[-1].nbytes
        if batch.targets is not None:
            classes.append(batch.targets)
        num_rows += batch.num_real
        if batch.ends_step and (num_rows >= most or num_bytes >= _MOST_BYTES):
            break
    return [torch.cat(of_layer) for of_layer in vectors], torch.cat(classes).cpu()


def _vectors_of_rows(states_TH: Tensor, batch: FlatBatch) -> Tensor:
    """`[B, 2 H]` each row's first token beside the mean over its tokens."""
    first_BH = states_TH.index_select(0, batch.offsets[:-1])
    means_BH = means_of_rows(states_TH, batch.offsets[1:] - batch.offsets[:-1])
    return torch.cat((first_BH, means_BH), 1).float()

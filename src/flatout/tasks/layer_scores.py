"""How much a linear head reads off each layer of an encoder, in one pass over some rows: a cheap look at where to cut.

A head reads a row's first token and the mean over its tokens. It says what a layer already knows of the classes, not
what training the layers above would reach. A cut below the first good layer loses what that layer adds to train again;
one above it leaves fewer layers that can learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.store import StoreSplit
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.network import Transformer, means_of_rows

_SHRINKAGE = 1e-2
"""Of a head's weights: a layer has as many numbers as a small table has rows."""
_PASS_ROWS = 64
_MOST_BYTES = 1 << 29
"""Of states that are held at once; fewer rows are read where they would take more."""

Read = list[tuple[FlatBatch, list[Tensor]]]
"""Batches, and states of some layers for each."""


@dataclass(frozen=True, slots=True)
class LayerScore:
    """Accuracy on the validation rows after so many layers, its standard error, and what training took."""

    layers: int
    accuracy: float
    error: float
    seconds: float = 0.0

    @classmethod
    def of(cls, layers: int, is_right: Tensor, seconds: float = 0.0) -> LayerScore:
        """Of answers that are right or wrong."""
        share = float(is_right.float().mean())
        return cls(layers, share, (share * (1 - share) / len(is_right)) ** 0.5, seconds)


def score_layers(
    network: Transformer, splits: Sequence[StoreSplit], most: Sequence[int], device: torch.device, precision: Precision
) -> list[LayerScore]:
    """A score for the embeddings and each layer; `splits` to learn and to judge by, of which `most` rows are read."""
    network.to(device).is_narrow = False  # the means of the last layer want all of its tokens
    found = [_vectors(network, split, rows, device, precision) for split, rows in zip(splits, most, strict=True)]
    (vectors, targets), (others, wanted) = found
    both = enumerate(zip(vectors, others, strict=True))
    return [LayerScore.of(n, _answers(own, targets, other) == wanted) for n, (own, other) in both]


def choose_cut(scores: Sequence[LayerScore]) -> LayerScore:
    """The first layer that is within a standard error of the best; one layer at least is left to train."""
    best = max(scores[1:], key=lambda each: each.accuracy)
    near = next(each for each in scores[1:] if each.accuracy >= best.accuracy - best.error)
    return scores[max(1, min(near.layers, len(scores) - 2))]


def read_layers(
    network: Transformer,
    feed: Feed,
    most: int,
    *,
    layers: Sequence[int],
    precision: Precision,
    reduce: Callable[[Tensor, FlatBatch], Tensor] = lambda states, batch: states,
) -> Read:
    """A feed's batches up to so many rows, with what is kept of the states after some layers, from one pass."""
    read: Read = []
    rows = size = 0
    network.eval()
    for batch in feed:
        states: list[Tensor] = []
        with torch.no_grad(), arithmetic(precision, feed.device):
            network.run_layers(batch, stop=layers[-1], outputs=states)
            read.append((batch, [reduce(states[each], batch).cpu() for each in layers]))
        rows, size = rows + batch.num_real, size + sum(each.nbytes for each in read[-1][1])
        if batch.ends_step and (rows >= most or size >= _MOST_BYTES):
            break
    return read


def _vectors(
    network: Transformer, split: StoreSplit, most: int, device: torch.device, precision: Precision
) -> tuple[list[Tensor], Tensor]:
    """`[N, 2 H]` of each layer for rows drawn at random, and their classes, on the host."""
    feed = Feed(split, PlanSettings(rows_per_batch=_PASS_ROWS), device=device)
    layers = range(len(network.in_order()) + 1)
    read = read_layers(network, feed, most, layers=layers, precision=precision, reduce=_of_rows)
    targets = torch.cat([batch.targets for batch, _ in read if batch.targets is not None])
    return [torch.cat(each) for each in zip(*(states for _, states in read), strict=True)], targets.cpu()


def _of_rows(states_TH: Tensor, batch: FlatBatch) -> Tensor:
    """First tokens beside means."""
    means_BH = means_of_rows(states_TH, batch.offsets[1:] - batch.offsets[:-1])
    return torch.cat((states_TH.index_select(0, batch.offsets[:-1]), means_BH), 1).float()


def _answers(vectors: Tensor, targets: Tensor, others: Tensor) -> Tensor:
    """The classes that a logistic regression, learnt from the first rows, gives to others."""
    mean, spread = vectors.mean(0), vectors.std(0).clamp_min(1e-6)
    known, asked = (vectors - mean) / spread, (others - mean) / spread
    weights = torch.zeros(known.shape[1], int(targets.max()) + 1, requires_grad=True)
    bias = torch.zeros(weights.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weights, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = functional.cross_entropy(known @ weights + bias, targets) + _SHRINKAGE / 2 * weights.square().sum()
        found.backward()
        return found

    solver.step(loss)
    with torch.no_grad():
        return (asked @ weights + bias).argmax(1)

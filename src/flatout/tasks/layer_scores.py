"""How much a linear head reads off each layer of an encoder, in one pass over some rows: a cheap look at where to cut.

A head reads a row's first token and the mean over its tokens. It says what a layer already knows of the classes, not
what training the layers above would reach. A cut below the first good layer loses what that layer adds to train again;
one above it leaves fewer layers that can learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.store import StoreSplit
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.network import Transformer, means_of_rows

_SHRINKAGE = 1e-2
"""Of a head's weights: a layer has as many numbers as a small table has rows."""
_PASS_ROWS = 64


@dataclass(frozen=True, slots=True)
class LayerScore:
    """Accuracy of a head on the validation rows after so many layers, and its standard error."""

    layers: int
    accuracy: float
    error: float


def score_layers(
    network: Transformer, splits: Sequence[StoreSplit], most: Sequence[int], device: torch.device, precision: Precision
) -> list[LayerScore]:
    """A score for the embeddings and each layer; `splits` to learn and to judge by, of which `most` rows are read."""
    found = [_read(network, split, rows, device, precision) for split, rows in zip(splits, most, strict=True)]
    (vectors, targets), (others, wanted) = found
    both = zip(vectors, others, strict=True)
    shares = [float((_answers(own, targets, other) == wanted).float().mean()) for own, other in both]
    return [LayerScore(n, share, (share * (1 - share) / len(wanted)) ** 0.5) for n, share in enumerate(shares)]


def choose_cut(scores: Sequence[LayerScore]) -> LayerScore:
    """The first layer that is within a standard error of the best; one layer at least is left to train."""
    best = max(scores[1:], key=lambda each: each.accuracy)
    near = next(each for each in scores[1:] if each.accuracy >= best.accuracy - best.error)
    return scores[max(1, min(near.layers, len(scores) - 2))]


def _read(
    network: Transformer, split: StoreSplit, most: int, device: torch.device, precision: Precision
) -> tuple[list[Tensor], Tensor]:
    """`[N, 2 H]` of each layer for rows drawn at random, and their classes, on the host."""
    count = len(network.in_order())
    of_layers: list[list[Tensor]] = [[] for _ in range(count + 1)]
    targets: list[Tensor] = []
    network.eval().to(device).is_narrow = False  # the means of the last layer want all of its tokens
    for batch in Feed(split, PlanSettings(rows_per_batch=_PASS_ROWS), device=device):
        with torch.no_grad(), arithmetic(precision, device):
            states = network.run_layers(batch, stop=0)
            of_layers[0].append(_of_rows(states, batch.offsets))
            for first, last in pairwise(range(count + 1)):
                batch.states = states
                states = network.run_layers(batch, first=first, stop=last)
                of_layers[last].append(_of_rows(states, batch.offsets))
        assert batch.targets is not None
        targets.append(batch.targets.cpu())
        if sum(map(len, targets)) >= most:
            break
    return [torch.cat(each) for each in of_layers], torch.cat(targets)


def _of_rows(states_TH: Tensor, offsets: Tensor) -> Tensor:
    """First tokens beside means."""
    means_BH = means_of_rows(states_TH, offsets[1:] - offsets[:-1])
    return torch.cat((states_TH.index_select(0, offsets[:-1]), means_BH), 1).float().cpu()


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

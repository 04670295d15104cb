"""The layers of an encoder over some rows: what frozen ones put out, and how much a linear head
reads off each.

Outputs of frozen layers are computed once over the rows of a store, and read by each epoch from
then on. They are a store in the cache, beside that of the texts: a ragged column of `tokens *
hidden` numbers a row, or a fixed one where only first tokens are read above the cut. Rows are
computed a block at a time, by length and without padding, and written in their order; so memory
holds one block. Nothing is dropped below the cut. Scores are a cheap look at where to cut, in one
pass over some rows. A head reads a row's first token and the mean over its tokens. It says what a
layer already knows of the classes, not what training the layers above would reach. A cut below the
first good layer loses what that layer adds to train again; one above it leaves fewer layers that
can learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.feed import Feed, choose_feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, column_on
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.data.store.progress import Progress
from flatout.data.store.store import Array, Column, Ragged, Store, StoreSplit, StoreWriter
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.network import Transformer, means_of_rows

STATES = "states"
_BLOCK_TOKENS = 1 << 13
_PASS_TOKENS = 1 << 12
_SHRINKAGE = 1e-2  # of a head's weights: a layer has as many numbers as a small table has rows
_PASS_ROWS = 64
# of states that are held at once; fewer rows are read where they would take more
_MOST_BYTES = 1 << 29
Read = list[tuple[FlatBatch, list[Tensor]]]  # batches, and states of some layers for each


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """The first layers of an encoder, and the arithmetic that they are computed with."""

    network: Transformer
    layers: int
    device: torch.device
    precision: Precision
    kind: torch.dtype | None  # the number format that is kept; None: the layer's own

    @property
    def are_first(self) -> bool:
        """Whether only first tokens are read above the cut."""
        return self.network.is_narrow and self.layers == len(self.network.in_order())

    def blocks(self, split: StoreSplit) -> Iterator[tuple[NDArray[np.integer], Tensor]]:
        """Lengths and outputs of one run of rows after the other."""
        tokens = split.ragged(TOKENS)
        ends = tokens.offsets[1:]
        cuts = np.searchsorted(
            ends, np.arange(_BLOCK_TOKENS, ends[-1] if len(ends) else 0, _BLOCK_TOKENS)
        )
        for start, stop in itertools.pairwise(np.unique([0, *cuts, split.num_rows]).tolist()):
            yield tokens.lengths[start:stop], self.outputs(rows_between(split, start, stop))

    def outputs(self, rows: StoreSplit) -> Tensor:
        """Outputs of some rows on the host, in their order: `[T, H]`, or `[B, H]` of
        first tokens.
        """
        lengths = rows.lengths(TOKENS).astype(np.int64)
        plan = PlanSettings(tokens_per_batch=max(_PASS_TOKENS, int(lengths.max())), shuffle=False)
        begins_B = torch.from_numpy(np.cumsum(lengths) - lengths)
        found: Tensor | None = None
        was_training = self.network.training
        self.network.eval()
        for batch in Feed(rows, plan, device=self.device):
            with torch.no_grad(), arithmetic(self.precision, self.device):
                states = self.network.run_layers(batch, stop=self.layers).cpu()
            states = states if self.kind is None else states.to(self.kind)
            if found is None:
                found = states.new_empty(
                    len(lengths) if self.are_first else int(lengths.sum()), states.shape[1]
                )
            found[batch.rows if self.are_first else _places(batch, begins_B)] = states
        self.network.train(was_training)
        assert found is not None
        return found

    def write(self, writer: StoreWriter, splits: Sequence[StoreSplit]) -> None:
        writer.expected_rows = sum(split.num_rows for split in splits)
        with Progress() as progress:
            for split in (split for split in splits if split.num_rows):
                done = progress.task(f"{split.name}: {self.layers} layers", split.num_rows)
                part = None
                for lengths, states in self.blocks(split):
                    width = states.shape[1]
                    is_known = states.dtype is torch.float32
                    values = (
                        states.numpy()
                        if is_known
                        else states.view(torch.int16).numpy().view(np.uint16)
                    )
                    if part is None:
                        column = Column(
                            values.dtype.name, not self.are_first, width if self.are_first else 0
                        )
                        part = writer.split(split.name, {STATES: column})
                        writer.facts |= {
                            "width": width,
                            "format": str(states.dtype).removeprefix("torch."),
                        }
                    part.append(
                        states=values if self.are_first else (values.reshape(-1), lengths * width)
                    )
                    done(len(lengths))


class StoredStates:
    """Adds to each batch of a split what frozen layers answer to its rows, while the network reads
    that.

    A feed's `complete`: it reads memory of the device, which a worker process has no access to.
    """

    def __init__(
        self, store: Store, split: str, network: Transformer, device: torch.device
    ) -> None:
        self.network, self.device = network, device
        self.width = int(store.facts["width"])
        self.kind = getattr(torch, store.facts["format"])
        stored = store.splits[split]
        kind = choose_feed(FeedKind.auto, stored.num_bytes, device).value
        column = _shaped(stored.columns[STATES], self.width)
        self.column = column_on(
            column, device if kind is FeedKind.resident else torch.device("cpu")
        )

    def __call__(self, batch: FlatBatch) -> FlatBatch:
        if self.network.stored_layers:
            values, _ = self.column.gather(batch.rows.numpy(), batch.lengths.numpy())
            states = values.view(-1, self.width).view(self.kind)
            if states.device.type == "cpu" and self.device.type == "cuda":
                states = states.pin_memory()
            batch.states = states.to(self.device, non_blocking=True)
        return batch


def rows_between(split: StoreSplit, start: int, stop: int) -> StoreSplit:
    """The texts of some rows that follow each other, as a split of their own."""
    tokens = split.ragged(TOKENS)
    offsets = tokens.offsets[start : stop + 1]
    own = Ragged(
        tokens.values[offsets[0] : offsets[-1]], offsets - offsets[0], tokens.lengths[start:stop]
    )
    return StoreSplit(split.name, stop - start, {TOKENS: own})


def _places(batch: FlatBatch, begins_B: Tensor) -> Tensor:
    """Where each token of a batch stands when rows come in their order."""
    shift_B = begins_B[batch.rows] - batch.lengths.cumsum(0) + batch.lengths
    return torch.repeat_interleave(shift_B, batch.lengths) + torch.arange(batch.num_tokens)


def _shaped(column: Array | Ragged, width: int) -> Array | Ragged:
    """A column of `[T, H]` numbers; torch knows few operations on uint16, so bits are held as
    int16.
    """
    values = column.values if isinstance(column, Ragged) else column
    values = values.view(np.int16) if values.dtype == np.uint16 else values
    if not isinstance(column, Ragged):
        return values
    return Ragged(values.reshape(-1, width), column.offsets // width, column.lengths // width)


@dataclass(frozen=True, slots=True)
class LayerScore:
    """Accuracy on the validation rows after so many layers, its standard error, and what training
    took.
    """

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
    network: Transformer,
    splits: Sequence[StoreSplit],
    most: Sequence[int],
    device: torch.device,
    precision: Precision,
) -> list[LayerScore]:
    """A score for the embeddings and each layer; `splits` to learn and to judge by, of which `most`
    rows are read.
    """
    network.to(device).is_narrow = False  # the means of the last layer want all of its tokens
    found = [
        _vectors(network, split, rows, device, precision)
        for split, rows in zip(splits, most, strict=True)
    ]
    (vectors, targets), (others, wanted) = found
    both = enumerate(zip(vectors, others, strict=True))
    return [LayerScore.of(n, _answers(own, targets, other) == wanted) for n, (own, other) in both]


def choose_cut(scores: Sequence[LayerScore]) -> LayerScore:
    """The first layer that is within a standard error of the best; one layer at least is left to
    train.
    """
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
    """A feed's batches up to so many rows, with what is kept of the states after some layers, from
    one pass.
    """
    read: Read = []
    rows = 0
    size = 0
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
    return [
        torch.cat(each) for each in zip(*(states for _, states in read), strict=True)
    ], targets.cpu()


def _of_rows(states_TH: Tensor, batch: FlatBatch) -> Tensor:
    """First tokens beside means."""
    means_BH = means_of_rows(states_TH, batch.offsets[1:] - batch.offsets[:-1])
    return torch.cat((states_TH.index_select(0, batch.offsets[:-1]), means_BH), 1).float()


def _answers(vectors: Tensor, targets: Tensor, others: Tensor) -> Tensor:
    """The classes that a logistic regression, learnt from the first rows, gives to others."""
    mean = vectors.mean(0)
    spread = vectors.std(0).clamp_min(1e-6)
    known, asked = (vectors - mean) / spread, (others - mean) / spread
    weights = torch.zeros(known.shape[1], int(targets.max()) + 1, requires_grad=True)
    bias = torch.zeros(weights.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weights, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = (
            F.cross_entropy(known @ weights + bias, targets)
            + _SHRINKAGE / 2 * weights.square().sum()
        )
        found.backward()
        return found

    solver.step(loss)
    with torch.no_grad():
        return (asked @ weights + bias).argmax(1)

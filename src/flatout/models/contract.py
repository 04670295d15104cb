"""What flatout asks of a network beyond `forward(batch)`, with what it takes for granted where a
network says nothing.

A network of ours is a `Network`. One of your own is any `nn.Module`: name what differs from the
defaults below, by the same names, and leave out the rest. `contract(network)` is how everybody else
asks. For MFU, a network lists the products of matrices of one forward pass, in the order in which
they come. Backwards each costs the gradient of its weight, where that is trained, and of its input,
where anything before it is trained. In all that is three times the forward pass for a model that is
trained whole, less for one with frozen layers. Only products count: no look-ups, norms or
activations, and nothing beyond a row's end. Work repeated to save memory does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.models.recurrent import CarriedState, State

Lengths = NDArray[np.integer]  # [B] real tokens of each row


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices, or several that read the same numbers."""

    flops: float  # operations forwards: two for each number and weight that meet
    trained: float = 0.0  # those of them whose weight is trained
    # whether anything here is trained, so that gradients flow through all that comes after
    is_trained: bool = False
    # whether both sides were computed before, as in attention: then both want a gradient
    is_between: bool = False

    def __add__(self, other: Product) -> Product:
        """Both at once, on the same input."""
        assert self.is_between == other.is_between
        trains = self.is_trained or other.is_trained
        return Product(
            self.flops + other.flops, self.trained + other.trained, trains, self.is_between
        )


def through(count: float, *weights: Tensor) -> Product:
    """`count` vectors through each of these weights: of linear layers, recurrent ones, or filters
    at each window.
    """
    flops = [2.0 * count * weight.numel() for weight in weights]
    trained = [each for each, weight in zip(flops, weights, strict=True) if weight.requires_grad]
    return Product(sum(flops), sum(trained), bool(trained))


def look_up(table: Tensor) -> Product:
    """Rows of a table: no product, but gradients begin here where the table is trained."""
    return Product(0.0, is_trained=table.requires_grad)


class Network:
    """The defaults.

    What a network reads, its layers, what it computes, and, on recordings, its state.
    """

    # how it reads a batch: `flat`, or `padded`, where rows of like length stand together
    layout: str = "flat"
    # epochs in which frozen weights join the training; the optimizer has them at once
    unfreeze_epochs: float = 0.0
    vectors_found: float | None = None  # share of the vocabulary that a file of word vectors held
    # on chunks of recordings: hidden states from one training batch to the next
    carried: CarriedState | None = None
    # the same of validation and test, which come in between
    carried_of_others: CarriedState | None = None
    # whether it reads a recording from its end too: no device can call it sample by sample
    is_both: bool = False

    def blocks(self) -> Sequence[nn.Module]:
        """Its layers from bottom to top: FSDP gathers one at a time, and Muon steps the matrices in
        them.
        """
        return ()

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight, for `optim.layer_decay`; empty: there are none
        that could decay.
        """
        return {}

    def thaw(self, epochs: float) -> bool:
        """Let weights that were frozen train, after so many epochs; whether any has joined just
        now.
        """
        return False

    def residual_of(self) -> Any:
        """The layer that takes the solution of ridge regression before training, where the network
        adds to one.
        """
        return None

    def computed_tokens(self, batch: FlatBatch) -> int:
        """Tokens computed for a batch, padding included."""
        return batch.longest() * batch.num_rows if self.layout == "padded" else batch.num_tokens

    def products(self, lengths: Lengths) -> list[Product]:
        """The products of matrices of a forward pass on rows of these lengths; empty: they are not
        counted.
        """
        return []

    def training_flops(self, lengths: Lengths) -> float | None:
        """Operations of a training step, forwards and backwards, for MFU; None where they are not
        counted.
        """
        total = 0.0
        flows = False
        for product in self.products(lengths):
            total += product.flops + product.trained
            if flows:  # something before it is trained, so its input wants a gradient too
                total += 2 * product.flops if product.is_between else product.flops
            flows = flows or product.is_trained
        return total or None

    def make_state(self, rows: int, device: torch.device | str = "cpu") -> State | None:
        """The state before a recording; None: it keeps none, and reads recordings whole."""
        return None

    def run(self, inputs_BLF: Tensor, before: State) -> tuple[Tensor, State]:
        """`[B, L, K]` answers to samples that follow a state, and the state after them."""
        from flatout.errors import UserError

        raise UserError(
            "model",
            "has make_state(), and no run() that takes its state",
            hint="Define run(inputs, state), or leave make_state out.",
        )


def contract(network: object) -> Network:
    """A network as all can ask it: itself, or its own answers beside the defaults."""
    if isinstance(network, Network):
        return network
    found = Network()
    for name in (each for each in vars(Network) if not each.startswith("_")):
        own, usual = getattr(network, name, None), getattr(Network, name)
        if (
            callable(own) and not isinstance(own, nn.Module)
            if inspect.isfunction(usual)
            else own is not None
        ):
            setattr(found, name, own)
    return found


def recommended_lr(config: object) -> float | None:
    """The rate that the Config of a model recommends where no setting names one; None: the
    optimizer's own.
    """
    return getattr(config, "recommended_lr", None)


def recommended_clip(config: object) -> float:
    """The longest gradient that it recommends; 0: gradients are not clipped."""
    return float(getattr(config, "recommended_clip", 0.0))

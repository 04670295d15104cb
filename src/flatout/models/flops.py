"""How many operations a training step takes, counted from a model's own shape and its rows' real lengths.

A model lists the products of matrices of one forward pass, in the order in which they come. Backwards each costs the
gradient of its weight, where that is trained, and of its input, where anything before it is trained. In all that is
three times the forward pass for a model that is trained whole, less for one with frozen layers.

Only products count: no look-ups, norms or activations, and nothing beyond a row's end. Work repeated to save memory
does not count, nor do rows that a loss makes up. This is what MFU divides by what the device could have done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Lengths = NDArray[np.integer]
"""[B] real tokens of each row."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices, or several that read the same numbers."""

    flops: float
    """Operations forwards: two for each number and weight that meet."""
    trained: float = 0.0
    """Those of them whose weight is trained."""
    is_trained: bool = False
    """Whether anything here is trained, so that gradients flow through all that comes after."""
    is_between: bool = False
    """Whether both sides were computed before, as in attention: then both want a gradient."""

    def __add__(self, other: Product) -> Product:
        """Both at once, on the same input."""
        assert self.is_between == other.is_between
        flops, trained = self.flops + other.flops, self.trained + other.trained
        return Product(flops, trained, self.is_trained or other.is_trained, self.is_between)


def through(count: float, *weights: Tensor) -> Product:
    """`count` vectors through each of these weights: of linear layers, recurrent ones, or filters at each window."""
    flops = [2.0 * count * weight.numel() for weight in weights]
    trained = [each for each, weight in zip(flops, weights, strict=True) if weight.requires_grad]
    return Product(sum(flops), sum(trained), bool(trained))


def look_up(table: Tensor) -> Product:
    """Rows of a table: no product, but gradients begin here where the table is trained."""
    return Product(0.0, is_trained=table.requires_grad)


def between(flops: float) -> Product:
    """A product of what was computed before with what was computed before."""
    return Product(float(flops), is_between=True)

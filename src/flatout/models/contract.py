"""What flatout asks of a network beyond `forward(batch)`, and what it assumes where a network says
nothing.

Networks of flatout are subclasses of `Network`. Your own network may be any `nn.Module`: define
what differs from the defaults below, under the same names, and leave out the rest.
`contract(network)` gives both kinds the same interface, and all callers use it. Open this file to
see what you can define, or to ask something new of all networks.

For MFU a network lists the matrix products of one forward pass, in the order in which they are
computed. In the backward pass each product costs as much again for the gradient of its weight,
where that is trained. It costs as much once more for the gradient of its input, where anything
before it is trained. In all that is three times the forward pass for a model that is trained whole,
and less with frozen layers. Only products count: no look-ups, norms, activations or padding, and no
work that is repeated to save memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.models.carried_state import CarriedState
    from flatout.models.recurrent import State
    from flatout.models.series import WindowRidge

Answer = TypeVar("Answer")
Lengths = NDArray[np.integer]  # [B] real tokens of each row


class ModelConfig(Protocol):
    """The settings of a network, which build it: a dataclass, of flatout's or of your own."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, *args: Any, **sizes: Any) -> nn.Module:
        """A new network; `sizes` are what only the data says, such as the number of classes."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or several that read the same input."""

    flops: float  # operations of the forward pass: two for each weight and vector that meet
    trained: float = 0.0  # those of them whose weight is trained
    # whether anything here is trained, so that gradients flow through all that comes after
    is_trained: bool = False
    # whether both sides were computed before, as in attention: then both want a gradient
    is_between: bool = False

    def __add__(self, other: Product) -> Product:
        """Both products at once, on the same input."""
        assert self.is_between == other.is_between
        return Product(
            flops=self.flops + other.flops,
            trained=self.trained + other.trained,
            is_trained=self.is_trained or other.is_trained,
            is_between=self.is_between,
        )


def through(count: float, *weights: Tensor) -> Product:
    """The product of `count` vectors with each of these weights.

    They may be weights of linear layers, of recurrent ones, or filters (then `count` is the number
    of windows).
    """
    flops = 0.0
    trained = 0.0
    is_trained = False
    for weight in weights:
        operations = 2.0 * count * weight.numel()
        flops += operations
        if weight.requires_grad:
            trained += operations
            is_trained = True
    return Product(flops, trained, is_trained)


def look_up(table: Tensor) -> Product:
    """Rows of an embedding: no operations, but gradients begin here where the table is trained."""
    return Product(0.0, is_trained=table.requires_grad)


class Network:
    """What flatout reads and calls on a network, with the defaults."""

    # How it reads a batch: `flat`, or `padded`, where rows of like length are batched together.
    layout: str = "flat"
    # Epochs over which frozen weights join the training; the optimizer holds them from the start.
    unfreeze_epochs: float = 0.0
    # Tokens of the windows that a row holds, one after the other; 0: a row is read at once.
    window: int = 0
    # Fraction of the vocabulary that a file of word vectors held; None: no file was read.
    vectors_found: float | None = None
    # For chunks of recordings: hidden states from one training batch to the next.
    carried: CarriedState | None = None
    # The same for validation and test batches, which come between training batches.
    carried_of_others: CarriedState | None = None
    # Whether it reads a recording from its end too. Then it cannot answer sample by sample.
    is_both: bool = False

    def decides_on_host(self) -> str:
        """What the host decides in each forward pass, so that a captured step would repeat it.

        Empty: nothing beyond shapes. Then whole training steps may be captured on a GPU. A network
        of your own says so by defining this; else its steps are not captured.
        """
        return ""

    def blocks(self) -> Sequence[nn.Module]:
        """The layers from bottom to top.

        FSDP gathers the weights of one at a time, and Muon steps the matrices in them.
        """
        return ()

    def depths(self) -> dict[str, int]:
        """For each weight's name how many layers lie above it, for `optim.layer_decay`.

        A BERT of two layers gives 0 for its head, 1 for layer 1, 2 for layer 0, and 3 for the
        embeddings. Empty: the network has no layers, and the setting is refused.
        """
        return {}

    def thaw(self, epochs: float) -> bool:
        """Let frozen weights train whose turn has come after `epochs` epochs (a fraction counts).

        Returns whether any weight has joined the training in this call.
        """
        return False

    def residual_of(self) -> WindowRidge | None:
        """The layer in the network that gets the solution of ridge regression before training.

        None: the network does not add its answers to those of a ridge regression.
        """
        return None

    def computed_tokens(self, batch: FlatBatch) -> int:
        """How many tokens are computed for a batch, padding included."""
        if self.layout == "padded":
            return batch.longest() * batch.num_rows
        return batch.num_tokens

    def products(self, lengths: Lengths) -> list[Product]:
        """The matrix products of a forward pass on rows of these lengths.

        Empty: they are not counted for this network, so MFU is not shown.
        """
        return []

    def training_flops(self, lengths: Lengths) -> float | None:
        """Operations of a training step, forwards and backwards, for MFU; None: not counted."""
        total = 0.0
        is_trained_below = False
        for product in self.products(lengths):
            total += product.flops + product.trained
            if is_trained_below:  # its input wants a gradient too; in attention both inputs do
                total += 2 * product.flops if product.is_between else product.flops
            is_trained_below = is_trained_below or product.is_trained
        return total or None

    def make_state(self, rows: int, device: torch.device | str = "cpu") -> State | None:
        """The state before the first sample of `rows` recordings.

        None: the network keeps no state, and reads recordings whole.
        """
        return None

    def run(self, inputs_BLF: Tensor, before: State) -> tuple[Tensor, State]:
        """`[B, L, K]` answers to samples that follow the state `before`, and the state after them.

        Called only where `make_state` gives a state.
        """
        from flatout.errors import UserError

        raise UserError(
            "model",
            "has make_state(), and no run() that takes its state",
            hint="Define run(inputs, state), or leave make_state out.",
        )


def contract(network: object) -> Network:
    """The interface of any network: itself, or the defaults with what it defines in their place."""
    if isinstance(network, Network):
        return network
    answers = Network()
    for name, default in vars(Network).items():
        if name.startswith("_"):
            continue
        attribute = getattr(network, name, None)
        if attribute is None:
            continue
        # A module of the network may have a name like `blocks`, and modules are callable too: it
        # does not answer the question.
        is_method = callable(attribute) and not isinstance(attribute, nn.Module)
        if is_method or not inspect.isfunction(default):
            setattr(answers, name, attribute)
    return answers


def recommended_lr(config: object) -> float | None:
    """The learning rate that a model's Config recommends where `optim.lr` is not set.

    None: it leaves the choice to the optimizer.
    """
    return _answer_of(config, "recommended_lr", None)


def is_pretrained(config: object) -> bool:
    """Whether a model's Config begins with the weights of a model that exists."""
    return _answer_of(config, "pretrained", None) is not None


def recommended_clip(config: object) -> float:
    """The largest gradient norm that a model's Config recommends; 0: gradients are not clipped."""
    return float(_answer_of(config, "recommended_clip", 0.0))


def asks_for_ngrams(config: object) -> str:
    """Whether a linear model on n-grams is to answer with a model: `auto`, `on` or `off`."""
    return str(_answer_of(config, "ngrams", "off"))


def _answer_of(config: object, name: str, default: Answer) -> Answer:
    """What a Config defines under a name; `default` if it does not, as your own Config may."""
    return getattr(config, name, default)

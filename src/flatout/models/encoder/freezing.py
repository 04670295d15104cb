"""Freeze the first layers of an encoder, thaw them as epochs pass, and store what they put out.

A frozen weight has `requires_grad` False. `freeze` sets it from the embeddings upwards.
`thaw_over` and `thaw` set it back, the last layer first (`model.unfreeze_epochs`). Where batches
bring the outputs of frozen layers from a store (`model.reuse`), `keep_layers_still` switches off
the dropout of these layers. `frozen_digest` names their weights, so that a store of other weights
is refused.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Self

import xxhash
from torch import nn

from flatout.errors import require
from flatout.models.encoder.layered import LayeredEncoder

# settings of the library's configuration that change nothing below the head
_SETTINGS_OF_THE_HEAD = (
    "_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
    "num_labels",
    "transformers_version",
)


class FreezableEncoder(LayeredEncoder):
    """An encoder whose first layers can be frozen and thawed."""

    # number of first layers that are frozen and whose outputs a batch may bring as its `states`
    stored_layers = 0
    # names of the weights that are still frozen, a list for each layer; the next to thaw is first
    _waiting: list[list[str]]
    _frozen_at_first = 0  # length of `_waiting` when training began
    _digest_of_stored = ""  # `frozen_digest` of the weights whose outputs are stored

    def freeze(self, layers: int, *, embeddings: bool) -> None:
        """Freeze the first `layers` layers; the embeddings too if any layer is, or if asked for."""
        blocks = self.blocks()
        require(
            layers <= len(blocks),
            "model.freeze_layers",
            f"{layers}",
            allowed=f"at most {len(blocks)} layers",
        )
        if layers or embeddings:
            for weight in self._below_blocks():
                weight.requires_grad_(False)
        for block in blocks[:layers]:
            block.requires_grad_(False)

    def thaw_over(self, epochs: float) -> None:
        """Plan to thaw what is frozen now, evenly over so many epochs; `thaw` carries it out."""
        self.unfreeze_epochs = epochs
        frozen_names = dict[int, str]()
        for name, weight in self.named_parameters():
            if not weight.requires_grad:
                frozen_names[id(weight)] = name
        # Of layers 0, 1, 2 with 0 and 1 frozen: [[names of 1], [names of 0], [embeddings]].
        waiting = list[list[str]]()
        for block in reversed(self.blocks()):
            weights = list(block.parameters())
            if id(weights[0]) in frozen_names:
                waiting.append([frozen_names.pop(id(weight)) for weight in weights])
        if frozen_names:
            waiting.append(list(frozen_names.values()))
        self._waiting = waiting
        self._frozen_at_first = len(waiting)

    def thaw(self, epochs: float) -> bool:
        """Let the layers train whose turn has come after so many epochs, the last layer first.

        Returns whether any layer has joined the training just now.
        """
        due = self._layers_due(epochs)
        if not due:
            return False
        weights = dict(self.named_parameters())
        for name in itertools.chain(*self._waiting[:due]):
            weights[name].requires_grad_(True)
        del self._waiting[:due]
        if self.stored_layers:
            self.keep_layers_still(0)
        return True

    def is_thaw_due(self, epochs: float) -> bool:
        """Whether `thaw` would let any layer join the training after so many epochs."""
        return self._layers_due(epochs) > 0

    def _layers_due(self, epochs: float) -> int:
        """How many of the layers that wait have their turn after so many epochs."""
        if not self._waiting:
            return 0
        due = int(self._frozen_at_first * min(1.0, epochs / self.unfreeze_epochs))
        return max(0, due - self._frozen_at_first + len(self._waiting))

    def layers_waiting(self) -> int:
        """How many layers are frozen now and will thaw."""
        return len(self._waiting)

    def epochs_frozen(self) -> float:
        """Epochs before the first frozen layer joins the training; infinite where none does."""
        return self.unfreeze_epochs / self._frozen_at_first if self._waiting else math.inf

    def frozen_layers(self) -> int:
        """How many first layers are frozen with everything below them; 0 where rows are padded."""
        if not self.is_flat or any(weight.requires_grad for weight in self._below_blocks()):
            return 0
        return sum(1 for _ in itertools.takewhile(_is_frozen, self.in_order()))

    def keep_layers_still(self, layers: int) -> None:
        """Switch off dropout in the first `layers` layers, as their outputs may come from a store.

        0 switches it on again: nothing comes from a store any more.
        """
        self.stored_layers = layers
        self._digest_of_stored = self.frozen_digest() if layers else ""
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.stored_layers:
            modules = self.net.base_model._modules
            modules.get("embeddings", self.net.get_input_embeddings()).eval()
            for layer in self.in_order()[: self.stored_layers]:
                layer.eval()
        return self

    def frozen_digest(self) -> str:
        """A string that is equal for two encoders only if their frozen layers put out the same.

        It depends on all frozen weights and on the settings by which layers are built.
        """
        settings = {
            name: value
            for name, value in self.described.to_dict().items()
            if name not in _SETTINGS_OF_THE_HEAD
        }
        digest = xxhash.xxh3_128(json.dumps(settings, sort_keys=True, default=str).encode())
        for name, weight in self.net.base_model.named_parameters():
            if not weight.requires_grad:
                digest.update(name.encode())
                digest.update(weight.detach().cpu().contiguous().numpy())
        return digest.hexdigest()


def require_same_weights(model: FreezableEncoder, _: object) -> None:
    """Refuse loaded weights if outputs of other frozen weights are stored; a hook of loading."""
    is_same = not model.stored_layers or model.frozen_digest() == model._digest_of_stored
    require(
        is_same,
        "model.reuse",
        "the frozen weights loaded here are not those whose outputs are stored",
        hint="Set model.reuse=false, or model.pretrained to the encoder of before.",
    )


def _is_frozen(layer: nn.Module) -> bool:
    return not any(weight.requires_grad for weight in layer.parameters())

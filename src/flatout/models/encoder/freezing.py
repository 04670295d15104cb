"""Freezing and thawing the layers of an encoder, and what stays of frozen layers."""

from __future__ import annotations

import itertools
import json
import math
import operator
from typing import Any, Self

import xxhash

from flatout.errors import require
from flatout.models.encoder.layered import LayeredEncoder

_OF_THE_HEAD = (
    "_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
    "num_labels",
    "transformers_version",
)
"""What of an encoder's own configuration changes nothing below its head."""


class FreezableEncoder(LayeredEncoder):
    """An encoder whose first layers can be frozen and thawed."""

    # first layers that stay as they are, and whose outputs a batch may bring as its `states`
    stored_layers = 0
    _waiting: list[list[str]]
    _frozen_at_first = 0
    _weights_then = ""

    def freeze(self, layers: int, *, embeddings: bool) -> None:
        """Keep the first layers, and the embeddings, as they are."""
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

    def wait(self, epochs: float) -> None:
        """Remember what is frozen, to thaw it over these epochs."""
        self.unfreeze_epochs = epochs
        names = {
            id(weight): name for name, weight in self.named_parameters() if not weight.requires_grad
        }
        blocks = [list(block.parameters()) for block in self.blocks()]
        frozen_blocks = [
            [names.pop(id(each)) for each in block]
            for block in reversed(blocks)
            if id(block[0]) in names
        ]
        self._waiting = [*frozen_blocks, *([list(names.values())] if names else [])]
        self._frozen_at_first = len(self._waiting)

    def thaw(self, epochs: float) -> bool:
        """Let frozen layers train as epochs pass, the last first, embeddings last; whether any has
        joined just now.
        """
        if not self._waiting:
            return False
        waited = len(self._waiting)
        weights = dict(self.named_parameters())
        due = self._frozen_at_first * min(1.0, epochs / self.unfreeze_epochs)
        while self._waiting and self._frozen_at_first - len(self._waiting) < int(due):
            for name in self._waiting.pop(0):
                weights[name].requires_grad_(True)
        is_changed = len(self._waiting) < waited
        if is_changed and self.stored_layers:
            self.keep_layers_still(0)
        return is_changed

    def epochs_frozen(self) -> float:
        """Epochs before the first frozen layer joins; infinite where none does."""
        return self.unfreeze_epochs / self._frozen_at_first if self._waiting else math.inf

    def frozen_layers(self) -> int:
        """How many first layers stay as they are, with all that lies below; 0 where rows are
        padded.
        """
        if not self.is_flat or any(weight.requires_grad for weight in self._below_blocks()):
            return 0
        trains = (
            any(weight.requires_grad for weight in layer.parameters()) for layer in self.in_order()
        )
        return sum(1 for _ in itertools.takewhile(operator.not_, trains))

    def keep_layers_still(self, layers: int) -> None:
        """Let the first layers drop nothing, as batches may bring what they answer; 0:
        as before.
        """
        self.stored_layers = layers
        self._weights_then = self.frozen_digest() if layers else ""
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        below = getattr(self.net.base_model, "embeddings", self.net.get_input_embeddings())
        for module in [below, *self.in_order()[: self.stored_layers]] if self.stored_layers else []:
            module.eval()
        return self

    def frozen_digest(self) -> str:
        """Names the content of all frozen weights of the encoder, and how its layers are put
        together.
        """
        described = {
            name: value
            for name, value in self.described.to_dict().items()
            if name not in _OF_THE_HEAD
        }
        digest = xxhash.xxh3_128(json.dumps(described, sort_keys=True, default=str).encode())
        for name, weight in self.net.base_model.named_parameters():
            if not weight.requires_grad:
                digest.update(name.encode())
                digest.update(weight.detach().cpu().contiguous().numpy())
        return digest.hexdigest()


def require_same_weights(model: Any, _: Any) -> None:
    """Refuse weights under which stored outputs of frozen layers would be those of
    another encoder.
    """
    is_same = not model.stored_layers or model.frozen_digest() == model._weights_then
    require(
        is_same,
        "model.reuse",
        "the frozen weights loaded here are not those whose outputs are stored",
        hint="Set model.reuse=false, or model.pretrained to the encoder of before.",
    )

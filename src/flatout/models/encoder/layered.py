"""Freezing, thawing and depth: what belongs to which layer of an encoder, by the modules of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatout.errors import require
from flatout.models.contract import Network

_BESIDE_BLOCKS = {"deberta-v2": ("encoder.LayerNorm", "encoder.conv")}
"""What families declare after their layers although it serves the first of them, or all; tables are found anyway."""


class LayeredEncoder(Network, nn.Module):
    """An encoder of transformers whose layers can be frozen, thawed, and trained at rates of their own."""

    net: Any
    family: str
    unfreeze_epochs: float
    _waiting: list[list[str]]
    _frozen_at_first: int

    def blocks(self) -> list[Any]:
        """The encoder's layers, first to last."""
        stacks = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(max(stacks, key=lambda stack: (len(stack), _size(stack)), default=[]))

    def drop_before_output(self, share: float) -> None:
        """Drop so much in the head, also where a family's configuration has no word for it."""
        found = [module for module in self.head_modules() if isinstance(module, nn.Dropout)]
        what = f"{self.family} drops nothing before its output"
        require(bool(found) or not share, "model.head_dropout", what, hint="Leave it out.")
        for module in found:
            module.p = share

    def freeze(self, layers: int, *, embeddings: bool) -> None:
        """Keep the first layers, and the embeddings, as they are."""
        blocks = self.blocks()
        require(layers <= len(blocks), "model.freeze_layers", f"{layers}", allowed=f"at most {len(blocks)} layers")
        if layers or embeddings:
            for weight in self._below_blocks():
                weight.requires_grad_(False)
        for block in blocks[:layers]:
            block.requires_grad_(False)

    def wait(self, epochs: float) -> None:
        """Remember what is frozen, to thaw it over these epochs."""
        self.unfreeze_epochs = epochs
        names = {id(weight): name for name, weight in self.named_parameters() if not weight.requires_grad}
        blocks = [list(block.parameters()) for block in self.blocks()]
        frozen_blocks = [[names.pop(id(each)) for each in block] for block in reversed(blocks) if id(block[0]) in names]
        self._waiting = [*frozen_blocks, *([list(names.values())] if names else [])]
        self._frozen_at_first = len(self._waiting)

    def thaw(self, epochs: float) -> bool:
        """Let frozen layers join the training, from the last to the first, as the epochs pass; the embeddings last.

        Whether any has joined just now.
        """
        if not self._waiting:
            return False
        waited, weights = len(self._waiting), dict(self.named_parameters())
        due = self._frozen_at_first * min(1.0, epochs / self.unfreeze_epochs)
        while self._waiting and self._frozen_at_first - len(self._waiting) < int(due):
            for name in self._waiting.pop(0):
                weights[name].requires_grad_(True)
        return len(self._waiting) < waited

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight: 0 for the head, most for the embeddings."""
        blocks = self.blocks()
        place = {id(weight): number for number, block in enumerate(blocks) for weight in block.parameters()}
        below = set(map(id, self._below_blocks()))
        found: dict[str, int] = {}
        for name, weight in self.named_parameters():
            if id(weight) in place:
                found[name] = len(blocks) - place[id(weight)]
            elif id(weight) in below:
                found[name] = len(blocks) + 1
            else:
                found[name] = 0
        return found

    def head_modules(self) -> list[nn.Module]:
        """What is no part of the backbone; some families declare it first."""
        in_backbone = set(map(id, self.net.base_model.modules()))
        return [module for module in self.net.modules() if id(module) not in in_backbone]

    def _below_blocks(self) -> list[nn.Parameter]:
        """The embeddings: what a row meets before the first layer, and tables outside of them that all layers read."""
        blocks, late = self.blocks(), _BESIDE_BLOCKS.get(self.family, ())
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        found: list[nn.Parameter] = []
        is_below = bool(blocks)
        for name, module in self.net.base_model.named_modules():
            is_below = is_below and module is not blocks[0]
            if id(module) not in in_blocks and (is_below or isinstance(module, nn.Embedding) or name.startswith(late)):
                found += module.parameters(recurse=False)
        return found


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())

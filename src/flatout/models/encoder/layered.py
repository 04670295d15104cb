"""The layers of an encoder: their order, freezing, thawing, and rates by depth."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatout.models.contract import Network
from flatout.models.encoder.families import FLAT_FAMILIES

_BESIDE_BLOCKS = {"deberta-v2": ("encoder.LayerNorm", "encoder.conv")}
"""What families declare after their layers although it serves the first of them, or all; tables are
found anyway."""


class LayeredEncoder(Network, nn.Module):
    """An encoder of transformers whose layers can be frozen, thawed, and trained at rates of their
    own.
    """

    net: Any
    family: str
    described: Any
    is_flat: bool

    def blocks(self) -> list[Any]:
        """The encoder's layers, first to last."""
        stacks = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(
            max(
                stacks,
                key=lambda stack: (len(stack), sum(map(Tensor.numel, stack.parameters()))),
                default=[],
            )
        )

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight: 0 for the head, most for the embeddings."""
        blocks = self.blocks()
        depth = dict.fromkeys(map(id, self._below_blocks()), len(blocks) + 1)
        depth |= {
            id(weight): above
            for above, block in enumerate(blocks[::-1], 1)
            for weight in block.parameters()
        }
        return {name: depth.get(id(weight), 0) for name, weight in self.named_parameters()}

    def in_order(self) -> list[Any]:
        """The layers as tokens go through them; ALBERT's come again and again."""
        layers = list(self.net.base_model.get_submodule(FLAT_FAMILIES[self.family].layers))
        if self.family != "albert":
            return layers
        times = self.described.num_hidden_layers
        return [layers[int(number / (times / len(layers)))] for number in range(times)]

    def head_modules(self) -> list[nn.Module]:
        """What is no part of the backbone; some families declare it first."""
        backbone = set(self.net.base_model.modules())
        return [module for module in self.net.modules() if module not in backbone]

    def _below_blocks(self) -> list[nn.Parameter]:
        """The embeddings: what a row meets before the first layer, and tables outside of them that
        all layers read.
        """
        blocks = self.blocks()
        late = _BESIDE_BLOCKS.get(self.family, ())
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        found = list[nn.Parameter]()
        is_below = bool(blocks)
        for name, module in self.net.base_model.named_modules():
            is_below = is_below and module is not blocks[0]
            if id(module) not in in_blocks and (
                is_below or isinstance(module, nn.Embedding) or name.startswith(late)
            ):
                found += module.parameters(recurse=False)
        return found

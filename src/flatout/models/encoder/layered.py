"""The layers of an encoder of transformers: which modules they are, and in which order tokens meet
them.

All families keep their layers in a list of modules, but each under another name. Not all declare
the modules around it in the order in which tokens meet them. Here each module of an encoder is
found to be one of three: below the layers (embeddings), a layer, or the head. Freezing, rates by
depth (`optim.layer_decay`), FSDP and Muon ask here. Open this file if a new family puts its layers
or embeddings somewhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from flatout.models.contract import Network
from flatout.models.encoder.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LayeredEncoder(Network, nn.Module):
    """An encoder of transformers with known places of embeddings, layers and head."""

    net: Any  # the model of transformers, with its head
    family: str  # transformers' name of its family, such as "bert"
    described: PretrainedConfig  # the library's configuration of this encoder
    is_flat: bool  # whether it runs over flat batches, by our layers

    def blocks(self) -> list[nn.Module]:
        """The encoder's layers, first to last; empty where it has no list of modules."""
        stacks = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(max(stacks, key=_count_layers_and_weights, default=[]))

    def in_order(self) -> list[nn.Module]:
        """The layers as tokens go through them; ALBERT's few layers come again and again."""
        family = family_of(self.family)
        assert family.flat is not None, f"{self.family} has no flat layers"
        layers = list(self.net.base_model.get_submodule(family.flat.layers))
        if not family.repeats_layers:
            return layers
        # 12 passes through 3 groups of layers: 0 0 0 0 1 1 1 1 2 2 2 2
        passes = self.described.num_hidden_layers
        passes_a_layer = passes / len(layers)
        return [layers[int(number / passes_a_layer)] for number in range(passes)]

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight: 0 for the head, most for the embeddings."""
        blocks = self.blocks()
        depth_of_weight = dict.fromkeys(map(id, self._below_blocks()), len(blocks) + 1)
        for above, block in enumerate(reversed(blocks), 1):
            for weight in block.parameters():
                depth_of_weight[id(weight)] = above
        return {
            name: depth_of_weight.get(id(weight), 0) for name, weight in self.named_parameters()
        }

    def head_modules(self) -> list[nn.Module]:
        """The modules that are no part of the backbone, in the order of their declaration."""
        # Not simply "those after the layers": some families declare the head first.
        backbone = set(self.net.base_model.modules())
        return [module for module in self.net.modules() if module not in backbone]

    def _below_blocks(self) -> list[nn.Parameter]:
        """The weights that a row meets before the first layer, and tables that all layers read."""
        blocks = self.blocks()
        late_names = family_of(self.family).read_by_all_layers
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        weights = list[nn.Parameter]()
        is_before_layers = bool(blocks)
        for name, module in self.net.base_model.named_modules():
            if blocks and module is blocks[0]:
                is_before_layers = False
            if id(module) in in_blocks:
                continue
            is_table = isinstance(module, nn.Embedding)
            if is_before_layers or is_table or name.startswith(late_names):
                weights += module.parameters(recurse=False)
        return weights


def _count_layers_and_weights(stack: nn.ModuleList) -> tuple[int, int]:
    """The size of a list of modules; an encoder's layers are its longest, then its largest one."""
    return len(stack), sum(weight.numel() for weight in stack.parameters())

"""LoRA for encoders: train small matrices beside the frozen ones, and merge them afterwards.

The package peft puts two matrices of rank r beside each linear layer of the backbone. The head is
trained whole. `add_lora` puts them in, `merge_lora` adds them to the weights beside them, so that
what is exported is a plain encoder. Open this file for settings of LoRA, or another way to adapt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from flatout.errors import UserError, check_settings, require, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Settings of LoRA, `model.lora`."""

    rank: int = setting(
        0, "Rank of the small matrices; 0: none, all weights are trained.", least=0, example="8"
    )
    alpha: float | None = setting(
        None,
        "Their weight, over the rank; null: twice it.",
        above=0,
        example="model.lora.rank=8 model.lora.alpha=16",
    )
    dropout: float = setting(
        0.0, "Dropout rate.", least=0, below=1, example="model.lora.rank=8 model.lora.dropout=0.1"
    )
    targets: list[str] = setting(
        list,
        "Names of the layers that get them; empty: every linear layer of the encoder.",
        example="model.lora.rank=8 model.lora.targets=[query,value]",
    )

    def __post_init__(self) -> None:
        check_settings(self, "model.lora")


def add_lora(net: PreTrainedModel, config: LoraConfig) -> None:
    """Put small matrices into an encoder in place; everything but them and the head is frozen."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        # the linear layer of GPT-2, whose matrix is transposed
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise UserError(
            "model.lora.rank",
            "needs the package peft",
            hint="Install it with pip install 'flatout[lora]'.",
        ) from None
    backbone: nn.Module = net.base_model
    linear_names = list[str]()
    is_transposed = False
    for name, module in backbone.named_modules():
        is_transposed = is_transposed or isinstance(module, Conv1D)
        if isinstance(module, nn.Linear | Conv1D):
            linear_names.append(name)
    targets = config.targets or linear_names
    last_names = {name.rpartition(".")[2] for name in linear_names}
    require(
        _has_all(backbone, targets),
        "model.lora.targets",
        f"no layer named {', '.join(targets)}",
        allowed=", ".join(sorted(last_names)),
    )
    backbone.requires_grad_(False)
    # peft's field says int, but it divides by the rank, so any number will do
    alpha: Any = 2 * config.rank if config.alpha is None else config.alpha
    adapter = PeftConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        fan_in_fan_out=is_transposed,
    )
    inject_adapter_in_model(adapter, backbone)


def _has_all(backbone: nn.Module, targets: list[str]) -> bool:
    """Whether each target is the end of the name of a module with a matrix."""
    names_of_matrices = list[str]()
    for name, module in backbone.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2:
            names_of_matrices.append(f".{name}")

    def is_there(target: str) -> bool:
        return any(name.endswith(f".{target}") for name in names_of_matrices)

    return all(is_there(target) for target in targets)


def merge_lora(net: nn.Module) -> None:
    """Add the trained matrices to the frozen ones beside them; the model is a plain one again."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(net.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent_name, _, own_name = name.rpartition(".")
            setattr(net.get_submodule(parent_name), own_name, module.get_base_layer())

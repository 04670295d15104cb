"""LoRA for encoders: put small trained matrices beside frozen ones (by peft), and merge them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from flatout.errors import UserError, check_settings, require, setting


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Small matrices beside the frozen ones; the head is trained whole."""

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


def add_lora(net: Any, config: LoraConfig) -> None:
    """Put the matrices into an encoder in place; everything but them and the head is frozen."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        # the linear layer of GPT-2, its matrix turned round
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise UserError(
            "model.lora.rank",
            "needs the package peft",
            hint="Install it with pip install 'flatout[lora]'.",
        ) from None
    backbone = net.base_model
    modules = list(backbone.named_modules())
    linear = [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]
    targets = config.targets or linear
    tables = [
        f".{name}" for name, each in modules if getattr(getattr(each, "weight", 0), "ndim", 0) == 2
    ]
    is_there = all(any(name.endswith(f".{each}") for name in tables) for each in targets)
    allowed = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    require(is_there, "model.lora.targets", f"no layer named {', '.join(targets)}", allowed=allowed)
    alpha: Any = 2 * config.rank if config.alpha is None else config.alpha
    backbone.requires_grad_(False)
    is_turned = any(isinstance(each, Conv1D) for _, each in modules)
    how: dict[str, Any] = {
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "fan_in_fan_out": is_turned,
    }
    made = PeftConfig(r=config.rank, lora_alpha=alpha, **how)
    inject_adapter_in_model(made, backbone)


def merge_lora(net: Any) -> None:
    """Add the trained matrices to the ones they stand beside, so that the model is a plain one
    again.
    """
    from peft.tuners.lora import LoraLayer

    for name, module in list(net.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(net.get_submodule(parent), own, module.get_base_layer())

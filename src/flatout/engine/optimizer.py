"""The optimizer, its learning rate and the running mean of the weights, all by the settings and the
planned steps.

And the norm of the whole gradient and clipping by it; slices of several ranks count as one
gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from flatout.distributed.collectives import is_share
from flatout.engine.muon import MATRICES, Group, MuonAndAdamW
from flatout.engine.step_losses import NotFinite
from flatout.errors import check_settings, require, setting
from flatout.models.contract import contract

Schedule = StrEnum("Schedule", "linear cosine constant")
OptimizerName = StrEnum("OptimizerName", "adamw muon")
ScaleRate = StrEnum("ScaleRate", "none sqrt linear")


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, its schedule and the clipping of gradients."""

    name: OptimizerName = setting(
        OptimizerName.adamw, "adamw; muon: Muon for an encoder's matrices, AdamW for others."
    )
    lr: float | None = setting(
        None, "Highest rate; null: as the model recommends, or 0.002.", above=0, example="1e-3"
    )
    scale_lr: ScaleRate = setting(
        ScaleRate.none,
        "How lr grows with the rows of a step of all devices beyond base_batch: not, by their root,"
        " or alike.",
        example="sqrt optim.base_batch=128",
    )
    base_batch: int | None = setting(
        None,
        "Rows a step that lr was chosen for.",
        least=1,
        example="optim.scale_lr=sqrt optim.base_batch=128",
    )
    max_lr: float | None = setting(
        None,
        "Most that scaling may make of lr; null: no cap.",
        above=0,
        example="optim.scale_lr=linear optim.base_batch=128 optim.max_lr=0.01",
    )
    weight_decay: float = setting(
        0.01, "Decay of weight matrices; biases and norms have none.", least=0
    )
    beta1: float = setting(0.9, "Memory of the mean gradient.", least=0, below=1, example="0.95")
    beta2: float = setting(
        0.999, "Memory of the squared gradient.", least=0, below=1, example="0.98"
    )
    eps: float = setting(1e-8, "Added to the denominator.", least=0, example="1e-6")
    schedule: Schedule = setting(Schedule.linear, "How the learning rate falls after the warm-up.")
    warmup: float = setting(
        0.06,
        "Share of all steps in which the learning rate rises; 1 or more: that many steps.",
        least=0,
        example="100",
    )
    final_lr_share: float = setting(
        0.0, "Learning rate at the last step, as a share of the highest.", least=0, most=1
    )
    layer_decay: float = setting(
        1.0, "A layer's rate, as a share of the one above it.", above=0, most=1, example="0.9"
    )
    ema: float = setting(
        0.0,
        "Memory of a running mean of the weights, which answers then; 0: none.",
        least=0,
        below=1,
        example="0.999",
    )
    clip: float | None = setting(
        None, "Longest gradient; null: as the model recommends; 0: any.", least=0, example="1"
    )
    not_finite: NotFinite = setting(
        NotFinite.stop, "At a gradient that is not finite: stop, or skip and count it."
    )

    def __post_init__(self) -> None:
        check_settings(self, "optim")
        is_based = self.scale_lr is ScaleRate.none or self.base_batch is not None
        require(
            is_based,
            "optim.scale_lr",
            f"{self.scale_lr.value} without a base",
            hint="Set optim.base_batch to the rows a step that optim.lr was chosen for.",
        )

    @property
    def highest(self) -> float:
        """The learning rate that was set, or the usual one."""
        return 2e-3 if self.lr is None else self.lr

    def scaled(self, rows: int) -> OptimConfig:
        """These settings with the learning rate for so many rows a step; the warm-up to
        it stays.
        """
        if self.scale_lr is ScaleRate.none:
            return self
        assert self.base_batch is not None
        growth = rows / self.base_batch
        lr = self.highest * (growth if self.scale_lr is ScaleRate.linear else math.sqrt(growth))
        return replace(
            self, lr=lr if self.max_lr is None else min(lr, self.max_lr), scale_lr=ScaleRate.none
        )

    def build(self, model: nn.Module, *, fused: bool = True) -> Optimizer:
        """The optimizer of the weights that are trained or will be, in groups that decay or not, by
        their depth.
        """
        depths = self._depths(model)
        matrices = self._matrices(model)
        groups: dict[tuple[int, bool, bool], Group] = {}
        will_thaw = contract(model).unfreeze_epochs > 0
        for name, weight in model.named_parameters():
            if not (weight.requires_grad or will_thaw):
                continue
            depth = depths.get(name, 0)
            decays = weight.ndim >= 2
            is_matrix = id(weight) in matrices
            started = {
                "weight_decay": self.weight_decay if decays else 0.0,
                "lr_share": self.layer_decay**depth,
            }
            marked = {MATRICES: is_matrix} if matrices else {}
            key = (depth, not decays, is_matrix)
            groups.setdefault(key, {"params": [], **started, **marked})["params"].append(weight)
        ordered = [groups[key] for key in sorted(groups)]
        settings: dict[str, Any] = {
            "lr": self.highest,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }
        return (
            MuonAndAdamW(ordered, **settings, fused=fused)
            if matrices
            else AdamW(ordered, **settings, fused=fused)
        )

    def _matrices(self, model: nn.Module) -> set[int]:
        if self.name is not OptimizerName.muon:
            return set()
        require(
            hasattr(torch.optim, "Muon"),
            "optim.name",
            f"muon: torch {torch.__version__} has none",
            hint="Install torch 2.9 or later, or leave it at adamw.",
        )
        will_thaw = contract(model).unfreeze_epochs > 0
        found = {
            id(weight)
            for block in contract(model).blocks()
            for name, weight in block.named_parameters()
            if weight.ndim == 2
            and (weight.requires_grad or will_thaw)
            and "lora_" not in name
            and not is_share(weight)
        }
        require(
            bool(found),
            "optim.name",
            f"muon: {type(model).__name__} has no whole matrices in layers that are trained",
            hint="Leave it at adamw, or set model=transformer.",
        )
        return found

    def _depths(self, model: nn.Module) -> dict[str, int]:
        """How far below the head each weight lies; all alike where that makes no difference."""
        if self.layer_decay == 1:
            return {}
        found = contract(model).depths()
        require(
            bool(found),
            "optim.layer_decay",
            f"{type(model).__name__} has no layers that could decay",
            hint="Leave it at 1, or set model=transformer.",
        )
        return found

    def lr_at(self, step: int, total_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        warmup = self.warmup if self.warmup >= 1 else math.ceil(self.warmup * total_steps)
        if step < warmup:
            return self.highest * (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if self.schedule is Schedule.constant:
            return self.highest
        falling = (
            1 - done if self.schedule is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
        )
        return self.highest * (self.final_lr_share + (1 - self.final_lr_share) * falling)

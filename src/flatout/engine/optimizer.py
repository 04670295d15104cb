"""The optimizer and its learning rate, both plain functions of the settings and the planned number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from flatout.distributed.slices import is_share
from flatout.engine.muon import MATRICES, MuonAndAdamW
from flatout.engine.step_losses import NotFinite
from flatout.errors import UserError, as_choice, require
from flatout.models.contract import contract

_USUAL_RATE = 2e-3


class Schedule(StrEnum):
    """How the learning rate falls after the warm-up."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class OptimizerName(StrEnum):
    """What steps the weights."""

    adamw = "adamw"
    muon = "muon"


class ScaleRate(StrEnum):
    """How the learning rate grows with the rows of a step."""

    none = "none"
    sqrt = "sqrt"
    linear = "linear"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, its schedule and the clipping of gradients."""

    name: OptimizerName = OptimizerName.adamw
    """adamw; or muon: Muon for the matrices of an encoder's layers, AdamW for all other weights."""
    lr: float | None = None
    """Highest learning rate; null: what the model recommends, else 0.002."""
    scale_lr: ScaleRate = ScaleRate.none
    """How lr grows with the rows of a step over all devices, beyond base_batch: not at all, by their root, or alike."""
    base_batch: int | None = None
    """Rows a step that lr was chosen for; scale_lr needs it."""
    max_lr: float | None = None
    """Most that scaling may make of lr; null: no cap."""
    weight_decay: float = 0.01
    """Decay of weight matrices; biases and norms have none."""
    beta1: float = 0.9
    """Memory of the mean gradient."""
    beta2: float = 0.999
    """Memory of the squared gradient."""
    eps: float = 1e-8
    """Added to the denominator."""
    schedule: Schedule = Schedule.linear
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.06
    """Share of all steps in which the learning rate rises; 1 or more: that many steps."""
    final_lr_share: float = 0.0
    """Learning rate at the last step, as a share of the highest."""
    layer_decay: float = 1.0
    """Learning rate of each layer of an encoder, as a share of the layer above it; the head has all of it."""
    ema: float = 0.0
    """Memory of a running mean of the weights, which validation, test and the saved model then use; 0: none."""
    clip: float | None = None
    """Longest gradient; null: what the model recommends; 0: no clipping."""
    not_finite: NotFinite = NotFinite.stop
    """What happens at a step whose gradient is not finite: stop before the update, or skip the step and count it."""

    def __post_init__(self) -> None:
        self.name = as_choice(OptimizerName, self.name, "optim.name")
        self.schedule = as_choice(Schedule, self.schedule, "optim.schedule")
        self.not_finite = as_choice(NotFinite, self.not_finite, "optim.not_finite")
        self.scale_lr = as_choice(ScaleRate, self.scale_lr, "optim.scale_lr")
        base, cap = self.base_batch, self.max_lr
        require(base is None or base >= 1, "optim.base_batch", f"{base}", allowed="1 or more")
        require(cap is None or cap > 0, "optim.max_lr", f"{cap}", allowed="above 0")
        is_based = self.scale_lr is ScaleRate.none or base is not None
        hint = "Set optim.base_batch to the rows a step that optim.lr was chosen for."
        require(is_based, "optim.scale_lr", f"{self.scale_lr.value} without a base", hint=hint)
        require(self.lr is None or self.lr > 0, "optim.lr", f"{self.lr}", allowed="above 0")
        require(self.weight_decay >= 0, "optim.weight_decay", f"{self.weight_decay}", allowed="0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}", f"{getattr(self, name)}", allowed="0 to below 1")
        require(self.eps >= 0, "optim.eps", f"{self.eps}", allowed="0 or more")
        require(self.warmup >= 0, "optim.warmup", f"{self.warmup}", allowed="a share below 1, or a number of steps")
        require(0 <= self.final_lr_share <= 1, "optim.final_lr_share", f"{self.final_lr_share}", allowed="0 to 1")
        require(0 < self.layer_decay <= 1, "optim.layer_decay", f"{self.layer_decay}", allowed="above 0, at most 1")
        require(0 <= self.ema < 1, "optim.ema", f"{self.ema}", allowed="0 to below 1")
        require(self.clip is None or self.clip >= 0, "optim.clip", f"{self.clip}", allowed="0 or more, or null")

    @property
    def highest(self) -> float:
        """The learning rate that was set, or the usual one."""
        return _USUAL_RATE if self.lr is None else self.lr

    def scaled(self, rows: int) -> OptimConfig:
        """These settings with the learning rate for so many rows a step; the warm-up to it stays."""
        if self.scale_lr is ScaleRate.none:
            return self
        assert self.base_batch is not None
        growth = rows / self.base_batch
        lr = self.highest * (growth if self.scale_lr is ScaleRate.linear else math.sqrt(growth))
        return replace(self, lr=lr if self.max_lr is None else min(lr, self.max_lr), scale_lr=ScaleRate.none)

    def build(self, model: nn.Module, *, fused: bool = True) -> Optimizer:
        """The optimizer of the weights that are trained or will be, in groups that decay or not, by their depth."""
        depths, matrices = self._depths(model), self._matrices(model)
        groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
        will_thaw = contract(model).unfreeze_epochs > 0
        for name, weight in model.named_parameters():
            if not (weight.requires_grad or will_thaw):
                continue
            depth, decays, is_matrix = depths.get(name, 0), weight.ndim >= 2, id(weight) in matrices
            started = {"weight_decay": self.weight_decay if decays else 0.0, "lr_share": self.layer_decay**depth}
            marked = {MATRICES: is_matrix} if matrices else {}
            key = (depth, not decays, is_matrix)
            groups.setdefault(key, {"params": [], **started, **marked})["params"].append(weight)
        ordered = [groups[key] for key in sorted(groups)]
        settings: dict[str, Any] = {"lr": self.highest, "betas": (self.beta1, self.beta2), "eps": self.eps}
        return MuonAndAdamW(ordered, **settings, fused=fused) if matrices else AdamW(ordered, **settings, fused=fused)

    def _matrices(self, model: nn.Module) -> set[int]:
        """The weights that Muon steps: whole matrices of an encoder's layers."""
        if self.name is not OptimizerName.muon:
            return set()
        what, hint = f"muon: torch {torch.__version__} has none", "Install torch 2.9 or later, or leave it at adamw."
        require(hasattr(torch.optim, "Muon"), "optim.name", what, hint=hint)
        blocks = contract(model).blocks()
        will_thaw = contract(model).unfreeze_epochs > 0
        found = {
            id(weight)
            for block in blocks
            for name, weight in block.named_parameters()
            if weight.ndim == 2 and (weight.requires_grad or will_thaw) and "lora_" not in name and not is_share(weight)
        }
        what = f"muon: {type(model).__name__} has no whole matrices in layers that are trained"
        require(bool(found), "optim.name", what, hint="Leave it at adamw, or set model=transformer.")
        return found

    def _depths(self, model: nn.Module) -> dict[str, int]:
        """How far below the head each weight lies; all alike where that makes no difference."""
        if self.layer_decay == 1:
            return {}
        found = contract(model).depths()
        if not found:
            what = f"{type(model).__name__} has no layers that could decay"
            raise UserError("optim.layer_decay", what, hint="Leave it at 1, or set model=transformer.")
        return found

    def lr_at(self, step: int, total_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        warmup = self.warmup if self.warmup >= 1 else math.ceil(self.warmup * total_steps)
        if step < warmup:
            return self.highest * (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if self.schedule is Schedule.constant:
            return self.highest
        falling = 1 - done if self.schedule is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
        return self.highest * (self.final_lr_share + (1 - self.final_lr_share) * falling)

"""The settings of `optim`, and what follows from them: the optimizer and the rate of each step.

`OptimConfig.build(model)` puts the weights into groups that share decay and rate, and makes the
optimizer of them: one by `name`, or a class of the user's. `OptimConfig.lr_at(step, total_steps)`
is the learning rate of a step. Open this file to add a setting of the optimizer. Beside it stand
`schedule`, `muon`, `clipping` and `weight_average`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from flatout.distributed.collectives import is_share
from flatout.engine.fused_adamw import FusedAdamW, is_as_known
from flatout.engine.muon import MATRICES, Group, MuonAndAdamW
from flatout.engine.step_losses import NotFinite
from flatout.errors import UserError, check_settings, class_name, first_line, require, setting
from flatout.models.contract import contract

Schedule = StrEnum("Schedule", "linear cosine constant")
OptimizerName = StrEnum("OptimizerName", "adamw muon sgd adafactor")
ScaleRate = StrEnum("ScaleRate", "none sqrt linear")
OWN = "optim._target_"
"""How the command line names a class of the user's."""
_READS = {
    OptimizerName.adamw: ("beta1", "beta2", "eps"),
    OptimizerName.muon: ("beta1", "beta2", "eps"),
    OptimizerName.sgd: ("beta1",),
}
"""Settings that an optimizer reads beside rate and decay; others read none of them."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, its schedule and the clipping of gradients."""

    name: OptimizerName = setting(
        OptimizerName.adamw,
        "adamw; muon: Muon for an encoder's matrices, AdamW for others; sgd: beta1 is its momentum;"
        " adafactor: a matrix's state is one row and one column.",
    )
    optimizer: Any = setting(
        None,
        "A class of optimizer in place of name, typed as optim._target_=CLASS; null: by name.",
        allowed="a class of torch.optim, or one that allow_targets names",
        example="torch.optim.RAdam",
    )
    arguments: dict[str, Any] = setting(
        dict,
        "Further arguments of the optimizer, each with a plus sign.",
        allowed="a mapping of names to values",
        example="optim.name=sgd +optim.arguments.nesterov=true",
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
        self._require_optimizer()
        is_based = self.scale_lr is ScaleRate.none or self.base_batch is not None
        require(
            is_based,
            "optim.scale_lr",
            f"{self.scale_lr.value} without a base",
            hint="Set optim.base_batch to the rows a step that optim.lr was chosen for.",
        )

    def _require_optimizer(self) -> None:
        """Refuse what is no optimizer, and settings that the optimizer does not read."""
        own = self.optimizer
        reads = () if own is not None else _READS.get(self.name, ())
        # a checkpoint keeps the name of a class, and nothing is imported by it
        is_optimizer = isinstance(own, type) and issubclass(own, Optimizer)
        require(
            own is None or isinstance(own, str) or is_optimizer,
            OWN,
            f"{class_name(own)} is no optimizer",
            hint="Name a subclass of torch.optim.Optimizer.",
        )
        require(
            own is None or self.name is OptimizerName.adamw,
            OWN,
            f"{class_name(own)} beside optim.name={self.name}",
            hint="Leave one of them out.",
        )
        for name in ("beta1", "beta2", "eps"):
            value = getattr(self, name)
            default = type(self).__dataclass_fields__[name].default
            require(
                name in reads or value == default,
                f"optim.{name}",
                f"{value}, which {self.shown_name} does not read",
                hint="Leave it out, or add +optim.arguments.NAME=VALUE.",
            )
        if is_optimizer or (self.arguments and self.name is not OptimizerName.muon):
            # a wrong argument is refused before any data are read
            one_weight = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
            self._make(one_weight, fused=False)

    @property
    def shown_name(self) -> str:
        """The optimizer's name in messages."""
        return self.name.value if self.optimizer is None else class_name(self.optimizer)

    @property
    def highest(self) -> float:
        """The learning rate that was set, or the usual one."""
        return 2e-3 if self.lr is None else self.lr

    def scaled(self, rows: int) -> OptimConfig:
        """These settings with the learning rate for `rows` rows in each step of all devices.

        `optim.scale_lr=sqrt optim.base_batch=128` doubles the rate at 512 rows. The warm-up stays.
        """
        if self.scale_lr is ScaleRate.none:
            return self
        assert self.base_batch is not None
        growth = rows / self.base_batch
        lr = self.highest * (growth if self.scale_lr is ScaleRate.linear else math.sqrt(growth))
        if self.max_lr is not None:
            lr = min(lr, self.max_lr)
        return self.at_rate(lr)

    def at_rate(self, lr: float) -> OptimConfig:
        """These settings with a learning rate that is final: rows of a step scale it no more."""
        return replace(self, lr=lr, scale_lr=ScaleRate.none)

    def build(self, model: nn.Module, *, fused: bool = True) -> Optimizer:
        """The optimizer of all weights that are trained now or after layers have thawed.

        A group holds the weights of one depth that decay alike: matrices decay, biases and norms
        do not. Muon's matrices are groups of their own. `fused`: AdamW and SGD are one kernel.
        """
        depths = self._depths(model)
        matrices = self._matrices(model)
        # by depth below the head, whether its weights are left without decay, whether Muon steps it
        groups: dict[tuple[int, bool, bool], Group] = {}
        will_thaw = contract(model).unfreeze_epochs > 0
        for name, weight in model.named_parameters():
            if not (weight.requires_grad or will_thaw):
                continue
            depth = depths.get(name, 0)
            decays = weight.ndim >= 2
            is_matrix = id(weight) in matrices
            key = (depth, not decays, is_matrix)
            if key not in groups:
                groups[key] = {
                    "params": [],
                    "weight_decay": self.weight_decay if decays else 0.0,
                    "lr_share": self.layer_decay**depth,
                }
                if matrices:
                    groups[key][MATRICES] = is_matrix
            groups[key]["params"].append(weight)
        ordered = [groups[key] for key in sorted(groups)]
        return self._make(ordered, fused=fused)

    def _make(self, groups: list[Group], *, fused: bool) -> Optimizer:
        optimizer, arguments = self._choose(fused=fused)
        arguments = {"lr": self.highest, **arguments, **self.arguments}
        try:
            return optimizer(groups, **arguments)
        # so do classes refuse arguments that they lack, their values, and groups of weights
        except (TypeError, ValueError) as error:
            where = "optim.arguments" if self.optimizer is None else OWN
            problem = f"{self.shown_name} cannot be made: {first_line(error)}"
            raise UserError(where, problem) from error

    def _choose(self, *, fused: bool) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
        """What makes the optimizer, and its arguments beside groups and rate."""
        if self.optimizer is not None:
            require(
                not isinstance(self.optimizer, str),
                OWN,
                f"{self.optimizer} is a name that a checkpoint keeps",
                hint="Pass optim=OptimConfig(optimizer=…) with the class itself.",
            )
            return self.optimizer, {}
        if self.name is OptimizerName.adafactor:
            return Adafactor, {}
        if self.name is OptimizerName.sgd:
            return SGD, {"momentum": self.beta1, "fused": fused}
        betas = (self.beta1, self.beta2)
        adamw = {"betas": betas, "eps": self.eps, "fused": fused}
        if self.name is OptimizerName.muon:
            return MuonAndAdamW, adamw
        is_fused = self.arguments.get("fused", fused) and is_as_known()
        return (FusedAdamW if is_fused else AdamW), adamw

    def _matrices(self, model: nn.Module) -> set[int]:
        """The `id` of each weight that Muon steps: whole matrices of the model's layers."""
        if self.name is not OptimizerName.muon:
            return set()
        require(
            hasattr(torch.optim, "Muon"),
            "optim.name",
            f"muon: torch {torch.__version__} has none",
            hint="Install torch 2.9 or later, or leave it at adamw.",
        )
        will_thaw = contract(model).unfreeze_epochs > 0
        matrices = {
            id(weight)
            for block in contract(model).blocks()
            for name, weight in block.named_parameters()
            if weight.ndim == 2
            and (weight.requires_grad or will_thaw)
            and "lora_" not in name
            and not is_share(weight)
        }
        require(
            bool(matrices),
            "optim.name",
            f"muon: {type(model).__name__} has no whole matrices in layers that are trained",
            hint="Leave it at adamw, or set model=transformer.",
        )
        return matrices

    def _depths(self, model: nn.Module) -> dict[str, int]:
        """How many layers below the head each weight lies, by its name; empty if none decays."""
        if self.layer_decay == 1:
            return {}
        depths = contract(model).depths()
        require(
            bool(depths),
            "optim.layer_decay",
            f"{type(model).__name__} has no layers that could decay",
            hint="Leave it at 1, or set model=transformer.",
        )
        return depths

    def lr_at(self, step: int, total_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0, of `total_steps`."""
        return self.rates(total_steps)(step)

    def rates(self, total_steps: int) -> Callable[[int], float]:
        """A function with the learning rate of each optimizer step, counted from 0.

        It rises for `warmup` steps, then falls by the schedule to `final_lr_share` of the highest.
        """
        highest = self.highest
        final_share = self.final_lr_share
        warmup = self.warmup if self.warmup >= 1 else math.ceil(self.warmup * total_steps)
        falling_steps = max(1, total_steps - warmup)

        def rate_at(step: int) -> float:
            if step < warmup:
                return highest * (step + 1) / (warmup + 1)
            if self.schedule is Schedule.constant:
                return highest
            progress = (step - warmup) / falling_steps
            if progress > 1:
                progress = 1.0
            if self.schedule is Schedule.linear:
                falling = 1 - progress
            else:
                falling = 0.5 * (1 + math.cos(math.pi * progress))
            return highest * (final_share + (1 - final_share) * falling)

        return rate_at

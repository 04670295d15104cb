"""The optimizer, its learning rate and the running mean of the weights, all by the settings and the
planned steps.

And the norm of the whole gradient and clipping by it; slices of several ranks count as one
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flatout.distributed.collectives import is_share, share_of, whole
from flatout.engine.step_losses import NotFinite
from flatout.errors import check_settings, require, setting
from flatout.models.contract import contract

Group = dict[str, Any]
MATRICES = "is_matrices"  # marks the groups of weights that Muon steps
_LEAST = 1e-6  # what torch's clipping adds to a length
Schedule = StrEnum("Schedule", "linear cosine constant")
OptimizerName = StrEnum("OptimizerName", "adamw muon")
ScaleRate = StrEnum("ScaleRate", "none sqrt linear")


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of an encoder's layers, AdamW for all other weights, as two optimizers
    with one state.
    """

    # Muon (Jordan and others 2024) steps along the nearest matrix with orthogonal rows to the
    # momentum of the gradient. Its steps are scaled to the length of AdamW's (`match_rms_adamw`),
    # so learning rates and weight decays carry over. It keeps one number a weight where AdamW keeps
    # two. Choose it for large batches and long training. One optimizer, because Lightning,
    # schedules and checkpoints know one: its groups and its state are those of both.

    def __init__(
        self, groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float, fused: bool
    ) -> None:
        matrices = [group for group in groups if group[MATRICES]]
        others = [group for group in groups if not group[MATRICES]]
        muon: Any = torch.optim.Muon
        self._of_matrices: Optimizer = muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._of_others = AdamW(others, lr=lr, betas=betas, eps=eps, fused=fused)
        super().__init__([*self._of_matrices.param_groups, *self._of_others.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both steps; neither where `found_inf` says that the gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        # waits for a GPU: Muon cannot leave a step out there by itself
        if found_inf is not None and bool(found_inf):
            return loss
        for optimizer, is_theirs in ((self._of_matrices, True), (self._of_others, False)):
            optimizer.param_groups = [
                group for group in self.param_groups if group[MATRICES] == is_theirs
            ]
            optimizer.state = self.state
            if optimizer.param_groups:
                optimizer.step()
        return loss


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


class StepSchedule(LRScheduler):
    """Sets every group's rate to `rate_at(step)` times the group's `lr_share`; its whole state is
    one number.
    """

    def __init__(self, optimizer: Optimizer, rate_at: Callable[[int], float]) -> None:
        self.rate_at = rate_at
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        rate = self.rate_at(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_share"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"] - 1
        self.step()


class WeightAverage:
    """A running mean of all that training changes in a model (weights, statistics); it often
    answers better.
    """

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        will_thaw = contract(model).unfreeze_epochs > 0
        kept = model.state_dict().keys()  # of running statistics those that a checkpoint has
        weights = {
            name: each for name, each in model.named_parameters() if each.requires_grad or will_thaw
        }
        buffers = {
            name: each
            for name, each in model.named_buffers()
            if name in kept and each.is_floating_point()
        }
        self._weights: dict[str, Tensor] = {**weights, **buffers}
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}
        # whether the mean stands in the model's place and the weights aside
        self.is_in_model = False

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Move towards the weights that step `step`, counted from 0, has left."""
        memory = min(self.memory, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._means.values()), list(self._weights.values()), 1 - memory)

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the mean into the model and keep the weights aside; the second time, the other way
        round.
        """
        self.is_in_model = not self.is_in_model
        for name, weight in self._weights.items():
            kept = weight.clone()
            weight.copy_(self._means[name])
            self._means[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole means, also where each rank follows its slices; all ranks must ask at once."""
        return {name: whole(mean) for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in state.items():
            if name in self._means:  # earlier versions kept what is frozen, too
                self._means[name].copy_(share_of(mean, self._means[name]))


def clip_gradients(parameters: list[nn.Parameter], longest: float) -> Tensor:
    """Shorten the gradient to `longest` where it is longer; its length before, still on
    the device.
    """
    return whole(nn.utils.clip_grad_norm_(parameters, longest, foreach=True))


def clip_divisor(norm: Tensor, longest: float) -> Tensor:
    """What clipping to `longest` divides a gradient of this length by, on its device; 1 where it is
    short enough.
    """
    return ((norm + _LEAST) / longest).clamp_min(1.0)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads `grad_scale` and `found_inf`, and divides or leaves out a step by
    itself.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def gradient_is_finite(parameters: list[nn.Parameter]) -> bool:
    """Whether the gradient has no number that is none; waits for the device."""
    # one number to wait for, of all ranks
    if parameters and (is_share(parameters[0]) or not parameters[0].is_cpu):
        return math.isfinite(gradient_length(parameters))
    # On a CPU a sum for each weight is quicker than a length; it is not finite where any of its
    # parts is not.
    return all(math.isfinite(weight.grad.sum()) for weight in parameters if weight.grad is not None)


def gradient_length(parameters: list[nn.Parameter]) -> Tensor:
    """The length of the whole gradient, still on the device."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    is_plain = all(type(each) is Tensor and each.is_cpu for each in gradients)
    if is_plain and len({each.dtype for each in gradients}) == 1:
        # then torch's own function, which groups them first, computes just this
        with torch.no_grad():
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return whole(nn.utils.get_total_norm(gradients, foreach=True))

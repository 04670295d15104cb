"""Muon for the matrices of an encoder's layers, AdamW for all other weights, as one optimizer.

Muon (Jordan and others, 2024) moves a weight matrix along the orthogonal matrix that is nearest to
the momentum of its gradient. It keeps one number for each weight where AdamW keeps two. Choose it
by `optim.name=muon` for large batches and long training. `OptimConfig.build` decides which weights
it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

Group = dict[str, Any]
"""A parameter group of torch: its `params`, and the settings that they share."""
MATRICES = "is_matrices"
"""The key of a group that says whether Muon steps its weights."""


class MuonAndAdamW(Optimizer):
    """Steps groups that are marked by `MATRICES` with Muon, and all others with AdamW.

    It is one optimizer to Lightning, schedules and checkpoints, which know one: its groups and its
    state are those of both.
    """

    def __init__(
        self, groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float, fused: bool
    ) -> None:
        matrix_groups = [group for group in groups if group[MATRICES]]
        other_groups = [group for group in groups if not group[MATRICES]]
        # torch before 2.9 has no Muon, so a type checker must not look for it
        muon: Any = torch.optim.Muon
        # `match_rms_adamw` scales Muon's steps to the length of AdamW's, so that learning rates and
        # weight decays that are right for AdamW are right here.
        self._muon: Optimizer = muon(matrix_groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(other_groups, lr=lr, betas=betas, eps=eps, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers, or none of them where `found_inf` says so.

        `found_inf` is an attribute that the fast loop sets: 1 where the gradient is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        # Reading it waits for a GPU. AdamW could leave its step out on the device; Muon cannot.
        if found_inf is not None and bool(found_inf):
            return loss
        for optimizer, steps_matrices in ((self._muon, True), (self._adamw, False)):
            # Read from here each time: a schedule changes the groups, a checkpoint replaces the
            # state, and layers that thaw add groups.
            optimizer.param_groups = [
                group for group in self.param_groups if group[MATRICES] == steps_matrices
            ]
            optimizer.state = self.state
            if optimizer.param_groups:
                optimizer.step()
        return loss

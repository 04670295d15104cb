"""Muon for the matrices of an encoder, AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

Group = dict[str, Any]
MATRICES = "is_matrices"  # marks the groups of weights that Muon steps


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

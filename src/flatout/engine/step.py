"""One optimizer step, from its batches to the new weights. It holds no loop.

    add_gradients(batch): forward, backward    for each batch of the step
    update(): clip, check, update              once, after the last batch
    run_at_once(batch): all of it              for a step that is captured (`step_graph.py`)

`LightningSide` runs the module, with what Lightning wants around it. `clipping.py` computes norms;
`StepLosses` keeps a loss and a norm a step, and decides what happens where one is not finite.

After out-of-memory the step is undone: its gradients are dropped, random state and running
statistics restored. Then each batch is cut into twice as many pieces, now and in all later steps
(`pieces.py`). Losses are divided by the rows of the whole step, so the gradients of the pieces add
up to the same. On several ranks, one rank repeats while the others wait for its gradients. Once DDP
has begun to exchange them, a repeat would send some twice: then the run ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.clipping import (
    clip_divisor,
    clip_gradients,
    gradient_is_finite,
    gradient_norm,
    is_fused,
)
from flatout.engine.device_rates import DeviceRates
from flatout.engine.lightning_side import LightningSide
from flatout.engine.pieces import (
    TRAINING,
    CatchOutOfMemory,
    Pieces,
    running_statistics,
    update_first,
)
from flatout.engine.step_losses import StepLosses
from flatout.engine.step_start import StepStart
from flatout.models.lean import LeanEmbedding

Edge = Callable[[int], float]
"""The clock of a batch: `edge(1)` ends a forward pass. See `FastLoop.edge`."""


class Step:
    """Takes the optimizer steps of one training, one after the other."""

    def __init__(
        self,
        side: LightningSide,
        pieces: Pieces,
        losses: StepLosses,
        embeddings: list[LeanEmbedding],
        *,
        checks_on_host: bool,
    ) -> None:
        """`embeddings`: those that keep a gradient of their own, which autograd never sees.

        `checks_on_host`: whether the host decides before each update if a gradient is finite.
        """
        self.side = side
        self.module = side.module
        self.optimizer = side.optimizer
        self.pieces = pieces
        self.losses = losses
        self.embeddings = embeddings
        # Another optimizer cannot be told by the device to leave a step out.
        self.decides_on_host = checks_on_host or not is_fused(self.optimizer)
        self.weights: list[nn.Parameter] = []
        """Those that the optimizer trains in this step."""
        self.rates: DeviceRates | None = None
        """Where the optimizer reads its rates, if steps may be captured; None: from its groups."""
        self._batches: list[Any] = []  # of the step that is running
        self._piece_losses: list[Tensor] = []  # one a piece, of the step that is running
        # A walk over all modules takes longer than copies of the statistics: it is done once.
        self._start = StepStart(self.module.device, running_statistics(self.module))
        self._is_running = False
        self._is_updating = False
        self.is_at_once = False  # whether a captured step is taken, or tried
        # Whether a backward pass runs in which ranks exchange gradients.
        self._is_exchanging = False

    def is_partial(self) -> bool:
        """Whether a step that did not end has changed weights or running statistics."""
        # Weights change in the update; running means of batch norms already in the forward pass.
        has_moved_statistics = self._is_running and self._start.has_statistics
        return self._is_updating or self.is_at_once or has_moved_statistics

    def add_gradients(self, batch: Any, *, ends_step: bool, edge: Edge) -> float:
        """Add the gradients and the loss of the step's next batch.

        Returns the host seconds of its forward passes.
        """
        if not self._batches:
            self._begin()
        # A repeat drops the gradients of the step's earlier batches too, so it needs all of them.
        self._batches.append(batch)
        with CatchOutOfMemory() as caught:
            return self._run_pieces(batch, ends_step, edge)
        return self._repeat(caught.message, ends_step, edge)

    def update(self) -> None:
        """Change the weights by the gradients that the step's batches have added."""
        with self.losses.of_step(self._take_loss()):
            # In each step, as callbacks that unfreeze layers add groups to the optimizer.
            groups = self.optimizer.param_groups
            self.weights = [weight for group in groups for weight in group["params"]]
            if self.side.has_several_ranks:
                for embedding in self.embeddings:
                    embedding.exchange()
            may_update = self._clip_and_check()
            self._is_updating = True
            if may_update and not self.optimizer.state:
                may_repeat = self.side.scaler is None
                update_first(self._update, self.weights, self.optimizer, may_repeat=may_repeat)
            elif may_update:
                self._update()
            self.side.end_step()
            self._is_updating = False
        self._is_running = False

    def run_at_once(self, batch: object) -> tuple[dict[str, Any], Tensor]:
        """All that a step of one batch asks of the device; its outputs and its gradient's norm.

        It reads no random state, counts nothing, and cannot be repeated; `finish` does the rest.
        """
        with self.losses.of_step(None):
            loss = self.side.forward(batch)
            assert loss is not None
            self.optimizer.zero_grad()
            self.side.backward(loss, ends_step=True)
            self._clip_and_check()
            self._update()
            return self.side.take_outputs(), self.losses.norms.pop()

    def finish(self, loss: Tensor, norm: Tensor, *, follows: bool = True) -> None:
        """Note and count a step that a replay has taken; `follows`: the module has to follow it."""
        self.losses.values.append(loss)
        self.losses.norms.append(norm)
        self.side.end_step(follows=follows)
        self.is_at_once = False

    def _begin(self) -> None:
        self._is_running = True
        self._start.keep()
        self.side.begin_step()

    def _run_pieces(self, batch: Any, ends_step: bool, edge: Edge) -> float:
        """Forward and backward pass of each piece of a batch; the seconds of the forward passes."""
        side = self.side
        seconds = 0.0
        pieces = self.pieces.cut(batch, TRAINING)
        for number, piece in enumerate(pieces, 1):
            is_last = ends_step and number == len(pieces)
            began = time.perf_counter()
            # Both passes in one context: DDP decides in the forward pass whether the backward pass
            # exchanges gradients.
            with side.exchange_context(ends_step=is_last):
                loss = side.forward(piece)
                seconds += edge(1) - began
                if loss is None:
                    continue
                # In this pass gradients are sent to other ranks, which cannot be undone.
                self._is_exchanging = is_last
                side.backward(loss, ends_step=is_last)
                self._is_exchanging = False
            self._piece_losses.append(loss.detach())
        return seconds

    def _repeat(self, message: str, ends_step: bool, edge: Edge) -> float:
        """Run all batches of the step again in smaller pieces, until memory suffices.

        `message`: first words of the out-of-memory error. Returns seconds of the forward passes.
        """
        self.pieces.require_repeatable(TRAINING, self._batches, message)
        seconds = 0.0
        before = self.pieces.counts[TRAINING]
        while True:
            # Other ranks would receive some of this rank's gradients twice, and add them up.
            if self._is_exchanging and self.side.has_several_ranks:
                raise self.pieces.exchange_error(message)
            self.pieces.halve(TRAINING, self._batches, message)
            self._undo()
            with CatchOutOfMemory() as caught:
                # Earlier batches of the step did fit, but their gradients were dropped, too.
                for number, batch in enumerate(self._batches, 1):
                    is_last = ends_step and number == len(self._batches)
                    seconds += self._run_pieces(batch, is_last, edge)
                self.pieces.tell(TRAINING, before, message)
                return seconds
            message = caught.message

    def _undo(self) -> None:
        """Restore all that the step's passes have changed: gradients, random state, statistics."""
        self._piece_losses.clear()
        self._start.restore()
        self.optimizer.zero_grad()
        self.side.undo_step()
        self._is_exchanging = False

    def _take_loss(self) -> Tensor | None:
        """The mean loss of the step whose batches have all passed; None if none gave a loss."""
        losses = self._piece_losses
        loss: Tensor | None = None
        if len(losses) == 1:
            loss = losses[0]
        elif losses:
            # Each was divided by the rows of the whole step, so their sum is the mean over rows.
            loss = torch.stack(losses).sum()
        losses.clear()
        self._batches.clear()
        return loss

    # Clip, check, update.

    def _clip_and_check(self) -> bool:
        """Clip the gradient; False if the host knows that the step must be left out.

        A fused optimizer on a GPU decides it on the device: then this is True.
        """
        # With fp16 the scaler leaves such steps out. Gradients still contain its factor here.
        if self.side.scaler is not None:
            return True
        self.side.call_hooks("on_before_optimizer_step", self.optimizer)
        norm = self._clip()
        if self.decides_on_host:
            is_finite = gradient_is_finite(self.weights) if norm is None else math.isfinite(norm)
            return self.losses.accept(self.side.trainer.global_step, is_finite=is_finite)
        if norm is None:
            norm = gradient_norm(self.weights)
            self.losses.norms.append(norm)
            self.losses.flag_broken(norm, math.inf)
        # A fused optimizer leaves the step out where this number on the device is 1. With
        # not_finite=stop it then stays 1, so no later step changes a weight either. The host waits
        # for nothing; the next `take_losses` finds which step it was.
        vars(self.optimizer)["found_inf"] = self.losses.broken
        return True

    def _clip(self) -> Tensor | None:
        """Clip as the Trainer's arguments say; on a GPU, flag a gradient that is not finite.

        Returns the gradient's norm before clipping, or None if it was not computed: no clipping, or
        clipping by value or by the module's own `configure_gradient_clipping`.
        """
        if self.side.clips_in_its_own_way():
            self.side.clip()
            return None
        longest = self.side.longest_gradient
        if not longest:
            return None
        # A fused optimizer divides gradients by `grad_scale` as it reads them, which saves a pass
        # over memory. Sharded gradients need a norm over all ranks.
        divides = is_fused(self.optimizer) and not self.side.is_sharded
        norm = gradient_norm(self.weights) if divides else clip_gradients(self.weights, longest)
        self.losses.norms.append(norm)
        divisor: Tensor | None = None
        if not self.decides_on_host:
            divisor = self.losses.flag_broken(norm, longest)
        elif divides:
            divisor = clip_divisor(norm, longest)
        if divides:
            vars(self.optimizer)["grad_scale"] = divisor
        return norm

    def _update(self) -> None:
        with nullcontext() if self.rates is None else self.rates.in_groups():
            self._update_weights()

    def _update_weights(self) -> None:
        if self.side.scaler is None:
            self.optimizer.step()
            # A fused optimizer reads both in each step. Those of this step are not the next one's.
            for name in ("grad_scale", "found_inf"):
                vars(self.optimizer).pop(name, None)
        elif is_fused(self.optimizer):
            self._update_scaled(self.side.scaler)
        else:
            # Lightning's precision plugin unscales, clips, and may leave the step out.
            self.side.update_by_plugin(self.losses.values[-1])

    def _update_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Update with fp16: the fused optimizer unscales, clips, and leaves a broken step out.

        The optimizer reads scale, clipping and `found_inf` on the device, so the host never waits.
        """
        scale = scaler.scale(torch.ones((), device=self.module.device))
        if self.side.has_hook("on_before_optimizer_step"):
            # The hook has to see gradients without the scaler's factor.
            scaler.unscale_(self.optimizer)
            scale = torch.ones_like(scale)
            self.side.call_hooks("on_before_optimizer_step", self.optimizer)
        norm = gradient_norm(self.weights) / scale
        self.losses.norms.append(norm)
        longest = self.side.longest_gradient
        divisor = clip_divisor(norm, longest) if longest else torch.ones_like(norm)
        vars(self.optimizer)["grad_scale"] = divisor
        scaler.step(self.optimizer)
        scaler.update()

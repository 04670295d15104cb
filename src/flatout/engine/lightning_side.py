"""Lightning's side of an optimizer step: hooks, contexts and counters around each of its passes.

`Step` computes; whatever Lightning or its strategy wants to be asked on the way is here, in the
order of Lightning's own loop. The hooks of a step are called only where the module or a callback
overrides them. Those around the backward pass are called here only if `loss.backward()` is all that
the backward pass needs; else Lightning's strategy calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flatout.distributed.both_lightnings import either
from flatout.distributed.collectives import are_several
from flatout.engine import lightning_internals as internals

_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")
_STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *_ZERO_GRAD_HOOKS,
)


class LightningSide:
    """What a step asks of one training in Lightning's Trainer."""

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        optimization: internals.PluggedOptimization,
        watching: list[Callback],
    ) -> None:
        """`watching`: callbacks whose hooks are called in a step."""
        self.trainer = trainer
        self.module = module
        self.optimizer: Optimizer = trainer.optimizers[0]
        self._optimization = optimization
        self._strategy: Any = trainer.strategy
        self.scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
        """Multiplies losses with fp16; None otherwise."""
        self.has_several_ranks = are_several()
        self.is_sharded = bool(getattr(module, "is_sharded", False))
        self._is_ddp = isinstance(getattr(self._strategy, "model", None), DistributedDataParallel)
        self._calls_backward_itself = (
            isinstance(self._strategy, either(SingleDeviceStrategy))
            and self.scaler is None
            and not internals.overrides(module, "backward", L.LightningModule)
        )
        self._module_clips = internals.overrides(
            module, "configure_gradient_clipping", L.LightningModule
        )
        self._after_optimizer_step = getattr(module, "after_optimizer_step", None)
        self.hooks = internals.overridden_hooks(_STEP_HOOKS, module, watching)
        # Lightning drops gradients between the forward and the backward pass. Tasks of flatout
        # never read old gradients, so theirs are dropped before the forward pass. Memory use peaks
        # at the end of the forward pass; there it saves four bytes a weight.
        is_of_flatout = type(module).__module__.startswith("flatout.")
        self._zeroes_before_forward = is_of_flatout and not self.has_hook("on_before_zero_grad")
        # Of the batch that is running: the arguments of `training_step` after the batch, and what
        # Lightning hands on of its answer for the last piece.
        self._other_arguments: tuple[Any, ...] = ()
        self._batch_idx = 0
        self._must_zero_gradients = False
        self._outputs: dict[str, Any] = {}
        self._one: Tensor | None = None  # see `_root_gradient`

    @property
    def longest_gradient(self) -> float:
        """The Trainer's `gradient_clip_val`; 0: any length."""
        return float(self.trainer.gradient_clip_val or 0.0)

    def has_hook(self, name: str) -> bool:
        return name in self.hooks

    def call_hooks(self, name: str, *arguments: Any) -> None:
        if name in self.hooks:
            internals.call_hooks(self.trainer, name, *arguments)

    def begin_batch(self, arguments: tuple[Any, ...], batch_idx: int) -> bool:
        """Count a batch, as Lightning does; whether it is the last of its step.

        `arguments`: those of `training_step`.
        """
        self._other_arguments = arguments[1:]
        self._batch_idx = batch_idx
        # Batches of flatout's feeds have it. Asking Lightning takes longer.
        ends_step: bool | None = getattr(arguments[0], "ends_step", None)
        if ends_step is None:
            ends_step = internals.ends_optimizer_step(self.trainer)
        if ends_step:  # Lightning counts it before the forward pass, too
            self._optimization.usual.optim_progress.optimizer.step.increment_ready()
        self._must_zero_gradients = batch_idx % self.trainer.accumulate_grad_batches == 0
        if self._zeroes_before_forward:
            self.zero_gradients()
        return ends_step

    def run_passes(self, passes: Callable[[], float]) -> float:
        """Run the passes of a batch, with DDP inside one forward of it."""
        if self._is_ddp:
            return internals.run_inside_ddp(self._strategy, self.module, passes)
        return passes()

    def take_outputs(self) -> dict[str, Any]:
        """What Lightning hands on as the outputs of the batch."""
        outputs = self._outputs
        self._outputs = {}
        return outputs

    def begin_step(self) -> None:
        if (begin := getattr(self.module, "begin_step", None)) is not None:
            begin()

    def undo_step(self) -> None:
        """Let the module go back to where the step began: its passes are repeated."""
        if (reset := getattr(self.module, "reset_step", None)) is not None:
            reset()

    def forward(self, batch: Any) -> Tensor | None:
        """Run `training_step` on a batch or a piece of one; None if it returns no loss.

        The loss is divided by the number of batches in an optimizer step, as Lightning does.
        """
        arguments = (batch, *self._other_arguments)
        result = internals.run_training_step(self.trainer, arguments, is_inside_ddp=self._is_ddp)
        # Not the loss itself: as long as it lives, so do its graph and all activations.
        self._outputs = {} if result.loss is None else result.asdict()
        # After `training_step`, as in Lightning's loop: gradients that it has added by a `backward`
        # of its own are dropped, too.
        self.zero_gradients()
        return result.closure_loss

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add the gradients of one piece of a step; after its last piece, ranks exchange them."""
        if self._calls_backward_itself:
            self.call_hooks("on_before_backward", loss)
            loss.backward(self._root_gradient(loss))
            self.call_hooks("on_after_backward")
            return
        # DDP prepares for the exchange at the end of its forward pass. Here the backward pass runs
        # within DDP's forward pass, so prepare by hand.
        if self._is_ddp and ends_step:
            internals.prepare_for_backward(self._strategy.model, loss)
        self._strategy.backward(loss, self.optimizer)

    def exchange_context(self, *, ends_step: bool) -> AbstractContextManager[object]:
        """Context manager for one piece's forward and backward pass.

        Ranks exchange gradients in it only if the piece is the last one of its step.
        """
        block = getattr(self._strategy, "block_backward_sync", None)
        if ends_step or not self.has_several_ranks or block is None:
            return nullcontext()
        return cast("AbstractContextManager[object]", block())

    def clips_in_its_own_way(self) -> bool:
        """Whether gradients are clipped by the module's own method, or by value."""
        is_by_length = str(self.trainer.gradient_clip_algorithm or "norm") == "norm"
        return self._module_clips or (self.longest_gradient > 0 and not is_by_length)

    def clip(self) -> None:
        """Clip as the module does it, by its own or by Lightning's method."""
        trainer = self.trainer
        internals.call_module_hook(
            trainer,
            "configure_gradient_clipping",
            self.optimizer,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
        )

    def update_by_plugin(self, loss: Tensor) -> None:
        """Take the update as Lightning's precision plugin does."""
        self._strategy.optimizer_step(self.optimizer, closure=lambda: loss)

    def end_step(self, *, follows: bool = True) -> None:
        """Count the step, and let the module follow it, unless it has."""
        self.zero_gradients()  # a replay has dropped them, but did not count it
        self._optimization.usual.optim_progress.optimizer.step.increment_completed()
        if self._after_optimizer_step is not None and follows:
            self._after_optimizer_step()

    def _root_gradient(self, loss: Tensor) -> Tensor | None:
        """The gradient of a loss by itself, 1, which torch would make in each backward pass.

        None where the loss is no single number: torch decides about such ones.
        """
        if loss.dim():
            return None
        if self._one is None or self._one.dtype is not loss.dtype:
            self._one = torch.ones_like(loss)
        return self._one

    def zero_gradients(self) -> None:
        """Drop all gradients and count it, as Lightning does, unless this step has done it."""
        if self._must_zero_gradients:
            self._must_zero_gradients = False
            hooked = not self.hooks.isdisjoint(_ZERO_GRAD_HOOKS)
            self._optimization.zero_gradients(self.optimizer, self._batch_idx, are_hooked=hooked)

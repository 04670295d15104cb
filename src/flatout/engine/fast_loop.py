"""The fast loop: an optimizer step without closures, profiling contexts and device syncs, in
Lightning's own Trainer.

Add `Trainer(callbacks=[FastLoop()])`. It trains a LightningModule with automatic optimisation and
one optimizer of torch, on one device, with DDP or with FSDP. Gradients, hooks and counters equal
those of Lightning's loop. It adds a guard against losses that are not finite (`step_losses.py`),
and repeats a step in smaller pieces after out-of-memory (`passes.py`).

How a batch goes through, from `_run_batch`:

    edge 0 | passes.train: forward, backward | edge 2 | _take_step: clip, check, update | edge 3

Lightning's own loop trains where this one could compute something else: a module that overrides
`optimizer_step`, an optimizer that may ask for the loss again, a strategy or precision of another
package. One printed line says so. Lightning's loop also takes the steps of learning rate and batch
size finders, which train before the training begins.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from flatout.distributed.collectives import are_several
from flatout.engine import lightning_internals as internals
from flatout.engine.clipping import (
    clip_divisor,
    clip_gradients,
    gradient_is_finite,
    gradient_length,
    is_fused,
)
from flatout.engine.passes import BATCH_NORMS, CatchOutOfMemory, Passes, give_back_memory
from flatout.engine.step_losses import NotFinite, StepLosses
from flatout.errors import UserError
from flatout.models.lean import LeanEmbedding

_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")
# Hooks of a step. The fast loop calls those that the module or a callback overrides.
_STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *_ZERO_GRAD_HOOKS,
)
# Lightning's strategies and precisions that step as the fast loop does.
_LIGHTNING_PARTS = (
    SingleDeviceStrategy,
    DDPStrategy,
    MixedPrecision,
    HalfPrecision,
    DoublePrecision,
    Precision,
)
# If another package's strategy or precision overrides one of these, its steps may differ.
_METHODS_OF_A_STEP = (
    "training_step",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "clip_gradients",
)


def fast_loop_of(trainer: L.Trainer) -> FastLoop | None:
    """The fast loop among a trainer's callbacks; None if it has none."""
    for callback in internals.callbacks_of(trainer):
        if isinstance(callback, FastLoop):
            return callback
    return None


class FastLoop(Callback):
    """Takes optimizer steps in place of Lightning's automatic optimisation.

    `not_finite`: stop the training at a loss or gradient that is not finite, or skip that step.
    """

    def __init__(self, *, not_finite: NotFinite = NotFinite.stop) -> None:
        self.phase_s = dict.fromkeys(internals.PHASES, 0.0)
        """Host seconds in each phase: exact on a CPU, the time to enqueue the work elsewhere."""
        self.losses = StepLosses(not_finite)
        self.passes = Passes(self)
        self.checks_on_host = True
        """Whether the host checks each gradient on a CPU before the update. Set it to False to test
        on a CPU how a GPU does it: the optimizer leaves the step out, the host learns of it later.
        """
        # Learning rate of the last step. The optimizer already has that of the next one.
        self.last_lr = 0.0
        # Whether this loop takes the steps of the training, and not Lightning's.
        self.is_active = False
        # One device, no gradient scaler, no `backward` of the module: `loss.backward()` is all.
        self._calls_backward_itself = False
        # Whether losses are multiplied by a gradient scaler (fp16).
        self.is_scaled = False
        self.has_several_ranks = False
        self._is_ddp = False
        self._is_updating = False
        self._is_in_step = False
        self._must_zero_gradients = False
        # Arguments of `training_step`, of the batch that is running; the batch is the first.
        self._arguments: tuple[Any, ...] = ()
        # Names of the step hooks that the module or a callback overrides. Those around the backward
        # pass are called here only if `_calls_backward_itself`; else Lightning's strategy does it.
        self._overridden_hooks: set[str] = set()
        self._lean_embeddings: list[LeanEmbedding] = []
        self._trained_weights: list[nn.Parameter] = []
        self.optimizer: Optimizer | None = None
        # What the training step of the last piece has returned.
        self._closure_result: ClosureResult | None = None

    @property
    def skipped(self) -> list[int]:
        """Steps, counted from 0, that were left out because their gradient was not finite."""
        return self.losses.skipped

    def take_losses(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the steps since the last call, in one transfer from the
        device.
        """
        return self.losses.take(self.trainer.global_step, is_scaled=self.is_scaled)

    def edge(self, number: int) -> float:
        """The host's clock at an edge of a batch: 0 begins it; 1, 2, 3 end forward, backward, and
        the optimizer.

        `StepTimer` replaces this method on a GPU by one that also records an event.
        """
        return time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.last_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_lr = state_dict["rate"]

    def position_state(self) -> dict[str, Any]:
        """For a checkpoint: losses not reported yet, and into how many pieces batches are cut."""
        if not self.is_active:
            return {}
        return {**self.losses.state(), "pieces": dict(self.passes.pieces)}

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        """Restore `position_state`, of which `of_ranks` has one entry a rank.

        If the number of ranks is another now, each takes the mean losses of all ranks and the
        largest number of pieces.
        """
        if "losses" in of_ranks[0]:  # not if Lightning's own loop wrote the checkpoint
            is_same_world = len(of_ranks) == self.trainer.world_size
            self.losses.load(of_ranks, rank, is_same_world=is_same_world)
            self.passes.load_pieces(of_ranks, rank, is_same_world=is_same_world)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.trainer, self.module = trainer, pl_module
        if stage == "fit":
            self.optimizer = None
            self.is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
            self._set_active(_reason_against_module(trainer, pl_module))
            # A training that an error ended has not released them.
            self._release_embedding_gradients()
            self._set_up_embedding_gradients()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_active:
            self._set_active(_reason_against_optimizer(trainer))
        self._optimization = None
        if self.is_active:
            # Only now: between `setup` and here other callbacks (a batch size finder) may train, in
            # Lightning's loop.
            self._optimization = internals.plug_optimization(
                trainer, self._takes_batches_of, self._run_batch
            )
        if self._optimization is None:
            self._stop(trainer, pl_module)
            return
        strategy = trainer.strategy
        self.optimizer = trainer.optimizers[0]
        has_own_backward = internals.overrides(pl_module, "backward", L.LightningModule)
        self._calls_backward_itself = (
            isinstance(strategy, SingleDeviceStrategy)
            and not self.is_scaled
            and not has_own_backward
        )
        self._is_on_cpu = pl_module.device.type == "cpu"
        self._is_ddp = isinstance(getattr(strategy, "model", None), DistributedDataParallel)
        self.has_several_ranks = are_several()
        self.is_sharded = bool(getattr(pl_module, "is_sharded", False))
        self._clips_gradients = not internals.overrides(
            pl_module, "configure_gradient_clipping", L.LightningModule
        )
        self._after_optimizer_step = getattr(pl_module, "after_optimizer_step", None)
        self._overridden_hooks = self._find_overridden_hooks()
        # Lightning drops gradients between the forward and the backward pass. Tasks of flatout
        # never read old gradients, so theirs are dropped before the forward pass. Memory use peaks
        # at the end of the forward pass; there it saves four bytes a weight.
        is_of_flatout = type(pl_module).__module__.startswith("flatout.")
        self._zeroes_before_forward = (
            is_of_flatout and "on_before_zero_grad" not in self._overridden_hooks
        )
        # A checkpoint restores losses on the host; they are stacked with later ones on the device.
        self.losses.to(pl_module.device)
        self.passes.begin_training()
        if self.has_several_ranks:
            # Each rank draws its own dropout.
            torch.manual_seed(torch.initial_seed() + dist.get_rank())
            for embedding in self._lean_embeddings:
                # All ranks start with rank 0's weights. DDP does this for the weights it knows.
                dist.broadcast(embedding.weight.detach(), 0)

    def _find_overridden_hooks(self) -> set[str]:
        """Names of the step hooks that the module or a callback other than this one overrides."""
        hooks = set[str]()
        for name in _STEP_HOOKS:
            if internals.overrides(self.module, name, L.LightningModule):
                hooks.add(name)
            for callback in internals.callbacks_of(self.trainer):
                if callback is not self and internals.overrides(callback, name, Callback):
                    hooks.add(name)
        return hooks

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # `is_active` stays: before the last checkpoint is saved, `is_state_partial` is asked.
        internals.unplug_optimization(trainer)

    def _set_active(self, reason_against: str) -> None:
        if reason_against:
            print(f"fast loop: off, {reason_against}; Lightning's own loop trains")
        self.is_active = not reason_against
        _mark_module(self.module, self.is_active)

    def _stop(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        internals.unplug_optimization(trainer)
        self._release_embedding_gradients()
        self.is_active = False
        self.optimizer = None
        _mark_module(module, False)

    def _takes_batches_of(self, optimizer: Optimizer) -> bool:
        """Whether a batch belongs to the training that this loop has begun.

        A batch size or learning rate finder trains with other callbacks or another optimizer.
        """
        return optimizer is self.optimizer and any(
            callback is self for callback in internals.callbacks_of(self.trainer)
        )

    def forward(self, batch: Any) -> Tensor | None:
        """Run `training_step` on a batch or a piece of one; None if it returns no loss.

        The loss is divided by the number of batches in an optimizer step, as Lightning does.
        """
        arguments = (batch, *self._arguments[1:])
        result = internals.run_training_step(self.trainer, arguments, is_inside_ddp=self._is_ddp)
        self._closure_result = result
        # After `training_step`, as in Lightning's loop: gradients that it has added by a `backward`
        # of its own are dropped, too.
        if self._must_zero_gradients:
            self._zero_gradients()
        return result.closure_loss

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add the gradients of one piece of a step; after its last piece, ranks exchange them."""
        if self._calls_backward_itself:
            self._call_hooks("on_before_backward", loss)
            loss.backward()
            self._call_hooks("on_after_backward")
            return
        strategy: Any = self.trainer.strategy
        # DDP prepares for the exchange at the end of its forward pass. Here the backward pass runs
        # within DDP's forward pass, so prepare by hand.
        if self._is_ddp and ends_step:
            internals.prepare_for_backward(strategy.model, loss)
        strategy.backward(loss, self.optimizer)

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        if name in self._overridden_hooks:
            internals.call_hooks(self.trainer, name, *arguments)

    def _zero_gradients(self) -> None:
        assert self._optimization is not None and self.optimizer is not None
        self._must_zero_gradients = False
        are_hooked = not self._overridden_hooks.isdisjoint(_ZERO_GRAD_HOOKS)
        self._optimization.zero_gradients(self.optimizer, self._batch_idx, are_hooked=are_hooked)

    def exchange_context(self, *, ends_step: bool) -> Any:
        """Context manager for one piece's forward and backward pass.

        Ranks exchange gradients in it only if the piece is the last one of its step.
        """
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        if ends_step or not self.has_several_ranks or block is None:
            return nullcontext()
        return block()

    def is_state_partial(self) -> bool:
        """Whether a step that did not end has changed weights or running statistics.

        Such a state lies between two steps; a checkpoint of it could not be resumed.
        """
        # Weights change in the update; running means of batch norms already in the forward pass.
        has_statistics = any(isinstance(layer, BATCH_NORMS) for layer in self.module.modules())
        return self._is_updating or (self._is_in_step and has_statistics)

    def _run_batch(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Train on one batch; take the optimizer step if it is the step's last batch.

        Stands for `run` of Lightning's automatic optimisation: same arguments, same result.
        """
        edge = self.edge
        # An edge never waits for the device: it is an event or the host's clock (see `edge`).
        started = edge(0)
        self._is_in_step = True
        self._batch_idx = batch_idx
        self._arguments = tuple(kwargs.values())
        batch = self._arguments[0]
        # Batches of flatout's feeds have it. Asking Lightning takes longer.
        ends_step = getattr(batch, "ends_step", None)
        if ends_step is None:
            ends_step = internals.ends_optimizer_step(self.trainer)
        assert self._optimization is not None
        progress = self._optimization.optim_progress.optimizer.step
        if ends_step:  # Lightning counts it before the forward pass, too
            progress.increment_ready()
        self._must_zero_gradients = batch_idx % self.trainer.accumulate_grad_batches == 0
        if self._must_zero_gradients and self._zeroes_before_forward:
            self._zero_gradients()
        if self._is_ddp:
            passes = partial(self.passes.train, batch, ends_step=ends_step)
            forward_s = internals.run_inside_ddp(self.trainer.strategy, self.module, passes)
        else:
            forward_s = self.passes.train(batch, ends_step=ends_step)
        backwarded = edge(2)
        if ends_step:
            with self.losses.of_step(self.passes.end_step()):
                self._take_step(optimizer, progress)
            self._is_in_step = False
            # Every rank gets here after each step, so all of them join this collective.
            if self.has_several_ranks:
                self.passes.agree_on_pieces()
        phase_s = self.phase_s
        phase_s["forward"] += forward_s
        phase_s["backward"] += backwarded - started - forward_s
        phase_s["optimizer"] += edge(3) - backwarded
        # Not kept: as long as a loss lives, so do its graph and autograd's nodes of the first step.
        result = self._closure_result
        self._closure_result = None
        return {} if result is None or result.loss is None else result.asdict()

    def _take_step(self, optimizer: Optimizer, progress: Any) -> None:
        """Clip, check and apply the gradients; `progress` is Lightning's counter of steps."""
        self.last_lr = optimizer.param_groups[0]["lr"]
        # In each step, as callbacks that unfreeze layers add groups to the optimizer.
        self._trained_weights = [
            weight for group in optimizer.param_groups for weight in group["params"]
        ]
        if self.has_several_ranks:
            for embedding in self._lean_embeddings:
                embedding.exchange()
        may_update = self._clip_and_check(optimizer)
        self._is_updating = True
        if may_update and not optimizer.state:
            self._update_first(optimizer)
        elif may_update:
            self._update(optimizer)
        progress.increment_completed()
        if self._after_optimizer_step is not None:
            self._after_optimizer_step()
        self._is_updating = False

    def _update(self, optimizer: Optimizer) -> None:
        if self.is_scaled and is_fused(optimizer):
            self._update_scaled(optimizer)
        elif self.is_scaled:
            # Lightning's precision plugin unscales, clips, and may leave the step out.
            self.trainer.strategy.optimizer_step(optimizer, closure=lambda: self.losses.values[-1])
        else:
            optimizer.step()
            # A fused optimizer reads both in each step. Those of this step are not the next one's.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def _update_scaled(self, optimizer: Optimizer) -> None:
        """Update with fp16: the fused optimizer unscales, clips, and leaves a broken step out.

        The optimizer reads scale, clipping and `found_inf` on the device, so the host never waits.
        """
        scaler: Any = vars(self.trainer.precision_plugin)["scaler"]
        scale = scaler.scale(torch.ones((), device=self.module.device))
        if "on_before_optimizer_step" in self._overridden_hooks:
            # The hook has to see gradients without the scaler's factor.
            scaler.unscale_(optimizer)
            scale = torch.ones_like(scale)
            self._call_hooks("on_before_optimizer_step", optimizer)
        norm = gradient_length(self._trained_weights) / scale
        self.losses.norms.append(norm)
        longest = self.trainer.gradient_clip_val
        vars(optimizer)["grad_scale"] = (
            clip_divisor(norm, float(longest)) if longest else torch.ones_like(norm)
        )
        scaler.step(optimizer)
        scaler.update()

    def _update_first(self, optimizer: Optimizer) -> None:
        """Take the first step, in which the optimizer allocates its state.

        After out-of-memory it frees cached memory and tries once more. Smaller batches would not
        help: the state is as large as the weights, or twice.
        """
        # A second try is right only if the first has changed no weight. Each write to a tensor
        # raises its `_version`, so equal versions mean unchanged weights.
        before = [weight._version for weight in self._trained_weights]
        with CatchOutOfMemory() as caught:
            return self._update(optimizer)
        if self.is_scaled or before != [weight._version for weight in self._trained_weights]:
            raise _no_memory_for_state(caught.message)
        optimizer.state.clear()  # the first weights may have theirs already
        give_back_memory()
        with caught:
            return self._update(optimizer)
        raise _no_memory_for_state(caught.message)

    def _clip_and_check(self, optimizer: Optimizer) -> bool:
        """Clip the gradient; False if the host knows that the step must be left out.

        A fused optimizer on a GPU decides it on the device: then this is True.
        """
        # With fp16 the scaler leaves such steps out. Gradients still contain its factor here.
        if self.is_scaled:
            return True
        self._call_hooks("on_before_optimizer_step", optimizer)
        norm = self._clip(optimizer)
        losses = self.losses
        if (self.checks_on_host and self._is_on_cpu) or not is_fused(optimizer):
            is_finite = (
                math.isfinite(norm)
                if norm is not None
                else gradient_is_finite(self._trained_weights)
            )
            return losses.accept(self.trainer.global_step, is_finite=is_finite)
        if norm is None:
            norm = gradient_length(self._trained_weights)
            losses.norms.append(norm)
        # A fused optimizer leaves the step out where this number on the device is 1. With
        # not_finite=stop it then stays 1, so no later step changes a weight either. The host waits
        # for nothing; the next `take_losses` finds which step it was.
        vars(optimizer)["found_inf"] = losses.flag_broken(norm)
        return True

    def _clip(self, optimizer: Optimizer) -> Tensor | None:
        """Clip as the Trainer's arguments say.

        Returns the gradient's norm before clipping, or None if it was not computed: no clipping, or
        clipping by value or by the module's own `configure_gradient_clipping`.
        """
        trainer = self.trainer
        value = trainer.gradient_clip_val
        algorithm = trainer.gradient_clip_algorithm
        if not self._clips_gradients or (value and str(algorithm or "norm") != "norm"):
            internals.call_module_hook(
                trainer, "configure_gradient_clipping", optimizer, value, algorithm
            )
            return None
        if not value:
            return None
        # A fused optimizer divides gradients by `grad_scale` as it reads them, which saves a pass
        # over memory. Sharded gradients need a norm over all ranks.
        if is_fused(optimizer) and not self.is_sharded:
            norm = gradient_length(self._trained_weights)
            vars(optimizer)["grad_scale"] = clip_divisor(norm, float(value))
        else:
            norm = clip_gradients(self._trained_weights, float(value))
        self.losses.norms.append(norm)
        return norm

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """With fp16, note the gradient's norm here, where Lightning has just unscaled it."""
        if self.is_active and self.is_scaled and not is_fused(optimizer):
            self.losses.norms.append(gradient_length(self._trained_weights))

    def _set_up_embedding_gradients(self) -> None:
        """On a CPU, let each lean embedding reuse one gradient table in all steps.

        Autograd never sees these gradients, so DDP would wait for them for ever. DDP is set to
        ignore them; the embeddings exchange the rows that were used themselves.
        """
        strategy = self.trainer.strategy
        is_supported = self.is_active and isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
        embeddings = list[LeanEmbedding]()
        if is_supported and not self.is_scaled and strategy.root_device.type == "cpu":
            modules = self.module.modules()
            embeddings = [layer for layer in modules if isinstance(layer, LeanEmbedding)]
        tables = {id(embedding.weight) for embedding in embeddings}
        names = [name for name, weight in self.module.named_parameters() if id(weight) in tables]
        is_left_out = internals.leave_out_of_ddp(self.module, names)
        if isinstance(strategy, DDPStrategy) and not is_left_out:
            embeddings = []
        self._lean_embeddings[:] = embeddings
        for embedding in self._lean_embeddings:
            embedding.keeps_gradient = True

    def _release_embedding_gradients(self) -> None:
        for embedding in self._lean_embeddings:
            embedding.clear()
            embedding.keeps_gradient = False
            embedding.weight.grad = None
        self._lean_embeddings.clear()


def _mark_module(module: Any, is_active: bool) -> None:
    """Set the module's `is_in_fast_loop`, if it has one.

    A flatout task with it logs no loss itself and may use a fused optimizer.
    """
    if hasattr(type(module), "is_in_fast_loop"):
        module.is_in_fast_loop = is_active


def reason_against(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Why Lightning's own loop has to train; "" if the fast loop can.

    The trainer must have its optimizers already, as from `on_fit_start` on.
    """
    return _reason_against_module(trainer, module) or _reason_against_optimizer(trainer)


def _reason_against_module(trainer: L.Trainer, module: L.LightningModule) -> str:
    name = type(module).__name__
    base = L.LightningModule
    if not module.automatic_optimization:
        return f"{name} uses manual optimisation"
    if internals.overrides(module, "optimizer_step", base) and not hasattr(
        module, "after_optimizer_step"
    ):
        return f"{name} overrides optimizer_step"
    if internals.overrides(module, "optimizer_zero_grad", base):
        return f"{name} overrides optimizer_zero_grad"
    precision = trainer.precision_plugin
    strategy = trainer.strategy
    if not _steps_like_lightning(precision):
        return f"the precision {type(precision).__name__} computes in its own way"
    # `share_out` is a method of flatout's own FSDP strategy.
    is_supported = _steps_like_lightning(strategy) or hasattr(strategy, "share_out")
    return "" if is_supported else f"the strategy {type(strategy).__name__} steps in its own way"


def _steps_like_lightning(part: Strategy | Precision) -> bool:
    """Whether this is a class of Lightning, or a subclass that overrides no method of a step."""
    for base in _LIGHTNING_PARTS:
        if isinstance(part, base):
            return not any(internals.overrides(part, name, base) for name in _METHODS_OF_A_STEP)
    return False


def _reason_against_optimizer(trainer: L.Trainer) -> str:
    kind = type(trainer.optimizers[0])
    if kind.__name__ == "_MockOptimizer":  # Lightning's stand-in for no optimizer
        return "the module has no optimizer"
    # An optimizer that calls its closure twice (SAM, LBFGS) needs Lightning's closure. All others
    # of torch ignore it.
    needs_no_closure = (
        kind.step.__module__.startswith(("torch.optim.", "flatout.")) and kind is not LBFGS
    )
    return (
        ""
        if needs_no_closure
        else f"{kind.__name__} may want the loss computed again while it steps"
    )


def _no_memory_for_state(why: str) -> UserError:
    return UserError(
        "training",
        (
            "memory ran out in the first step of the optimizer, whose state is twice the weights"
            f" ({why})"
        ),
        hint=(
            "Freeze layers, train with model.lora.rank=8, or take a smaller model; smaller batches"
            " change little."
        ),
    )

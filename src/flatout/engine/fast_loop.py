"""The fast loop: an optimizer step without closures, profiling contexts and device syncs, in
Lightning's own Trainer.

`Trainer(callbacks=[FastLoop()])` is all there is to it. It serves a LightningModule with automatic
optimisation and one optimizer of torch, on one device, DDP or FSDP; gradients, hooks and counters
equal those of the ordinary loop. On top of it come a guard against losses that are not finite, and
a second try in smaller pieces after out-of-memory.

It takes the steps that it knows and no others. A module with an `optimizer_step` of its own, an
optimizer that may ask for the loss again, a strategy or precision of another package: they get
Lightning's own loop, and a line says so. So do steps that another callback takes in between, as
finders of rates and batch sizes do.
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
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
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
from flatout.engine.passes import BATCH_NORMS, Passes, ShortOfMemory, give_back_memory
from flatout.engine.step_losses import NotFinite, StepLosses
from flatout.errors import UserError
from flatout.models.lean import LeanEmbedding

_HOOKS_OF_ZERO = ("on_before_zero_grad", "optimizer_zero_grad")
_STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *_HOOKS_OF_ZERO,
)
_KNOWN = (
    SingleDeviceStrategy,
    DDPStrategy,
    MixedPrecision,
    HalfPrecision,
    DoublePrecision,
    Precision,
)
"""Strategies and precisions of Lightning whose steps are taken here."""
_OF_A_STEP = (
    "training_step",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "clip_gradients",
)


def fast_loop_of(trainer: L.Trainer) -> FastLoop | None:
    return next(
        (each for each in internals.callbacks_of(trainer) if isinstance(each, FastLoop)), None
    )


class FastLoop(Callback):
    """Takes optimizer steps in place of Lightning's automatic optimisation."""

    def __init__(self, *, not_finite: NotFinite = NotFinite.stop) -> None:
        self.phase_s = dict.fromkeys(internals.PHASES, 0.0)
        """Host seconds in each phase: exact on a CPU, the time to enqueue the work elsewhere."""
        self.losses = StepLosses(not_finite)
        self.passes = Passes(self)
        self.finds_at_once = True
        """Whether a CPU finds a step that is not finite at once; elsewhere the device itself leaves
        the step out."""
        # learning rate of the last step: a scheduler has set that of the next one already
        self.rate = 0.0
        self.is_serving = False
        self.is_plain = False
        self.is_scaled = False
        self.exchanges = False
        self._is_ddp = False
        self._is_updating = False
        self._is_under_way = False
        self._must_zero = False
        # step hooks that some part has; Lightning calls them itself off the plain road
        self._hooked: set[str] = set()
        self._lean: list[LeanEmbedding] = []
        self._trained: list[nn.Parameter] = []
        self.optimizer: Optimizer | None = None

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
        """The host's clock at the edge of a phase: 0 is the start of a batch, 1 to 3 are the ends
        of its phases.
        """
        return time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rate = state_dict["rate"]

    def position_state(self) -> dict[str, Any]:
        """What this rank has not reported yet of the steps taken, and the pieces that its batches
        need.
        """
        return (
            {**self.losses.state(), "pieces": dict(self.passes.pieces)} if self.is_serving else {}
        )

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        """Take over `position_state`; another number of ranks takes the sum of losses, and the most
        pieces.
        """
        if "losses" in of_ranks[0]:  # Lightning's own loop has none
            is_same_world = len(of_ranks) == self.trainer.world_size
            self.losses.load(of_ranks, rank, is_same_world=is_same_world)
            self.passes.load(of_ranks, rank, is_same_world=is_same_world)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.trainer, self.module = trainer, pl_module
        if stage == "fit":
            self.optimizer = None
            self.is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
            self._serve(_reason_against(trainer, pl_module))
            self._let_go_of_embeddings()  # of a training that an error ended
            self._keep_embedding_gradients()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_serving:
            self._serve(_reason_against_optimizer(trainer))
        self._plugged = None
        if self.is_serving:
            # Not before: other callbacks may train in between, with loops of their own, before a
            # training begins.
            self._plugged = internals.plug_optimization(trainer, self._serves, self._run_batch)
        if self._plugged is None:
            self._leave(trainer, pl_module)
            return
        strategy = trainer.strategy
        self.optimizer = trainer.optimizers[0]
        is_backward_ours = internals.overrides(pl_module, "backward", L.LightningModule)
        self.is_plain = (
            isinstance(strategy, SingleDeviceStrategy)
            and not self.is_scaled
            and not is_backward_ours
        )
        self._is_on_cpu = pl_module.device.type == "cpu"
        self._is_ddp = isinstance(getattr(strategy, "model", None), DistributedDataParallel)
        self.exchanges = are_several()
        self.is_sharded = bool(getattr(pl_module, "is_sharded", False))
        self._clips_itself = not internals.overrides(
            pl_module, "configure_gradient_clipping", L.LightningModule
        )
        self._after_step = getattr(pl_module, "after_optimizer_step", None)
        others = [(each, Callback) for each in internals.callbacks_of(trainer) if each is not self]
        parts: list[tuple[Any, type]] = [*others, (pl_module, L.LightningModule)]
        self._hooked = {
            name
            for name in _STEP_HOOKS
            for part, base in parts
            if internals.overrides(part, name, base)
        }
        # Lightning drops gradients between the forward and the backward pass. Tasks of flatout
        # never read old ones, so theirs go before the forward pass: at its end, where memory is
        # scarce, that is four bytes a weight less.
        is_of_flatout = type(pl_module).__module__.startswith("flatout.")
        self._zeroes_early = is_of_flatout and "on_before_zero_grad" not in self._hooked
        # A checkpoint brought the losses on the host; they are stacked with those of the device.
        self.losses.to(pl_module.device)
        self.passes.restart()
        if self.exchanges:
            torch.manual_seed(torch.initial_seed() + dist.get_rank())  # other rows, other dropout
            for embedding in self._lean:
                dist.broadcast(embedding.weight.detach(), 0)  # as DDP does with all others

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._leave(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # `is_serving` stays: a last checkpoint asks whether this loop has left the weights whole.
        internals.unplug_optimization(trainer)

    def _serve(self, reason_against: str) -> None:
        if reason_against:
            print(f"fast loop: off, {reason_against}; Lightning's own loop trains")
        self.is_serving = not reason_against
        _note(self.module, self.is_serving)

    def _leave(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        internals.unplug_optimization(trainer)
        self._let_go_of_embeddings()
        self.is_serving = False
        self.optimizer = None
        _note(module, False)

    def _serves(self, optimizer: Optimizer) -> bool:
        """Whether a batch is of the training that began here; a finder's has other callbacks, or
        another optimizer.
        """
        return optimizer is self.optimizer and any(
            each is self for each in internals.callbacks_of(self.trainer)
        )

    def forward(self, batch: Any) -> Tensor | None:
        """The loss of a batch or of a piece of one, over the batches of its optimizer step."""
        arguments = (batch, *self._arguments[1:])
        self._result = internals.run_training_step(
            self.trainer, arguments, is_inside_ddp=self._is_ddp
        )
        # now, as Lightning does: a training step may call `backward` on its own account
        if self._must_zero:
            self._zero_gradients()
        return self._result.closure_loss

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add the gradients of a part of a step; ranks exchange them all after the last."""
        if self.is_plain:
            self._call_hooks("on_before_backward", loss)
            loss.backward()
            self._call_hooks("on_after_backward")
            return
        strategy: Any = self.trainer.strategy
        # DDP prepares for the exchange in its forward pass, which ended before this: here it has to
        # be told again.
        if self._is_ddp and ends_step:
            internals.prepare_for_backward(strategy.model, loss)
        strategy.backward(loss, self.optimizer)

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        if name in self._hooked:
            internals.call_hooks(self.trainer, name, *arguments)

    def _zero_gradients(self) -> None:
        assert self._plugged is not None and self.optimizer is not None
        self._must_zero = False
        are_hooked = not self._hooked.isdisjoint(_HOOKS_OF_ZERO)
        self._plugged.zero_gradients(self.optimizer, self._batch_idx, are_hooked=are_hooked)

    def exchange_context(self, *, ends_step: bool) -> Any:
        """Around the forward and backward pass of a part: gradients are exchanged in the last part
        of a step.
        """
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if ends_step or not self.exchanges or block is None else block()

    def is_torn(self) -> bool:
        """Whether weights or running statistics are no longer those that the last step has left."""
        # A forward pass moves running means at once, gradients move weights only in the update.
        has_statistics = any(isinstance(each, BATCH_NORMS) for each in self.module.modules())
        return self._is_updating or (self._is_under_way and has_statistics)

    def _run_batch(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        edge = self.edge
        # edges take no device's time: an event or the host's clock, as the timer has set it
        started = edge(0)
        self._is_under_way = True
        self._batch_idx = batch_idx
        self._arguments = tuple(kwargs.values())
        batch = self._arguments[0]
        # Batches of our feeds know it; Lightning's answer costs a look at the fetcher.
        ends_step = getattr(batch, "ends_step", None)
        if ends_step is None:
            ends_step = internals.ends_optimizer_step(self.trainer)
        assert self._plugged is not None
        progress = self._plugged.optim_progress.optimizer.step
        if ends_step:  # before the forward pass, as Lightning counts
            progress.increment_ready()
        self._must_zero = batch_idx % self.trainer.accumulate_grad_batches == 0
        if self._must_zero and self._zeroes_early:
            self._zero_gradients()
        if self._is_ddp:
            passes = partial(self.passes.train, batch, ends_step=ends_step)
            forward_s = internals.run_inside_ddp(self.trainer.strategy, self.module, passes)
        else:
            forward_s = self.passes.train(batch, ends_step=ends_step)
        backwarded = edge(2)
        if ends_step:
            with self.losses.of_step(self.passes.end_step()):
                self._step(optimizer, progress)
            self._is_under_way = False
            # every rank is here after each step, so none waits for one that is elsewhere
            if self.exchanges:
                self.passes.agree()
        phase_s = self.phase_s
        phase_s["forward"] += forward_s
        phase_s["backward"] += backwarded - started - forward_s
        phase_s["optimizer"] += edge(3) - backwarded
        return {} if self._result.loss is None else self._result.asdict()

    def _step(self, optimizer: Optimizer, progress: Any) -> None:
        self.rate = optimizer.param_groups[0]["lr"]
        # Now, not when training begins: callbacks that thaw layers add groups to the optimizer.
        self._trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self.exchanges:
            for embedding in self._lean:
                embedding.exchange()
        is_wanted = self._is_sound(optimizer)
        self._is_updating = True
        if is_wanted and not optimizer.state:
            self._update_first(optimizer)
        elif is_wanted:
            self._update(optimizer)
        progress.increment_completed()
        if self._after_step is not None:
            self._after_step()
        self._is_updating = False

    def _update(self, optimizer: Optimizer) -> None:
        if self.is_scaled and is_fused(optimizer):
            self._update_scaled(optimizer)
        elif self.is_scaled:
            # the scaler unscales, clips and may leave the step out: Lightning's own way
            self.trainer.strategy.optimizer_step(optimizer, closure=lambda: self.losses.values[-1])
        else:
            optimizer.step()
            # A fused optimizer reads both in each step: what belongs to this one must not stay for
            # the next.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def _update_scaled(self, optimizer: Optimizer) -> None:
        """With fp16 a fused optimizer itself takes out the scaler's factor, clips, and leaves
        broken steps out.
        """
        # It reads all three from the device: nothing is waited for. Before hooks the factor is
        # taken out.
        scaler: Any = vars(self.trainer.precision_plugin)["scaler"]
        scale = scaler.scale(torch.ones((), device=self.module.device))
        if "on_before_optimizer_step" in self._hooked:
            scaler.unscale_(optimizer)
            scale = torch.ones_like(scale)
            self._call_hooks("on_before_optimizer_step", optimizer)
        norm = gradient_length(self._trained) / scale
        self.losses.norms.append(norm)
        longest = self.trainer.gradient_clip_val
        vars(optimizer)["grad_scale"] = (
            clip_divisor(norm, float(longest)) if longest else torch.ones_like(norm)
        )
        scaler.step(optimizer)
        scaler.update()

    def _update_first(self, optimizer: Optimizer) -> None:
        """The step in which the optimizer makes its state; smaller batches would not help where
        memory lacks for it.
        """
        # What activations have left is given back and the step tried once more, if no weight was
        # changed yet. Each write to a tensor raises its version: unchanged versions mean that no
        # weight was stepped yet.
        before = [weight._version for weight in self._trained]
        with ShortOfMemory() as short:
            return self._update(optimizer)
        if self.is_scaled or before != [weight._version for weight in self._trained]:
            raise _no_memory_for_state(short.why)
        optimizer.state.clear()  # half of it may be there, of the weights that came first
        give_back_memory()
        with short:
            return self._update(optimizer)
        raise _no_memory_for_state(short.why)

    def _is_sound(self, optimizer: Optimizer) -> bool:
        """Clip the gradient; whether the step may be taken, which a fused optimizer on a GPU
        decides itself.
        """
        # its scaler leaves such steps out itself, and is not done with the gradient yet
        if self.is_scaled:
            return True
        self._call_hooks("on_before_optimizer_step", optimizer)
        norm = self._clip(optimizer)
        losses = self.losses
        if (self.finds_at_once and self._is_on_cpu) or not is_fused(optimizer):
            is_finite = (
                math.isfinite(norm) if norm is not None else gradient_is_finite(self._trained)
            )
            return losses.accept(self.trainer.global_step, is_finite=is_finite)
        if norm is None:
            norm = gradient_length(self._trained)
            losses.norms.append(norm)
        # A fused optimizer leaves a step out where this number is 1, and once it is, so are all
        # that follow: nothing is waited for, and the next `take_losses` finds which step it was.
        vars(optimizer)["found_inf"] = losses.flag_broken(norm)
        return True

    def _clip(self, optimizer: Optimizer) -> Tensor | None:
        """Clip as the Trainer says; the gradient's norm before, or None where nothing
        asked for it.
        """
        trainer = self.trainer
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if not self._clips_itself or (value and str(algorithm or "norm") != "norm"):
            internals.call_module_hook(
                trainer, "configure_gradient_clipping", optimizer, value, algorithm
            )
            return None
        if not value:
            return None
        # which divides while it steps: one pass over memory less
        if is_fused(optimizer) and not self.is_sharded:
            norm = gradient_length(self._trained)
            vars(optimizer)["grad_scale"] = clip_divisor(norm, float(value))
        else:
            norm = clip_gradients(self._trained, float(value))
        self.losses.norms.append(norm)
        return norm

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """With fp16 the gradient is measured here, after Lightning has taken the scaler's factor
        out of it.
        """
        if self.is_serving and self.is_scaled and not is_fused(optimizer):
            self.losses.norms.append(gradient_length(self._trained))

    def _keep_embedding_gradients(self) -> None:
        """On a CPU large embeddings keep one gradient table, which autograd never sees, so DDP must
        not wait for it.
        """
        strategy = self.trainer.strategy
        is_known = self.is_serving and isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
        is_lean = is_known and not self.is_scaled and strategy.root_device.type == "cpu"
        lean = [
            each for each in self.module.modules() if is_lean and isinstance(each, LeanEmbedding)
        ]
        tables = {id(embedding.weight) for embedding in lean}
        names = [name for name, weight in self.module.named_parameters() if id(weight) in tables]
        may_leave_out = internals.leave_out_of_ddp(self.module, names) or not isinstance(
            strategy, DDPStrategy
        )
        self._lean[:] = lean if may_leave_out else []
        for embedding in self._lean:
            embedding.keeps_gradient = True

    def _let_go_of_embeddings(self) -> None:
        for embedding in self._lean:
            embedding.clear()
            embedding.keeps_gradient = False
            embedding.weight.grad = None
        self._lean.clear()


def _note(module: Any, is_serving: bool) -> None:
    """Say it to a task, which then logs no loss and may fuse its optimizer."""
    if hasattr(type(module), "is_in_fast_loop"):
        module.is_in_fast_loop = is_serving


def reason_against(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Why Lightning's own loop has to train, for one that has optimizers already; empty where the
    fast loop can.
    """
    return _reason_against(trainer, module) or _reason_against_optimizer(trainer)


def _reason_against(trainer: L.Trainer, module: L.LightningModule) -> str:
    name, base = type(module).__name__, L.LightningModule
    if not module.automatic_optimization:
        return f"{name} uses manual optimisation"
    if internals.overrides(module, "optimizer_step", base) and not hasattr(
        module, "after_optimizer_step"
    ):
        return f"{name} overrides optimizer_step"
    if internals.overrides(module, "optimizer_zero_grad", base):
        return f"{name} overrides optimizer_zero_grad"
    precision, strategy = trainer.precision_plugin, trainer.strategy
    if not _steps_as_known(precision):
        return f"the precision {type(precision).__name__} computes in its own way"
    is_known = _steps_as_known(strategy) or hasattr(strategy, "share_out")
    return "" if is_known else f"the strategy {type(strategy).__name__} steps in its own way"


def _steps_as_known(part: Any) -> bool:
    """Whether a strategy or a precision is one of Lightning's, or differs from it in nothing that a
    step does.
    """
    base = next((each for each in _KNOWN if isinstance(part, each)), None)
    own = [name for name in _OF_A_STEP if base is not None and hasattr(base, name)]
    return base is not None and not any(internals.overrides(part, name, base) for name in own)


def _reason_against_optimizer(trainer: L.Trainer) -> str:
    kind = type(trainer.optimizers[0])
    if kind.__name__ == "_MockOptimizer":  # Lightning's, in the place of none
        return "the module has no optimizer"
    # One that calls its closure twice (SAM, LBFGS) needs the closure; none of torch's others looks
    # at it.
    is_known = kind.step.__module__.startswith(("torch.optim.", "flatout.")) and kind is not LBFGS
    return "" if is_known else f"{kind.__name__} may want the loss computed again while it steps"


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

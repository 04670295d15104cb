"""Every private name of Lightning that flatout touches, each with what it saves and the road without it.

A name that is gone, or has another signature, is reported once and the ordinary road is taken. Savings are of one
training step of 400 µs on a 2-core AMD EPYC, Lightning 2.6.6, as `python -m flatout bench shortcuts` prints them. Gone,
since they saved less than a twentieth of it: a profiler of our own (9 µs), a step past the strategy's hook (5 µs), and
leaving out empty hooks of callbacks (nothing). The signature in `tasks/task.py` (15 µs) stays: it is one line.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.overrides.distributed import prepare_for_backward as prepare_for_backward
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call

_RUN_ARGUMENTS = ["self", "optimizer", "batch_idx", "kwargs"]


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The trainer's callbacks, which Lightning sets without declaring them."""
    return list(vars(trainer)["callbacks"])


class PluggedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimisation with another `run`. Saves closures, hooks and profiling: 343 µs."""

    def __init__(self, trainer: L.Trainer, run: Callable[..., dict[str, Any]]) -> None:
        super().__init__(trainer)
        self._run_batch = run

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        return self._run_batch(optimizer, batch_idx, kwargs)


def plug_optimization(trainer: L.Trainer, run: Callable[..., dict[str, Any]]) -> PluggedOptimization | None:
    """Let `run` take the place of Lightning's automatic optimisation; None where Lightning has changed."""
    loop = trainer.fit_loop.epoch_loop
    standing = getattr(loop, "automatic_optimization", None)
    arguments = list(inspect.signature(_AutomaticOptimization.run).parameters)
    if not isinstance(standing, _AutomaticOptimization) or arguments != _RUN_ARGUMENTS:
        _warn_of("automatic_optimization of the epoch loop")
        return None
    plugged = PluggedOptimization(trainer, run)
    plugged.optim_progress = standing.optim_progress
    loop.automatic_optimization = plugged
    return plugged


def run_training_step(trainer: L.Trainer, arguments: tuple[Any, ...]) -> Any:
    """A training step with all that Lightning puts around it; `self.log` works in it."""
    return call._call_strategy_hook(trainer, "training_step", *arguments)


def run_inside_ddp(strategy: Any, module: L.LightningModule, passes: Callable[[], float]) -> float:
    """Run the passes of a batch inside one forward of DDP: a pass that is repeated then adds no collective call."""
    wrapper, forward = strategy.model, module.forward

    def run_passes() -> float:
        vars(module)["forward"] = forward
        seconds = passes()
        wrapper.require_backward_grad_sync = False  # DDP need not prepare for a backward pass: it was here
        return seconds

    vars(module)["forward"] = run_passes
    try:
        return float(wrapper())
    finally:
        wrapper.require_backward_grad_sync = True
        vars(module).pop("forward", None)


def adds_nothing_to_steps(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Whether the strategy would call `training_step` and no more, and nothing profiles it."""
    strategy = trainer.strategy
    is_usual = type(strategy).training_step is Strategy.training_step and strategy.model is module
    return is_usual and type(vars(trainer)["profiler"]) is PassThroughProfiler


def call_training_step(trainer: L.Trainer, module: L.LightningModule, arguments: tuple[Any, ...]) -> Any:
    """A training step past the strategy; `self.log` works in it."""
    set_hook_name(module, "_current_fx_name", "training_step")
    with trainer.precision_plugin.train_step_context():
        output = module.training_step(*arguments)
    set_hook_name(module, "_current_fx_name", None)
    return output


def ends_optimizer_step(trainer: L.Trainer) -> bool:
    """Whether the batch under way is the last of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def without_gradient_exchange(strategy: Any) -> AbstractContextManager[Any]:
    """Within an accumulation window ranks need not exchange gradients."""
    block = getattr(strategy, "block_backward_sync", None)
    return block() if block else nullcontext()


def rebuild_ddp(strategy: DDPStrategy, module: L.LightningModule) -> None:
    """DDP exchanges the gradients of the weights that were trained when it was set up: set it up again."""
    strategy.model = strategy._setup_model(module)


def set_hook_name(module: L.LightningModule, name: str, value: Any) -> bool:
    """Set the name of the current hook past `nn.Module.__setattr__`, ten times a step; saves 36 µs."""
    if name != "_current_fx_name":
        return False
    module.__dict__[name] = value
    return True


class ShortHooks(L.LightningModule):
    """A module without Lightning's hooks around the transfer of a batch, three in two contexts each: saves 22 µs."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not set_hook_name(self, name, value):
            super().__setattr__(name, value)

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch that was made by hand; feeds place theirs."""
        wanted = device or self.device
        return batch if batch.tokens.device.type == wanted.type else batch.to(wanted)


def disable_signal_handling(trainer: L.Trainer) -> None:
    """Lightning's handlers end a run without a checkpoint, and its ranks wait for each other before every batch."""
    connector, loop = vars(trainer).get("_signal_connector"), trainer.fit_loop.epoch_loop
    if not hasattr(connector, "register_signal_handlers") or not hasattr(loop, "_broadcast_sigterm_tensor"):
        _warn_of("_signal_connector or _broadcast_sigterm_tensor")
        return
    vars(connector)["register_signal_handlers"] = lambda: None
    vars(loop)["_broadcast_sigterm_tensor"] = lambda: None


def call_before_validation(trainer: L.Trainer, note: Callable[[], None]) -> None:
    """Call `note` before each validation of a fit, ahead of every hook in it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    run = type(loop).run

    def run_after_note() -> Any:
        note()
        return run(loop)

    vars(loop)["run"] = run_after_note


def resume_after_batch(trainer: L.Trainer, restore: Callable[[], None], *, is_validation_due: bool) -> None:
    """Continue behind the last batch of an optimizer step: `restore` runs just before, then a validation if due.

    Lightning resumes inside a validation or a hook; a position is never there, so its restart stages are switched off.
    """
    loop = trainer.fit_loop.epoch_loop
    start = loop.on_run_start

    def start_again(fetcher: Any) -> None:
        del vars(loop)["on_run_start"]
        start(fetcher)
        for each in (trainer.fit_loop, loop, loop.val_loop, loop.manual_optimization, loop.automatic_optimization):
            vars(each)["_restarting"] = False
        restore()
        if is_validation_due:
            loop.on_advance_end(fetcher)

    vars(loop)["on_run_start"] = start_again


def _warn_of(name: str) -> None:
    what = f"lightning {L.__version__} has no {name} as flatout knows it: the ordinary, slower way is used"
    warnings.warn(what, RuntimeWarning, stacklevel=3)

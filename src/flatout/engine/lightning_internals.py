"""Private names of Lightning and DDP that flatout touches, each with what it saves and the road
without it.

A name that is gone, or has another signature, is reported once and the ordinary road is taken. The
saving is of one training step of a tiny network, on one core of a 2-core AMD EPYC with Lightning
2.6.6, as `python -m flatout bench shortcuts` prints it. Gone, since each gave less than its lines
cost a reader: an epoch loop of our own (92 µs), a step of AdamW past torch's wrappers (82 µs), no
hooks around the transfer of a batch (76 µs), the hook's name set past `nn.Module` (35 µs), a ready
signature (25 µs).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.overrides.distributed import prepare_for_backward as prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

PHASES = ("forward", "backward", "optimizer")  # of a batch in training
_LEFT_OUT = "_set_params_and_buffers_to_ignore_for_model"


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The trainer's callbacks, which Lightning sets without declaring them."""
    return list(vars(trainer)["callbacks"])


def is_fitting(trainer: L.Trainer) -> bool:
    """Whether a validation is one of a training, and not the look before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_second(callback: Callback, trainer: L.Trainer) -> bool:
    """Whether another callback of its class stands before it, which does the work of both."""
    return (
        next((each for each in callbacks_of(trainer) if type(each) is type(callback)), callback)
        is not callback
    )


def step_of_loggers(trainer: L.Trainer) -> int:
    """The step at which `self.log` writes: batches that ended a step before this one, of however
    many optimizers.
    """
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def passes_of(trainer: L.Trainer) -> Any:
    """How the fast loop among a trainer's callbacks passes batches through; None where there is
    none.
    """
    return next(
        (vars(each)["passes"] for each in callbacks_of(trainer) if "passes" in vars(each)), None
    )


def overrides(part: Any, name: str, base: type) -> bool:
    """Whether a module, callback or strategy has a method other than its base's, by its class or
    set on itself.
    """
    return hasattr(base, name) and getattr(getattr(part, name), "__func__", None) is not getattr(
        base, name
    )


class PluggedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimisation, whose batches a fast loop takes.

    Saves closures and profiling: 700 µs.
    """

    def __init__(
        self, trainer: L.Trainer, serves: Callable[[Optimizer], bool], run: Callable[..., Any]
    ) -> None:
        super().__init__(trainer)
        self._serves, self._run_batch = serves, run

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        # `_skip_backward` is how weight averaging (SWA) passes batches by without training on them.
        if self._skip_backward or not self._serves(optimizer):
            return super().run(optimizer, batch_idx, kwargs)
        return self._run_batch(optimizer, batch_idx, kwargs)

    def zero_gradients(self, optimizer: Optimizer, batch_idx: int, *, are_hooked: bool) -> None:
        """Lightning's own way, with its counters; where no part has such a hook, none is looked
        for: saves 50 µs.
        """
        if are_hooked:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)
            return
        count = self.optim_progress.optimizer.zero_grad
        count.increment_ready()
        count.increment_started()
        optimizer.zero_grad()
        count.increment_completed()


def plug_optimization(trainer: L.Trainer, serves: Any, run: Any) -> PluggedOptimization | None:
    """Let `run` take the batches of optimizers that it `serves`; None where Lightning
    has changed.
    """
    loop = trainer.fit_loop.epoch_loop
    standing = getattr(loop, "automatic_optimization", None)
    arguments = " ".join(inspect.signature(_AutomaticOptimization.run).parameters)
    if (
        not isinstance(standing, _AutomaticOptimization)
        or arguments != "self optimizer batch_idx kwargs"
    ):
        _warn_of("automatic_optimization of the epoch loop")
        return None
    plugged = PluggedOptimization(trainer, serves, run)
    plugged.optim_progress = standing.optim_progress  # `global_step` reads it
    loop.automatic_optimization = plugged
    return plugged


def unplug_optimization(trainer: L.Trainer) -> None:
    """Give the trainer an optimisation of Lightning's own back, with the same counters."""
    loop = trainer.fit_loop.epoch_loop
    plugged = loop.automatic_optimization
    if isinstance(plugged, PluggedOptimization):
        loop.automatic_optimization = _AutomaticOptimization(trainer)
        loop.automatic_optimization.optim_progress = plugged.optim_progress


def call_hooks(trainer: L.Trainer, name: str, *arguments: Any) -> None:
    """A hook of all callbacks, then of the module; `self.log` works in it."""
    call._call_callback_hooks(trainer, name, *arguments)
    call_module_hook(trainer, name, *arguments)


def run_training_step(
    trainer: L.Trainer, arguments: tuple[Any, ...], *, is_inside_ddp: bool
) -> ClosureResult:
    """A training step with all that Lightning puts around it: what it may return, and the loss
    divided.
    """
    if is_inside_ddp:  # the strategy would send it through DDP's forward once more
        with trainer.precision_plugin.train_step_context():
            output = call_module_hook(trainer, "training_step", *arguments)
    else:
        output = call._call_strategy_hook(trainer, "training_step", *arguments)
    if output is None and trainer.world_size > 1:
        raise RuntimeError(
            "training_step returned None: where there are several ranks, each batch needs its loss."
        )
    return ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)


def run_inside_ddp(strategy: Any, module: L.LightningModule, passes: Callable[[], float]) -> float:
    """Run the passes of a batch inside one forward of DDP: a pass that is repeated then adds no
    collective call.
    """
    wrapper, forward = strategy.model, module.forward

    def run_passes(_: None) -> float:
        vars(module)["forward"] = forward
        seconds = passes()
        # DDP need not prepare for a backward pass: it was here
        wrapper.require_backward_grad_sync = False
        return seconds

    vars(module)["forward"] = run_passes
    try:
        return float(wrapper(None))  # on a GPU DDP moves arguments, and fails where there are none
    finally:
        wrapper.require_backward_grad_sync = True
        vars(module).pop("forward", None)


def ends_optimizer_step(trainer: L.Trainer) -> bool:
    """Whether the batch under way is the last of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def rebuild_ddp(strategy: DDPStrategy, module: L.LightningModule) -> None:
    """DDP exchanges the gradients of the weights that were trained when it was set up: set it up
    again.
    """
    strategy.model = strategy._setup_model(module)
    strategy._register_ddp_hooks()  # such as the compression of gradients


def disable_signal_handling(trainer: L.Trainer) -> None:
    """Lightning's handlers end a run without a checkpoint, and its ranks wait for each other before
    every batch.
    """
    connector = vars(trainer).get("_signal_connector")
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(connector, "register_signal_handlers") or not hasattr(
        loop, "_broadcast_sigterm_tensor"
    ):
        _warn_of("_signal_connector or _broadcast_sigterm_tensor")
        return
    vars(connector)["register_signal_handlers"] = lambda: None
    vars(loop)["_broadcast_sigterm_tensor"] = lambda: None


def call_before_validation(trainer: L.Trainer, note: Callable[[], None]) -> None:
    """Call `note` before each validation of a fit, ahead of every hook in it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    vars(loop)["run"] = partial(_run_after_note, loop, note)


def _run_after_note(loop: Any, note: Callable[[], None]) -> Any:
    """With `partial`, as neither a function in a function nor the class's own, decorated one could
    be pickled.
    """
    note()
    return type(loop).run(loop)


def set_fetch_hooks(
    trainer: L.Trainer, before: Callable[[], None] | None, after: Callable[[], None] | None
) -> None:
    """Call two functions around each fetch of a training batch, beside the profiler's own; None: no
    longer.
    """
    loop = trainer.fit_loop.epoch_loop
    for name, note in (("_on_before_fetch", before), ("_on_after_fetch", after)):
        if not hasattr(type(loop), name):
            _warn_of(name)
        elif note is None:
            vars(loop).pop(name, None)
        else:
            vars(loop)[name] = partial(_run_both, note, getattr(loop, name))


def _run_both(note: Callable[[], None], usual: Callable[[], Any]) -> Any:
    """With `partial`, as a function in a function could not be pickled."""
    note()
    return usual()


def resume_after_batch(
    trainer: L.Trainer, restore: Callable[[], None], *, is_validation_due: bool
) -> None:
    """Continue behind a step's last batch, with a validation if due: `restore` runs before, restart
    stages are off.
    """
    loop = trainer.fit_loop.epoch_loop
    start = loop.on_run_start

    def start_again(fetcher: Any) -> None:
        del vars(loop)["on_run_start"]
        start(fetcher)
        for each in (
            trainer.fit_loop,
            loop,
            loop.val_loop,
            loop.manual_optimization,
            loop.automatic_optimization,
        ):
            vars(each)["_restarting"] = False
        restore()
        if is_validation_due:
            loop.on_advance_end(fetcher)
        else:
            # Lightning lets plateau schedules step after the validation, and so after the
            # checkpoint
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    vars(loop)["on_run_start"] = start_again


def _warn_of(name: str) -> None:
    what = (
        f"lightning {L.__version__} has no {name} as flatout knows it: the ordinary, slower way is"
        " used"
    )
    warnings.warn(what, RuntimeWarning, stacklevel=3)


def leave_out_of_ddp(module: nn.Module, names: Sequence[str]) -> bool:
    """Let DDP wait for no gradients of these weights, of which used rows are exchanged; False if
    torch has no way.
    """
    method = getattr(DistributedDataParallel, _LEFT_OUT, None)
    if method is None or list(inspect.signature(method).parameters) != [
        "module",
        "params_and_buffers_to_ignore",
    ]:
        what = (
            f"torch {torch.__version__} has no DistributedDataParallel.{_LEFT_OUT} as flatout"
            " knows it"
        )
        warnings.warn(f"{what}: embeddings exchange whole tables", RuntimeWarning, stacklevel=2)
        return False
    method(module, list(names))
    return True

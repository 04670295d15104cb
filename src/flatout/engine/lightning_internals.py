"""Private names of Lightning that flatout touches, each with what it saves and the road without it.

A name that is gone, or has another signature, is reported once and the ordinary road is taken. Savings are of one
training step of 250 µs on a 2-core AMD EPYC, Lightning 2.6.6, as `python -m flatout bench shortcuts` prints them. Gone,
since they saved less than a twentieth of it: a profiler of our own (9 µs), a step past the strategy's hook (5 µs), and
leaving out empty hooks of callbacks (nothing). The name of the hook and the signature in `tasks/task.py` save 36 and
15 µs where Lightning's own loop takes the batches, as on several devices.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import prepare_for_backward as prepare_for_backward
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call

_RUN_ARGUMENTS = ["self", "optimizer", "batch_idx", "kwargs"]
_ADVANCE_ARGUMENTS = ["self", "data_fetcher"]
_OWN_HOOKS = ("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step")
_METHODS = ("advance", "on_advance_end")


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The trainer's callbacks, which Lightning sets without declaring them."""
    return list(vars(trainer)["callbacks"])


class PluggedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimisation with another `run`. Saves closures, hooks and profiling: 545 µs."""

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

    def run_passes(_: None) -> float:
        vars(module)["forward"] = forward
        seconds = passes()
        wrapper.require_backward_grad_sync = False  # DDP need not prepare for a backward pass: it was here
        return seconds

    vars(module)["forward"] = run_passes
    try:
        return float(wrapper(None))  # on a GPU DDP moves arguments, and fails where there are none
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
    strategy._register_ddp_hooks()  # such as the compression of gradients


def set_hook_name(module: L.LightningModule, name: str, value: Any) -> bool:
    """Set the name of the current hook past `nn.Module.__setattr__`: saves 36 µs of a step of Lightning's own loop."""
    if name != "_current_fx_name":
        return False
    module.__dict__[name] = value
    return True


class ShortHooks(L.LightningModule):
    """A module without Lightning's hooks around the transfer of a batch, three in two contexts each: saves 23 µs."""

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
    vars(loop)["run"] = partial(_run_after_note, loop, note)  # a function in a function could not be pickled


def _run_after_note(loop: Any, note: Callable[[], None]) -> Any:
    note()
    return type(loop).run(loop)


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
        else:  # Lightning lets plateau schedules step after the validation, and so after the checkpoint
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    vars(loop)["on_run_start"] = start_again


def plug_short_epoch(trainer: L.Trainer, module: L.LightningModule, feed: type) -> bool:
    """Let `ShortEpoch` take the batches that such a feed makes, where nothing asks for more; whether it does."""
    loop = trainer.fit_loop.epoch_loop
    unplug_short_epoch(trainer)
    if not _is_usual(trainer, module, loop):
        return False
    for name in _METHODS:
        if list(inspect.signature(getattr(_TrainingEpochLoop, name)).parameters) != _ADVANCE_ARGUMENTS:
            _warn_of(f"{name} of the epoch loop")
            return False
    short = ShortEpoch(trainer, module, feed)
    vars(loop).update({name: getattr(short, name) for name in _METHODS})
    return True


def unplug_short_epoch(trainer: L.Trainer) -> None:
    """Give the loop its own methods back."""
    for name in _METHODS:
        vars(trainer.fit_loop.epoch_loop).pop(name, None)


def _is_usual(trainer: L.Trainer, module: L.LightningModule, loop: Any) -> bool:
    """Whether nothing in a training asks for more than is done here."""
    strategy, schedules = trainer.strategy, trainer.lr_scheduler_configs
    base: Any = L.LightningModule
    is_module_usual = all(getattr(type(module), name) is getattr(base, name) for name in _OWN_HOOKS)
    is_strategy_usual = type(strategy).on_train_batch_start is Strategy.on_train_batch_start
    return (
        type(loop) is _TrainingEpochLoop
        and isinstance(strategy, SingleDeviceStrategy)
        and is_strategy_usual
        and is_module_usual
        and not set(_OWN_HOOKS) & set(vars(module))
        and type(vars(trainer)["profiler"]) is PassThroughProfiler
        and all(each.interval == "step" and each.frequency == 1 and not each.reduce_on_plateau for each in schedules)
    )


class ShortEpoch:
    """Two methods of Lightning's loop over the batches of an epoch, without what it does for nothing: saves 58 µs.

    Lightning opens a profiling context around each hook of each callback, works out the signature of the training step,
    and collects logged values after each batch, also where there is nothing to call, profile or collect. Here the same
    hooks are called in the same order, and the same counters move. What is unusual stays with Lightning's own methods:
    a restart, a profiler, hooks of the module around a batch, other schedulers, a validation that is due, a stop.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, feed: type) -> None:
        self.trainer, self.module, self.loop = trainer, module, trainer.fit_loop.epoch_loop
        self.feed = feed
        self._takes_number = len(self.loop._build_kwargs(OrderedDict(), None, 0)) > 1
        self._schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
        self._known: Any = None
        self._is_known_usual = False

    def advance(self, fetcher: Any) -> None:
        """Train on the next batch."""
        loop, trainer = self.loop, self.trainer
        if loop._restarting or loop.val_loop._restarting or not self._is_feed(fetcher):
            _TrainingEpochLoop.advance(loop, fetcher)
            return
        batch = self._place(next(fetcher)[0])
        number, progress = loop.batch_idx + 1, loop.batch_progress
        progress.is_last_batch = fetcher.done
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self._call("on_train_batch_start", batch, number)
        progress.increment_started()
        arguments = {"batch": batch, "batch_idx": number} if self._takes_number else {"batch": batch}
        outputs = loop.automatic_optimization.run(trainer.optimizers[0], number, OrderedDict(arguments))
        progress.increment_processed()
        if not loop._should_accumulate():
            self._step_schedules()
        self._call("on_train_batch_end", outputs, batch, number)
        self._close_batch(progress)

    def on_advance_end(self, fetcher: Any) -> None:
        """What follows a batch: a validation that is due and whatever is unusual is Lightning's."""
        loop, trainer = self.loop, self.trainer
        is_unusual = loop._skip_next_val or trainer.should_stop or trainer.received_sigterm
        if is_unusual or not self._is_feed(fetcher) or loop._should_check_val_fx(fetcher):
            _TrainingEpochLoop.on_advance_end(loop, fetcher)
        elif not loop._should_accumulate():
            loop._batches_that_stepped += 1

    def _is_feed(self, fetcher: Any) -> bool:
        """Whether batches come from a feed of ours, whose number is known and of which none is None."""
        if fetcher is not self._known:
            loaders = fetcher.combined_loader.flattened
            is_ours = len(loaders) == 1 and isinstance(loaders[0], self.feed)
            self._known, self._is_known_usual = fetcher, is_ours and type(fetcher) is _PrefetchDataFetcher
        return self._is_known_usual

    def _place(self, batch: Any) -> Any:
        """A batch on the device, by the same calls."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _call(self, name: str, *arguments: Any) -> None:
        """A hook of the callbacks that have it; which do may change in any step."""
        usual = getattr(Callback, name)
        for callback in vars(self.trainer)["callbacks"]:
            hook = getattr(callback, name)
            if callable(hook) and getattr(hook, "__func__", None) is not usual:
                before = self.module._current_fx_name
                vars(self.module)["_current_fx_name"] = name
                hook(self.trainer, self.module, *arguments)
                vars(self.module)["_current_fx_name"] = before

    def _step_schedules(self) -> None:
        progress = self.loop.scheduler_progress
        for schedule in self._schedules:
            progress.increment_ready()
            schedule.step()
            progress.increment_completed()

    def _close_batch(self, progress: Any) -> None:
        """Collect what was logged, if anything was."""
        results, connector = self.loop._results, self.trainer._logger_connector
        if results:
            connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()


def _warn_of(name: str) -> None:
    what = f"lightning {L.__version__} has no {name} as flatout knows it: the ordinary, slower way is used"
    warnings.warn(what, RuntimeWarning, stacklevel=3)

"""The batches of an epoch past what Lightning's loop does for nothing; the saving is in `bench shortcuts`.

Lightning opens a profiling context around each hook of each callback, works out the signature of the training step, and
collects logged values after each batch, also where there is nothing to call, profile or collect. Here the same hooks
are called in the same order, and the same counters move. What is unusual stays with Lightning's own methods: a restart,
a profiler, hooks of the module around a batch, other schedulers, a validation that is due, a stop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from flatout.data.batches.feed import Feed

_RELEASES = "2.6."
"""Releases of Lightning whose loop this one stands for; with others Lightning's own runs."""
_OWN_HOOKS = ("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step")
_METHODS = ("advance", "on_advance_end")


def plug_short_epoch(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Let a training take its batches here; whether it may."""
    loop = trainer.fit_loop.epoch_loop
    unplug_short_epoch(trainer)
    if not _is_usual(trainer, module, loop):
        return False
    short = ShortEpoch(trainer, module)
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
        L.__version__.startswith(_RELEASES)
        and type(loop) is _TrainingEpochLoop
        and isinstance(strategy, SingleDeviceStrategy)
        and is_strategy_usual
        and is_module_usual
        and not set(_OWN_HOOKS) & set(vars(module))
        and type(vars(trainer)["profiler"]) is PassThroughProfiler
        and all(each.interval == "step" and each.frequency == 1 and not each.reduce_on_plateau for each in schedules)
    )


class ShortEpoch:
    """What takes the place of two methods of Lightning's loop over the batches of an epoch."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trainer, self.module, self.loop = trainer, module, trainer.fit_loop.epoch_loop
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
            is_ours = len(loaders) == 1 and isinstance(loaders[0], Feed)
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
            if getattr(hook, "__func__", None) is not usual:
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

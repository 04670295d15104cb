"""All uses of private names of Lightning and DDP, and what each one saves.

Other modules ask Lightning through these functions only. If a private name is missing, or has
another signature, one warning says so, and Lightning's ordinary, slower way is used. Open this file
when a new version of Lightning breaks the fast loop.

The time that a shortcut saves is of one step of a tiny network, on one core of a 2-core AMD EPYC
with Lightning 2.6.6. `python -m flatout bench shortcuts` prints it.

Some shortcuts were removed, since each saved too little for its lines of code:

- an epoch loop of our own: 92 µs
- a step of AdamW past torch's wrappers: 82 µs
- no hooks around the transfer of a batch: 76 µs
- the hook's name set past `nn.Module`: 35 µs
- a signature that is inspected only once: 25 µs
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.overrides.distributed import prepare_for_backward as prepare_for_backward
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flatout.distributed.both_lightnings import either, in_package_of

if TYPE_CHECKING:
    from flatout.engine.pieces import Pieces

_RETURNED_NONE = "`training_step` returned `None`. If this was on purpose, ignore this warning..."
PHASES = ("forward", "backward", "optimizer")  # of a batch in training
_NO_CONTEXT = nullcontext()
_LEFT_OUT = "_set_params_and_buffers_to_ignore_for_model"
# What that method sets: the names on the module, and a flag on each weight.
_NAMES_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"
_FLAG_LEFT_OUT = "_ddp_ignored"


def set_method(owner: object, name: str, method: Callable[..., Any]) -> None:
    """Give this one object a method of its own, which hides the one of its class.

    Written past `__setattr__`: modules search their weights in it, and mypy knows no such method.
    """
    vars(owner)[name] = method


def unset_method(owner: object, name: str) -> Callable[..., Any] | None:
    """Undo `set_method`; return the method that was set, None if there was none."""
    return vars(owner).pop(name, None)


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The trainer's callbacks, which Lightning sets without declaring them."""
    return list(vars(trainer)["callbacks"])


def set_callbacks(trainer: L.Trainer, callbacks: Iterable[Callback]) -> None:
    """Replace all callbacks of a trainer, without those that Lightning would add."""
    vars(trainer)["callbacks"] = list(callbacks)


def datamodule_of(trainer: L.Trainer) -> L.LightningDataModule | None:
    """The DataModule of a trainer, or None. Before the first `fit` a trainer lacks the name."""
    return vars(trainer).get("datamodule")


def profiler_of(trainer: L.Trainer) -> Profiler:
    undeclared: Any = trainer
    profiler: Profiler = undeclared.profiler
    return profiler


def set_epoch_length(trainer: L.Trainer, batches: int) -> None:
    """Let the epoch that begins, and those after it, have so many batches.

    Lightning reads the limit of its loader once, when training starts.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        loop._combined_loader.limits = [batches]
    loop.max_batches = batches
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))


def is_dry_run(trainer: L.Trainer) -> bool:
    """Whether the trainer runs a few batches to find mistakes, by `fast_dev_run`."""
    return bool(getattr(trainer, "fast_dev_run", False))


def is_fitting(trainer: L.Trainer) -> bool:
    """Whether a validation belongs to a training. The sanity check before it does not."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_second(callback: Callback, trainer: L.Trainer) -> bool:
    """Whether a callback of the same class comes before this one, and does the work of both."""
    same = (other for other in callbacks_of(trainer) if type(other) is type(callback))
    return next(same, callback) is not callback


def step_of_loggers(trainer: L.Trainer) -> int:
    """The step at which `self.log` writes now.

    It is the number of earlier batches that ended a step. Lightning's `global_step` counts such a
    batch once for each optimizer.
    """
    stepped = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return trainer.global_step if stepped is None else int(stepped)


def pieces_of(trainer: L.Trainer) -> Pieces | None:
    """Into how many pieces the trainer's fast loop cuts batches; None if there is no fast loop."""
    # Importing FastLoop here would be circular, so its attribute is searched.
    callbacks = callbacks_of(trainer)
    return next((loop.pieces for loop in callbacks if hasattr(loop, "pieces")), None)


def overrides(part: object, name: str, base: type) -> bool:
    """Whether a module, callback or strategy replaces a method of `base`.

    The replacement is in its class, or was set on the object itself. False if `base` has no such
    method.
    """
    if not hasattr(base, name):
        return False
    function = getattr(getattr(part, name), "__func__", None)
    bases: tuple[type, ...] = either(base)
    return all(function is not getattr(one_base, name) for one_base in bases)


def overridden_hooks(
    names: Sequence[str], module: L.LightningModule, callbacks: Sequence[Callback]
) -> set[str]:
    """Those of the hooks that the module or a callback overrides."""
    hooks = set[str]()
    for name in names:
        if overrides(module, name, L.LightningModule):
            hooks.add(name)
        for callback in callbacks:
            if overrides(callback, name, Callback):
                hooks.add(name)
    return hooks


@dataclass(frozen=True, slots=True)
class PluggedOptimization:
    """Stands for `run` of Lightning's automatic optimisation: a fast loop trains on the batches.

    That saves closures and profiling: 700 µs.
    """

    usual: _AutomaticOptimization
    serves: Callable[[Optimizer], bool]  # whether the fast loop trains this optimizer
    run_batch: Callable[..., Any]

    def __call__(
        self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        # Weight averaging (SWA) sets `_skip_backward` to run batches without training on them.
        if self.usual._skip_backward or not self.serves(optimizer):
            return type(self.usual).run(self.usual, optimizer, batch_idx, kwargs)
        answer: dict[str, Any] = self.run_batch(optimizer, batch_idx, kwargs)
        return answer

    def zero_gradients(self, optimizer: Optimizer, batch_idx: int, *, are_hooked: bool) -> None:
        """Set all gradients to None, and count that as Lightning does.

        If nothing overrides a hook of it (`are_hooked=False`), no hooks are called: saves 50 µs.
        """
        if are_hooked:
            self.usual._on_before_zero_grad(optimizer)
            self.usual._optimizer_zero_grad(batch_idx, optimizer)
            return
        count = self.usual.optim_progress.optimizer.zero_grad
        count.increment_ready()
        count.increment_started()
        optimizer.zero_grad()
        count.increment_completed()


def plug_optimization(
    trainer: L.Trainer, serves: Callable[[Optimizer], bool], run: Callable[..., Any]
) -> PluggedOptimization | None:
    """Let `run` train on the batches of each optimizer for which `serves` is true.

    None if this version of Lightning has no such place to plug it in.
    """
    usual = getattr(trainer.fit_loop.epoch_loop, "automatic_optimization", None)
    arguments = " ".join(inspect.signature(_AutomaticOptimization.run).parameters)
    is_as_known = arguments == "self optimizer batch_idx kwargs"
    if not (isinstance(usual, either(_AutomaticOptimization)) and is_as_known):
        _warn_of("automatic_optimization of the epoch loop")
        return None
    plugged = PluggedOptimization(usual, serves, run)
    set_method(usual, "run", plugged)
    return plugged


def unplug_optimization(trainer: L.Trainer) -> None:
    """Undo `plug_optimization`; the counters of steps stay."""
    usual = trainer.fit_loop.epoch_loop.automatic_optimization
    standing = unset_method(usual, "run")
    if not (standing is None or isinstance(standing, PluggedOptimization)):
        set_method(usual, "run", standing)


def plug_turns(trainer: L.Trainer, take_turn: Callable[[_DataFetcher], None]) -> bool:
    """Let `take_turn` stand for `advance` of the epoch loop, which trains on one batch.

    False if this version of Lightning has no such place.
    """
    loop = trainer.fit_loop.epoch_loop
    arguments = " ".join(inspect.signature(type(loop).advance).parameters)
    if arguments != "self data_fetcher":
        _warn_of("advance of the epoch loop")
        return False
    set_method(loop, "advance", take_turn)
    return True


def skip_profiling(trainer: L.Trainer) -> Profiler | None:
    """Let the profiler that times nothing make no context for each hook: saves 8 calls of it.

    Returns the profiler for `restore_profiling`; None where nothing was changed.
    """
    profiler = profiler_of(trainer)
    if is_profiled(trainer) or "profile" in profiler.__dict__:
        return None
    set_method(profiler, "profile", _time_nothing)
    return profiler


def restore_profiling(profiler: Profiler | None) -> None:
    """Undo `skip_profiling`."""
    if profiler is not None:
        unset_method(profiler, "profile")


def _time_nothing(action_name: str) -> AbstractContextManager[None]:
    return _NO_CONTEXT


def take_usual_turn(trainer: L.Trainer, fetcher: _DataFetcher) -> None:
    """Train on one batch as Lightning does."""
    loop = trainer.fit_loop.epoch_loop
    type(loop).advance(loop, fetcher)


def unplug_turns(trainer: L.Trainer) -> None:
    """Undo `plug_turns`."""
    unset_method(trainer.fit_loop.epoch_loop, "advance")


def batches_of(fetcher: _DataFetcher) -> Iterator[Any]:
    """The coming batches of the only loader, past Lightning's way to join several: saves 20 calls
    of each. Empty where there are several. `count_fetched` counts those that were taken.
    """
    joined: Any = fetcher.combined_loader._iterator
    # by its name, which is the same in both Lightnings; `either` would take 9 calls
    is_cycle = type(joined).__name__ == _MaxSizeCycle.__name__
    if not is_cycle or len(joined.iterators) > 1 or not fetcher.length:
        return iter(())
    return joined.iterators[0]


def count_fetched(fetcher: _DataFetcher, batches: int) -> None:
    """Count batches that were taken past Lightning, as it counts those that it fetches."""
    joined = fetcher.combined_loader._iterator
    assert joined is not None
    joined._idx += batches
    fetcher.fetched += batches
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length


class FetchedBefore:
    """Stands for Lightning's fetcher in a turn whose batch was fetched before."""

    def __init__(self, batch: object, fetcher: _DataFetcher) -> None:
        self._batch = batch
        self._fetcher = fetcher

    def __next__(self) -> object:
        # Lightning has no use for the other two, the numbers of batch and loader
        return self._batch, 0, 0

    @property
    def done(self) -> bool:
        return self._fetcher.done


def is_profiled(trainer: L.Trainer) -> bool:
    """Whether a profiler was asked for, which times each batch."""
    return type(profiler_of(trainer)) not in either(PassThroughProfiler)


def takes_usual_turns(trainer: L.Trainer) -> bool:
    """Whether Lightning wants each batch by itself now, whatever the callbacks want.

    After a restart it repeats hooks; in its weight averaging it trains on nothing.
    """
    loop = trainer.fit_loop.epoch_loop
    is_averaging = loop.automatic_optimization._skip_backward
    return bool(loop.restarting or is_averaging or trainer.should_stop)


def batches_to_next_hook(trainer: L.Trainer) -> int:
    """How many batches there are up to the next that ends an epoch, a training, or comes before a
    validation.
    """
    loop = trainer.fit_loop.epoch_loop
    in_epoch = loop.batch_idx + 1
    distances = [trainer.num_training_batches - in_epoch]
    if trainer.max_steps >= 0:
        distances.append(trainer.max_steps - trainer.global_step)
    every = trainer.val_check_batch
    if every is not None:
        is_by_epoch = trainer.check_val_every_n_epoch is not None
        done = in_epoch if is_by_epoch else loop.total_batch_idx + 1
        distances.append(every - done % every)
    nearest = min(distances)
    # that of a stream without a length is infinite
    return int(min(nearest, 1_000_000))


def count_steps(trainer: L.Trainer, steps: int) -> None:
    """Count batches that have each taken an optimizer step, up to the hooks of the last one."""
    loop = trainer.fit_loop.epoch_loop
    is_last = loop.batch_progress.is_last_batch
    loop.batch_progress.increment_by(steps, is_last)
    progress = loop.automatic_optimization.optim_progress.optimizer
    progress.step.increment_by(steps)
    progress.zero_grad.increment_by(steps)
    loop.scheduler_progress.increment_by(steps * len(step_schedules(trainer)))
    loop._batches_that_stepped += steps - 1


def end_counted_steps(trainer: L.Trainer) -> None:
    """Count the last of these batches as Lightning does behind its hooks."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def step_schedules(trainer: L.Trainer) -> list[LRSchedulerConfig]:
    """The schedules that advance with each optimizer step."""
    return [config for config in trainer.lr_scheduler_configs if config.interval == "step"]


def call_hooks(trainer: L.Trainer, name: str, *arguments: Any) -> None:
    """Call a hook of all callbacks, then of the module. `self.log` works in the hook."""
    call._call_callback_hooks(trainer, name, *arguments)
    call_module_hook(trainer, name, *arguments)


def run_training_step(
    trainer: L.Trainer, arguments: tuple[Any, ...], *, is_inside_ddp: bool
) -> ClosureResult:
    """Call `training_step` and check what it returns, as Lightning does.

    The loss is divided by the number of batches in an optimizer step. `is_inside_ddp`: whether the
    call is within DDP's forward already.
    """
    if is_inside_ddp:  # the strategy would enter DDP's forward a second time
        with trainer.precision_plugin.train_step_context():
            output = call_module_hook(trainer, "training_step", *arguments)
    else:
        output = call._call_strategy_hook(trainer, "training_step", *arguments)
    if output is None and trainer.world_size > 1:
        raise RuntimeError(
            "training_step returned None. With several ranks it must return a loss for each batch."
        )
    if output is None:
        in_package_of(trainer, Closure).warning_cache.warn(_RETURNED_NONE)
    if isinstance(output, Tensor) and trainer.accumulate_grad_batches == 1:
        return _undivided_result(output)
    result_class = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
    return result_class.from_training_step_output(output, trainer.accumulate_grad_batches)


def _undivided_result(loss: Tensor) -> ClosureResult:
    """The result of a step of one batch, without a division by 1 and a copy of the loss.

    On a GPU each of these, and the division's backward pass, is an operator to launch.
    """
    result = ClosureResult(None)
    result.closure_loss = loss
    result.loss = loss.detach()
    return result


def run_inside_ddp(
    strategy: Strategy, module: L.LightningModule, passes: Callable[[], float]
) -> float:
    """Call `passes`, which trains on a batch, inside one forward of DDP; return its seconds.

    DDP makes its collective calls once, however often a pass in it is repeated.
    """
    wrapper = strategy.model
    assert isinstance(wrapper, DistributedDataParallel)
    forward = module.forward

    def run_passes(_: None) -> float:
        set_method(module, "forward", forward)
        seconds = passes()
        # DDP would prepare for a backward pass, but the passes have done theirs already.
        wrapper.require_backward_grad_sync = False
        return seconds

    set_method(module, "forward", run_passes)
    try:
        # One argument, as on a GPU DDP moves arguments, and fails if there are none.
        return float(wrapper(None))
    finally:
        wrapper.require_backward_grad_sync = True
        unset_method(module, "forward")


def ends_optimizer_step(trainer: L.Trainer) -> bool:
    """Whether the current batch is the last of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def rebuild_ddp(strategy: DDPStrategy, module: L.LightningModule) -> None:
    """Set DDP up again after other weights were frozen or thawed.

    It exchanges gradients of the weights that were trained when it was set up.
    """
    strategy.model = strategy._setup_model(module)
    strategy._register_ddp_hooks()  # such as the compression of gradients


def disable_signal_handling(trainer: L.Trainer) -> None:
    """Keep Lightning from handling signals.

    Its handlers end a run without a checkpoint, and make ranks wait for each other before every
    batch.
    """
    connector = getattr(trainer, "_signal_connector", None)
    loop = trainer.fit_loop.epoch_loop
    names = {"register_signal_handlers": connector, "_broadcast_sigterm_tensor": loop}
    if not all(hasattr(owner, name) for name, owner in names.items()):
        _warn_of("_signal_connector or _broadcast_sigterm_tensor")
        return
    for name, owner in names.items():
        set_method(owner, name, lambda: None)


def call_before_validation(trainer: L.Trainer, note: Callable[[], None] | None) -> None:
    """Call `note` before each validation of a fit, before all its hooks.

    None ends the calls of an earlier function. A `run` that other code has set on the loop stays.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    standing = unset_method(loop, "run")
    if isinstance(standing, _RunAfterNote):
        standing = standing.standing
    if note is not None:
        set_method(loop, "run", _RunAfterNote(loop, note, standing))
    elif standing is not None:
        set_method(loop, "run", standing)


@dataclass(frozen=True, slots=True)
class _RunAfterNote:
    """Calls `note`, then the loop's `run`: the one that was set on it, or else its class's.

    It can be pickled. A function within a function cannot, and the decorated `run` of the class
    neither.
    """

    loop: _EvaluationLoop
    note: Callable[[], None]
    standing: Callable[[], Any] | None

    def __call__(self) -> Any:
        self.note()
        return type(self.loop).run(self.loop) if self.standing is None else self.standing()


def set_fetch_hooks(
    trainer: L.Trainer, before: Callable[[], None] | None, after: Callable[[], None] | None
) -> None:
    """Call `before` and `after` around each fetch of a training batch.

    Lightning's profiler still gets its calls. None ends the calls of an earlier function.
    """
    loop = trainer.fit_loop.epoch_loop
    for name, note in (("_on_before_fetch", before), ("_on_after_fetch", after)):
        if not hasattr(type(loop), name):
            _warn_of(name)
        elif note is None:
            unset_method(loop, name)
        else:
            set_method(loop, name, partial(_run_both, note, getattr(loop, name)))


def _run_both(note: Callable[[], None], usual: Callable[[], Any]) -> Any:
    """Call both. In a `partial`, as a function within a function could not be pickled."""
    note()
    return usual()


def resume_after_batch(
    trainer: L.Trainer, restore: Callable[[], None], *, is_validation_due: bool
) -> None:
    """Let a resumed training continue after the last batch of a step.

    `restore` is called first. A validation follows if it is due. Lightning's own restarting, which
    would repeat hooks, is off.
    """
    loop = trainer.fit_loop.epoch_loop
    start = loop.on_run_start

    def start_again(fetcher: _DataFetcher) -> None:
        unset_method(loop, "on_run_start")
        start(fetcher)
        optimizations = (loop.manual_optimization, loop.automatic_optimization)
        for restarted in (trainer.fit_loop, loop, loop.val_loop, *optimizations):
            restarted._restarting = False
        restore()
        if is_validation_due:
            loop.on_advance_end(fetcher)
        else:
            # Lightning steps these schedules after the validation, so after the checkpoint.
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    set_method(loop, "on_run_start", start_again)


def _warn_of(
    name: str,
    library: str = f"lightning {L.__version__}",
    consequence: str = "the ordinary, slower way is used",
) -> None:
    message = f"{library} has no {name} as flatout expects it: {consequence}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def leave_out_of_ddp(module: nn.Module, names: Sequence[str]) -> bool:
    """Exclude these weights from DDP's exchange of gradients: flatout exchanges their used rows.

    What the module itself leaves out stays left out. False, after a warning, if this torch has no
    way to do it.
    """
    method = getattr(DistributedDataParallel, _LEFT_OUT, None)
    arguments = [] if method is None else list(inspect.signature(method).parameters)
    if method is None or arguments != ["module", "params_and_buffers_to_ignore"]:
        name = f"DistributedDataParallel.{_LEFT_OUT}"
        _warn_of(name, f"torch {torch.__version__}", "embeddings exchange whole tables")
        return False
    method(module, [*_names_left_out(module), *names])
    return True


def take_back_into_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Undo `leave_out_of_ddp`, for the next DDP that is set up."""
    others = [name for name in _names_left_out(module) if name not in names]
    if others:
        setattr(module, _NAMES_LEFT_OUT, others)
    else:
        delattr(module, _NAMES_LEFT_OUT)
    for name in names:
        delattr(module.get_parameter(name), _FLAG_LEFT_OUT)


def _names_left_out(module: nn.Module) -> list[str]:
    """Names of the weights that DDP leaves out of its exchange of gradients."""
    return list(getattr(module, _NAMES_LEFT_OUT)) if hasattr(module, _NAMES_LEFT_OUT) else []

"""Begin a run in a process apart, end it after some seconds of steps, and return its summary.

What such a try has cost is multiplied with the plan of the whole run (`price/costs.py`). It is a
real run: its feed, precision, captured steps, validations and checkpoints are those of the run.
Only loggers, your callbacks, the verdict and the rival are left out. Nothing of it stays.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatout.callbacks.profile_steps import ProfileConfig
from flatout.config import RunConfig
from flatout.errors import UserError
from flatout.perf.measure.apart import Failed, run
from flatout.perf.measure.steps import held_bytes

if TYPE_CHECKING:
    from flatout.run.closing import Result

STEPS_S = 6.0  # seconds of steps in a try
# A long run is tried for a share of it: on shared cores six seconds agree with the forty behind
# them within 10 % in 78 of 100 places, twelve in 83.
_SHARE = 0.05
_MOST_STEPS_S = 15.0
_LEAST_STEPS = 6  # or as many steps, whatever they take
_STEPS_OF_RANKS = 40  # their clocks differ, so several ranks take a fixed number of steps
_LONGEST_S = 300.0
_COUNTED_STEP = 3

Begin = Callable[[RunConfig, Path], "Result"]  # begins a run in a folder


def seconds_to_try(run_s: float) -> float:
    """Seconds of steps that say enough of a run of `run_s`.

    Six for one of two minutes, ten for one of 200 s, and fifteen for all from five minutes on.
    """
    return min(max(STEPS_S, _SHARE * run_s), _MOST_STEPS_S)


class CountOperators(TorchDispatchMode):
    """Counts operators of a step that are kernels on a card, and the bytes they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves((args, result)) if isinstance(part, Tensor)]
        # a view or an allocation moves nothing
        if not func.is_view and not str(func).startswith(("aten.empty", "aten.detach")):
            self.launches += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


class EndSoon(L.Callback):
    """Ends training after some seconds of steps; Lightning then validates as at an epoch's end.

    `seconds`: None for six, or a twentieth of a longer run, at most fifteen.
    """

    def __init__(self, seconds: float | None = None, *, counts: bool = False) -> None:
        self.seconds = seconds
        self.counts = counts
        self.step = CountOperators()
        self._first_at = 0.0
        self._is_counting = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        on_cpu = trainer.strategy.root_device.type == "cpu"
        is_step = trainer.global_step == _COUNTED_STEP and not self.step.launches
        if self.counts and on_cpu and is_step:
            self.step.__enter__()
            self._is_counting = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._is_counting:
            self.step.__exit__(None, None, None)
            self._is_counting = False
        now = time.perf_counter()
        self._first_at = self._first_at or now
        if trainer.world_size > 1:
            is_over = trainer.global_step >= _STEPS_OF_RANKS
        else:
            elapsed_s = now - self._first_at
            wanted_s = self.seconds
            if wanted_s is None:
                # infinite, or -1, in a run without an end
                times_longer = trainer.estimated_stepping_batches / max(1, trainer.global_step)
                wanted_s = seconds_to_try(elapsed_s * times_longer)
            is_over = elapsed_s >= wanted_s and trainer.global_step >= _LEAST_STEPS
        if is_over:
            trainer.should_stop = True


@cache
def bytes_before_data() -> int:
    """Memory that this process holds before it opens data; call it first then.

    It is asked for once: a store that was built here for one run is no memory of the next.
    """
    return held_bytes(torch.device("cpu"))


def try_run(
    config: RunConfig, begin: Begin, *, seconds: float | None = None, counts: bool = False
) -> dict[str, Any]:
    """The summary of a try; `UserError` if it could not be made.

    `seconds`: of steps; None for six, or a twentieth of a longer run, at most fifteen.
    `counts`: whether the operators of a step are counted, on the CPU; they stand under `price`.
    """
    own_bytes = bytes_before_data()
    with tempfile.TemporaryDirectory(prefix="flatout-price-") as folder:
        tried = replace(
            config,
            callbacks={"end_soon": EndSoon(seconds, counts=counts)},
            compile=False if counts else config.compile,
            checkpoint=replace(config.checkpoint, patience=None),
            monitor=replace(
                config.monitor, progress=False, verdict=False, rival=False, profile=ProfileConfig()
            ),
            logger="none",
            resume=None,
            budget=None,
            until=None,
            output=folder,
        )
        make = partial(
            _begin, tried, Path(folder) / "try", begin, torch.get_num_threads(), own_bytes
        )
        try:
            return run(make, _LONGEST_S)
        except Failed as failed:
            hint = "python -m train with these settings shows where it fails."
            if failed.is_unread:  # a script of yours that begins a run as it is imported
                hint = "Put the training below: if __name__ == '__main__':"
            elif failed.is_memory:
                hint = "Lower data.batch_size, or take a smaller model."
            raise UserError("price", f"the try failed: {failed.why}", hint=hint) from None


def _begin(
    config: RunConfig, folder: Path, begin: Begin, threads: int, own_bytes: int
) -> dict[str, Any]:
    """`own_bytes`: what a process of a command holds before a run, with more modules than here."""
    torch.set_num_threads(threads)
    more_gb = (own_bytes - held_bytes(torch.device("cpu"))) / 1e9
    summary = begin(config, folder).summary
    ending = config.callbacks["end_soon"]
    flops = summary["price"]["flops_a_step"] or 0.0
    step = {"flops": flops, "launches": ending.step.launches, "bytes": ending.step.bytes}
    price = {**summary["price"], "step": step}
    if price.get("host_peak_gb") is not None:
        price["host_peak_gb"] += max(0.0, more_gb)
    return {**summary, "price": price}

"""Curves of the card and of the machine: load, memory, clocks, disk, swap.

A thread on the first rank samples them each second, so no step waits for a driver or a file. A
flush takes the means since the last flush; `summary` gives medians over the whole training. The
machine's figures come from psutil and from the files of control groups, as a container may use less
than its machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus

from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.hardware_watch import Source, Watch, hardware_of
from flatout.engine.lightning_internals import is_second
from flatout.errors import require
from flatout.run_log import Say


class HardwareMonitor(CurveSource):
    """Curves of the GPU (by NVML) and of the host (by psutil and control groups)."""

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        every_s: float = 1.0,
        sources: Sequence[Source] | None = None,
        say: Say = print,
    ) -> None:
        """`sources`: what to sample; None: this machine, and the card of the Trainer."""
        super().__init__(every_n_steps)
        require(every_s > 0, "every_s", f"{every_s:g}", allowed="more than 0")
        self.sources = sources
        self.every_s = every_s
        self.say = say
        self.watch = Watch(sources or [], say, every_s)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.end()  # an error may have ended an earlier training, and left its thread
        if is_second(self, trainer):
            self.say("HardwareMonitor: another one samples already; this one logs nothing")
            self.watch = Watch([], self.say, self.every_s)
            return
        sources = self.sources
        if sources is None and trainer.is_global_zero:
            sources = hardware_of(trainer.strategy.root_device)
        if self.sources is None or not self.watch.sources:  # a copy's watch has none
            self.watch = Watch(sources or [], self.say, self.every_s)
        self.watch.is_needed = lambda: trainer.state.status == TrainerStatus.RUNNING

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Only here: if a rate search before the training fails, no hook of this callback is called.
        self.watch.__enter__()

    def end(self) -> None:
        self.watch.__exit__()

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        return self.watch.take()

    def summary(self) -> dict[str, dict[str, Any]]:
        """Medians over the training, and facts such as reasons for throttling, for each source."""
        return self.watch.summary()

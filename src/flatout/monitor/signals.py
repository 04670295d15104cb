"""A signal to one rank is a signal to all: they agree on it about twice a second, not in every step.

Lightning lets the first rank tell the others before each batch whether it was asked to stop, which is one wait for the
device a batch and does not see signals to other ranks.
"""

from __future__ import annotations

import time
from types import FrameType

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

_WARM_UP = 8
_SECONDS = 0.5
_MOST_BATCHES = 256


def agree_on_signals_seldom(trainer: L.Trainer) -> None:
    """Put our agreement in the place of Lightning's."""
    watch = SignalWatch()
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: watch.look(trainer.strategy.root_device)
    vars(vars(trainer)["_signal_connector"])["_sigterm_notifier_fn"] = watch.note


class SignalWatch:
    """Counts batches and asks all ranks every so many of them whether one was asked to stop."""

    def __init__(self) -> None:
        self.every = _WARM_UP
        self.was_asked = False
        self._batches = 0
        self._since = time.perf_counter()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal: it waits for nobody."""
        self.was_asked = True

    def look(self, device: torch.device) -> None:
        """Once before each batch, on every rank."""
        self._batches += 1
        if self._batches % self.every:
            return
        now = time.perf_counter()
        batch_s = (now - self._since) / self.every
        told = torch.tensor([float(self.was_asked), batch_s], device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        asked, slowest_s = told.tolist()
        if asked:
            raise SIGTERMException
        self._batches, self._since = 0, now
        self.every = min(_MOST_BATCHES, max(1, int(_SECONDS / max(slowest_s, 1e-6))))

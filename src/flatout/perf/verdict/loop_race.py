"""Race the fast loop against Lightning's own loop on a copy of a foreign module.

Both loops train the same copy in one small Trainer, in turns of a few batches. The milliseconds
that the fast loop saves of a batch carry over to the run. Open this file to change when the race is
worth its time, or how the turns are timed.
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flatout.engine.fast_loop import FastLoop, fast_loop_of, reason_against
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.step_losses import NotFinite
from flatout.errors import first_line
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import experiments
from flatout.perf.verdict.copies import OwnTask
from flatout.perf.verdict.evidence import Evidence, Tried
from flatout.perf.verdict.ways import Refused

_LOOP_MS = 10.0  # the longest batch for which half a millisecond matters, which a loop may save
_LOOP_SHARE = 0.3  # of the time that is left, what the race may take
_SETUP_S = 0.5  # a guess at what the race's Trainer takes to begin


def try_fast_loop(
    trainer: L.Trainer,
    module: L.LightningModule,
    was: TrainingWay,
    evidence: Evidence,
    until: float,
) -> None:
    """Fill in what the fast loop saves of each batch, where batches are so short that it is worth
    it.
    """
    feed: Any = was.feed
    step_s, left_s = evidence.total_ms * evidence.accumulate / 1000, until - time.perf_counter()
    length = evidence.accumulate * math.ceil(experiments.ROUND_S / max(step_s, 1e-6))
    needed_s = 2 * (experiments.ROUNDS + 1) * length * evidence.total_ms / 1000 + _SETUP_S
    whole_ms = evidence.model_ms + evidence.ms.get("other", 0.0)
    is_worth_it = whole_ms <= _LOOP_MS and needed_s <= _LOOP_SHARE * left_s
    if fast_loop_of(trainer) is not None or not is_worth_it or reason_against(trainer, module):
        return
    turns = _InTurns(length, time.perf_counter() + _LOOP_SHARE * left_s)
    try:
        _train(trainer, feed.task, experiments.some_batches(feed), turns)
    except Refused:
        raise
    except Exception as error:
        # your own step may raise anything; the other ways are raced all the same
        evidence.notes.append(f"the fast loop was left out: {first_line(error)}")
        return
    # Milliseconds carry over to the run, whose steps have more around them; ratios do not.
    saved = [slow - fast for slow, fast in zip(turns.ms[0], turns.ms[1][1:], strict=False)]
    gain = speedup(
        [1.0] * len(saved), [whole_ms / max(whole_ms - each, 0.1 * whole_ms) for each in saved]
    )
    fix: dict[str, Any] = {"cause": "loop", "override": "Trainer(callbacks=[FastLoop()])"}
    sizes: dict[str, Any] = {
        "rows_per_batch": evidence.rows_per_batch,
        "batches_per_step": evidence.accumulate,
    }
    evidence.tried.append(Tried.by(gain, 1000 * evidence.rows_per_batch / whole_ms, **fix, **sizes))


def _train(trainer: L.Trainer, task: OwnTask, batches: list[Any], turns: _InTurns) -> None:
    """Train a copy in a Trainer that has nothing but both loops."""
    device = task.device
    interrupt = signal.getsignal(signal.SIGINT)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    same = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    settings: dict[str, Any] = off | {name: getattr(trainer, name) for name in same}
    devices: Any = 1 if device.type == "cpu" else [device.index or 0]
    inner = L.Trainer(accelerator=device.type, devices=devices, max_epochs=1, **settings)
    vars(inner)["callbacks"] = [turns]  # none that a factory adds
    disable_signal_handling(inner)
    given = (
        (batch,)
        for batch in itertools.takewhile(lambda _: not turns.is_done, itertools.cycle(batches))
    )
    try:
        inner.fit(_Step(task), given)
    except SystemExit:  # Lightning's answer to Ctrl-C, which it then ignores
        signal.signal(signal.SIGINT, interrupt)
        raise KeyboardInterrupt from None
    finally:
        task.optimizers[0].zero_grad()
        task.optimizers[0].load_state_dict(task.optimizers[0].state_dict())  # back to the device


class _Step(L.LightningModule):
    def __init__(self, task: OwnTask) -> None:
        super().__init__()
        self._task = task

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._task.training_loss(batch[0], self._task.model)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizers[0]


class _InTurns(FastLoop):
    """Takes every second stretch of batches; Lightning's own loop takes those between."""

    def __init__(self, length: int, until: float) -> None:
        super().__init__(not_finite=NotFinite.skip)
        self.length, self.until = length, until
        self.ms: tuple[list[float], list[float]] = ([], [])
        """Of a batch in each stretch: by Lightning's loop without its first, and by this one."""
        self.is_turn = False
        self.is_done = False
        self._ended = 0
        self._at = 0.0

    def _serves(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.is_turn and super()._serves(optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._ended += 1
        if self._ended % self.length:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        now = time.perf_counter()
        if self._at:
            self.ms[self.is_turn].append(1000 * (now - self._at) / self.length)
        rounds = len(self.ms[1]) - 1
        self.is_done = rounds >= MOST_ROUNDS or (rounds >= experiments.ROUNDS and now > self.until)
        self.is_turn = not self.is_turn
        self._at = time.perf_counter()

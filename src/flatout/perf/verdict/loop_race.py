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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from flatout.engine.fast_loop import FastLoop, fast_loop_of, reason_against
from flatout.engine.lightning_internals import disable_signal_handling, set_callbacks
from flatout.engine.step_losses import NotFinite
from flatout.errors import first_line
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup
from flatout.perf.verdict.evidence import ROUND_S, ROUNDS, Evidence, Tried
from flatout.perf.verdict.ways import Refused

if TYPE_CHECKING:
    from flatout.perf.verdict.copies import OwnTask
    from flatout.perf.verdict.own_feed import OwnBatch

_LOOP_MS = 10.0  # the longest batch for which half a millisecond matters, which a loop may save
_LOOP_SHARE = 0.3  # of the time that is left, what the race may take
_SETUP_S = 0.5  # a guess at what the race's Trainer takes to begin


def try_fast_loop(
    task: OwnTask,
    some_batches: Callable[[], list[Any]],
    evidence: Evidence,
    until: float,
) -> None:
    """Add to `evidence` what the fast loop saves of each batch; nothing where batches are long.

    Both loops train `task`, a copy of the module, on the batches that `some_batches` reads.
    `until` is the end of all tries, a time of `time.perf_counter`.
    """
    trainer = task.trainer
    step_s = evidence.total_ms * evidence.accumulate / 1000
    left_s = until - time.perf_counter()
    batches_per_turn = evidence.accumulate * math.ceil(ROUND_S / max(step_s, 1e-6))
    turns_s = 2 * (ROUNDS + 1) * batches_per_turn * evidence.total_ms / 1000
    whole_ms = evidence.model_ms + evidence.ms.get("other", 0.0)
    is_worth_it = whole_ms <= _LOOP_MS and turns_s + _SETUP_S <= _LOOP_SHARE * left_s
    if fast_loop_of(trainer) is not None or not is_worth_it:
        return
    if reason_against(trainer, task.module):
        return
    turns = _InTurns(batches_per_turn, time.perf_counter() + _LOOP_SHARE * left_s)
    try:
        _train(task, some_batches(), turns)
    except Refused:
        raise
    except Exception as error:
        # Your own step may raise anything. The other ways are raced all the same.
        evidence.notes.append(f"the fast loop was left out: {first_line(error)}")
        return
    # Milliseconds carry over to the run, whose steps have more around them; ratios do not.
    # Saved 0.5 ms of a batch of 2 ms in the run: a ratio of 2 / 1.5.
    ratios = list[float]()
    for lightning_ms, fast_ms in zip(turns.lightning_ms, turns.fast_ms[1:], strict=False):
        saved_ms = lightning_ms - fast_ms
        ratios.append(whole_ms / max(whole_ms - saved_ms, 0.1 * whole_ms))
    tried = Tried.by(
        speedup([1.0] * len(ratios), ratios),
        1000 * evidence.rows_per_batch / whole_ms,
        cause="loop",
        override="Trainer(callbacks=[FastLoop()])",
        rows_per_batch=evidence.rows_per_batch,
        batches_per_step=evidence.accumulate,
    )
    evidence.tried.append(tried)


def _train(task: OwnTask, batches: list[OwnBatch], turns: _InTurns) -> None:
    """Train the task's copy over `batches` again and again, in a bare Trainer, until `turns` end.

    The Trainer has the precision, accumulation and clipping of the task's own, and neither logger
    nor checkpoints.
    """
    trainer = task.trainer
    device = task.device
    interrupt_handler = signal.getsignal(signal.SIGINT)
    devices: Any = 1 if device.type == "cpu" else [device.index or 0]
    inner = L.Trainer(
        accelerator=device.type,
        devices=devices,
        max_epochs=1,
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    set_callbacks(inner, [turns])
    disable_signal_handling(inner)

    def batches_of_all_turns() -> Iterator[tuple[OwnBatch]]:
        for batch in itertools.cycle(batches):
            if turns.is_done:
                return
            yield (batch,)

    optimizer = task.optimizers[0]
    try:
        inner.fit(_Step(task), batches_of_all_turns())
    except SystemExit:  # Lightning's answer to Ctrl-C, which it then ignores
        signal.signal(signal.SIGINT, interrupt_handler)
        raise KeyboardInterrupt from None
    finally:
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())  # back to the device


class _Step(L.LightningModule):
    """The training step of a task's copy, on batches that are on the device already."""

    def __init__(self, task: OwnTask) -> None:
        super().__init__()
        self._task = task

    def training_step(self, batch: tuple[OwnBatch], batch_idx: int) -> Tensor:
        return self._task.training_loss(batch[0], self._task.model)

    def transfer_batch_to_device(
        self, batch: object, device: torch.device, dataloader_idx: int
    ) -> object:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizers[0]


class _InTurns(FastLoop):
    """Fast loop that takes every second turn of batches; Lightning's loop takes those between.

    With turns of 3 batches, L for Lightning's loop and F for the fast one:

        batches   L L L   F F F   L L L   F F F   L L L   F F F
        timed     no      F[0]    L[0]    F[1]    L[1]    F[2]

    The first turn of all is not timed, as it begins before this class sees a batch. The race
    compares L[0] with F[1], L[1] with F[2]: F[0] only warms up.
    """

    def __init__(self, batches_per_turn: int, until: float) -> None:
        super().__init__(not_finite=NotFinite.skip)
        self.batches_per_turn = batches_per_turn
        self.until = until
        self.lightning_ms: list[float] = []  # of a batch, for each timed turn
        self.fast_ms: list[float] = []
        self.is_fast_turn = False
        self.is_done = False
        self._batches_ended = 0
        self._turn_began = 0.0

    def _takes_batches_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.is_fast_turn and super()._takes_batches_of(optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._batches_ended += 1
        if self._batches_ended % self.batches_per_turn:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        now = time.perf_counter()
        if self._turn_began:
            times_ms = self.fast_ms if self.is_fast_turn else self.lightning_ms
            times_ms.append(1000 * (now - self._turn_began) / self.batches_per_turn)
        rounds = len(self.fast_ms) - 1
        is_over = rounds >= ROUNDS and now > self.until
        self.is_done = rounds >= MOST_ROUNDS or is_over
        self.is_fast_turn = not self.is_fast_turn
        self._turn_began = time.perf_counter()

"""Passes through a step's batches; where memory does not suffice they are repeated in smaller pieces.

The plan, the feed and the checkpoints know nothing of it: a batch is cut *inside* the step. The gradients of a step's
batches are dropped, the random numbers set back, and the same rows go through in twice as many pieces, then and in all
steps to come. Losses are divided by the rows of the whole step, so the pieces' gradients add up to the same.

On several ranks each repeats by itself; the others wait where gradients are exchanged, and none sees a difference. The
hard case is memory that runs out in a step's last backward pass: DDP has sent some gradients off, and cannot take them
back. That ends the run with its last checkpoint. The size that fits is noted, and `resume=auto` continues with it.

A step that has memory pays one list append and a note of the random state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from flatout.checkpoints.position import RandomState
from flatout.data.batches.cut import cut_batch
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine.out_of_memory import ERRORS, give_back_memory, in_short, is_out_of_memory
from flatout.errors import UserError

if TYPE_CHECKING:
    from flatout.tasks.step import StepTask

TRAINING, EVALUATION = "training", "evaluation"


class Tell(Protocol):
    """Told that batches are cut into more pieces than before: what for, at which step, and the error's words."""

    def __call__(self, name: str, pieces: int, before: int, step: int, why: str, has_ended: bool) -> None: ...


def _tell_nobody(name: str, pieces: int, before: int, step: int, why: str, has_ended: bool) -> None:
    return


class Passes:
    """Forward and backward passes of a task, in as many pieces as memory asks for."""

    def __init__(self, task: StepTask) -> None:
        self.task = task
        self.pieces = {TRAINING: 1, EVALUATION: 1}
        """Into how many pieces each batch is cut."""
        self.losses: list[Tensor] = []
        """Of the step that is under way, so far."""
        self.times_out = 0
        """How often memory did not suffice."""
        self.tell: Tell = _tell_nobody
        """Told when more pieces were enough, or when the run ends although they might be."""
        self.least = {TRAINING: 1, EVALUATION: 1}
        """Pieces without which a run that goes on would end again."""
        self._batches: list[FlatBatch] = []
        self._random: RandomState | None = None
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._is_exchanging = False

    def restart(self) -> None:
        """Forget a step that was never ended."""
        self._batches.clear()
        self.losses.clear()
        self._is_exchanging = False

    def train(self, batch: FlatBatch) -> float:
        """Gradients and the loss of a step's next batch; the seconds of its forward passes."""
        if not self._batches:
            self._begin_step()
        self._batches.append(batch)
        try:
            seconds = self._through(batch)
        except ERRORS as error:
            if not is_out_of_memory(error):
                raise
            why = in_short(error)
        else:
            return seconds
        # Out here the error is gone, and with it its frames, which hold the activations.
        return self._again(why)

    def end_step(self) -> Tensor:
        """The loss of the step whose batches went through."""
        losses = self.losses
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        losses.clear()
        self._batches.clear()
        return loss

    def judge(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        """The answers to a batch of validation or test."""
        why, before = "", self.pieces[EVALUATION]
        while True:
            count = self.pieces[EVALUATION]
            try:
                parts = cut_batch(batch, count, labels_are_of_tokens=self.task.labels_are_of_tokens)
                found = answer(batch) if count == 1 else torch.cat([answer(part) for part in parts])
            except ERRORS as error:
                if not is_out_of_memory(error):
                    raise
                why = in_short(error)
            else:
                if why:
                    self._tell(EVALUATION, before, why)
                return found
            self._require_alone(EVALUATION, why)
            self._halve(EVALUATION, [batch], why)

    def hear(self, told: list[int]) -> None:
        """How many pieces some rank needs: the most of all."""
        for name, count in zip(self.pieces, told, strict=True):
            if count > (before := self.pieces[name]):
                self.pieces[name] = count
                self._tell(name, before, "on another rank")

    def _begin_step(self) -> None:
        self._random = RandomState(self.task.device, with_others=False)
        self._statistics = [(mean, mean.clone()) for mean in self.task.running_statistics]
        self.task.begin_step()

    def _through(self, batch: FlatBatch) -> float:
        """Forwards and backwards, piece by piece; ranks exchange gradients in the last pass of a step."""
        task, seconds, count = self.task, 0.0, self.pieces[TRAINING]
        parts = [batch] if count == 1 else cut_batch(batch, count, labels_are_of_tokens=task.labels_are_of_tokens)
        for part in parts:
            began = time.perf_counter()
            loss = task.loss(task.model(part), part)
            seconds += task.edge(1) - began
            self._is_exchanging = part.ends_step
            task.backward_of(loss, part.ends_step)
            self._is_exchanging = False
            self.losses.append(loss.detach())
        return seconds

    def _again(self, why: str) -> float:
        """All batches of the step so far once more, in more pieces, until memory suffices."""
        self._require_alone(TRAINING, why)
        seconds, task, before = 0.0, self.task, self.pieces[TRAINING]
        while True:
            self._halve(TRAINING, self._batches, why)
            if self._is_exchanging and task.exchanges:
                raise self._beyond_mending(before, why)
            self._set_back()
            try:
                seconds += sum(map(self._through, self._batches))
            except ERRORS as error:
                if not is_out_of_memory(error):
                    raise
                why = in_short(error)
            else:
                self._tell(TRAINING, before, why)
                return seconds

    def _require_alone(self, name: str, why: str) -> None:
        """No rank can repeat a pass by itself where each holds slices of the weights."""
        if self.task.shares_weights:
            what = f"no rank can take smaller pieces by itself where weights are shared out ({why})"
            size = "data.batch_size" if name == TRAINING else "data.eval_batch_size"
            mend = f"Set a smaller {size}. {self.task.smaller_rows} The last checkpoint is kept."
            raise UserError(f"{name} ran out of memory {self._at()}", what, mend=mend)

    def _halve(self, name: str, batches: list[FlatBatch], why: str) -> None:
        """Twice as many pieces, where there are rows for them."""
        self.times_out += 1
        if self.pieces[name] >= max(batch.num_real for batch in batches):
            longest = max(batch.longest() for batch in batches)
            where = f"{name} ran out of memory {self._at()}"
            what = f"a single row at once, of at most {longest} tokens, is too much ({why})"
            raise UserError(where, what, mend=f"{self.task.smaller_rows} The last checkpoint is kept.")
        give_back_memory()
        self.pieces[name] *= 2

    def _set_back(self) -> None:
        """To where the step began: random numbers, running means, and no gradients."""
        task = self.task
        self.losses.clear()
        assert self._random is not None
        self._random.restore(task.device)
        for mean, before in self._statistics:
            mean.copy_(before)
        task.set_back()
        self._is_exchanging = False

    def _beyond_mending(self, before: int, why: str) -> UserError:
        """Ranks have exchanged what cannot be taken back: this run ends, the next begins with smaller pieces."""
        self._tell(TRAINING, before, why, has_ended=True)
        what = f"memory ran out {self._at()} while ranks exchanged gradients ({why})"
        mend = "Smaller pieces are noted for the next run: the same command with resume=auto goes on with them."
        return UserError("training", what, mend=mend)

    def _tell(self, name: str, before: int, why: str, has_ended: bool = False) -> None:
        self.tell(name, self.pieces[name], before, self.task.trainer.global_step, why, has_ended)

    def _at(self) -> str:
        return f"at step {self.task.trainer.global_step + 1}"


def running_statistics(model: nn.Module) -> list[Tensor]:
    """What batch normalisation notes in every forward pass."""
    layers = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return [buffer for layer in layers for buffer in layer.buffers()]

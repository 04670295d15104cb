"""Forward and backward passes of a step's batches; after out-of-memory they are repeated in smaller
pieces.

The plan, the feed and the checkpoints know nothing of it: a batch is cut *inside* the step. It
drops the gradients of the step's batches and sets the random numbers back. The same rows then pass
in twice as many pieces, now and in all later steps. Losses are divided by the rows of the whole
step, so the gradients of the pieces add up to the same.

On several ranks each repeats alone while the others wait. DDP cannot call back an exchange that it
has begun. Then the run ends with its last checkpoint and notes the size that fits; `resume=auto`
continues with it. A step that has enough memory pays one list append and a note of the random
state. Only errors that plainly say so count as out-of-memory. cuDNN's "no engine" and cuBLAS's "not
initialized" often mean the same. As often they mean something that smaller batches do not cure. On
a CPU the system ends a process first.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch, cut_batch
from flatout.distributed.collectives import SharedMaximum
from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import UserError, require

_WORDS = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) (?:error: )?out of memory"
    r"|(?:CU|HIP|ROC)(?:BLAS|BLASLT|DNN|SPARSE|SOLVER|FFT|RAND)"
    r"_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED"
    r"|MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    re.IGNORECASE,
)
_OTHERS = re.compile(r"\bNCCL\b")  # after one of these the ranks cannot talk any more
TRAINING = "training"
EVALUATION = "evaluation"
# layers that keep running means
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice for what was computed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and _WORDS.search(text) is not None
        and _OTHERS.search(text) is None
    )


def in_short(error: BaseException) -> str:
    """The first words of an error: what could not be had, without the allocator's account."""
    sentences = re.split(r"(?<=\D\.) ", " ".join(str(error).split()) or type(error).__name__)
    return " ".join(sentences[:2])[:160].rstrip(".")


class ShortOfMemory:
    """Around a pass, stops an error that memory did not suffice, and drops its frames; `why` has
    its first words.
    """

    why = ""

    def __enter__(self) -> ShortOfMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.why = in_short(error)
        return True


def give_back_memory() -> None:
    """Return unused memory to the device; call it where the error's traceback is gone."""
    # Frames of the error and their tensors refer to each other: counting references alone never
    # frees them.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Passes:
    """Passes of a module, in as many pieces as memory asks for."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop  # the fast loop that these passes are of
        self.pieces = {TRAINING: 1, EVALUATION: 1}  # into how many pieces each batch is cut
        self.times_out = 0  # how often memory did not suffice
        self.report: Callable[[str, int, int, int, str, bool], object] | None = None
        """Called with what for, the pieces now and before, the step, the error's words, and whether
        the run ends."""
        # pieces without which a resumed run would end again
        self.least = {TRAINING: 1, EVALUATION: 1}
        self.losses: list[Tensor] = []  # of the step that is under way, so far
        self._batches: list[Any] = []
        self._random: dict[str, Any] = {}
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._is_exchanging = False
        self._of_ranks = SharedMaximum()

    def restart(self) -> None:
        """Forget a step that was never ended."""
        self._batches.clear()
        self.losses.clear()
        self._is_exchanging = False
        # Once, not in each step: a walk over all modules takes longer than the copies.
        self._buffers = running_statistics(self.loop.module)

    def train(self, batch: Any, *, ends_step: bool) -> float:
        """Gradients and the loss of a step's next batch; the seconds of its forward passes."""
        if not self._batches:
            # What a repeat sets back. Running means are copied, as each forward pass moves them;
            # weights are untouched.
            self._random = random_state(self.loop.module.device, with_others=False)
            self._statistics = [(mean, mean.clone()) for mean in self._buffers]
            if (begin := getattr(self.loop.module, "begin_step", None)) is not None:
                begin()
        # All batches of the step are kept: a repeat drops the gradients of the earlier ones, too.
        self._batches.append(batch)
        with ShortOfMemory() as short:
            return self._pass(batch, ends_step)
        return self._repeat(short.why, ends_step)

    def end_step(self) -> Tensor | None:
        """The loss of the step whose batches have passed."""
        losses = self.losses
        # Each part was divided by the rows of the whole step, so the sum is the mean over its rows.
        loss = None if not losses else losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        losses.clear()
        self._batches.clear()
        return loss

    def judge(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        """The answers to a batch of validation or test."""
        why = ""
        before = self.pieces[EVALUATION]
        while True:
            count = self.pieces[EVALUATION]
            with ShortOfMemory() as short:
                found = (
                    answer(batch)
                    if count == 1
                    else torch.cat([answer(part) for part in self._parts(batch, count)])
                )
                if why:
                    self._report(EVALUATION, before, why)
                return found
            why = short.why
            self._require_alone(EVALUATION, why)
            self._halve(EVALUATION, [batch], why)

    def agree(self) -> None:
        """Now and then, take over how many pieces some rank needs: the most of all.

        After each step of every rank.
        """
        # Not needed for the result, only for speed: ranks that cut alike wait less for each other.
        counts = self._of_ranks.look(list(self.pieces.values()), self.loop.module.device)
        for name, count in zip(self.pieces, counts or (), strict=False):
            if count > (before := self.pieces[name]):
                self.pieces[name] = int(count)
                self._report(name, before, "on another rank")

    def load(self, of_ranks: list[dict[str, Any]], rank: int, *, is_same_world: bool) -> None:
        """Start with the pieces that a checkpoint notes: this rank's, or the most of all in another
        world.
        """
        # Pieces change the order of sums, so a resume with others would not be exact: this rank's
        # own count stays.
        known = [of_ranks[rank]] if is_same_world else of_ranks
        for name in self.pieces:
            self.pieces[name] = max(
                self.least[name], *(each.get("pieces", {}).get(name, 1) for each in known)
            )

    def _parts(self, batch: FlatBatch, count: int) -> list[FlatBatch]:
        return cut_batch(
            batch,
            count,
            labels_are_of_tokens=getattr(self.loop.module, "labels_are_of_tokens", False),
        )

    def _pass(self, batch: Any, ends_step: bool) -> float:
        loop = self.loop
        seconds = 0.0
        count = self.pieces[TRAINING]
        parts = [batch] if count == 1 else self._parts(batch, count)
        for number, part in enumerate(parts, 1):
            is_last = ends_step and number == len(parts)
            began = time.perf_counter()
            # Forward and backward pass in one context: DDP decides in the forward pass whether it
            # will exchange.
            with loop.exchange_context(ends_step=is_last):
                loss = loop.forward(part)
                seconds += loop.edge(1) - began
                if loss is None:
                    continue
                # From here on other ranks wait for this one's gradients, and nothing can call them
                # back.
                self._is_exchanging = is_last
                loop.backward(loss, ends_step=is_last)
                self._is_exchanging = False
            self.losses.append(loss.detach())
        return seconds

    def _repeat(self, why: str, ends_step: bool) -> float:
        self._require_alone(TRAINING, why)
        seconds = 0.0
        before = self.pieces[TRAINING]
        while True:
            # A rank that repeated now would send its gradients twice, and the others would add them
            # up.
            if self._is_exchanging and self.loop.exchanges:
                raise self._no_way_back(why)
            self._halve(TRAINING, self._batches, why)
            self._reset()
            with ShortOfMemory() as short:
                # The batches before the one that failed were fine; but their gradients were dropped
                # with its own.
                for number, batch in enumerate(self._batches, 1):
                    seconds += self._pass(batch, ends_step and number == len(self._batches))
                self._report(TRAINING, before, why)
                return seconds
            why = short.why

    def _require_alone(self, name: str, why: str) -> None:
        """Refuse where no rank can repeat a pass alone, and batches that flatout cannot cut."""
        size = "data.batch_size" if name == TRAINING else "data.eval_batch_size"
        where = f"{name} ran out of memory {self._at()}"
        require(
            all(isinstance(batch, FlatBatch) for batch in self._batches),
            where,
            why,
            hint=f"Lower {size} or the batch size of your DataModule. The last checkpoint is kept.",
        )
        # Sharded weights are gathered by all ranks in each pass: one that passes twice would wait
        # for ever.
        require(
            not getattr(self.loop.module, "is_sharded", False),
            where,
            f"no rank can take smaller pieces by itself where weights are shared out ({why})",
            hint=f"Set a smaller {size}. {self._smaller_rows()} The last checkpoint is kept.",
        )

    def _halve(self, name: str, batches: list[FlatBatch], why: str) -> None:
        self.times_out += 1
        if self.pieces[name] >= max(batch.num_real for batch in batches):
            longest = max(batch.longest() for batch in batches)
            raise UserError(
                f"{name} ran out of memory {self._at()}",
                f"a single row at once, of at most {longest} tokens, is too much ({why})",
                hint=f"{self._smaller_rows()} The last checkpoint is kept.",
            )
        # The caching allocator keeps blocks of the old sizes, which smaller pieces cannot always
        # use.
        give_back_memory()
        self.pieces[name] *= 2

    def _reset(self) -> None:
        module = self.loop.module
        self.losses.clear()
        assert self._random
        restore_random_state(self._random, module.device)
        for mean, before in self._statistics:
            mean.copy_(before)
        self.loop.optimizer.zero_grad()
        if (reset := getattr(module, "reset_step", None)) is not None:
            reset()
        self._is_exchanging = False

    def _no_way_back(self, why: str) -> UserError:
        """Ranks have exchanged what cannot be called back: this run ends, the next begins with
        smaller pieces.
        """
        before = self.pieces[TRAINING]
        # the checkpoint that the error leaves behind notes it; there the next run reads it
        self.pieces[TRAINING] *= 2
        self._report(TRAINING, before, why, has_ended=True)
        return UserError(
            "training",
            f"memory ran out {self._at()} while ranks exchanged gradients ({why})",
            hint="The next run starts with smaller pieces: type the same command with resume=auto.",
        )

    def _report(self, name: str, before: int, why: str, has_ended: bool = False) -> None:
        if self.report is not None:
            self.report(
                name, self.pieces[name], before, self.loop.trainer.global_step, why, has_ended
            )

    def _at(self) -> str:
        return f"at step {self.loop.trainer.global_step + 1}"

    def _smaller_rows(self) -> str:
        return getattr(self.loop.module, "smaller_rows", "Make its rows smaller.")


def running_statistics(model: nn.Module) -> list[Tensor]:
    """What batch normalisation notes in every forward pass."""
    layers = (module for module in model.modules() if isinstance(module, BATCH_NORMS))
    return [buffer for layer in layers for buffer in layer.buffers()]

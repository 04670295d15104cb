"""Forward and backward passes of a step; after out-of-memory they are repeated in smaller pieces.

After out-of-memory, `Passes` undoes the step: it drops its gradients and restores random state and
running statistics. Then it cuts each batch into twice as many pieces, now and in all later steps.
Losses are divided by the rows of the whole step, so the gradients of the pieces add up to the same.
For example, a step of two batches of 8 rows, where memory runs out in the second:

    [8 rows] [8 rows: out of memory]  ->  undo  ->  [4] [4] [4] [4], then one update

Plan, feed and checkpoints see whole batches only. A step with enough memory costs one list append
and a copy of the random state.

On several ranks, one rank repeats while the others wait for its gradients. Once DDP has begun to
exchange gradients, a repeat would send some twice. Then the run ends, and its last checkpoint notes
the size that fits; `resume=auto` continues with it.

Only errors that clearly say "out of memory" count. cuDNN's "no engine" and cuBLAS's "not
initialized" often mean it too, but as often something that smaller batches do not fix. On a CPU,
the operating system usually kills the process first.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.data.batches.flat_batch import FlatBatch, cut_batch
from flatout.distributed.collectives import SharedMaximum
from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import UserError, require

# What errors say when memory ran out: of the allocators, and of the libraries of CUDA and ROCm.
_OUT_OF_MEMORY_TEXTS = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) (?:error: )?out of memory"
    r"|(?:CU|HIP|ROC)(?:BLAS|BLASLT|DNN|SPARSE|SOLVER|FFT|RAND)"
    r"_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED"
    r"|MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    re.IGNORECASE,
)
# After an error of NCCL ranks cannot communicate any more, so repeating a step makes no sense.
_LOST_RANKS_TEXTS = re.compile(r"\bNCCL\b")
TRAINING = "training"
EVALUATION = "evaluation"
# layers that keep running means
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and _OUT_OF_MEMORY_TEXTS.search(text) is not None
        and _LOST_RANKS_TEXTS.search(text) is None
    )


def shorten_error(error: BaseException) -> str:
    """The first two sentences of an error, at most 160 characters, on one line.

    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..." gives "CUDA out of memory. Tried
    to allocate 2.00 GiB".
    """
    on_one_line = " ".join(str(error).split()) or type(error).__name__
    sentences = re.split(r"(?<=\D\.) ", on_one_line)
    return " ".join(sentences[:2])[:160].rstrip(".")


class CatchOutOfMemory:
    """Context manager that swallows an out-of-memory error; `message` then has its first words.

    It keeps no reference to the error, whose frames hold tensors. Code after a block that ends with
    `return` runs only after out-of-memory:

        with CatchOutOfMemory() as caught:
            return run()
        return run_smaller(caught.message)
    """

    message = ""

    def __enter__(self) -> CatchOutOfMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.message = shorten_error(error)
        return True


def give_back_memory() -> None:
    """Return unused memory to the device; call it after the error's traceback is gone."""
    # Frames of the error and their tensors refer to each other in cycles; only the garbage
    # collector frees those.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class StepLoop(Protocol):
    """What `Passes` needs of the fast loop; `FastLoop` describes each."""

    trainer: L.Trainer
    module: L.LightningModule
    optimizer: Optimizer | None
    has_several_ranks: bool

    def forward(self, batch: Any) -> Tensor | None: ...

    def backward(self, loss: Tensor, *, ends_step: bool) -> None: ...

    def edge(self, number: int) -> float: ...

    def exchange_context(self, *, ends_step: bool) -> AbstractContextManager[object]: ...


class Passes:
    """Runs batches through a module, each in as many pieces as memory needs.

    Training and evaluation have their own number of pieces, as evaluation needs less memory.
    """

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.pieces = {TRAINING: 1, EVALUATION: 1}  # into how many pieces each batch is cut
        self.num_out_of_memory = 0  # how often memory ran out
        self.report: Callable[[str, int, int, int, str, bool], object] | None = None
        """Called when pieces change: with TRAINING or EVALUATION, pieces now and before, the step,
        the error's first words, and whether the run ends."""
        # Fewest pieces that a resumed run may take, however few its checkpoint notes.
        self.least = {TRAINING: 1, EVALUATION: 1}
        self.losses: list[Tensor] = []  # one a piece, of the step that is running
        self._batches: list[Any] = []  # of the step that is running
        # Random state at the start of the step, and each running statistic with its copy.
        self._random_before: dict[str, Any] = {}
        self._statistics_before: list[tuple[Tensor, Tensor]] = []
        # Whether a backward pass runs in which ranks exchange gradients.
        self._is_exchanging = False
        self._largest_of_ranks = SharedMaximum()

    def begin_training(self) -> None:
        """Drop a step that an error has left unfinished; find the module's running statistics."""
        self._batches.clear()
        self.losses.clear()
        self._is_exchanging = False
        # Once, not in each step: a walk over all modules takes longer than the copies.
        self._buffers = running_statistics(self.loop.module)

    def train(self, batch: Any, *, ends_step: bool) -> float:
        """Add the gradients and the loss of a step's next batch.

        Returns the host seconds of its forward passes.
        """
        if not self._batches:
            # What `_undo_step` restores. Each forward pass changes running statistics, so they are
            # copied. Weights change in the update only.
            self._random_before = random_state(self.loop.module.device, with_others=False)
            self._statistics_before = [(mean, mean.clone()) for mean in self._buffers]
            if (begin := getattr(self.loop.module, "begin_step", None)) is not None:
                begin()
        # A repeat drops the gradients of the step's earlier batches too, so it needs all of them.
        self._batches.append(batch)
        with CatchOutOfMemory() as caught:
            return self._run_pieces(batch, ends_step)
        return self._repeat_step(caught.message, ends_step)

    def end_step(self) -> Tensor | None:
        """The mean loss of the step whose batches have all passed; None if none gave a loss."""
        losses = self.losses
        loss: Tensor | None = None
        if len(losses) == 1:
            loss = losses[0]
        elif losses:
            # Each was divided by the rows of the whole step, so their sum is the mean over rows.
            loss = torch.stack(losses).sum()
        losses.clear()
        self._batches.clear()
        return loss

    def evaluate(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        """Outputs of `answer` for a batch of validation or test, in smaller pieces if need be."""
        message = ""
        before = self.pieces[EVALUATION]
        while True:
            with CatchOutOfMemory() as caught:
                outputs = self._answer_pieces(batch, answer)
                if message:
                    self._report(EVALUATION, before, message)
                return outputs
            message = caught.message
            self._require_repeatable(EVALUATION, message)
            self._halve_pieces(EVALUATION, [batch], message)

    def _answer_pieces(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        count = self.pieces[EVALUATION]
        if count == 1:
            return answer(batch)
        return torch.cat([answer(piece) for piece in self._cut(batch, count)])

    def agree_on_pieces(self) -> None:
        """Cut batches into as many pieces as the rank that needs most.

        A collective: every rank calls it after each step. Ranks communicate only now and then.
        """
        # Results do not need it, speed does: ranks that cut alike wait less for each other.
        counts = self._largest_of_ranks.look(list(self.pieces.values()), self.loop.module.device)
        for name, count in zip(self.pieces, counts or (), strict=False):
            before = self.pieces[name]
            if count > before:
                self.pieces[name] = int(count)
                self._report(name, before, "on another rank")

    def load_pieces(
        self, of_ranks: list[dict[str, Any]], rank: int, *, is_same_world: bool
    ) -> None:
        """Start with the pieces that a checkpoint notes.

        `of_ranks` has the loop's `position_state` of each rank. If the number of ranks is another
        now, each takes the largest count of all.
        """
        # The number of pieces changes the order of sums. A resume is exact, bit for bit, only if
        # each rank takes its own count.
        states = [of_ranks[rank]] if is_same_world else of_ranks
        for name in self.pieces:
            counts = [state.get("pieces", {}).get(name, 1) for state in states]
            self.pieces[name] = max(self.least[name], *counts)

    def _cut(self, batch: FlatBatch, count: int) -> list[FlatBatch]:
        return cut_batch(
            batch,
            count,
            labels_are_of_tokens=getattr(self.loop.module, "labels_are_of_tokens", False),
        )

    def _run_pieces(self, batch: Any, ends_step: bool) -> float:
        """Forward and backward pass of each piece of a batch; the seconds of the forward passes."""
        loop = self.loop
        seconds = 0.0
        count = self.pieces[TRAINING]
        pieces = [batch] if count == 1 else self._cut(batch, count)
        for number, piece in enumerate(pieces, 1):
            is_last = ends_step and number == len(pieces)
            began = time.perf_counter()
            # Both passes in one context: DDP decides in the forward pass whether the backward pass
            # exchanges gradients.
            with loop.exchange_context(ends_step=is_last):
                loss = loop.forward(piece)
                seconds += loop.edge(1) - began
                if loss is None:
                    continue
                # In this pass gradients are sent to other ranks, which cannot be undone.
                self._is_exchanging = is_last
                loop.backward(loss, ends_step=is_last)
                self._is_exchanging = False
            self.losses.append(loss.detach())
        return seconds

    def _repeat_step(self, message: str, ends_step: bool) -> float:
        """Run all batches of the step again in smaller pieces, until memory suffices.

        `message`: first words of the out-of-memory error. Returns seconds of the forward passes.
        """
        self._require_repeatable(TRAINING, message)
        seconds = 0.0
        before = self.pieces[TRAINING]
        while True:
            # Other ranks would receive some of this rank's gradients twice, and add them up.
            if self._is_exchanging and self.loop.has_several_ranks:
                raise self._exchange_error(message)
            self._halve_pieces(TRAINING, self._batches, message)
            self._undo_step()
            with CatchOutOfMemory() as caught:
                # Earlier batches of the step did fit, but their gradients were dropped, too.
                for number, batch in enumerate(self._batches, 1):
                    seconds += self._run_pieces(batch, ends_step and number == len(self._batches))
                self._report(TRAINING, before, message)
                return seconds
            message = caught.message

    def _require_repeatable(self, name: str, message: str) -> None:
        """Raise `UserError` if flatout cannot cut the batches, or weights are sharded over ranks.

        `name`: TRAINING or EVALUATION. `message`: first words of the out-of-memory error.
        """
        size = "data.batch_size" if name == TRAINING else "data.eval_batch_size"
        where = f"{name} ran out of memory {self._name_step()}"
        require(
            all(isinstance(batch, FlatBatch) for batch in self._batches),
            where,
            message,
            hint=f"Lower {size} or the batch size of your DataModule. The last checkpoint is kept.",
        )
        # All ranks gather sharded weights together in each pass. One with more passes than the
        # others would wait for ever.
        require(
            not getattr(self.loop.module, "is_sharded", False),
            where,
            f"no rank can take smaller pieces by itself where weights are shared out ({message})",
            hint=f"Set a smaller {size}. {self._hint_smaller_rows()} The last checkpoint is kept.",
        )

    def _halve_pieces(self, name: str, batches: list[FlatBatch], message: str) -> None:
        """Cut batches into twice as many pieces; raise if a piece has one row already."""
        self.num_out_of_memory += 1
        if self.pieces[name] >= max(batch.num_real for batch in batches):
            longest = max(batch.longest() for batch in batches)
            raise UserError(
                f"{name} ran out of memory {self._name_step()}",
                f"a single row at once, of at most {longest} tokens, is too much ({message})",
                hint=f"{self._hint_smaller_rows()} The last checkpoint is kept.",
            )
        # PyTorch's allocator caches blocks of the old sizes, which smaller pieces may not fit.
        give_back_memory()
        self.pieces[name] *= 2

    def _undo_step(self) -> None:
        """Restore all that the step's passes have changed: gradients, random state, statistics."""
        module = self.loop.module
        self.losses.clear()
        assert self._random_before
        restore_random_state(self._random_before, module.device)
        for mean, before in self._statistics_before:
            mean.copy_(before)
        assert self.loop.optimizer is not None
        self.loop.optimizer.zero_grad()
        if (reset := getattr(module, "reset_step", None)) is not None:
            reset()
        self._is_exchanging = False

    def _exchange_error(self, message: str) -> UserError:
        """Note twice as many pieces for the next run; return the error that ends this one."""
        before = self.pieces[TRAINING]
        # The error makes the run save a last checkpoint, from which a resumed run reads it.
        self.pieces[TRAINING] *= 2
        self._report(TRAINING, before, message, has_ended=True)
        return UserError(
            "training",
            f"memory ran out {self._name_step()} while ranks exchanged gradients ({message})",
            hint="The next run starts with smaller pieces: type the same command with resume=auto.",
        )

    def _report(self, name: str, before: int, message: str, has_ended: bool = False) -> None:
        if self.report is not None:
            step = self.loop.trainer.global_step
            self.report(name, self.pieces[name], before, step, message, has_ended)

    def _name_step(self) -> str:
        return f"at step {self.loop.trainer.global_step + 1}"

    def _hint_smaller_rows(self) -> str:
        return getattr(self.loop.module, "smaller_rows", "Make its rows smaller.")


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Buffers of batch normalisation layers, which every forward pass in training changes."""
    layers = (module for module in model.modules() if isinstance(module, BATCH_NORMS))
    return [buffer for layer in layers for buffer in layer.buffers()]

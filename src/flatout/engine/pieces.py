"""Into how many pieces batches are cut so that they fit into memory, and what out-of-memory is.

`Step` repeats a training step in smaller pieces, `Pieces.evaluate` a batch of a validation. Plan,
feed and checkpoints see whole batches only. A checkpoint notes the number of pieces, as a resumed
run with another one would add up in another order. A step of two batches of 8 rows, where memory
runs out in the second:

    [8 rows] [8 rows: out of memory]  ->  undo  ->  [4] [4] [4] [4], then one update

Only errors that clearly say "out of memory" count. cuDNN's "no engine" and cuBLAS's "not
initialized" often mean it too, but as often something that smaller batches do not fix. On a CPU,
the operating system usually kills the process first.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.data.batches.flat_batch import FlatBatch, cut_batch
from flatout.distributed.collectives import SharedMaximum
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
# layers that keep running means
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TRAINING = "training"
EVALUATION = "evaluation"


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


class Pieces:
    """Into how many pieces batches are cut, so that their passes fit into memory.

    Training and evaluation have their own number of pieces, as evaluation needs less memory.
    """

    def __init__(self) -> None:
        self.counts = {TRAINING: 1, EVALUATION: 1}  # into how many pieces each batch is cut
        self.num_out_of_memory = 0  # how often memory ran out
        self.report: Callable[[str, int, int, int, str, bool], object] | None = None
        """Called when pieces change: with TRAINING or EVALUATION, pieces now and before, the step,
        the error's first words, and whether the run ends."""
        # Fewest pieces that a resumed run may take, however few its checkpoint notes.
        self.least = {TRAINING: 1, EVALUATION: 1}
        self._largest_of_ranks = SharedMaximum()

    def set_up(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Learn whose batches are cut."""
        self.trainer = trainer
        self.module = module

    def evaluate(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        """Outputs of `answer` for a batch of validation or test, in smaller pieces if need be."""
        message = ""
        before = self.counts[EVALUATION]
        while True:
            with CatchOutOfMemory() as caught:
                answers = [answer(piece) for piece in self.cut(batch, EVALUATION)]
                outputs = answers[0] if len(answers) == 1 else torch.cat(answers)
                if message:
                    self.tell(EVALUATION, before, message)
                return outputs
            message = caught.message
            self.require_repeatable(EVALUATION, [batch], message)
            self.halve(EVALUATION, [batch], message)

    def agree(self) -> None:
        """Cut batches into as many pieces as the rank that needs most.

        A collective: every rank calls it after each step. Ranks communicate only now and then.
        """
        # Results do not need it, speed does: ranks that cut alike wait less for each other.
        counts = self._largest_of_ranks.look(list(self.counts.values()), self.module.device)
        for name, count in zip(self.counts, counts or (), strict=False):
            before = self.counts[name]
            if count > before:
                self.counts[name] = int(count)
                self.tell(name, before, "on another rank")

    def load(self, of_ranks: list[dict[str, Any]], rank: int, *, is_same_world: bool) -> None:
        """Start with the pieces that a checkpoint notes.

        `of_ranks` has the loop's `position_state` of each rank. If the number of ranks is another
        now, each takes the largest count of all.
        """
        # The number of pieces changes the order of sums. A resume is exact, bit for bit, only if
        # each rank takes its own count.
        states = [of_ranks[rank]] if is_same_world else of_ranks
        for name in self.counts:
            counts = [state.get("pieces", {}).get(name, 1) for state in states]
            self.counts[name] = max(self.least[name], *counts)

    def cut(self, batch: Any, name: str) -> list[Any]:
        """The pieces of a batch. `name`: TRAINING or EVALUATION."""
        count = self.counts[name]
        if count == 1:
            return [batch]
        labels_are_of_tokens = getattr(self.module, "labels_are_of_tokens", False)
        return cut_batch(batch, count, labels_are_of_tokens=labels_are_of_tokens)

    def require_repeatable(self, name: str, batches: list[Any], message: str) -> None:
        """Raise `UserError` if flatout cannot cut the batches, or weights are sharded over ranks.

        `name`: TRAINING or EVALUATION. `message`: first words of the out-of-memory error.
        """
        size = "data.batch_size" if name == TRAINING else "data.eval_batch_size"
        where = f"{name} ran out of memory {self._name_step()}"
        require(
            all(isinstance(batch, FlatBatch) for batch in batches),
            where,
            message,
            hint=f"Lower {size} or the batch size of your DataModule. The last checkpoint is kept.",
        )
        # All ranks gather sharded weights together in each pass. One with more passes than the
        # others would wait for ever.
        require(
            not getattr(self.module, "is_sharded", False),
            where,
            f"no rank can take smaller pieces by itself where weights are shared out ({message})",
            hint=f"Set a smaller {size}. {self._hint_smaller_rows()} The last checkpoint is kept.",
        )

    @property
    def are_cut_for_training(self) -> bool:
        """Whether whole batches have not fitted into memory."""
        return self.counts[TRAINING] > 1

    def halve(self, name: str, batches: list[FlatBatch], message: str) -> None:
        """Cut batches into twice as many pieces; raise if a piece has one row already."""
        self.num_out_of_memory += 1
        if self.counts[name] >= max(batch.num_real for batch in batches):
            longest = max(batch.longest() for batch in batches)
            raise UserError(
                f"{name} ran out of memory {self._name_step()}",
                f"a single row at once, of at most {longest} tokens, is too much ({message})",
                hint=f"{self._hint_smaller_rows()} The last checkpoint is kept.",
            )
        # PyTorch's allocator caches blocks of the old sizes, which smaller pieces may not fit.
        give_back_memory()
        self.counts[name] *= 2

    def exchange_error(self, message: str) -> UserError:
        """Note twice as many pieces for the next run; return the error that ends this one."""
        before = self.counts[TRAINING]
        # The error makes the run save a last checkpoint, from which a resumed run reads it.
        self.counts[TRAINING] *= 2
        self.tell(TRAINING, before, message, has_ended=True)
        return UserError(
            "training",
            f"memory ran out {self._name_step()} while ranks exchanged gradients ({message})",
            hint="The next run starts with smaller pieces: type the same command with resume=auto.",
        )

    def tell(self, name: str, before: int, message: str, has_ended: bool = False) -> None:
        if self.report is not None:
            step = self.trainer.global_step
            self.report(name, self.counts[name], before, step, message, has_ended)

    def _name_step(self) -> str:
        return f"at step {self.trainer.global_step + 1}"

    def _hint_smaller_rows(self) -> str:
        return getattr(self.module, "smaller_rows", "Make its rows smaller.")


def no_memory_for_state(why: str) -> UserError:
    """The error where the optimizer cannot allocate its state."""
    return UserError(
        "training",
        (
            "memory ran out in the first step of the optimizer, whose state is twice the weights"
            f" ({why})"
        ),
        hint=(
            "Freeze layers, train with model.lora.rank=8, or take a smaller model; smaller batches"
            " change little."
        ),
    )


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Buffers of batch normalisation layers, which every forward pass in training changes."""
    layers = (module for module in model.modules() if isinstance(module, BATCH_NORMS))
    return [buffer for layer in layers for buffer in layer.buffers()]


def update_first(
    update: Callable[[], None],
    weights: list[nn.Parameter],
    optimizer: Optimizer,
    *,
    may_repeat: bool,
) -> None:
    """Take a training's first update, in which the optimizer allocates its state.

    After out-of-memory it frees cached memory and tries once more, if it `may_repeat`. Smaller
    batches would not help: the state is as large as the weights, or twice.
    """
    # A second try is right only if the first has changed no weight. Each write to a tensor raises
    # its `_version`, so equal versions mean unchanged weights.
    before = [weight._version for weight in weights]
    with CatchOutOfMemory() as caught:
        return update()
    has_changed = before != [weight._version for weight in weights]
    if has_changed or not may_repeat:
        raise no_memory_for_state(caught.message)
    optimizer.state.clear()  # the first weights may have theirs already
    give_back_memory()
    with caught:
        return update()
    raise no_memory_for_state(caught.message)

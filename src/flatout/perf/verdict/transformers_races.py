"""Race other ways of training a model of transformers' Trainer, after its training has ended.

Copies of the model, the optimizer and the data set take steps, as `own_tries.py` does for
Lightning: other workers, rows without fixed padding, larger batches, another precision. The
Trainer's own loss is computed. Nothing of the training changes, and no Lightning is imported.
Where a copy would not be safe, `Refused` says why, and the verdict predicts from the clock alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from flatout.data.batches.feed import free_memory
from flatout.engine.precision import by_lightning_name
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import experiments
from flatout.perf.verdict.evidence import ROUNDS, Evidence
from flatout.perf.verdict.own_feed import MOST_BATCHES, OwnBatch, OwnFeed
from flatout.perf.verdict.own_ways import larger_batches, other_loaders, other_precision
from flatout.perf.verdict.predicted import LEAST_PADDING, PREDICTED, UNPADDED, TransformersFacts
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.shared_copies import (
    complete_optimizer,
    copy_deeply,
    large_below,
    nothing_stays,
)
from flatout.perf.verdict.ways import Refused, other_arithmetic

# [rows, length], true where a token is no padding; None where a batch has no tokens.
FindReal = Callable[[dict[str, Any]], Tensor | None]


def race_copies(
    trainer: Trainer | None,
    model: nn.Module,
    evidence: Evidence,
    facts: TransformersFacts,
    find_real: FindReal,
) -> None:
    """Race ways that `evidence` suggests, and add to it what each was worth.

    `evidence.not_tried` says why, where nothing is raced.
    """
    trained_s = evidence.total_ms * evidence.batches / 1000
    seconds = experiments.time_for_tries(trained_s)
    finding = starved(evidence)
    why = ""
    if trainer is None:
        why = "flatout.attach(trainer) lets it race"
    elif evidence.world > 1 or trainer.args.n_gpu > 1:
        why = "on several ranks"
    elif seconds < experiments.LEAST_S:
        why = "the run was short"
    elif 4 * ROUNDS * evidence.total_ms * evidence.accumulate / 1000 > seconds:
        why = "a step takes too long for it"
    elif finding is not None and not experiments.has_own_clock(evidence):
        why = f"{finding.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        device = torch.device(trainer.args.device)
        training = _EndedTraining(trainer, model, facts, find_real)
        race = partial(_race, training, evidence, until)
        with nothing_stays(model, device):
            experiments.try_safely(evidence, race)
        why = evidence.not_tried.removeprefix("nothing was tried: ")
    if not evidence.tried:
        evidence.not_tried = f"{PREDICTED}: {why}" if why else PREDICTED


@dataclass(frozen=True, slots=True)
class _EndedTraining:
    trainer: Trainer
    model: nn.Module
    facts: TransformersFacts
    find_real: FindReal


def _race(training: _EndedTraining, evidence: Evidence, until: float) -> None:
    _require_safe(training.trainer)
    task: Any = _CopiedTask(training.trainer, training.model)
    feed = _copy_feed(training.trainer, evidence, task.device)
    precision = by_lightning_name(evidence.precision)
    own_feed: Any = feed
    was = TrainingWay(feed=own_feed, precision=precision, model=task.model)
    evidence.native = evidence.native or other_precision(precision, task.device)
    is_disturbed = starved(evidence) is not None
    waits = evidence.share("wait") >= experiments.WAITS and not is_disturbed
    feeds_until = experiments.end_of_feeds(evidence, until)
    if waits and experiments.try_feeds(task, was, other_loaders, evidence, feeds_until):
        return
    # From here on what computes is raced, in this process.
    here_feed: Any = feed.opened(num_workers=0)
    here = replace(was, feed=here_feed)
    ways = [
        here,
        *_without_padding(here, training),
        *larger_batches(here, evidence, until),
        *other_arithmetic(here, evidence),
    ]
    if is_disturbed:
        # Only ways of one thread can be timed then.
        ways = [way for way in ways if way.threads == here.threads]
    experiments.try_models(task, ways, evidence, until)


def _require_safe(trainer: Trainer) -> None:
    """Refuse trainings whose steps a copy cannot take, or would leave something behind."""
    for name in ("compute_loss", "training_step"):
        # It may note things in the Trainer.
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            raise Refused(f"its {name} is the script's own")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise Refused("its weights are sharded")
    if trainer.args.torch_compile:
        raise Refused("its model is compiled")
    if trainer.args.fp16:
        raise Refused("steps in fp16 are not timed")


class _CopiedTask:
    """A copy of a model and its optimizer in the shape of a `Task`; its learning rates are zero."""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self.device = torch.device(trainer.args.device)
        wrapped: Any = trainer.optimizer
        optimizer = wrapped.optimizer if isinstance(wrapped, AcceleratedOptimizer) else wrapped
        tensors = [*model.parameters(), *model.buffers()]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        # Twice: its steps need room for gradients as well.
        if 2 * sum(tensor.nbytes for tensor in tensors) > free_memory(self.device):
            raise Refused("a copy of its model does not fit into memory")
        # In one copy, so that the copied optimizer holds the copied weights.
        self.model, self._optimizer = copy_deeply("model", (model, optimizer))
        complete_optimizer(self._optimizer, optimizer)
        # Accelerate replaces `forward` by a function of the original model where it casts.
        for name in ("forward", "_original_forward"):
            self.model.__dict__.pop(name, None)
        self.model.train()
        self._weights = list(model.parameters())
        self._batches = 0
        self.optim = self  # a task's `optim` builds optimizers
        self.trainer = SimpleNamespace(gradient_clip_val=trainer.args.max_grad_norm)
        # What the loss assigns or logs stays with a copy of the Trainer.
        standing: Any = copy.copy(trainer)
        standing.model = self.model
        standing.log = lambda *_, **__: None
        self._compute_loss = standing.compute_loss
        self._accumulate = trainer.args.gradient_accumulation_steps

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a step."""
        optimizer: torch.optim.Optimizer = self._optimizer
        return optimizer

    def training_loss(self, batch: OwnBatch, model: nn.Module) -> Tensor:
        """The loss of a batch, divided by the number of batches in a step."""
        self._batches += 1
        if self._batches == 2 and any(weight.grad is not None for weight in self._weights):
            raise Refused("its steps reach the model itself, not a copy of it")
        loss: Tensor = self._compute_loss(model, dict(batch.batch))  # some losses take labels out
        return loss / self._accumulate


def _copy_feed(trainer: Trainer, evidence: Evidence, device: torch.device) -> OwnFeed:
    """The training's rows in a random order, by a loader like the Trainer's."""
    args = trainer.args
    data: Any = trainer.train_dataset
    if data is None or isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise Refused("its data set is a stream")
    loader = trainer.callback_handler.train_dataloader
    collate: Any = trainer.data_collator
    if isinstance(loader, DataLoader):  # it leaves out columns that the model does not take
        data = loader.dataset
        collate = loader.collate_fn
    shared = [*large_below((data, collate)), trainer, trainer.model]
    memo = {id(thing): thing for thing in shared}
    data, collate = copy_deeply("data set", (data, collate), memo)
    rows = args.per_device_train_batch_size
    # Drawn by a generator that no other draws from; a Trainer's sampler would move on.
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    firsts = range(0, max(1, len(order) - rows + 1), rows)
    batches = [order[first : first + rows] for first in firsts][:MOST_BATCHES]
    workers = args.dataloader_num_workers
    copied: Any = DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0 and args.dataloader_persistent_workers,
        pin_memory=args.dataloader_pin_memory and device.type == "cuda",
        prefetch_factor=args.dataloader_prefetch_factor,
    )
    return OwnFeed(
        loader=copied,
        device=device,
        move=partial(send_to_device, device=device),
        rows=rows,
        accumulate=args.gradient_accumulation_steps,
        batches=evidence.batches / max(evidence.epochs, 1e-9),
        epochs=max(1.0, evidence.epochs),
    )


@dataclass(frozen=True, slots=True)
class _WithoutPadding:
    """A function that makes batches as `collate` does, without columns of padding alone."""

    collate: Callable[[list[Any]], Any]
    find_real: FindReal

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Columns [a, b, 0], [c, 0, 0] become [a, b], [c, 0]."""
        batch = dict(self.collate(rows))
        real = self.find_real(batch)
        if real is None or not real.any():
            return batch
        columns = real.any(0).nonzero()
        first = int(columns.min())
        last = int(columns.max())
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.ndim == 2 and value.shape == real.shape:
                batch[name] = value[:, first : last + 1].contiguous()
        return batch


def _without_padding(was: TrainingWay, training: _EndedTraining) -> Iterator[TrainingWay]:
    """The same rows, padded to the longest of each batch."""
    if training.facts.fixed_padding < LEAST_PADDING:
        return
    feed: Any = was.feed
    collate = _WithoutPadding(feed.loader.collate_fn, training.find_real)
    loader = DataLoader(feed.loader.dataset, batch_sampler=feed.rows_of_batches, collate_fn=collate)
    yield replace(was, cause="padding", override=UNPADDED, feed=replace(feed, loader=loader))

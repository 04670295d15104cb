"""Copy a foreign module, its optimizers and its loader, to try other ways of training with them.

`OwnTask` and `OwnFeed` give the copies the shape of this package's own tasks and feeds. Copied is
what steps change: weights, states of optimizers, random generators, and what little a data set
notes for itself. Its large arrays and tables are shared. Where something cannot be copied,
`Refused` says so in one sentence, and nothing is tried.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.callbacks.throughput import rows_of
from flatout.data.batches.feed import Feed, free_memory
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.distributed.both_lightnings import either
from flatout.engine.lightning_internals import datamodule_of, overrides, set_method
from flatout.perf.verdict.shared_copies import complete_optimizer, copy_deeply, large_below
from flatout.perf.verdict.ways import Refused, open_feed

# Settings of a DataLoader that all tries share.
_KEPT = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
_OF_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")
_MOST_BATCHES = 2048  # whose rows are drawn for all tries
# Hooks that move a batch to the device, in their order.
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def copy_of_loader(loader: object, trainer: L.Trainer) -> Any:
    """A loader of the same rows. Reading it does not disturb `loader`."""
    if isinstance(loader, Feed):
        return open_feed(loader)
    if _holds_loaders(loader):
        raise Refused("several loaders are read at once")
    if hasattr(loader, "__next__"):
        raise Refused("its loader can be read once")
    shared = [
        *large_below(loader),
        trainer,
        trainer.lightning_module,
        datamodule_of(trainer),
    ]
    memo: dict[int, Any] = {}
    for thing in shared:
        # The workers of a loader that keeps them stay with it.
        is_workers = isinstance(thing, _BaseDataLoaderIter)
        memo[id(thing)] = None if is_workers else thing
    return copy_deeply("loader", loader, memo)


def _holds_loaders(loader: object) -> bool:
    """Whether it is a list, tuple or mapping of DataLoaders, as Lightning allows."""
    if isinstance(loader, Mapping):
        loader = list(loader.values())
    return isinstance(loader, list | tuple) and any(isinstance(item, DataLoader) for item in loader)


class OwnTask:
    """A copy of a module and its optimizers, on the device, in the shape of a `Task`.

    Tries take steps with it. Its learning rates are zero, so the copied weights stay as they are,
    and a step takes as long as a real one. The module itself is left alone; where its steps reach
    it all the same, `training_loss` raises `Refused`.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, device: torch.device) -> None:
        """`Refused` where the module is compiled, or a copy does not fit into memory."""
        if module._compiler_ctx is not None:
            raise Refused("its module is compiled, and a copy would compute with the same weights")
        # Twice: its steps need room for gradients as well.
        if 2 * _copied_bytes(trainer, module) > free_memory(device):
            raise Refused("a copy of its module does not fit into memory")
        # In one copy, so that the copied optimizers hold the copied weights.
        self.model, self.optimizers = copy_deeply("module", (module, list(trainer.optimizers)))
        self.trainer = trainer
        self.module = module
        self.device = device
        self.optim = self  # a task's `optim` builds optimizers: see `build`
        self.model.to(device)
        for copied, original in zip(self.optimizers, trainer.optimizers, strict=True):
            complete_optimizer(copied, original)
        self.model.trainer = _Standing(trainer, self.optimizers)
        self._replace_lightning_methods()
        self._nothing = nn.Parameter(torch.zeros((), device=device))
        self._batches = 0

    def _replace_lightning_methods(self) -> None:
        """Let the copy, and each LightningModule in it, log nothing and find the copied
        optimizers.
        """
        # as Lightning answers `self.optimizers()`: one by itself, several in a list
        optimizers = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
        methods = _OF_A_COPY | {"optimizers": lambda use_pl_optimizer=True: optimizers}
        for submodule in self.model.modules():
            if isinstance(submodule, either(L.LightningModule)):
                for name, method in methods.items():
                    set_method(submodule, name, method)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a step; in manual optimisation `training_step` has its own."""
        is_one = self.model.automatic_optimization and len(self.optimizers) == 1
        return self.optimizers[0] if is_one else torch.optim.SGD([self._nothing])

    def training_loss(self, batch: OwnBatch, model: L.LightningModule) -> Tensor:
        """The loss of a batch, divided by the number of batches in a step.

        0 in manual optimisation, where `training_step` computes its own backward pass.
        """
        step = model.training_step
        inputs = batch.batch
        if isinstance(inputs, list | MutableMapping):
            inputs = copy.copy(inputs)  # some take labels out of it
        takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._batches += 1
        if self._batches == 2 and self._reaches_module():
            raise Refused("its steps reach the module itself, not a copy of it")
        output = step(inputs, batch.number) if takes_number else step(inputs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not self.model.automatic_optimization or loss is None:
            return self._nothing * 0
        return loss / self.trainer.accumulate_grad_batches

    def _reaches_module(self) -> bool:
        """Whether a step has left gradients in the module, which had none before."""
        return any(weight.grad is not None for weight in self.module.parameters())


def _copied_bytes(trainer: L.Trainer, module: L.LightningModule) -> int:
    """Memory of a module's weights and buffers and of its optimizers' states."""
    tensors = [*module.parameters(), *module.buffers()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def ignore(*_: Any, **__: Any) -> None:
    """Do nothing: what a try logs is dropped."""


# Methods of a LightningModule that are replaced in a copy.
_OF_A_COPY: dict[str, Callable[..., Any]] = {
    "log": ignore,
    "log_dict": ignore,
    "print": ignore,
    "manual_backward": Tensor.backward,
}


class _Standing:
    """The Trainer that a copied module sees: as the original, but its loggers write nothing."""

    def __init__(self, trainer: L.Trainer, optimizers: list[Any]) -> None:
        self._trainer = trainer
        self.optimizers = optimizers
        self.logger = DummyLogger()
        self.loggers = [self.logger]
        self.lr_scheduler_configs = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """A batch of a foreign loader, with the attributes of a `FlatBatch` that steps read."""

    batch: Any
    number: int
    num_real: int
    ends_step: bool
    num_tokens: int = 0


@dataclass(kw_only=True)
class OwnFeed:
    """A copied loader in the shape of a `Feed`: its batches on the device.

    All ways of reading it (`opened`) give the same batches.
    """

    loader: Any
    task: OwnTask
    rows: float  # of a batch
    accumulate: int
    batches: float  # of an epoch
    epochs: float
    # for each batch of a DataLoader; None for streams and other loaders
    rows_of_batches: list[Any] | None = None
    changed: dict[str, Any] = field(default_factory=dict)  # arguments that differ from the loader's

    def __post_init__(self) -> None:
        self.device = self.task.device
        self.plan = PlanSettings(
            rows_per_batch=max(1, round(self.rows)), accumulate=self.accumulate
        )
        self.num_rows = max(1, round(self.rows * self.batches))
        settings = {
            name: getattr(self.loader, name) for name in _OF_WORKERS if hasattr(self.loader, name)
        }
        settings |= self.changed
        self.num_workers = settings.get("num_workers", 0)
        self.workers = max(1, self.num_workers)
        self.kind = FeedKind.workers if self.num_workers else FeedKind.resident
        self.prefetch = settings.get("prefetch_factor") or 2  # torch's default
        # How often an epoch starts the workers.
        stays = settings.get("persistent_workers", False)
        self.starts = 1 / max(1.0, self.epochs) if stays else 1.0
        self.is_torchs = (
            isinstance(self.loader, DataLoader)
            and type(self.loader).__iter__ is DataLoader.__iter__
        )
        self.is_stream = self.is_torchs and isinstance(self.loader.dataset, IterableDataset)
        # Drawn once, so that all ways read the same rows.
        if self.is_torchs and not self.is_stream and self.rows_of_batches is None:
            loader = self.loader
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self.rows_of_batches = list(itertools.islice(sampler, _MOST_BATCHES))

    def opened(self, **changed: Any) -> OwnFeed:
        """The same batches with other arguments of the DataLoader."""
        return replace(self, changed=self.changed | changed)

    def grown(self, times: int) -> OwnFeed:
        """The same rows in batches of `times` as many; a last, smaller batch is dropped.

        With `times=2`, batches [0, 1], [2, 3], [4, 5] become [0, 1, 2, 3].
        """
        assert self.rows_of_batches is not None
        batches = self.rows_of_batches
        rows = []
        for first in range(0, len(batches) - times + 1, times):
            rows.append(list(itertools.chain(*batches[first : first + times])))
        return replace(
            self,
            rows_of_batches=rows,
            rows=self.rows * times,
            batches=self.batches / times,
            accumulate=1,
        )

    def __len__(self) -> int:
        return max(1, round(self.batches))

    def set_epoch(self, epoch: int) -> None:
        """Each epoch has the same batches."""

    def __iter__(self) -> Iterator[OwnBatch]:
        number = 0
        move = _mover(self.task)
        for number, batch in enumerate(self._open(), 1):
            rows = batch.num_real if isinstance(batch, FlatBatch) else rows_of(batch)
            yield OwnBatch(move(batch), number - 1, rows or 1, number % self.accumulate == 0)
        if not number:
            raise Refused("its loader can be read once")

    def _open(self) -> Iterable[Any]:
        """The loader itself if it is foreign; else a DataLoader with the changed arguments."""
        if not self.is_torchs:
            return self.loader
        batching: dict[str, Any] = {"batch_sampler": self.rows_of_batches}
        if self.is_stream:
            batching = {"batch_size": self.loader.batch_size, "drop_last": self.loader.drop_last}
        elif self.loader.batch_sampler is None:
            batching = {"batch_size": None, "sampler": self.rows_of_batches}
        settings = {name: getattr(self.loader, name) for name in _KEPT} | batching | self.changed
        if not settings["num_workers"]:
            settings |= {"prefetch_factor": None, "persistent_workers": False}
        elif self.loader.num_workers:
            settings["multiprocessing_context"] = self.loader.multiprocessing_context
        return DataLoader(
            self.loader.dataset, generator=torch.Generator().manual_seed(0), **settings
        )


def _mover(task: OwnTask) -> Callable[[Any], Any]:
    """A function that moves a batch to the device, by the hooks of the DataModule or the module.

    As in Lightning, a hook of the DataModule is used if it overrides it.
    """
    data = datamodule_of(task.trainer)
    hooks: list[Callable[..., Any]] = []
    for name in _TRANSFER:
        is_of_data = data is not None and overrides(data, name, L.LightningDataModule)
        hooks.append(getattr(data if is_of_data else task.model, name))
    before, transfer, after = hooks
    return lambda batch: after(transfer(before(batch, 0), task.device, 0), 0)

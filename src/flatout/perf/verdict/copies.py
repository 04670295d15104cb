"""Copy a foreign module, its optimizers and its loader, to try other ways of training with them.

`OwnTask` and `OwnFeed` give the copies the shape of this package's own tasks and feeds. Copied is
what steps change: weights, states of optimizers, random generators, and what little a data set
notes for itself. Its large arrays and tables are shared. Where something cannot be copied,
`Refused` says so in one sentence, and nothing is tried.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.callbacks.throughput import rows_of
from flatout.data.batches.feed import Feed, free_memory
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.engine.lightning_internals import overrides
from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import first_line
from flatout.perf.verdict.ways import Refused, open_feed

_TABLES = ("pandas", "pyarrow", "polars", "datasets", "h5py", "zarr")
"""Packages whose objects are shared: some copy a whole table whatever they are asked."""
_MANY = 10_000  # items; longer containers are shared
_LARGE_BYTES = 1 << 16  # larger arrays are shared
_MOST_OBJECTS = 300_000  # a data set of more objects is not searched for large ones
_KEPT = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
"""Settings of a DataLoader that all tries share."""
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@contextmanager
def nothing_stays(module: L.LightningModule, device: torch.device) -> Iterator[None]:
    """Context manager that puts back what tries inside it change in the whole process.

    That is the gradients and buffers of `module`, random numbers, threads and logging. What is
    printed, logged or warned inside is dropped.
    """
    random = random_state(device)
    threads = torch.get_num_threads()
    logged = logging.root.manager.disable
    gradients = [(weight, weight.grad) for weight in module.parameters()]
    statistics = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    for weight, _ in gradients:
        weight.grad = None
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            yield
    finally:
        logging.disable(logged)
        for weight, gradient in gradients:
            weight.grad = gradient
        for buffer, version, before in statistics:
            if buffer._version != version:
                buffer.data.copy_(before)
        torch.set_num_threads(threads)
        restore_random_state(random, device)


def copy_of_loader(loader: Any, trainer: L.Trainer) -> Any:
    """A loader of the same rows, whose iteration does not disturb that of `loader`."""
    if isinstance(loader, Feed):
        return open_feed(loader)
    if _holds_loaders(loader):
        raise Refused("several loaders are read at once")
    if hasattr(loader, "__next__"):
        raise Refused("its loader can be read once")
    shared = [
        *_large_below(loader),
        trainer,
        trainer.lightning_module,
        vars(trainer).get("datamodule"),
    ]
    memo: dict[int, Any] = {}
    for thing in shared:
        # The workers of a loader that keeps them stay with it.
        is_workers = isinstance(thing, _BaseDataLoaderIter)
        memo[id(thing)] = None if is_workers else thing
    return _copied("loader", loader, memo)


def _holds_loaders(loader: Any) -> bool:
    """Whether it is a list, tuple or mapping of DataLoaders, as Lightning allows."""
    if isinstance(loader, Mapping):
        return any(isinstance(item, DataLoader) for item in loader.values())
    if isinstance(loader, list | tuple):
        return any(isinstance(item, DataLoader) for item in loader)
    return False


def _copied(what: str, part: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, but for what stands in `memo`; `what` names the part where it is refused."""
    try:
        return copy.deepcopy(part, memo)
    except Exception as error:
        # its own __deepcopy__ or __reduce__ may raise anything; the run must end well
        is_once = what == "loader" and isinstance(error, TypeError) and "generator" in str(error)
        why = "can be read once" if is_once else f"cannot be copied ({first_line(error)})"
        raise Refused(f"its {what} {why}") from None


def _large_below(root: Any) -> list[Any]:
    """Arrays, tables, long containers and started workers that an object holds, however deep."""
    seen: dict[int, Any] = {}
    large = list[Any]()
    unvisited = [root]
    while unvisited:
        thing = unvisited.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType):
            continue
        seen[id(thing)] = thing
        if len(seen) > _MOST_OBJECTS:
            raise Refused("its data set has too many objects to copy them")
        if _is_large(thing):
            large.append(thing)
        else:
            unvisited += gc.get_referents(thing)
    return large


def _is_large(thing: object) -> bool:
    if isinstance(thing, str | bytes | list | tuple | dict | set):
        return len(thing) > _MANY
    if isinstance(thing, Tensor | np.ndarray):
        return thing.nbytes > _LARGE_BYTES
    package = type(thing).__module__.partition(".")[0]
    return isinstance(thing, _BaseDataLoaderIter) or package in _TABLES


class OwnTask:
    """A copy of a module and its optimizers, on the device, in the shape of a `Task`.

    Tries take steps with it. Its learning rates are zero, so the copied weights stay as they are,
    and a step takes as long as a real one. The module itself is left alone; where its steps reach
    it all the same, `training_loss` raises `Refused`.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, device: torch.device) -> None:
        """`Refused` where the module is compiled, or a copy does not fit into memory."""
        if getattr(module, "_compiler_ctx", None) is not None:
            raise Refused("its module is compiled, and a copy would compute with the same weights")
        # Twice: its steps need room for gradients as well.
        if 2 * _copied_bytes(trainer, module) > free_memory(device):
            raise Refused("a copy of its module does not fit into memory")
        # In one copy, so that the copied optimizers hold the copied weights.
        self.model, self.optimizers = _copied("module", (module, list(trainer.optimizers)))
        self.trainer = trainer
        self.module = module
        self.device = device
        self.optim = self  # a task's `optim` builds optimizers: see `build`
        self.model.to(device)
        for copied, original in zip(self.optimizers, trainer.optimizers, strict=True):
            _complete_optimizer(copied, original)
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
            if isinstance(submodule, L.LightningModule):
                vars(submodule).update(methods)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a step; in manual optimisation `training_step` has its own."""
        is_one = self.model.automatic_optimization and len(self.optimizers) == 1
        return self.optimizers[0] if is_one else torch.optim.SGD([self._nothing])

    def training_loss(self, batch: OwnBatch, model: Any) -> Tensor:
        """The loss of a batch over those of its step; 0 where the module takes the step
        by itself.
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


def _complete_optimizer(copied: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Give a copied optimizer what copying leaves out, move it to the device, and stop its
    learning.
    """
    # Copying an optimizer keeps torch's own attributes only, not what a subclass adds to them.
    for name in vars(original).keys() - vars(copied).keys():
        if not callable(vars(original)[name]):
            vars(copied)[name] = vars(original)[name]
    copied.load_state_dict(copied.state_dict())  # moves it to the device
    for group in copied.param_groups:
        group["lr"] = 0.0


def ignore(*_: Any, **__: Any) -> None:
    """What a try logs is dropped."""


_OF_A_COPY = {
    "log": ignore,
    "log_dict": ignore,
    "print": ignore,
    "manual_backward": Tensor.backward,
}
"""Methods of a LightningModule that a copy has for itself."""


class _Standing:
    """A Trainer as a training step sees it, whose loggers write nothing."""

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
    batch: Any
    number: int
    num_real: int
    ends_step: bool
    num_tokens: int = 0


@dataclass(kw_only=True)
class OwnFeed:
    """Batches of a copied loader on the device: the same ones for every way of reading them."""

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
        self.num_workers = self.changed.get("num_workers", getattr(self.loader, "num_workers", 0))
        self.workers = max(1, self.num_workers)
        self.kind = FeedKind.workers if self.num_workers else FeedKind.resident
        stays = self.changed.get(
            "persistent_workers", getattr(self.loader, "persistent_workers", False)
        )
        self.prefetch = (
            self.changed.get("prefetch_factor", getattr(self.loader, "prefetch_factor", None)) or 2
        )
        # how often an epoch starts the workers
        self.starts = 1 / max(1.0, self.epochs) if stays else 1.0
        self.is_torchs = (
            isinstance(self.loader, DataLoader)
            and type(self.loader).__iter__ is DataLoader.__iter__
        )
        self.is_stream = self.is_torchs and isinstance(self.loader.dataset, IterableDataset)
        # drawn once for all ways
        if self.is_torchs and not self.is_stream and self.rows_of_batches is None:
            sampler = (
                self.loader.sampler
                if self.loader.batch_sampler is None
                else self.loader.batch_sampler
            )
            self.rows_of_batches = list(itertools.islice(sampler, 2048))

    def opened(self, **changed: Any) -> OwnFeed:
        """The same batches by other arguments of the DataLoader."""
        return replace(self, changed=self.changed | changed)

    def grown(self, times: int) -> OwnFeed:
        assert self.rows_of_batches is not None
        parts = [iter(self.rows_of_batches)] * times
        rows = [list(itertools.chain(*some)) for some in zip(*parts, strict=False)]
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
            rows = getattr(batch, "num_real", None) or rows_of(batch) or 1
            yield OwnBatch(move(batch), number - 1, rows, number % self.accumulate == 0)
        if not number:
            raise Refused("its loader can be read once")

    def _open(self) -> Iterable[Any]:
        if not self.is_torchs:
            return self.loader
        place: dict[str, Any] = {"batch_sampler": self.rows_of_batches}
        if self.is_stream:
            place = {"batch_size": self.loader.batch_size, "drop_last": self.loader.drop_last}
        elif self.loader.batch_sampler is None:
            place = {"batch_size": None, "sampler": self.rows_of_batches}
        settings = {name: getattr(self.loader, name) for name in _KEPT} | place | self.changed
        if not settings["num_workers"]:
            settings |= {"prefetch_factor": None, "persistent_workers": False}
        elif self.loader.num_workers:
            settings["multiprocessing_context"] = self.loader.multiprocessing_context
        return DataLoader(
            self.loader.dataset, generator=torch.Generator().manual_seed(0), **settings
        )


def _mover(task: OwnTask) -> Callable[[Any], Any]:
    """The way of a batch to the device, through the hooks of the module or of its DataModule."""
    data = vars(task.trainer).get("datamodule")
    has_own = {
        name: data is not None and overrides(data, name, L.LightningDataModule)
        for name in _TRANSFER
    }
    before, transfer, after = (
        getattr(data if has_own[name] else task.model, name) for name in _TRANSFER
    )
    return lambda batch: after(transfer(before(batch, 0), task.device, 0), 0)

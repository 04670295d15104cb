"""Copy a foreign module, its optimizers and its loader, to try other ways of training with them.

`OwnTask` gives the copies the shape of this package's own tasks; `OwnFeed` does so for loaders.
Copied is what steps change: weights, states of optimizers, random generators, and what little a
data set notes for itself. Its large arrays and tables are shared. Where something cannot be copied,
`Refused` says so in one sentence, and nothing is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.data.batches.feed import Feed, free_memory
from flatout.distributed.both_lightnings import either
from flatout.engine.lightning_internals import datamodule_of, overrides, set_method
from flatout.perf.verdict.own_feed import OwnBatch
from flatout.perf.verdict.shared_copies import complete_optimizer, copy_deeply, large_below
from flatout.perf.verdict.ways import Refused, open_feed

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


def mover_of(task: OwnTask) -> Callable[[Any], Any]:
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

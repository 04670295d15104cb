"""FSDP2 for models that do not fit on one device: each rank holds a slice of every weight.

A rank also holds the slices of the weight's gradient and of its optimizer state. Before a layer
computes, its whole weights are gathered from all ranks, and dropped after it. Its gradients are
summed, each slice on its rank. Results are the same up to rounding. Checkpoints hold whole tensors,
so a run can resume on another number of ranks. Gathering is a collective: all ranks run the same
passes at the same time, in validation, too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from flatout.distributed.collectives import share_of, whole
from flatout.models.contract import contract


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with every weight sliced over all ranks.

    Checkpoints are flatout's and hold whole tensors.
    """

    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def __init__(self, ranks: int) -> None:
        super().__init__(
            data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
        # The model without memory for its weights; None before they are sliced.
        self._skeleton: nn.Module | None = None

    def share_out(self, model: nn.Module) -> None:
        """Replace the model's weights by this rank's slices of the first rank's weights.

        A collective. Later calls do nothing.
        """
        if self._skeleton is not None:
            return
        # `gathered` fills this copy after training.
        empty = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"))
            for weight in model.parameters()
        }
        self._skeleton = copy.deepcopy(model, cast(dict[int, Any], empty))
        # One by one, so that the device never holds two whole weights.
        for tensor in [*model.parameters(), *model.buffers()]:
            on_device = tensor.detach().to(self.root_device)
            dist.broadcast(on_device, 0)
            with torch.no_grad():
                tensor.copy_(on_device)
        slice_weights(model, self.device_mesh["data_parallel"])

    def gathered(self, model: nn.Module) -> nn.Module:
        """The model with whole weights, on the CPU of every rank. A collective."""
        skeleton = self._skeleton
        if skeleton is None:
            return model
        state = {name: whole(tensor).detach().cpu() for name, tensor in model.state_dict().items()}
        skeleton.load_state_dict(state, assign=True)
        for weight, shared in zip(skeleton.parameters(), model.parameters(), strict=True):
            weight.requires_grad_(shared.requires_grad)
        return skeleton.train(model.training)

    def let_thawed_train(self, model: nn.Module) -> None:
        """After layers were thawed, let FSDP train them too.

        It keeps a second set of weights for the gathered state, which was frozen and would stay
        so. That set is the model's weights between `unshard` and `reshard`.
        """
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for block in blocks:
            block.unshard()
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in trained)
        for block in blocks:
            block.reshard()

    def hand_out(self, module: nn.Module, state: dict[str, Tensor] | None) -> None:
        """Load slices of the first rank's `state` on every rank; do nothing if it has None there.

        `state` of the other ranks is ignored. A collective.
        """
        if not self.broadcast(state is not None):
            return
        with torch.no_grad():
            for name, sliced in module.state_dict().items():
                if self.is_global_zero and state is not None:
                    full = state[name].to(sliced.device, sliced.dtype)
                else:
                    full = torch.empty(sliced.shape, dtype=sliced.dtype, device=sliced.device)
                dist.broadcast(full, 0)
                sliced.copy_(share_of(full, sliced))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return _on_first(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        sharded = module.state_dict()
        shares = dict[str, Any]()
        for name, tensor in checkpoint["state_dict"].items():
            # A name that the module lacks is passed on, so that `load_state_dict` reports it.
            shares[name] = share_of(tensor, sharded[name]) if name in sharded else tensor
        module.load_state_dict(shares, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        sharded = optimizer.state_dict()
        states = {index: _on_first(state) for index, state in sharded["state"].items()}
        return {**sharded, "state": states}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            indices = [index for group in saved["param_groups"] for index in group["params"]]
            states = dict[int, dict[str, Any]]()
            for index, weight in zip(indices, weights, strict=True):
                if index in saved["state"]:
                    states[index] = _slice_state(saved["state"][index], weight)
            optimizer.load_state_dict({**saved, "state": states})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def setup_environment(self) -> None:
        mesh = self._device_mesh
        super().setup_environment()
        if mesh is not None:  # the weights are sliced over this one, not over a new one
            self._device_mesh = mesh


def slice_weights(model: nn.Module, ranks: DeviceMesh) -> None:
    """Keep a slice of each weight on each rank; whole weights are gathered one layer at a time."""
    # Weights are gathered in fp32 even where layers compute in bf16. bf16 would send half the
    # bytes, but would round norms and embeddings too, which autocast leaves in fp32: gradients were
    # measured four times as far from those of fp32.
    # The warning is about a view that the last layer returns; it is only read.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for part in [*contract(model).blocks(), model]:
        # Whole weights are dropped after each pass. If they stayed, a running mean that replaces
        # the slices for a validation would not reach them.
        fully_shard(part, mesh=ranks, reshard_after_forward=True)


def _slice_state(state: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """This rank's slice of a weight's optimizer state.

    Moments have the weight's shape and are sliced like the weight; a step count is not.
    """
    sliced = dict[str, Any]()
    for name, value in state.items():
        has_shape_of_weight = isinstance(value, Tensor) and value.shape == weight.shape
        sliced[name] = share_of(value, weight) if has_shape_of_weight else value
    return sliced


def _on_first(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gather whole tensors on the CPU of the first rank; other ranks get an empty mapping.

    A collective: every rank calls it with the same names.
    """
    gathered = {}
    for name, value in state.items():
        full = whole(value).cpu() if isinstance(value, Tensor) else value
        if dist.get_rank() == 0:
            gathered[name] = full
    return gathered

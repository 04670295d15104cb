"""How the ranks of a run train together: as arguments of Lightning's Trainer.

With DDP every rank holds the whole model and gradients are averaged (in fp32, or in bf16 by
`trainer.strategy=ddp_bf16`). With FSDP every rank holds a slice of each weight. Open this file to
add a strategy, or to change what one is refused for.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from flatout.data.batches.feed import free_memory
from flatout.engine.pieces import BATCH_NORMS
from flatout.engine.precision import Precision
from flatout.errors import require
from flatout.run.context import RunContext
from flatout.run.memory import bytes_to_train

_DDP_BF16 = "ddp_bf16"  # DDP whose gradients are sent in bf16: for cards that are joined by PCIe
_OURS = (None, "auto", "ddp", _DDP_BF16)  # values of trainer.strategy that make our DDP
_BUCKET_MB = 1 << 14  # larger than any model: all gradients are sent at once


def choose_strategy(
    asked: object, module: nn.Module, precision: Precision, context: RunContext
) -> dict[str, Any]:
    """Arguments of Lightning's Trainer for the value of `trainer.strategy`.

    Empty where the Trainer's own strategy serves: on one device, and for strategies that are not
    ours.
    """
    if asked == "fsdp":
        return _choose_fsdp(module, precision, context)
    device = context.device
    sends_bf16 = asked == _DDP_BF16
    if sends_bf16:
        require(
            device.type == "cuda",
            f"trainer.strategy: {asked}",
            "gradients are sent in bf16 between GPUs alone",
            hint="Set trainer.strategy=ddp.",
        )
        context.folder.decision(
            "gradients between devices",
            "bf16",
            "asked for",
            "half the traffic of fp32, rounded",
        )
    if context.ranks.are_several and asked in _OURS:
        return {"strategy": _build_ddp(module, device, sends_bf16=sends_bf16)}
    # Lightning does not know our name
    return {"strategy": "auto"} if sends_bf16 else {}


def _build_ddp(module: nn.Module, device: torch.device, *, sends_bf16: bool) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients.

    Buffers are sent in each step only if steps change them.
    """
    parameters = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers"  # of newer versions of torch
    if sync_buffers not in parameters:
        sync_buffers = "broadcast_buffers"
    settings: dict[str, Any] = {
        "gradient_as_bucket_view": True,
        sync_buffers: _has_batch_norms(module),
    }
    if device.type == "cpu":
        # Sending takes its cores from computing, so it waits until all is computed.
        settings["bucket_cap_mb"] = _BUCKET_MB
    if sends_bf16:
        settings["ddp_comm_hook"] = bf16_compress_hook
    return DDPStrategy(**settings)


def _choose_fsdp(module: nn.Module, precision: Precision, context: RunContext) -> dict[str, Any]:
    """A slice of the weights on each device; says so if the whole ones would fit easily."""
    device = context.device
    ranks = context.ranks
    log = context.folder
    key = "trainer.strategy: fsdp"
    require(
        precision is not Precision.fp16,
        key,
        "does not go with fp16: its scaler looks at whole gradients",
        hint="Set precision=fp32.",
    )
    require(
        not _has_batch_norms(module),
        key,
        "batch normalisation would have other means on every rank",
        hint="Leave it out.",
    )
    from flatout.engine.fsdp import ShardedStrategy  # only such runs need it

    whole_bytes = bytes_to_train(module)
    log.decision(
        "weights",
        f"1/{ranks.world} on each device",
        "trainer.strategy=fsdp",
        f"with gradients and AdamW {whole_bytes / 1e6 / ranks.world:,.1f} MB a device instead of"
        f" {whole_bytes / 1e6:,.1f}",
    )
    ranks_on_device = 1 if device.type == "cuda" else ranks.local_world
    free = free_memory(device)
    if 2 * whole_bytes * ranks_on_device < free:
        log.say(
            f"weights: whole ones would take less than half of the free {free / 1e9:,.1f} GB;"
            " trainer.strategy=auto keeps them so and sends less"
        )
    # Weights that were gathered in inference mode could not be trained afterwards.
    return {"strategy": ShardedStrategy(ranks.world), "inference_mode": False}


def _has_batch_norms(module: nn.Module) -> bool:
    """Whether there is batch normalisation, whose running means each step changes.

    With DDP the first rank's means count.
    """
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())

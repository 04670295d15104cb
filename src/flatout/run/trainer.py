"""Parts of Lightning's Trainer for one run: defaults, strategy, monitor, profile, early stopping."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from flatout.callbacks.hardware_monitor import HardwareMonitor, hardware_of
from flatout.callbacks.loggers import RunLoggers
from flatout.callbacks.profile_steps import ProfileConfig, ProfileSteps
from flatout.callbacks.run_curves import RunCurves
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.checkpoints.settings import CheckpointConfig, best_mode
from flatout.data.batches.feed import free_memory
from flatout.distributed.ranks import Ranks
from flatout.engine.fast_loop import FastLoop
from flatout.engine.passes import BATCH_NORMS
from flatout.engine.precision import Precision, PrecisionChoice
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, require
from flatout.run.run_folder import RunFolder
from flatout.run_log import RunLog

FSDP = "fsdp"
"""The name of the strategy that keeps a slice of each weight on each rank."""


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that are asked afterwards."""

    trainer: L.Trainer
    curves: RunCurves
    loggers: RunLoggers
    checkpoints: ExactCheckpoint
    loop: FastLoop
    stopping: list[EarlyStopping]
    """Those of `checkpoint.patience`; callbacks of the user are not among them."""


def lightning_defaults(precision: PrecisionChoice, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What is set unless the user sets it otherwise: what flatout does itself is off."""
    return {
        "max_epochs": EPOCHS,
        "precision": precision.lightning_name,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "plugins": [FolderCheckpointIO(), *([ranks.environment()] if ranks.are_several else [])],
    }


def quiet_trainer(settings: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer, without its own messages; what it refuses is a user's mistake."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return L.Trainer(**settings, callbacks=callbacks)
    except (TypeError, ValueError, L.pytorch.utilities.exceptions.MisconfigurationException) as error:
        raise UserError("trainer", str(error), hint="These settings go to Lightning's Trainer.") from None


def build_profile(asked: ProfileConfig, folder: RunFolder) -> list[ProfileSteps]:
    """A profile of some steps of the first rank, where it is asked for."""
    if not (asked.enabled and folder.is_first):
        return []
    window = {"wait": asked.wait, "warmup": asked.warmup, "active": asked.active}
    return [ProfileSteps(**window, folder=folder.path, say=folder.say)]


def build_monitor(device: torch.device, folder: RunFolder) -> HardwareMonitor:
    """The first rank monitors its machine and its card; the others monitor nothing."""
    return HardwareMonitor(sources=hardware_of(device) if folder.is_first else [], say=folder.say)


def choose_strategy(
    trainer: dict[str, Any],
    module: L.LightningModule,
    device: torch.device,
    precision: PrecisionChoice,
    ranks: Ranks,
    log: RunLog,
) -> dict[str, Any]:
    """How ranks train together, as arguments of Lightning's Trainer: whole copies of the model, or slices of it."""
    asked = trainer.get("strategy")
    if asked != FSDP:
        compresses = asked == DDP_BF16
        if compresses:
            what = "gradients are sent in bf16 between GPUs alone"
            require(device.type == "cuda", f"trainer.strategy: {asked}", what, hint="Set trainer.strategy=ddp.")
            log.decision("gradients between devices", "bf16", "asked for", "half the traffic of fp32, rounded")
        if ranks.are_several and asked in (None, "auto", "ddp", DDP_BF16):
            return {"strategy": ddp(module, device, compresses=compresses)}
        return {"strategy": "auto"} if compresses else {}
    what, hint = "does not go with fp16: its scaler looks at whole gradients", "Set precision=fp32."
    require(precision.precision is not Precision.fp16, f"trainer.strategy: {asked}", what, hint=hint)
    what = "batch normalisation would have other means on every rank"
    require(not _has_means(module), f"trainer.strategy: {asked}", what, hint="Leave it out.")
    from flatout.distributed.fsdp import SharedOut

    # A trained weight comes with its gradient and with two numbers of AdamW.
    megabytes = sum(weight.nbytes * (4 if weight.requires_grad else 1) for weight in module.parameters()) / 1e6
    evidence = f"with gradients and AdamW {megabytes / ranks.world:,.1f} MB a device instead of {megabytes:,.1f}"
    log.decision("weights", f"1/{ranks.world} on each device", "trainer.strategy=fsdp", evidence)
    ranks_here = 1 if device.type == "cuda" else ranks.local_world
    if 2e6 * megabytes * ranks_here < (free := free_memory(device)):
        log.say(
            f"weights: whole ones would take less than half of the free {free / 1e9:,.1f} GB; trainer.strategy=auto"
            " keeps them so and sends less"
        )
    # Weights that were gathered in inference mode could not be trained afterwards.
    return {"strategy": SharedOut(ranks.world), "inference_mode": False}


_ONE_BUCKET_MB = 1 << 14
"""On a CPU what exchanges gradients takes its cores from what computes them: all are exchanged when all are there."""


DDP_BF16 = "ddp_bf16"
"""DDP whose gradients are sent in bf16: for cards that are joined by PCIe."""


def ddp(module: L.LightningModule, device: torch.device, *, compresses: bool = False) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients, and without buffers in each step that never change."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: _has_means(module)}
    if device.type == "cpu":
        settings["bucket_cap_mb"] = _ONE_BUCKET_MB
    if compresses:
        settings["ddp_comm_hook"] = bf16_compress_hook
    return DDPStrategy(**settings)


def _has_means(module: L.LightningModule) -> bool:
    """Whether there are running means, of batch normalisation; of several ranks' the first one's count."""
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())


def early_stopping(settings: CheckpointConfig, metric: str) -> list[EarlyStopping]:
    """Ends training when the metric gets no better, where the settings ask for it."""
    if settings.patience is None:
        return []
    return [
        EarlyStopping(
            f"val/{metric}",
            mode=best_mode(metric),
            patience=settings.patience or 1,
            min_delta=settings.min_delta,
            check_on_train_epoch_end=False,
        )
    ]

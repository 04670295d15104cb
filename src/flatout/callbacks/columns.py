"""Every curve of training, and what it shows: the columns of `metrics.csv`."""

from __future__ import annotations

from flatout.callbacks.gpu import GPU_CURVES
from flatout.callbacks.host import HOST_CURVES

COLUMNS = {
    "train/loss": "mean loss of the steps since the last flush",
    "train/gradient_norm": "mean gradient norm before clipping",
    "train/lr": "learning rate of the last step",
    "speed/rows_per_s": "rows trained a second since the last flush, over all ranks",
    "speed/tokens_per_s": "real tokens (padding not counted) a second",
    "speed/padding_share": "fraction of computed tokens that is padding",
    "speed/mfu": "fraction of the device's peak that real tokens take (on GPUs whose peak is known)",
    "time/wait_ms": "a batch's wait for data",
    "time/transfer_ms": "a batch's copy to the device, where training waits for it",
    "time/forward_ms": "a batch's forward pass and loss",
    "time/backward_ms": "a batch's backward pass",
    "time/optimizer_ms": "clipping and optimizer step, over all batches",
    "time/callbacks_ms": "your own callbacks, over all batches",
    "time/logging_ms": "writing these curves, over all batches",
    "time/checkpoint_ms": "checkpoints, over all batches",
    "time/validation_ms": "validations, over all batches",
    "time/other_ms": "what is left: the framework itself",
    "time/p50_ms": "median length of all optimizer steps so far; logging, checkpoints and validations not counted",
    "time/p99_ms": "99th percentile of the lengths of optimizer steps so far",
    **GPU_CURVES,
    **HOST_CURVES,
}

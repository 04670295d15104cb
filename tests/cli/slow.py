"""A callback that takes its time, for runs in processes of their own."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class Slow(L.Callback):
    """Waits after every batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.02)

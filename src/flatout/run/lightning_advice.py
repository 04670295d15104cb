"""Advice of Lightning that does not hold in a run of flatout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lightning_advice() -> Iterator[None]:
    """Inside it Lightning gives no advice that does not hold here.

    Feeds need no DataLoader workers, metrics are shared among ranks already, and a run resumes into
    a folder that holds checkpoints.
    """
    advice = (
        ".*does not have many workers.*",
        ".*recommended to use `self.log.*sync_dist=True.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*Checkpoint directory.*exists and is not empty.*",
        ".*smaller than the logging interval.*",
        ".*Be aware that when using `ckpt_path`.*",
    )
    with warnings.catch_warnings():
        for pattern in advice:
            warnings.filterwarnings("ignore", message=pattern)
        yield

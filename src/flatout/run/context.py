"""What the stages of a run hand to each other: where the run happens, and the parts it trains.

`run/run.py` makes both once; no stage changes them. Parts of flatout's own stand in
`RunParts.ours`. It is None where the user's own LightningModule or DataModule trains, so a stage
that needs our task, store or feeds asks for `ours` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from flatout.data.batches.feed import Feeds
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where one rank's part of a run happens."""

    ranks: Ranks
    device: torch.device  # of this rank
    folder: RunFolder  # what ranks but the first one write there is dropped


@dataclass(frozen=True, slots=True)
class OurParts:
    """A task of flatout with its network built, its data, and a feed for each split."""

    task: Task
    data: StoreData[Any, Any]
    feeds: Feeds


@dataclass(frozen=True, slots=True)
class RunParts:
    """What trains."""

    module: L.LightningModule
    data: L.LightningDataModule
    ours: OurParts | None  # both again, if they are flatout's; None beside parts of the user's own

    @property
    def feeds(self) -> Feeds | None:
        return None if self.ours is None else self.ours.feeds

"""The plans behind the feeds of one rank: of the training rows, and of rows that are evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flatout.data.batches.feed_kind import FeedKind
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.feeding import FeedingConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a feed's batches are computed: which rank of how many, on which device, in which layout."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layout: Layout = Layout.flat
    repeats: bool = False
    """Whether each epoch has the batches of the first."""


def training_plan(config: FeedingConfig, placement: Placement, accumulate: int, seed: int) -> PlanSettings:
    """The plan of the training rows, `accumulate` batches to a step."""
    return PlanSettings(
        rows_per_batch=config.batches(placement.world)[0],
        tokens_per_batch=config.tokens_per_batch,
        accumulate=accumulate,
        layout=placement.layout,
        repeats=placement.repeats,
        seed=seed,
        rank=placement.rank,
        world=placement.world,
    )


def evaluation_plan(config: FeedingConfig, placement: Placement) -> PlanSettings:
    """The plan of validation and test rows: all rows by length, the same in each pass."""
    return PlanSettings(
        rows_per_batch=config.eval_batch_size,
        layout=placement.layout,
        shuffle=False,
        rank=placement.rank,
        world=placement.world,
    )


def evaluation_kind(kind: FeedKind) -> FeedKind:
    """Rows that are only evaluated need no worker processes."""
    return kind if kind is FeedKind.resident else FeedKind.threaded

"""Rows that plans put into batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from flatout.data.batches.large_plan import LargePlan
from flatout.data.batches.plan import Plan, PlanSettings, StreamPlan

AnyPlan = TypeVar("AnyPlan", Plan, LargePlan)


def plans_of_all_ranks(
    make_plan: Callable[[np.ndarray, PlanSettings, int], AnyPlan],
    lengths: np.ndarray,
    settings: PlanSettings,
    epoch: int = 0,
) -> list[AnyPlan]:
    """The plan of each rank, one after the other."""
    ranks = range(settings.world)
    return [make_plan(lengths, replace(settings, rank=rank), epoch) for rank in ranks]


def real_rows(
    plan: Plan | LargePlan | StreamPlan, start: int = 0, stop: int | None = None
) -> list[list[int]]:
    """The rows that count in each batch."""
    found = plan.batches(start, plan.num_batches if stop is None else stop)
    spans = zip(found.bounds, found.num_real, strict=False)
    return [found.rows[begin : begin + real].tolist() for begin, real in spans]

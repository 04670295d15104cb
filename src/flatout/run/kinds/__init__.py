"""The kinds of runs, and which one some data asks for."""

from __future__ import annotations

from typing import Any

from flatout.bits.data import BitsDataConfig
from flatout.bits.scores import NAMES
from flatout.data.problem import Problem
from flatout.run.kinds.bits import BitsKind
from flatout.run.kinds.kind import Kind
from flatout.run.kinds.tags import METRICS as TAG_METRICS
from flatout.run.kinds.tags import TagKind
from flatout.run.kinds.text import TextKind
from flatout.tasks.metrics import TaskMetrics, monitored_metric


def kind_of(config: Any, data: Any) -> Kind:
    """The kind of run that trains on prepared data."""
    if isinstance(config, BitsDataConfig):
        return BitsKind(config, data)
    return (TagKind if config.problem is Problem.tags else TextKind)(config, data)


def usual_metric(config: Any) -> str:
    """What such a run is compared by when nobody said so, known before there is any data."""
    if isinstance(config, BitsDataConfig):
        return "dice"
    return "f1" if config.problem is Problem.tags else monitored_metric(config.problem)


def metric_names(config: Any) -> list[str]:
    """What such a run may be compared by; some of them depend on its data, as those of two classes do."""
    if isinstance(config, BitsDataConfig):
        return [*NAMES, "loss"]
    if config.problem is Problem.tags:
        return [*TAG_METRICS, "loss"]
    return [*TaskMetrics.build(config.problem, ["no", "yes"]).names(), "loss"]

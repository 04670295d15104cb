"""Which DataModule, task and metrics belong to which data settings."""

from __future__ import annotations

from typing import Any

from flatout.bits.bit_data import BitData
from flatout.bits.data import BitsDataConfig
from flatout.bits.scores import NAMES
from flatout.bits.task import GramDecoder
from flatout.data.problem import Problem
from flatout.data.sequence_data import SequenceData
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store_data import StoreData
from flatout.data.tag_data import TagData
from flatout.data.text_data import TextData
from flatout.run_log import RunLog
from flatout.tasks.classification import Classifier
from flatout.tasks.metrics import TaskMetrics, monitored_metric
from flatout.tasks.sequence_scores import names_of
from flatout.tasks.sequences import SequenceLabeller, SequenceRegressor
from flatout.tasks.tagging import METRICS as TAG_METRICS
from flatout.tasks.tagging import Tagger


def build_data(config: Any, *, seed: int, log: RunLog) -> StoreData[Any, Any]:
    """The DataModule of some data settings."""
    if isinstance(config, BitsDataConfig):
        return BitData.of(config, seed=seed, log=log)
    if isinstance(config, SequenceDataConfig):
        return SequenceData.of(config, seed=seed, log=log)
    kind: type[StoreData[Any, Any]] = TagData if config.problem is Problem.tags else TextData
    return kind.of(config, seed=seed, log=log)


def task_class(config: Any) -> type[Classifier] | type[Tagger] | type[GramDecoder] | type[SequenceRegressor]:
    """The LightningModule for some data settings."""
    if isinstance(config, BitsDataConfig):
        return GramDecoder
    if isinstance(config, SequenceDataConfig):
        return SequenceLabeller if config.problem is SequenceProblem.label else SequenceRegressor
    return Tagger if config.problem is Problem.tags else Classifier


def usual_metric(config: Any) -> str:
    """The metric that decides unless the settings name one, known before there is any data."""
    if isinstance(config, BitsDataConfig):
        return "dice"
    if isinstance(config, SequenceDataConfig):
        is_label = config.problem is SequenceProblem.label
        return "loss" if is_label else "rmse" if len(config.targets) == 1 else "mse_scaled"
    return "f1" if config.problem is Problem.tags else monitored_metric(config.problem)


def metric_names(config: Any) -> list[str]:
    """The metrics to choose from; some depend on the data, as those of two classes do."""
    if isinstance(config, BitsDataConfig):
        return [*NAMES, "loss"]
    if isinstance(config, SequenceDataConfig):
        both = [Problem.single, Problem.regression] if config.problem is SequenceProblem.label else []
        of_labels = [name for problem in both for name in TaskMetrics.build(problem, ["no", "yes"]).names()]
        return [*(of_labels or names_of(config.targets)), "loss"]
    if config.problem is Problem.tags:
        return [*TAG_METRICS, "loss"]
    return [*TaskMetrics.build(config.problem, ["no", "yes"]).names(), "loss"]

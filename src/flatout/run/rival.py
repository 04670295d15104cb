"""The rival of a run: the test scores of a simple model that is trained on the same rows.

A network that is no better than its rival is not worth its cost. For texts the rival is a linear
model on words and n-grams, for tagged words the commonest tag of each word. It is trained after the
run, on one core, in at most a tenth of the run's time and 20 s. If a few rows show that it would
take longer, it is left out, unless `monitor.rival=always`. The cache keeps its scores by the key of
the rows. It draws no random number of the run. To add a simple model, write a `Rival` here and name
it in `run/kinds.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.checks.tags import LISTS, as_bio
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.store.store import StoreWriter
from flatout.data.texts.opening import open_source, open_tables
from flatout.data.texts.source import TagSource
from flatout.inference.model_folder import ModelFolder
from flatout.run.linear import RunTexts, TooSlow, require_time, rows_of, targets_of
from flatout.run_log import RunLog
from flatout.tasks.calibration import best_thresholds
from flatout.tasks.classification import Classifier
from flatout.tasks.metrics import BEST_MODE, MultiMetrics, TaskMetrics
from flatout.tasks.mixture import log_shares
from flatout.tasks.tagging import EntityScores
from flatout.tasks.task import Task

if TYPE_CHECKING:
    from flatout.data.batches.store_data import StoreData
    from flatout.data.tags.data import TagData
    from flatout.data.texts.data import TextData

_MOST_S = 20.0  # the longest that a rival may take
_SHARE = 0.1  # fraction of the run's time that it may take
# The least time of any rival: an import, and so much a row. If that is too long, no text is read.
_START_S = 0.5
_ROW_S = 1e-4
_VERSION = 2  # of the scores in the cache
Scores = dict[str, float]


@dataclass(frozen=True, slots=True)
class Rival:
    """A simple model: its name, and a function that trains and scores it.

    The function takes the opened data and the seconds it may take, and returns test metrics.
    """

    name: str
    score: Callable[[Any, float], Scores]


def find_rival(
    rival: Rival, data: StoreData[Any, Any], summary: Mapping[str, Any], seconds: float, log: RunLog
) -> dict[str, Any] | None:
    """The section `rival` of `summary.json`, of a rival that is trained now or is in the cache.

    None without test rows, or without a metric that both have. `seconds`: of the run; infinite
    where the rival may take as long as it needs.
    """
    if not _test_scores(summary):
        return None
    scores = scores_within(rival, data, rival_limit_s(seconds), log)
    return compare_with_rival(rival, scores, summary)


def rival_limit_s(seconds: float) -> float:
    """The seconds that a rival may take beside a run of `seconds`; infinite where it may take any.

    A run of 100 s gives it 10 s, one of an hour 20 s.
    """
    return seconds if math.isinf(seconds) else min(_MOST_S, _SHARE * seconds)


def compare_with_rival(
    rival: Rival, metrics: Scores, summary: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The section of a rival with these test metrics, and whether it wins."""
    run_scores = _test_scores(summary)
    # The run's own metric decides, else the first that both have. A loss decides nothing: losses of
    # two models are not of one kind.
    for metric in (f"test/{summary['metric']}", *run_scores):
        mode = BEST_MODE.get(metric.removeprefix("test/"))
        if metric in metrics and mode is not None:
            sign = 1 if mode == "max" else -1
            return {
                "name": rival.name,
                "metric": metric,
                "metrics": metrics,
                "wins": sign * metrics[metric] > sign * run_scores[metric],
            }
    return None


def _test_scores(summary: Mapping[str, Any]) -> Scores:
    """The run's own test metrics."""
    metrics = summary["metrics"].items()
    return {metric: value for metric, value in metrics if metric.startswith("test/")}


def scores_within(rival: Rival, data: StoreData[Any, Any], limit_s: float, log: RunLog) -> Scores:
    """Scores by metric, cached or computed now; empty, with a printed reason, if too slow."""

    def build(writer: StoreWriter) -> None:
        require_time(_START_S + _ROW_S * data.store.splits["train"].num_rows, limit_s)
        scores = rival.score(data, limit_s)
        writer.facts |= {f"test/{name}": value for name, value in scores.items()}

    recipe = {"rival": _VERSION, "name": rival.name, "rows": data.info.key}
    try:
        cache = Cache(data.config.cache)
        store, _ = cache.open_or_build(f"rival of {data.info.source}", recipe, build)
        return dict(store.facts)
    except TooSlow as slow:
        log.say(
            f"rival: left out: it would take {slow.args[0]:.1f} s, and may take {limit_s:.1f} s;"
            " monitor.rival=always trains it"
        )
    except Exception as error:
        # scikit-learn, torch and sources share no class; a trained run is worth more
        log.say(f"rival: left out: {error}")
    return {}


def wins_clearly(section: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Whether a rival's score lies beyond the 95 % interval of the run's own."""
    metric = section["metric"]
    interval = (summary.get("intervals") or {}).get(metric)
    if not section["wins"] or interval is None:
        return False
    low, high = interval
    return not low <= section["metrics"][metric] <= high


def keep_rival(
    task: Task, data: TextData, folder: ModelFolder, limit_s: float, log: RunLog
) -> bool:
    """Write the linear model of a run beside its network; returns whether it was kept.

    It was fitted where a linear model answers with the network. Else it is trained once more:
    scores may have come from the cache, which has no model.
    """
    beside = task.beside if isinstance(task, Classifier) else None
    fitted = None if beside is None else beside.plain
    try:
        is_multi = data.info.problem is Problem.multi
        splits = [] if fitted is not None else ["train"]
        if is_multi:
            splits.append("validation")
        rows = RunTexts(data, {})
        if splits:
            rows = RunTexts.read(open_source(data.config), data, splits)
        model = rows.fit(limit_s) if fitted is None else fitted
        thresholds: list[float] = []
        if is_multi:
            shares = model.predict(rows.texts["validation"])
            targets = torch.from_numpy(targets_of(data, "validation"))
            thresholds = best_thresholds(torch.from_numpy(shares).float(), targets)
        folder.write_rival(model, thresholds)
        return True
    except TooSlow as slow:
        log.say(f"rival: not kept: it would take {slow.args[0]:.1f} s more")
    except Exception as error:
        # scikit-learn, torch and sources share no class; a trained run is worth more
        log.say(f"rival: not kept: {error}")
    return False


def score_linear(data: TextData, limit_s: float) -> Scores:
    """Test scores of a linear model on words and n-grams.

    For several labels a row, the thresholds are chosen on the validation rows.
    """
    problem = data.info.problem
    rows = RunTexts.read(open_source(data.config), data, data.store.splits)
    model = rows.fit(limit_s)
    judged = ["test", "validation"] if problem is Problem.multi else ["test"]
    outputs = {split: log_shares(model.predict(rows.texts[split]), problem) for split in judged}
    return _score_outputs(data, outputs)


def score_beside(task: Task, data: StoreData[Any, Any]) -> Scores:
    """Test metrics of the plain linear model, where one was fitted to answer with the network.

    Empty where there is none, or no test rows. Nothing is trained or read again.
    """
    beside = task.beside if isinstance(task, Classifier) else None
    if beside is None or "test" not in beside.rival:
        return {}
    scores = _score_outputs(cast("TextData", data), beside.rival)
    return {f"test/{name}": value for name, value in scores.items()}


def _score_outputs(data: TextData, outputs: Mapping[str, Tensor]) -> Scores:
    """Scores of the test rows by outputs such as a network has, by split."""
    metrics = TaskMetrics.build(data.info.problem, data.info.classes)
    if isinstance(metrics, MultiMetrics):
        targets = torch.from_numpy(targets_of(data, "validation"))
        thresholds = best_thresholds(outputs["validation"].sigmoid(), targets)
        metrics.thresholds.copy_(torch.tensor(thresholds))
    metrics.update(outputs["test"], torch.from_numpy(targets_of(data, "test")))
    return metrics.compute()


def score_commonest_tags(data: TagData, limit_s: float) -> Scores:
    """Test scores of giving each word the tag that it has most often in training.

    An unknown word gets the commonest tag of all:

        training: a/O Rome/B-place Rome/O Rome/B-place an/O   →   Rome: B-place, a: O, Paris: O
    """
    started = time.perf_counter()
    labels = data.info.labels
    words, tags, _ = _tags_of(data, "train")
    test_words, test_tags, offsets = _tags_of(data, "test")
    # counting takes at most three times as long as reading
    require_time(4 * (time.perf_counter() - started), limit_s)
    vocabulary = pc.unique(words)
    # One row for each word and one column for each tag. The last row counts all words: it answers
    # for a word that is in none of the training rows.
    counts = np.zeros((len(vocabulary) + 1, len(labels.names)), np.int64)
    np.add.at(counts, (pc.index_in(words, vocabulary).to_numpy(), tags), 1)
    counts[-1] = counts.sum(0)
    rows = pc.fill_null(pc.index_in(test_words, vocabulary), len(vocabulary)).to_numpy()
    answers = counts.argmax(1)[rows]
    scores = EntityScores(labels.types, is_plain=labels.are_plain)
    scores.add(answers, test_tags, offsets, np.zeros(len(offsets) - 1, np.bool_))
    return scores.values()


LINEAR = Rival("linear model on words and n-grams", score_linear)
COMMONEST = Rival("commonest tag of each word", score_commonest_tags)


def _tags_of(data: TagData, split: str) -> tuple[pa.Array, NDArray[Any], NDArray[Any]]:
    """Words and tags of a split, one after the other, and where its rows begin.

    Rows [a b] and [c]: words a, b, c; rows begin at 0, 2, 3.
    """
    source = TagSource(data.config, open_tables(data.config))
    source.census.expect(data.info.labels.names)
    words = []
    tags = []
    lengths = []
    for rows, block in rows_of(source, LISTS, data, split):
        numbered = source.census.numbered(block.column(LISTS[1]), rows)
        words.append(pc.list_flatten(block.column(LISTS[0])))
        tags.append(as_bio(numbered))
        lengths.append(np.diff(numbered.offsets))
    return (
        pa.concat_arrays(words),
        np.concatenate(tags),
        np.append(0, np.cumsum(np.concatenate(lengths))),
    )

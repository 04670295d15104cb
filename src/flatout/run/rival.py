"""The rival of a run: the test scores of a simple model that is trained on the same rows.

For texts that is a linear model on words and n-grams, for tagged words the commonest tag of each
word. It is trained after the run, on one core, in at most a tenth of the run's time and 20 s; if a
few rows show that it would take longer, it is left out. The cache keeps its scores by the key of
the rows. It draws no random number of the run. To add a simple model, write a `Model` here and
name it in `run/kinds.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.tags import LISTS, as_bio
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.store.store import StoreWriter
from flatout.data.tables.table import changed
from flatout.data.text_preparation import open_source, open_tables
from flatout.data.text_source import TagSource, TextSource
from flatout.run_log import RunLog
from flatout.tasks.calibration import best_thresholds
from flatout.tasks.metrics import BEST_MODE, MultiMetrics, TaskMetrics
from flatout.tasks.tagging import EntityScores

_MOST_S = 20.0  # that it may take
_SHARE = 0.1  # of the run's time that it may take
# what the import of scikit-learn and the quickest rows take: what is too long never begins
_START_S = 0.5
_ROW_S = 1e-4
_TRIED_ROWS = 2_048  # rows whose training is timed
_SLOWER = 1.5  # how many times as long a row takes among many
_VERSION = 1  # of the scores in the cache
Scores = dict[str, float]
# from the data and the seconds it may take the metrics on the test rows
Model = Callable[[Any, float], Scores]


class TooSlow(Exception):
    """A rival that would take longer than it may; with the seconds that it would take."""


def find_rival(
    name: str, model: Model, data: Any, summary: Mapping[str, Any], seconds: float, log: RunLog
) -> dict[str, Any] | None:
    """The section `rival` of `summary.json`: its metrics, and whether it wins.

    None without test rows, or without a metric that both have. `seconds`: of the run.
    """
    run_scores = {
        metric: value for metric, value in summary["metrics"].items() if metric.startswith("test/")
    }
    if not run_scores:
        return None
    metrics = _scores_within(model, data, min(_MOST_S, _SHARE * seconds), log)
    # the run's own metric decides, else the first that both have
    for metric in (f"test/{summary['metric']}", *run_scores):
        mode = BEST_MODE.get(metric.removeprefix("test/"))
        if metric in metrics and mode is not None:
            sign = 1 if mode == "max" else -1
            return {
                "name": name,
                "metric": metric,
                "metrics": metrics,
                "wins": sign * metrics[metric] > sign * run_scores[metric],
            }
    return None


def _scores_within(score: Model, data: Any, limit_s: float, log: RunLog) -> Scores:
    """Scores by metric, cached or computed now; empty, with a printed reason, if too slow."""

    def build(writer: StoreWriter) -> None:
        _require_time(_START_S + _ROW_S * data.store.splits["train"].num_rows, limit_s)
        writer.facts |= {f"test/{name}": value for name, value in score(data, limit_s).items()}

    recipe = {"rival": _VERSION, "rows": data.info.key}
    try:
        cache = Cache(data.config.cache)
        store, _ = cache.open_or_build(f"rival of {data.info.source}", recipe, build)
        return dict(store.facts)
    except TooSlow as slow:
        log.say(
            f"rival: left out: it would take {slow.args[0]:.1f} s, and a tenth of the run is"
            f" {limit_s:.1f} s"
        )
    except Exception as error:
        # scikit-learn, torch and sources share no class; a trained run is worth more
        log.say(f"rival: left out: {error}")
    return {}


def score_linear(data: Any, limit_s: float) -> Scores:
    """Test scores of a linear model on words and n-grams.

    For several labels a row, the thresholds are chosen on the validation rows.
    """
    started = time.perf_counter()
    from flatout.audit.quick_model import QuickModel  # scikit-learn takes a second to import

    problem, classes = data.info.problem, data.info.classes
    source = open_source(data.config)
    splits = {
        name: (_texts_of(source, data, name), _targets_of(data, name)) for name in data.store.splits
    }
    (texts, targets), (test_texts, test_targets) = splits["train"], splits["test"]
    num_rows = sum(len(texts) for texts, _ in splits.values())
    if len(texts) > 2 * _TRIED_ROWS:
        read = time.perf_counter()
        some = slice(0, None, len(texts) // _TRIED_ROWS)
        QuickModel(problem, len(classes)).fit(texts[some], targets[some])
        now = time.perf_counter()
        _require_time(now - started + _SLOWER * num_rows / len(texts[some]) * (now - read), limit_s)
    model = QuickModel(problem, len(classes)).fit(texts, targets)
    metrics = TaskMetrics.build(problem, classes)
    if isinstance(metrics, MultiMetrics):
        texts, targets = splits["validation"]
        metrics.thresholds.copy_(
            torch.tensor(best_thresholds(*map(torch.from_numpy, (model.predict(texts), targets))))
        )
    answers = torch.from_numpy(model.predict(test_texts))
    if problem is not Problem.regression:
        answers = answers.logit() if problem is Problem.multi else answers.log()
    metrics.update(answers.float(), torch.from_numpy(test_targets))
    return metrics.compute()


def score_commonest_tags(data: Any, limit_s: float) -> Scores:
    """Test scores of giving each word the tag that it has most often in training.

    An unknown word gets the commonest tag of all:

        training: a/O Rome/B-place Rome/O Rome/B-place an/O   →   Rome: B-place, a: O, Paris: O
    """
    started = time.perf_counter()
    types = data.info.labels.types
    (words, tags, _), (test_words, test_tags, offsets) = (
        _tags_of(data, name) for name in ("train", "test")
    )
    _require_time(4 * (time.perf_counter() - started), limit_s)
    known = pc.unique(words)
    counts = np.zeros((len(known) + 1, 2 * len(types) + 1), np.int64)
    np.add.at(counts, (pc.index_in(words, known).to_numpy(), tags), 1)
    counts[-1] = counts.sum(0)
    answers = counts.argmax(1)[pc.fill_null(pc.index_in(test_words, known), len(known)).to_numpy()]
    scores = EntityScores(types)
    scores.add(answers, test_tags, offsets, np.zeros(len(offsets) - 1, np.bool_))
    return scores.values()


LINEAR: tuple[str, Model] = ("linear model on words and n-grams", score_linear)
COMMONEST: tuple[str, Model] = ("commonest tag of each word", score_commonest_tags)


def _require_time(needed_s: float, limit_s: float) -> None:
    if needed_s > limit_s:
        raise TooSlow(needed_s)


def _rows_of(source: TextSource, columns: Sequence[str], data: Any, split: str) -> Iterator[Any]:
    """The rows of a split, read again block by block: their numbers in the table, and columns."""
    if data.store.manifest["recipe"]["source"] != source.fingerprints:
        raise changed(source.name)
    table = source.tables.get(split, source.tables["train"])
    wanted = data.store.splits[split].fixed("rows")
    for rows, block in table.numbered(columns):
        is_wanted = np.isin(rows, wanted)
        yield rows[is_wanted], block.filter(pa.array(is_wanted))


def _texts_of(source: TextSource, data: Any, split: str) -> list[str]:
    texts: list[str] = []
    for rows, block in _rows_of(source, source.roles.texts, data, split):
        findings = Findings(source.name)  # the run has reported them
        escapes = data.config.clean.escapes
        texts_of_block, _ = read_texts(block, source.roles, rows, findings, escapes=escapes)
        texts += pc.fill_null(texts_of_block, "").to_pylist()
    return texts


def _targets_of(data: Any, split: str) -> NDArray[Any]:
    store = data.store.splits[split]
    if data.info.problem is not Problem.multi:
        return store.fixed("targets").astype(
            np.float32 if data.info.problem is Problem.regression else np.int64
        )
    ragged = store.ragged("targets")
    hot = np.zeros((store.num_rows, len(data.info.classes)), np.int64)
    hot[np.repeat(np.arange(len(hot)), ragged.lengths), ragged.values] = 1
    return hot


def _tags_of(data: Any, split: str) -> tuple[pa.Array, NDArray[Any], NDArray[Any]]:
    """Words and tags of a split, one after the other, and where its rows begin."""
    source = TagSource(data.config, open_tables(data.config))
    source.census.types |= {name: number for number, name in enumerate(data.info.labels.types, 1)}
    words = []
    tags = []
    lengths = []
    for rows, block in _rows_of(source, LISTS, data, split):
        given = source.census.numbered(block.column(LISTS[1]), rows)
        words.append(pc.list_flatten(block.column(LISTS[0])))
        tags.append(as_bio(given))
        lengths.append(np.diff(given.offsets))
    return (
        pa.concat_arrays(words),
        np.concatenate(tags),
        np.append(0, np.cumsum(np.concatenate(lengths))),
    )

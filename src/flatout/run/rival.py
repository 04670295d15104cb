"""The rival: what a simple model scores on the same test rows, trained on the same training rows,
beside each run.

Of texts it is a linear model on words and n-grams, of tagged words the commonest tag of each word.
It is trained after the run, on one core, in at most a tenth of the run's time and 20 s. Where a
part of the rows says that it would take longer, it is left out. The cache keeps its scores under
the key of the rows. It draws no random number of the run.
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

_MOST_S = 20.0
_SHARE = 0.1
_START_S = 0.5
_ROW_S = 1e-4
"""What the import of scikit-learn and the quickest rows take, to leave out what is too long before
it begins."""
# rows that are tried, and how much longer a row takes among many
_TRIED = 2_048
_SLOWER = 1.5
_VERSION = 1
Scores = dict[str, float]
# from the data and the seconds it may take the metrics on the test rows
Model = Callable[[Any, float], Scores]


class TooSlow(Exception):
    """A rival that would take longer than it may; with the seconds that it would take."""


def find_rival(
    name: str, model: Model, data: Any, summary: Mapping[str, Any], seconds: float, log: RunLog
) -> dict[str, Any] | None:
    """The rival's metrics, and whether it wins; None where there is none. `seconds`: of the run."""
    own = {name: value for name, value in summary["metrics"].items() if name.startswith("test/")}
    metrics = _scores_within(model, data, min(_MOST_S, _SHARE * seconds), log) if own else {}
    shared = [
        each
        for each in (f"test/{summary['metric']}", *own)
        if each in metrics and each[5:] in BEST_MODE
    ]
    if not shared:
        return None
    metric = shared[0]
    sign = 1 if BEST_MODE[shared[0][5:]] == "max" else -1
    return {
        "name": name,
        "metric": metric,
        "metrics": metrics,
        "wins": sign * metrics[metric] > sign * own[metric],
    }


def _scores_within(score: Model, data: Any, limit_s: float, log: RunLog) -> Scores:
    """The scores, from the cache or computed now; empty, with a line, where that would take too
    long.
    """

    def build(writer: StoreWriter) -> None:
        _require_time(_START_S + _ROW_S * data.store.splits["train"].num_rows, limit_s)
        writer.facts |= {f"test/{name}": value for name, value in score(data, limit_s).items()}

    recipe = {"rival": _VERSION, "rows": data.info.key}
    try:
        return dict(
            Cache(data.config.cache)
            .open_or_build(f"rival of {data.info.source}", recipe, build)[0]
            .facts
        )
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
    """A linear model on words and n-grams; several labels are answered from thresholds found on
    validation.
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
    if len(texts) > 2 * _TRIED:
        read = time.perf_counter()
        some = slice(0, None, len(texts) // _TRIED)
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
    """The tag that each word has most often; of a word that training has not, the commonest tag of
    all.
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
    """The rows of a split, read again: their numbers in their table, and some columns, block by
    block.
    """
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
        found, _ = read_texts(
            block, source.roles, rows, Findings(source.name), escapes=data.config.clean.escapes
        )
        texts += pc.fill_null(found, "").to_pylist()
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

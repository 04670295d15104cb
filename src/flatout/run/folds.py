"""A run's own model in folds: what it says of each text, or word, when it is trained on the other
folds' alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.config import RunConfig
from flatout.data.problem import Problem
from flatout.data.tables.splits import SplitBy
from flatout.data.tokens.subwords import PAIR
from flatout.perf.measure import apart
from flatout.perf.tune.settings import tune_of
from flatout.run_log import Say

# what a fold, on one device, does without
_OF_MACHINES = ("devices", "num_nodes", "strategy", "accelerator")
Texts = NDArray[np.object_]
Rows = dict[str, Texts]  # texts and labels; or lists of words, and of their tags


def answers_in_folds(
    settings: RunConfig,
    texts: Texts,
    labels: Texts,
    classes: Sequence[str],
    folds: NDArray[np.int64],
    run_s: float,
    limit_s: float,
    say: Say,
) -> NDArray[np.float64] | None:
    """`[N, C]` probabilities of N texts, or of N words of tagged sentences, by trainings without
    the fold of each.
    """
    # None, with a line that says why, where the trainings take longer than they may, or fail;
    # `run_s`: what the run took. Sentences of fold -1 are always taught. The first of the classes
    # of words is that of no entity.
    numbers = np.unique(folds[folds >= 0])
    began = time.time()
    is_tagged = settings.data.problem is Problem.tags
    fold_N = np.repeat(folds, [len(words) for words in texts]) if is_tagged else folds
    found = np.zeros((len(fold_N), len(classes)))
    whole_s = run_s * len(numbers)
    for nth, fold in enumerate(numbers, 1):
        if whole_s > limit_s:
            what = f"{len(numbers)} trainings of the run's model take {whole_s:.0f} s"
            say(f"network: left out: {what}. Give it more time: for=TIME.")
            return None
        say(
            f"network: training {nth} of {len(numbers)} of the run's model, some {whole_s:.0f} s"
            " in all"
        )
        is_judged = folds == fold
        taught, judged = (
            {"text": texts[rows], "label": labels[rows]} for rows in (~is_judged, is_judged)
        )
        try:
            work = partial(_answers, settings, taught, judged, classes[0])
            answers = apart.run(work, began + limit_s - time.time())
        except apart.Failed as failed:
            say(f"network: left out: {failed.why}")
            return None
        for name, shares in answers.items():
            found[fold_N == fold, classes.index(name)] = shares
        whole_s = (time.time() - began) / nth * len(numbers)
    say(
        f"network: the run's model was trained {len(numbers)} times, in {time.time() - began:.0f} s"
    )
    return found


def _answers(
    settings: RunConfig, taught: Rows, judged: Rows, outside: str
) -> dict[str, NDArray[np.float32]]:
    # In a process of its own, as a training takes seeds and threads; its folder and its store are
    # gone afterwards.
    from flatout.run.launch import start

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "train": _columns(taught),
            "test": _columns(judged),
            "cache": folder,
        }
        given |= {"label": "label", "text": ["text", "other"] if settings.data.pair else "text"}
        given |= dict.fromkeys(("source", "validation", "group", "exclude", "relabel"))
        run = replace(
            settings,
            data=replace(settings.data, **given, split_by=SplitBy.content),
            trainer={
                name: value for name, value in settings.trainer.items() if name not in _OF_MACHINES
            },
            monitor=replace(settings.monitor, progress=False, verdict=False, rival=False),
            tune=tune_of("off"),
            logger="none",
            callbacks={},
            resume=None,
            output=folder,
        )
        predictor: Any = start(run).predictor
        if settings.data.problem is Problem.tags:
            words = predictor.tags(pa.array(judged["text"], pa.list_(pa.large_string())))
            return dict(
                zip(
                    [outside, *(name[2:] for name in predictor.names[1::2])],
                    words.types.T,
                    strict=True,
                )
            )
        shares = predictor.shares(predictor.outputs(pa.array(judged["text"], pa.string()))).numpy()
        return dict(zip(predictor.labels.classes, shares.T, strict=True))


def _columns(rows: Rows) -> dict[str, list[Any]]:
    if not isinstance(rows["text"][0], str):
        return {name: column.tolist() for name, column in rows.items()}
    sides = [text.partition(PAIR) for text in rows["text"]]
    texts = {"text": [first for first, *_ in sides], "other": [second for *_, second in sides]}
    return {**texts, "label": rows["label"].tolist()}

"""Train a run's model once for each fold of the rows, and let it judge the rows left out.

The audit compares these probabilities with the labels: a model that has seen a wrong label repeats
it. Each training is a run of its own, in another process, in a folder that is removed. Open this
file to change which settings such a run keeps.
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
from flatout.data.problem import Problem, are_plain, types_of_tags
from flatout.data.tables.splits import SplitBy
from flatout.data.tokens.subwords import PAIR
from flatout.perf.measure import apart
from flatout.perf.tune.settings import tune_of
from flatout.run_log import Say

# arguments of the Trainer that are left out: a fold trains on one device
_MACHINE_ARGUMENTS = ("devices", "num_nodes", "strategy", "accelerator")
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
    """`[N, C]` probabilities of N texts, or of N words of tagged sentences, from held-out models.

    `folds`: the fold of each text; those of fold -1 are in every training. `classes`: of words the
    first one is that of no entity. `run_s`: seconds that the run took. None, with a printed reason,
    where the trainings would take longer than `limit_s`, or where one fails.
    """
    numbers = np.unique(folds[folds >= 0])
    began = time.time()
    fold_N = folds
    if settings.data.problem is Problem.tags:
        words_in_text = [len(words) for words in texts]
        fold_N = np.repeat(folds, words_in_text)
    shares_NC = np.zeros((len(fold_N), len(classes)))
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
        training_rows = {"text": texts[~is_judged], "label": labels[~is_judged]}
        judged_rows = {"text": texts[is_judged], "label": labels[is_judged]}
        try:
            work = partial(_train_and_judge, settings, training_rows, judged_rows, classes[0])
            answers = apart.run(work, began + limit_s - time.time())
        except apart.Failed as failed:
            say(f"network: left out: {failed.why}")
            return None
        for name, shares in answers.items():
            shares_NC[fold_N == fold, classes.index(name)] = shares
        whole_s = (time.time() - began) / nth * len(numbers)
    say(
        f"network: the run's model was trained {len(numbers)} times, in {time.time() - began:.0f} s"
    )
    return shares_NC


def _train_and_judge(
    settings: RunConfig, training_rows: Rows, judged_rows: Rows, outside: str
) -> dict[str, NDArray[np.float32]]:
    """Probabilities of the judged rows by class, from a run on the training rows.

    It needs a process of its own, as a training takes seeds and threads. `outside`: the class of
    words of no entity.
    """
    from flatout.run.launch import start

    with tempfile.TemporaryDirectory() as folder:
        data = replace(
            settings.data,
            train=_columns(training_rows),
            test=_columns(judged_rows),
            label="label",
            text=["text", "other"] if settings.data.pair else "text",
            source=None,
            validation=None,
            group=None,
            exclude=None,
            relabel=None,
            split_by=SplitBy.content,
            cache=folder,
        )
        trainer = {
            name: value
            for name, value in settings.trainer.items()
            if name not in _MACHINE_ARGUMENTS
        }
        run = replace(
            settings,
            data=data,
            trainer=trainer,
            monitor=replace(settings.monitor, progress=False, verdict=False, rival=False),
            tune=tune_of("off"),
            logger="none",
            callbacks={},
            resume=None,
            output=folder,
        )
        predictor: Any = start(run).predictor
        if settings.data.problem is Problem.tags:
            words = predictor.tags(pa.array(judged_rows["text"], pa.list_(pa.large_string())))
            # Names are O, B-person, I-person, B-place, …: one class for every two tags. Plain tags
            # are a class each.
            types = types_of_tags(predictor.names)
            classes = types if are_plain(predictor.names) else [outside, *types]
            return dict(zip(classes, words.types.T, strict=True))
        outputs = predictor.outputs(pa.array(judged_rows["text"], pa.string()))
        shares = predictor.shares(outputs).numpy()
        return dict(zip(predictor.labels.classes, shares.T, strict=True))


def _columns(rows: Rows) -> dict[str, list[Any]]:
    """Rows as columns of a table; a text of a pair is parted into its two."""
    if not isinstance(rows["text"][0], str):
        return {name: column.tolist() for name, column in rows.items()}
    sides = [text.partition(PAIR) for text in rows["text"]]
    texts = {"text": [first for first, *_ in sides], "other": [second for *_, second in sides]}
    return {**texts, "label": rows["label"].tolist()}

"""A linear model on words and n-grams that answers with a network trained from scratch.

After training it is fitted on the training rows: the rival of the run, with what Naive Bayes says
added to its weights. With many rows it is Naive Bayes alone, which learns in a fraction of the
time. The network and it are mixed by weights that the validation rows choose (`tasks/mixture.py`).
It stays where it lowers the network's loss there. The metrics of the run, its predictor and its
`model/` folder are then those of both. Nothing of training changes: the curves are the network's.
Open this file to change in which runs that happens.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.problem import Problem
from flatout.data.texts.data import TextData
from flatout.data.texts.opening import open_source
from flatout.errors import require
from flatout.models.contract import asks_for_ngrams
from flatout.models.words import Ngrams
from flatout.run.context import OurParts, Run
from flatout.run.kinds import kind_of
from flatout.run.linear import RunTexts, TooSlow
from flatout.run.run_folder import RunFolder
from flatout.tasks.calibration import as_two_classes
from flatout.tasks.class_weights import ClassWeights
from flatout.tasks.classification import Classifier, LinearBeside
from flatout.tasks.mixture import FittedMixture, fit_mixture, log_shares
from flatout.tasks.task_class import TaskClass

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel

# Training rows up to which a regression is fitted. It is worth minutes: 5,000 long articles are
# answered right 50 times of 100 by the network, and 84 times with it. A busy machine must not
# decide between these. With more rows Naive Bayes is about as good, and takes a tenth of a run's
# time. Of 22,000 headlines of 41 classes the network answers 39 of 100 right, and 50 with it; of
# 11,000 long articles 53, and 86 with it.
_FEW_ROWS = 10_000
_LEAST_S_OF_FEW = 600.0
# Seconds that Naive Bayes may take in any run. In a longer one both kinds may take `_SHARE` of its
# time.
_LEAST_S = 60.0
_SHARE = 0.5
# Training rows below which nothing is learned, and above which reading them takes minutes.
_LEAST_ROWS = 100
_MOST_ROWS = 100_000
_WHY_FEW = "few rows teach a network little of which words matter"
_WHY_COUNTS = "counts of words tell what the network has not learned from these rows"


def require_mixable(config: RunConfig, data: object) -> None:
    """Refuse `model.ngrams=on` where no linear model can answer with the network."""
    if asks_for_ngrams(config.model) == Ngrams.on:
        reason = _why_impossible(config, data)
        require(not reason, "model.ngrams", f"on, but {reason}", hint="Leave it out.")


def add_linear_model(run: Run, ours: OurParts, seconds: float) -> None:
    """Fit the linear model, and let it answer with the network where that helps.

    `seconds`: of the run so far. Every rank does the same, as each has all texts.
    """
    config = run.settings.asked
    folder = run.folder
    ngrams = asks_for_ngrams(config.model)
    if _why_not(ngrams, config, ours):
        return
    assert isinstance(ours.data, TextData)
    assert isinstance(ours.task, Classifier)
    is_asked = ngrams == Ngrams.on
    limits = _Limits(
        # What was asked for takes its time.
        counting_s=math.inf if is_asked else max(_LEAST_S, _SHARE * seconds),
        fitting_s=math.inf if is_asked else max(_LEAST_S_OF_FEW, _SHARE * seconds),
        rows=math.inf if is_asked else _FEW_ROWS,
    )
    try:
        beside, fitted = _fit(ours.task, ours.data, ours.feeds, limits)
    except TooSlow as slow:
        folder.say(f"n-grams: left out: a linear model on them would take {slow.args[0]:.0f} s")
        return
    except Exception as error:
        # scikit-learn, torch and sources share no class; a trained run is worth more
        folder.say(f"n-grams: left out: {error}")
        return
    is_used = fitted.helps or is_asked
    if is_used:
        ours.task.answer_beside(beside)
    reason = ""
    if is_asked:
        reason = "model.ngrams=on"
    elif fitted.helps:
        reason = _WHY_COUNTS if beside.plain is None else _WHY_FEW
    _report(fitted, beside, folder, reason)


def _why_not(ngrams: str, config: RunConfig, ours: OurParts) -> str:
    """Why no linear model answers with the network; empty if it may."""
    if ngrams == Ngrams.off:
        return "model.ngrams=off"
    data = ours.data
    reason = _why_impossible(config, data)
    if reason or ngrams == Ngrams.on:
        return reason
    assert isinstance(data, TextData)
    if data.config.is_sample:
        return "the built-in sample has words without letters in common"
    if ours.feeds.train.plan.world > 1:
        return "each of several devices might decide for itself"
    rows = data.store.splits["train"].num_rows
    is_within = _LEAST_ROWS <= rows <= _MOST_ROWS
    return "" if is_within else f"not for {rows:,} rows"


def _why_impossible(config: RunConfig, data: object) -> str:
    """Why the answers of both cannot be mixed; empty if they can."""
    if isinstance(config.task, TaskClass) or not kind_of(config.data).mixes_ngrams:
        return "that is for flatout's own classifier of texts"
    assert isinstance(data, TextData)
    if data.info.problem not in (Problem.single, Problem.multi):
        return "that is for classes and labels"
    is_weighted = config.task.class_weights is not ClassWeights.none or bool(config.task.weights)
    return "classes have weights, which the linear model does not know" if is_weighted else ""


@dataclass(frozen=True, slots=True)
class _Limits:
    """The most seconds of each kind of linear model, and the most rows of a regression."""

    counting_s: float
    fitting_s: float
    rows: float


def _learn(rows: RunTexts, limits: _Limits) -> tuple[QuickModel | None, QuickModel]:
    """The plain regression and the model with counts; None and counts alone, where that is long."""
    if len(rows.texts["train"]) <= limits.rows:
        with suppress(TooSlow):
            return rows.fit_with_counts(limits.fitting_s)
    return None, rows.fit_counts(limits.counting_s)


def _fit(
    task: Classifier, data: TextData, feeds: Feeds, limits: _Limits
) -> tuple[LinearBeside, FittedMixture]:
    """The linear model and the weights of both, with its answers to validation and test rows."""
    labels = data.info.labels
    rows = RunTexts.read(open_source(data.config), data, data.store.splits)
    plain, linear = _learn(rows, limits)
    # As its file will have it, so that a predictor of the folder gives the same answers.
    linear = type(linear).of_arrays(labels.problem, labels.num_outputs, linear.arrays())
    answers: dict[str, Tensor] = {}
    rival: dict[str, Tensor] = {}
    judged = [split for split in rows.texts if split != "train"]
    for split in judged:
        # reading takes longer than answering, and both read alike
        columns = linear.features.read(rows.texts[split])
        answers[split] = log_shares(linear.head.predict(columns), labels.problem)
        if plain is not None:
            rival[split] = log_shares(plain.head.predict(columns), labels.problem)
    task.to(feeds.validation.device)  # Lightning has taken it back to the host
    outputs, targets, row_numbers = task.answers(feeds.validation)
    linear_outputs = answers["validation"][row_numbers]
    if labels.problem is Problem.multi:
        linear_outputs, _, _ = as_two_classes(linear_outputs, targets, row_numbers)
        outputs, targets, _ = as_two_classes(outputs, targets, row_numbers)
    if plain is None:
        # The network has had many rows, so that it must be seen that counts of words help.
        mixture = fit_mixture(outputs, linear_outputs, targets, few_rows=0)
    else:
        mixture = fit_mixture(outputs, linear_outputs, targets)
    return LinearBeside(linear, mixture.mixture, answers, plain, rival), mixture


def _report(fitted: FittedMixture, beside: LinearBeside, folder: RunFolder, reason: str) -> None:
    """Report what was chosen, with the held-out losses that decided.

    `reason`: why the linear model is used; empty where it is not.
    """
    name = "Naive Bayes" if beside.plain is None else "linear model"
    losses = {
        "network": fitted.loss_of_network,
        "linear model": fitted.loss_of_linear,
        "both": fitted.loss,
    }
    shown = [f"network {losses['network']:.3f}", f"{name} {losses['linear model']:.3f}"]
    shown.append(f"both {losses['both']:.3f}")
    held = len(beside.answers["validation"])
    model = "a linear model" if name == "linear model" else name
    value = f"{model} on them answers with the network" if reason else "left out"
    why = reason or "the network alone loses as little"
    evidence = f"losses on {held:,} validation rows: {', '.join(shown)}"
    folder.decision("n-grams", value, why, evidence)
    folder.summary.set(
        "mixture",
        {
            "used": bool(reason),
            "model": name,
            "network": fitted.mixture.network,
            "linear": fitted.mixture.linear,
            "losses": losses,
        },
    )

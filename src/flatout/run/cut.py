"""`tune=cut`: choose how many first layers of an encoder to freeze, by validation scores.

Some thousand rows go through the layers once, and what each cut reads stays in memory. From each
cut the layers above and the head train on these rows for one epoch, with the run's own learning
rate and batches; then validation rows judge. Of the cuts within one standard error of the best
accuracy the deepest is taken, as frozen layers cost no time in later epochs:

    cut  accuracy  standard error
      4      0.79            0.02   <- within 0.02 of the best and deeper than 2: taken
      2      0.80            0.02
      5      0.70            0.02
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, cast

import torch

from flatout.config import RunConfig
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.cache import recipe_key
from flatout.data.store.store import StoreSplit
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks
from flatout.engine.precision import Precision, arithmetic, choose_precision, fast_fp32_products
from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import require
from flatout.models.encoder.transformer import Transformer
from flatout.perf.measure.steps import Steps, TrainingWay
from flatout.perf.notes import machine_name
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, TuneAnswer
from flatout.perf.tune.probe import Parts
from flatout.report.summary import plain
from flatout.run.kinds import gives_one_class
from flatout.run.parts import build_parts
from flatout.tasks.layer_scores import LayerScore, Read, read_layers

CUT = "model.freeze_layers"  # the setting that is answered
_MOST_TRAINING_ROWS = 4_000
_MOST_VALIDATION_ROWS = 2_000
_WAIT_S = 600.0  # how long a run waits for another process that scores the same cuts


@dataclass(frozen=True, slots=True)
class _RowsBelowCuts:
    """The batches of the trial trainings, with what the layers below each cut put out for them."""

    training: Read
    validation: Read
    feed: Feed  # of the training rows, as a measured way of training names its feed
    precision: Precision


def measure_cut(
    config: RunConfig,
    data: StoreData[Any, Any],
    device: torch.device,
    say: Callable[[str], None],
) -> Answers:
    """The cut for these settings, from the cache or measured now; prints the score of each cut."""
    cuts = _list_cuts(config)
    depends_on = {
        name: plain(getattr(config, name))
        for name in ("model", "task", "optim", "precision", "seed")
    }
    depends_on |= {
        "texts": data.info.key,
        "rows": config.data.batches(1),
        "versions": metadata.version("flatout"),
        "cuts": cuts,
        "machine": machine_name(),
    }
    key = recipe_key(depends_on)
    store = AnswerStore(config.data.cache)
    with store.measuring(key, _WAIT_S, say):
        answers = None if config.tune.fresh else store.read(key)
        if answers is None:
            answers = _choose_cut(score_cuts(config, data.store.splits, cuts, device))
            store.write(key, answers)
    say("tune: layers frozen  accuracy  ± 95 %  seconds of an epoch")
    for row in answers.tried:
        mark = "  <- taken" if row.value == str(answers.values[CUT]) else ""
        say(f"tune: {row.value:>13}  {row.verdict}{mark}")
    return answers


def _list_cuts(config: RunConfig) -> list[int]:
    """A third of the layers, two thirds, and all but the last: of 12 layers 4, 8 and 11."""
    model = config.model
    hint = f"Set tune=off, or {CUT}=N."
    is_encoder = hasattr(model, "freeze_layers")
    require(
        is_encoder and gives_one_class(config.data),
        "tune",
        "cut scores encoders that give a row one class",
        hint=hint,
    )
    is_open = not (model.freeze_layers or model.lora.rank)
    require(
        is_open,
        "tune",
        f"cut, but {CUT} or model.lora.rank is asked for",
        hint="Leave one of them out.",
    )
    layers = int(model.read_description().num_hidden_layers)
    require(layers > 1, "tune", "cut, but the encoder has one layer", hint=hint)
    return sorted({layers // 3, 2 * layers // 3, layers - 1} - {0})


def score_cuts(
    config: RunConfig,
    splits: Mapping[str, StoreSplit],
    cuts: Sequence[int],
    device: torch.device,
) -> list[LayerScore]:
    """A score for each cut, in their order.

    The random state is the same before and after, so the run trains as if nothing was measured.
    """
    state_before = random_state(device)
    precision = choose_precision(config.precision, device).value
    try:
        with fast_fp32_products(precision, device):
            rows = _read_below_cuts(config, splits, cuts, device, precision)
            scores = []
            for number, cut in enumerate(cuts):
                parts = _build_cut(config, cut, device)
                scores.append(_score_cut(parts, rows, number, cut))
            return scores
    finally:
        restore_random_state(state_before, device)


def _read_below_cuts(
    config: RunConfig,
    splits: Mapping[str, StoreSplit],
    cuts: Sequence[int],
    device: torch.device,
    precision: Precision,
) -> _RowsBelowCuts:
    parts = _build_cut(config, cuts[0], device)
    network = cast(Transformer, parts.task.model)
    feed = Feed(parts.split, parts.plan, device=device)
    validation_plan = PlanSettings(rows_per_batch=config.data.eval_batch_size, seed=config.seed)
    validation_feed = Feed(splits["validation"], validation_plan, device=device)
    return _RowsBelowCuts(
        training=read_layers(network, feed, _MOST_TRAINING_ROWS, layers=cuts, precision=precision),
        validation=read_layers(
            network, validation_feed, _MOST_VALIDATION_ROWS, layers=cuts, precision=precision
        ),
        feed=feed,
        precision=precision,
    )


def _build_cut(config: RunConfig, cut: int, device: torch.device) -> Parts:
    """The parts of the run with its first `cut` layers frozen, on the device."""
    model = replace(config.model, freeze_layers=cut)
    parts = build_parts(replace(config, model=model), Ranks(), device)
    network = parts.task.model
    is_flat_classifier = (
        isinstance(network, Transformer)
        and network.is_flat
        and not network.predicts_words
        and not network.window
    )
    require(
        is_flat_classifier,
        "tune",
        "cut reads flat layers of an encoder that classifies",
        hint=f"Set {CUT}=N.",
    )
    parts.task.to(device)
    return parts


def _score_cut(parts: Parts, rows: _RowsBelowCuts, number: int, cut: int) -> LayerScore:
    """Train what lies above a cut, the `number`-th of all, for one epoch, and judge it."""
    task = parts.task.train()
    network = cast(Transformer, task.model)
    network.keep_layers_still(cut)
    optimizer = task.optim.build(network)
    way = TrainingWay(feed=rows.feed, precision=rows.precision, model=network)
    batches = _with_states(rows.training, number, parts.device)
    num_steps = sum(bool(batch.ends_step) for batch, _ in rows.training)
    began = time.perf_counter()
    with closing(Steps(task, way, batches, optimizer, clip=parts.clip)) as steps:
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"] = task.optim.lr_at(step, num_steps) * group["lr_share"]
            steps.take(1)
    seconds = time.perf_counter() - began
    task.eval()
    are_right = []
    with torch.no_grad(), arithmetic(rows.precision, parts.device):
        for batch in _with_states(rows.validation, number, parts.device):
            are_right.append(network(batch).argmax(1) == batch.targets)
    return LayerScore.of(cut, torch.cat(are_right), seconds)


def _with_states(rows: Read, number: int, device: torch.device) -> Iterator[FlatBatch]:
    """Batches that carry the outputs below the `number`-th cut, so the network begins above it."""
    for batch, states in rows:
        batch.states = states[number].to(device)
        yield batch


def _choose_cut(scores: Sequence[LayerScore]) -> Answers:
    """The deepest cut within one standard error of the best, as an answer with its evidence."""
    best = max(scores, key=lambda score: score.accuracy)
    near_best = [score for score in scores if score.accuracy >= best.accuracy - best.error]
    taken = max(near_best, key=lambda score: score.layers)
    evidence = (
        f"validation accuracy {taken.accuracy:.3f}, best {best.accuracy:.3f}, after an epoch of"
        " some rows"
    )
    choice = TuneAnswer(
        name=CUT,
        value=f"{taken.layers}",
        why=(
            "the deepest cut within one standard error of the best; freezing changes what is"
            " learned"
        ),
        evidence=evidence,
    )
    seconds = sum(score.seconds for score in scores)
    answers = Answers(values={CUT: taken.layers}, seconds=seconds)
    answers.choices.append(choice)
    for score in scores:
        verdict = f"{score.accuracy:>8.3f}  {1.96 * score.error:>6.3f}  {score.seconds:>7.1f}"
        answers.tried.append(Attempt(what="cut", value=f"{score.layers}", verdict=verdict))
    return answers

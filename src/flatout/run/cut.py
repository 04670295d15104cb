"""Cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, cast

import torch

from flatout.config import RunConfig
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.problem import Problem
from flatout.data.store.cache import recipe_key
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
from flatout.run.parts import build_parts
from flatout.tasks.encoder_layers import LayerScore, Read, read_layers

CUT = "model.freeze_layers"
_MOST_ROWS = (4_000, 2_000)  # rows that `tune=cut` trains on, and rows that judge
_WAIT_S = 600.0  # how long a run waits for another one that scores the same cuts


def measure_cut(
    config: RunConfig, data: Any, device: torch.device, say: Callable[[str], None]
) -> Answers:
    """The cut for these settings: measured before, or now."""
    cuts = _cuts(config)
    about = {
        name: plain(getattr(config, name))
        for name in ("model", "task", "optim", "precision", "seed")
    }
    about |= {
        "texts": data.info.key,
        "rows": config.data.batches(1),
        "versions": metadata.version("flatout"),
    }
    key = recipe_key(about | {"cuts": cuts, "machine": machine_name()})
    store = AnswerStore(config.data.cache)
    with store.measuring(key, _WAIT_S, say):
        answers = None if config.tune.fresh else store.read(key)
        if answers is None:
            answers = _choose(score_cuts(config, data.store.splits, cuts, device))
            store.write(key, answers)
    say("tune: layers frozen  accuracy  ± 95 %  seconds of an epoch")
    for row in answers.tried:
        mark = "  <- taken" if row.value == str(answers.values[CUT]) else ""
        say(f"tune: {row.value:>13}  {row.verdict}{mark}")
    return answers


def _cuts(config: RunConfig) -> list[int]:
    """A third of the layers, two thirds, and all but the last."""
    model = config.model
    hint = f"Set tune=off, or {CUT}=N."
    is_encoder = (
        hasattr(model, "freeze_layers") and getattr(config.data, "problem", None) is Problem.single
    )
    require(is_encoder, "tune", "cut scores encoders that give a row one class", hint=hint)
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
    config: RunConfig, splits: Any, cuts: Sequence[int], device: torch.device
) -> list[LayerScore]:
    """A score for each cut; random numbers stay as they are."""
    before = random_state(device)
    precision = choose_precision(config.precision, device).value
    try:
        with fast_fp32_products(precision, device):
            first = _build(config, cuts[0], device)
            feed = Feed(first.split, first.plan, device=device)
            plan = PlanSettings(rows_per_batch=config.data.eval_batch_size, seed=config.seed)
            read = partial(
                read_layers, cast(Transformer, first.task.model), layers=cuts, precision=precision
            )
            kept = read(feed, _MOST_ROWS[0])
            judged = read(Feed(splits["validation"], plan, device=device), _MOST_ROWS[1])
            built = ((nth, cut, _build(config, cut, device)) for nth, cut in enumerate(cuts))
            return [
                _score(parts, feed, kept, judged, nth, cut, precision) for nth, cut, parts in built
            ]
    finally:
        restore_random_state(before, device)


def _build(config: RunConfig, cut: int, device: torch.device) -> Parts:
    parts = build_parts(
        replace(config, model=replace(config.model, freeze_layers=cut)), Ranks(), device
    )
    network = parts.task.model
    is_flat = (
        isinstance(network, Transformer)
        and network.is_flat
        and not network.predicts_words
        and not network.window
    )
    require(
        is_flat, "tune", "cut reads flat layers of an encoder that classifies", hint=f"Set {CUT}=N."
    )
    parts.task.to(device)
    return parts


def _score(
    parts: Parts, feed: Feed, kept: Read, judged: Read, nth: int, cut: int, precision: Precision
) -> LayerScore:
    """Train what lies above a cut for one epoch, and judge it."""
    task = parts.task.train()
    total = sum(bool(batch.ends_step) for batch, _ in kept)
    cast(Transformer, task.model).keep_layers_still(cut)
    optimizer = task.optim.build(task.model)
    began = time.perf_counter()
    way = TrainingWay(feed=feed, precision=precision, model=task.model)
    with closing(
        Steps(task, way, _with_states(kept, nth, parts.device), optimizer, clip=parts.clip)
    ) as steps:
        for step in range(total):
            for group in optimizer.param_groups:
                group["lr"] = task.optim.lr_at(step, total) * group["lr_share"]
            steps.take(1)
    seconds = time.perf_counter() - began
    task.eval()
    with torch.no_grad(), arithmetic(precision, parts.device):
        right = [
            task.model(batch).argmax(1) == batch.targets
            for batch in _with_states(judged, nth, parts.device)
        ]
    return LayerScore.of(cut, torch.cat(right), seconds)


def _with_states(read: Read, place: int, device: torch.device) -> Iterator[FlatBatch]:
    for batch, states in read:
        batch.states = states[place].to(device)
        yield batch


def _choose(scores: Sequence[LayerScore]) -> Answers:
    best = max(scores, key=lambda each: each.accuracy)
    taken = max(
        (each for each in scores if each.accuracy >= best.accuracy - best.error),
        key=lambda each: each.layers,
    )
    why = "the deepest cut within one standard error of the best; freezing changes what is learned"
    evidence = (
        f"validation accuracy {taken.accuracy:.3f}, best {best.accuracy:.3f}, after an epoch of"
        " some rows"
    )
    found = Answers(values={CUT: taken.layers}, seconds=sum(each.seconds for each in scores))
    found.choices.append(TuneAnswer(name=CUT, value=f"{taken.layers}", why=why, evidence=evidence))
    for each in scores:
        verdict = f"{each.accuracy:>8.3f}  {1.96 * each.error:>6.3f}  {each.seconds:>7.1f}"
        found.tried.append(Attempt(what="cut", value=f"{each.layers}", verdict=verdict))
    return found

"""`tune=cut`: how many first layers of an encoder to freeze, by the validation scores of two or three cuts.

Some thousand rows go through the layers once, and what each cut reads stays in memory. From each cut the layers above
and the head then train on these rows for one epoch, at the run's own rate and batches, and validation rows judge. The
deepest cut within one standard error of the best is taken: what is frozen costs no time in later epochs. One epoch on
a part of the rows is not the run: a longer one can rank the cuts otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import torch

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.problem import Problem
from flatout.data.store.cache import recipe_key
from flatout.distributed.ranks import Ranks
from flatout.engine.precision import Precision, arithmetic, choose_precision, fast_fp32_products
from flatout.engine.random_state import RandomState
from flatout.errors import require
from flatout.models.encoder.transformer import Transformer, TransformerConfig
from flatout.perf.measure.steps import Steps, Way
from flatout.perf.notes import machine_name
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, Choice
from flatout.perf.tune.probe import Parts
from flatout.report.summary import plain
from flatout.tasks.layer_scores import LayerScore, Read, read_layers

if TYPE_CHECKING:
    from flatout.config import RunConfig

Build = Callable[["RunConfig", Ranks, torch.device], Parts]
"""Builds what a run would train: `parts.build_parts`."""
CUT = "model.freeze_layers"
_MOST_ROWS = (4_000, 2_000)
"""Rows that are trained on, and rows that judge."""
_WAIT_S = 600.0
"""How long a run waits for another one that measures the same."""


def measure_cut(
    config: RunConfig, data: Any, build: Build, device: torch.device, say: Callable[[str], None]
) -> Answers:
    """The cut for these settings: measured before, or now."""
    cuts = _cuts(config)
    about = {name: plain(getattr(config, name)) for name in ("model", "task", "optim", "precision", "seed")}
    about |= {"texts": data.info.key, "rows": config.data.batches(1), "versions": metadata.version("flatout")}
    key, store = recipe_key(about | {"cuts": cuts, "machine": machine_name()}), AnswerStore(config.data.cache)
    with store.measuring(key, _WAIT_S, say):
        answers = None if config.tune.fresh else store.read(key)
        if answers is None:
            answers = _choose(score_cuts(config, data.store.splits, build, cuts, device))
            store.write(key, answers)
    say("tune: layers frozen  accuracy  ± 95 %  seconds of an epoch")
    for row in answers.tried:
        mark = "  <- taken" if row.value == str(answers.values[CUT]) else ""
        say(f"tune: {row.value:>13}  {row.verdict}{mark}")
    return answers


def _cuts(config: RunConfig) -> list[int]:
    """A third of the layers, two thirds, and all but the last."""
    model, hint = config.model, f"Set tune=off, or {CUT}=N."
    is_encoder = isinstance(model, TransformerConfig) and getattr(config.data, "problem", None) is Problem.single
    require(is_encoder, "tune", "cut scores encoders that give a row one class", hint=hint)
    is_open = not (model.freeze_layers or model.lora.rank)
    require(is_open, "tune", f"cut, but {CUT} or model.lora.rank is asked for", hint="Leave one of them out.")
    layers = int(model.read_description().num_hidden_layers)
    require(layers > 1, "tune", "cut, but the encoder has one layer", hint=hint)
    return sorted({layers // 3, 2 * layers // 3, layers - 1} - {0})


def score_cuts(
    config: RunConfig, splits: Any, build: Build, cuts: Sequence[int], device: torch.device
) -> list[LayerScore]:
    """A score for each cut; random numbers stay as they are."""
    before, precision = RandomState(device), choose_precision(config.precision, device).precision
    try:
        with fast_fp32_products(precision, device):
            first = _build(config, build, cuts[0], device)
            feed = Feed(first.split, first.plan, device=device)
            plan = PlanSettings(rows_per_batch=config.data.eval_batch_size, seed=config.seed)
            network = cast(Transformer, first.task.model)
            read = partial(read_layers, network, layers=cuts, precision=precision)
            kept, judged = (
                read(feed, _MOST_ROWS[0]),
                read(Feed(splits["validation"], plan, device=device), _MOST_ROWS[1]),
            )
            return [
                _score(_build(config, build, cut, device), feed, kept, judged, place, cut, precision)
                for place, cut in enumerate(cuts)
            ]
    finally:
        before.restore(device)


def _build(config: RunConfig, build: Build, cut: int, device: torch.device) -> Parts:
    """What a run with this cut would train."""
    parts = build(replace(config, model=replace(config.model, freeze_layers=cut)), Ranks(), device)
    network = parts.task.model
    is_flat = isinstance(network, Transformer) and network.is_flat and not network.predicts_words and not network.window
    require(is_flat, "tune", "cut reads flat layers of an encoder that classifies", hint=f"Set {CUT}=N.")
    parts.task.to(device)
    return parts


def _score(
    parts: Parts, feed: Feed, kept: Read, judged: Read, place: int, cut: int, precision: Precision
) -> LayerScore:
    """Train what lies above a cut for one epoch, and judge it."""
    task, total = parts.task.train(), sum(bool(batch.ends_step) for batch, _ in kept)
    cast(Transformer, task.model).keep_layers_still(cut)
    optimizer, began = task.optim.build(task.model), time.perf_counter()
    way = Way(feed=feed, precision=precision, threads=torch.get_num_threads(), model=task.model)
    steps = Steps(task, way, _with_states(kept, place, parts.device), optimizer, clip=parts.clip)
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = task.optim.lr_at(step, total) * group["lr_share"]
        steps.take(1)
    steps.close()
    seconds = time.perf_counter() - began
    task.eval()
    with torch.no_grad(), arithmetic(precision, parts.device):
        right = [task.model(batch).argmax(1) == batch.targets for batch in _with_states(judged, place, parts.device)]
    return LayerScore.of(cut, torch.cat(right), seconds)


def _with_states(read: Read, place: int, device: torch.device) -> Iterator[FlatBatch]:
    for batch, states in read:
        batch.states = states[place].to(device)
        yield batch


def _choose(scores: Sequence[LayerScore]) -> Answers:
    """The deepest cut within one standard error of the best."""
    best = max(scores, key=lambda each: each.accuracy)
    taken = max((each for each in scores if each.accuracy >= best.accuracy - best.error), key=lambda each: each.layers)
    why = "the deepest cut within one standard error of the best; freezing changes what is learned"
    evidence = f"validation accuracy {taken.accuracy:.3f}, best {best.accuracy:.3f}, after an epoch of some rows"
    columns = [f"{each.accuracy:>8.3f}  {1.96 * each.error:>6.3f}  {each.seconds:>7.1f}" for each in scores]
    return Answers(
        values={CUT: taken.layers},
        choices=[Choice(name=CUT, value=f"{taken.layers}", why=why, evidence=evidence)],
        tried=[
            Attempt(what="cut", value=f"{each.layers}", verdict=text)
            for each, text in zip(scores, columns, strict=True)
        ],
        seconds=sum(each.seconds for each in scores),
    )

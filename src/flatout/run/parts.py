"""The parts of a run: its data, opened; its module, whose network is built; and a feed a split for
this rank.

And the settings that are measured on these parts before a run begins: by `tune`, in a process
apart, or by `doctor --confirm` for an earlier run. A resumed run keeps the answers of its
beginning.

`tune=cut` decides how many first layers of an encoder to freeze, by the validation scores of two or
three cuts. Some thousand rows go through the layers once, and what each cut reads stays in memory.
From each cut the layers above and the head then train on these rows for one epoch, at the run's own
rate and batches, and validation rows judge. The deepest cut within one standard error of the best
is taken: what is frozen costs no time in later epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import yaml

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.checkpoints.same_run import have_same_settings
from flatout.config import RunConfig
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.problem import Problem
from flatout.data.store.cache import recipe_key
from flatout.data.store_data import Placement
from flatout.distributed.ranks import Ranks
from flatout.engine.optimizer import ScaleRate
from flatout.engine.precision import Precision, arithmetic, choose_precision, fast_fp32_products
from flatout.engine.random_state import random_state, restore_random_state
from flatout.engine.run_length import planned_steps, whole_steps
from flatout.errors import UserError, require
from flatout.models.encoder.transformer import Transformer
from flatout.perf.measure.steps import Steps, TrainingWay
from flatout.perf.notes import machine_name
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, TuneAnswer
from flatout.perf.tune.probe import Child, Parts
from flatout.perf.tune.settings import TuneConfig, is_typed
from flatout.perf.verdict.confirmation import FILE, Confirmed, read_confirmations
from flatout.report.summary import hardware, plain, read_summary, versions
from flatout.run.kinds import kind_of
from flatout.run.memory import require_memory
from flatout.run.resolve import clip_of, resolve_rate
from flatout.run.run_folder import SETTINGS, RunFolder, newest_runs, unwritten_run
from flatout.run.tuning import FoundAnswers, Question, of_all_devices, override_line
from flatout.run_log import RunLog
from flatout.tasks.layer_scores import LayerScore, Read, read_layers
from flatout.tasks.networks import report_network
from flatout.tasks.task import Task

# settings that a run names its choice of
_NAMED = ("data.feed", "data.batch_size", "precision", "compile")
# settings that `tune` may set by a confirmation
_TUNED = (*_NAMED, "data.workers", "data.accumulate")
_OF_DATA = ("feed", "workers", "batch_size", "accumulate", "effective_batch", "tokens_per_batch")
CUT = "model.freeze_layers"
_ANSWERED = (*_TUNED, "optim.lr", CUT)  # settings that `tune` may set by what it measured
_MOST_ROWS = (4_000, 2_000)  # rows that `tune=cut` trains on, and rows that judge
_WAIT_S = 600.0  # how long a run waits for another one that scores the same cuts


def open_data(config: RunConfig, ranks: Ranks, folder: RunFolder) -> Any:
    """The DataModule, its store opened, which the first rank builds where it is missing; the user's
    own as it is.
    """
    if config.has_own_parts:
        is_own = isinstance(config.data, L.LightningDataModule)
        # The Trainer is given `data.accumulate`: in its DataModule it would be asked for twice.
        ours = None if is_own else replace(config.data, accumulate=1)
        data = config.data if is_own else kind_of(config.data).data.of(ours, seed=config.seed)
        folder.summary.set("data", {"source": type(data).__name__})
        return data
    data = kind_of(config.data).data.of(config.data, seed=config.seed, log=folder)

    def prepare() -> str:
        data.prepare_data()
        return str(data.info.key)

    key = ranks.agreed("store", prepare)
    data.setup()
    require(
        data.info.key == key,
        "data",
        f"rank {ranks.rank} sees other data than the first rank",
        hint="Every machine needs the same files, or one folder that all can read.",
    )
    facts = data.info.summary()
    rows = {
        "val" if split == "validation" else split: count
        for split, count in facts.pop("rows").items()
    }
    report = data.info.report
    cache = {"key": report.key, "hit": report.hit, "seconds": round(report.seconds, 4)}
    folder.summary.set("data", {"source": data.info.source, "rows": rows, **facts, "cache": cache})
    return data


def require_memory_for_model(
    config: RunConfig, data: Any, ranks: Ranks, device: torch.device
) -> None:
    """Refuse a model that this device cannot train, before it is built."""
    if config.has_own_parts:
        return
    copies = ranks.local_world if device.type == "cpu" else 1
    shares = ranks.world if config.is_sharded else 1
    task = kind_of(config.data).task
    require_memory(
        config.model,
        lambda model: task(model, config.task).build(data.info),
        device,
        copies / shares,
    )


def build_module(config: RunConfig, data: Any, log: RunLog) -> Any:
    """The task of the data, with the network of the settings or the user's own; or the user's own
    module.
    """
    if config.has_own_parts:
        return config.task
    task = kind_of(config.data).task(config.model, config.task, config.optim)
    report_network(task.build(data.info), config.model, data.info, log)
    return task


def place_feeds(
    config: RunConfig, data: Any, task: Task, device: torch.device, ranks: Ranks
) -> Feeds:
    """One feed a split, for this rank and for the layout that the network reads."""
    repeats = bool(config.trainer.get("overfit_batches"))
    data.place(
        Placement(ranks.rank, ranks.world, device, BatchLayout.of(task.model), repeats), config.data
    )
    return data.feeds


def build_parts(config: RunConfig, ranks: Ranks, device: torch.device) -> Parts:
    """Task and feed as a run has them, to measure how fast they are; in another process, by its
    name.
    """
    with unwritten_run() as folder:
        L.seed_everything(config.seed, verbose=False)
        data = open_data(config, Ranks(), folder)
        task = build_module(config, data, folder)
        feeds = place_feeds(config, data, task, device, ranks)
        task.total_steps = planned_steps(
            whole_steps(config.trainer, feeds.train, folder), feeds.train
        )
        task.optim = resolve_rate(config, task.model_config, feeds.train.plan, folder)
        task.prepare_probe(feeds, config.seed)
        return Parts(
            task, feeds.train.split, feeds.train.plan, device, config.data.workers, clip_of(config)
        )


def tune(
    config: RunConfig,
    data: Any,
    ranks: Ranks,
    device: torch.device,
    overrides: Sequence[str],
    folder: RunFolder,
) -> RunConfig:
    """The settings with everything decided that they leave open: from the run's beginning, or
    measured now.
    """
    if known := ranks.agreed("earlier answers", lambda: answers_in(config.resume, folder.path)):
        folder.summary.set("tune", known)
        kept = {
            name: value for name, value in known["values"].items() if not is_typed(name, overrides)
        }
        folder.say(
            f"tune: as at the beginning of this run ({override_line(kept) or 'nothing is changed'})"
        )
        return with_answers(config, kept)
    if not config.tune.enabled:
        return config
    if config.resume is not None and any((folder.path / CHECKPOINTS).glob("step-*")):
        folder.say("tune: this run began without it and continues without it")
        return config
    if config.tune.cut:
        answers = ranks.agreed("cut", lambda: asdict(measure_cut(config, data, device, folder.say)))
        found = FoundAnswers(Answers.of(answers))
    else:
        found = of_all_devices(question(config, data, ranks, device, overrides), folder.say)
    for line in found.lines:
        folder.say(line)
    for choice in found.answers.choices:
        folder.decision(choice.name, choice.value, choice.why, choice.evidence)
    folder.summary.set(
        "tune", {"key": found.key, "cached": found.is_known, **asdict(found.answers)}
    )
    folder.summary.write()
    return with_answers(config, found.answers.values)


def answers_in(resumed: str | None, folder: Path) -> dict[str, Any] | None:
    """The answers of the run that is resumed; None where there are none."""
    if resumed is None:
        return None
    try:
        known = read_summary(folder).get("tune")
    except UserError:
        return None
    return known if isinstance(known, dict) and isinstance(known.get("values"), dict) else None


def question(
    config: RunConfig,
    data: Any,
    ranks: Ranks,
    device: torch.device,
    overrides: Sequence[str],
    counts_time: bool = True,
) -> Question:
    confirmed = find_confirmed(Path(config.output, config.name), plain(config), device, overrides)
    config = with_answers(config, confirmed.values)
    measured = replace(config, callbacks={}, tune=TuneConfig(), compile=False)
    prober = Child(partial(build_parts, measured, ranks, device), torch.get_num_threads())
    return Question(config, data.store, ranks, device, overrides, prober, counts_time, confirmed)


def with_answers(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The settings with measured answers; a key that nothing measures is ignored: files of a cache
    may be changed.
    """
    values = {name: value for name, value in values.items() if name in _ANSWERED}
    of_data = {
        name.removeprefix("data."): value
        for name, value in values.items()
        if name.startswith("data.")
    }
    if config.data.effective_batch is not None:
        of_data.pop("accumulate", None)  # it follows
    changed: dict[str, Any] = {"data": replace(config.data, **of_data)} if of_data else {}
    if "optim.lr" in values:  # measured with the rows of a step: it is not scaled to them again
        changed["optim"] = replace(config.optim, lr=values["optim.lr"], scale_lr=ScaleRate.none)
    if CUT in values:
        changed["model"] = replace(config.model, freeze_layers=values[CUT])
    changed |= {name: values[name] for name in ("precision", "compile") if name in values}
    return replace(config, **changed) if changed else config


def find_confirmed(
    runs: Path, settings: dict[str, Any], device: torch.device, overrides: Sequence[str]
) -> Confirmed:
    """Open settings that were confirmed to be faster, and the overrides that slow a run."""
    same = [run for run in newest_runs(runs, FILE) if _is_same(run, settings)]
    here = (hardware(device, 1, "")["device"], versions()["flatout"])
    known = [
        (run, each)
        for run in same
        for each in read_confirmations(run)
        if (each.device, each.version) == here
    ]
    confirmed = Confirmed(slower=frozenset(each.override for _, each in known if each.slows))
    data = settings["data"]
    chosen = {"data.feed": data["feed"], "precision": settings["precision"]}
    for run, each in known:
        words = (word.partition("=") for word in each.override.split())
        values = {name: yaml.safe_load(value) for name, _, value in words}
        if not values or not values.keys() <= set(_TUNED):
            continue
        is_new = not values.keys() & confirmed.values.keys()
        is_open = all(
            chosen.get(name, "auto") == "auto" and not is_typed(name, overrides) for name in values
        )
        rows, accumulate = (
            values.get(f"data.{name}", data[name]) for name in ("batch_size", "accumulate")
        )
        # what is learned does not change
        keeps_step = rows * accumulate == data["batch_size"] * data["accumulate"]
        if each.helps and is_new and is_open and keeps_step:
            confirmed.values |= values
            why = f"confirmed by doctor: {each.measured} in {run.name}"
            confirmed.why |= {name: why for name in values if name in _NAMED}
    return confirmed


def _is_same(run: Path, settings: dict[str, Any]) -> bool:
    """Whether a run had these settings, those of its feed and its batches too."""
    try:
        theirs = yaml.safe_load((run / SETTINGS).read_text(encoding="utf-8"))
        same = all(theirs["data"].get(name) == settings["data"].get(name) for name in _OF_DATA)
        same = same and all(theirs[name] == settings[name] for name in ("precision", "compile"))
        return bool(same) and have_same_settings(theirs, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False


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

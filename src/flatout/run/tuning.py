"""`tune=auto`: measure which values of the open settings train fastest, before anything is built.

A setting is open unless it was typed or differs from `auto`. Open ones are measured in processes
that are thrown away (`perf/tune/`), or read from the cache, by a key of everything the answers
depend on. Of several ranks one measures for each kind of device, and all take what the smallest
device can do. `run/answers.py` puts the answers into the settings. Open this file to change when a
cached answer still counts, which settings are open, or how answers of unlike devices are combined.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from typing import Any

import numpy as np
import psutil
import torch

from flatout.config import RunConfig
from flatout.data.batches.feed import Feed, choose_feed
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.store.cache import recipe_key
from flatout.data.store.store import Store
from flatout.distributed.limits import free_bytes, limits, processor_name
from flatout.distributed.ranks import Ranks
from flatout.engine.compile import why_not
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.engine.precision import Precision, bf16_is_native_on_cpu, choose_precision
from flatout.engine.run_length import planned_steps
from flatout.perf.notes import known_rows, memory_key
from flatout.perf.tune.answers import Answers, AnswerStore, TuneAnswer
from flatout.perf.tune.probe import Child, Here, ProbedSetting
from flatout.perf.tune.search import Search
from flatout.perf.tune.settings import is_typed
from flatout.perf.tune.speeds import OpenSettings, allowed_seconds
from flatout.perf.verdict.confirmation import Confirmed
from flatout.report.summary import plain
from flatout.run.usual_rows import usual_rows

_WAIT_S = 30.0  # how much longer than its budget another process may take to measure the same
# A search that ran out of time begins again in a run that may spend this many times as long on it,
# and one that decided on compiling in a run of this many times as many steps.
_MORE_TIME = 1.5
_MORE_STEPS = 4.0
_BUSY_SPREAD = 1.5  # best over worst speed of the same settings; more is reported
# values from best to worst: a device that can do an earlier one can do the later ones
_BEST_FIRST: dict[str, list[Any]] = {
    "data.feed": ["resident", "threaded", "workers"],
    "precision": ["bf16", "fp16", "fp32"],
    "compile": [True, False],
}
_LENGTH_QUANTILES = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
# settings of the optimizer that matter only where `tune` searches for a learning rate
_RATE_SETTINGS = ("lr", "warmup", "schedule", "final_lr_share", "max_lr", "base_batch", "scale_lr")


@dataclass(slots=True)
class FoundAnswers:
    """Answers, and where they come from."""

    answers: Answers
    key: str = ""  # of the cache
    is_cached: bool = False  # whether they were measured before
    lines: list[str] = field(default_factory=list)  # to print


@dataclass(frozen=True, slots=True)
class Question:
    """What to decide: the open ones of these settings, for this store and device."""

    config: RunConfig
    store: Store
    ranks: Ranks
    device: torch.device
    overrides: Sequence[str]  # words that were typed; their settings stay
    prober: Child | Here  # measures training steps of the run's parts, in another process
    counts_time: bool = True  # whether the expected run bounds the time; false for a search alone
    confirmed: Confirmed = field(default_factory=Confirmed)  # already filled in


def measure_on_all_devices(question: Question, say: Callable[[str], None]) -> FoundAnswers:
    """Measure on the first rank of each kind of device; every rank gets the same answers."""
    ranks = question.ranks
    devices = ranks.gathered("device", lambda: device_key(question.device))

    def measure() -> dict[str, Any] | None:
        is_first_with_device = devices.index(devices[ranks.rank]) == ranks.rank
        return asdict(measure_answers(question, say)) if is_first_with_device else None

    measured = []
    # a rank may wait for another one to measure, and then measure itself
    takes = timedelta(seconds=2 * question.config.tune.budget_s + _WAIT_S)
    for facts in ranks.gathered("answers", measure, takes):
        if facts is not None:
            measured.append(FoundAnswers(**{**facts, "answers": Answers.of(facts["answers"])}))
    return replace(measured[0], answers=combine_answers([found.answers for found in measured]))


def measure_answers(question: Question, say: Callable[[str], None]) -> FoundAnswers:
    """The answers for one device: from the cache, or measured now and written there."""
    tune = question.config.tune
    open_settings = list_open_settings(question)
    key = recipe_key(list_dependencies(question, open_settings))
    store = AnswerStore(question.config.data.cache)
    # One process measures for all that ask the same: others wait, and then read its answers.
    with store.measuring(key, tune.budget_s + _WAIT_S, say):
        cached = None if tune.fresh else store.read(key)
        if cached is not None and not is_outdated(cached, open_settings, store):
            line = f"tune: cached ({store.path(key)}; tune.fresh=true measures again)"
            return FoundAnswers(cached, key, is_cached=True, lines=[line])
        say(f"tune: measuring in a process apart, for {tune.budget_s:g} s at most")
        answers = Search(open_settings, question.prober, store).decide()
        answers.values |= question.confirmed.values
        # Answers without a timed step rest on nothing: the next run measures again.
        if answers.step_s is not None:
            store.write(key, answers)
    count = sum(row.rows_per_s is not None for row in answers.tried)
    rest = "" if answers.is_complete else "; the time was not enough for all"
    lines = [f"tune: {count} probes in {answers.seconds:.1f} s{rest}"]
    # The answers may be wrong where other programs took turns with the probes.
    if answers.unrest > _BUSY_SPREAD:
        spread = (
            f"the same settings were {answers.unrest:.1f} times as fast at their best as at their"
            " worst"
        )
        lines.append(f"tune: this machine is busy: {spread}; tune.fresh=true measures again")
    return FoundAnswers(answers, key, is_cached=False, lines=lines)


def is_outdated(cached: Answers, open_settings: OpenSettings, store: AnswerStore) -> bool:
    """Whether cached answers should be measured again.

    They should if no step was timed, or if their batch has run out of memory since. They should
    also if the run's length decides otherwise about compiling, or if the search had stopped for
    want of time and may now take longer.
    """
    if cached.step_s is None:
        return True
    # a run has cut its batches since, and has written down what fitted
    fitting_rows = known_rows(store.cache, cached.row_key) if cached.row_key else None
    if fitting_rows is not None and cached.values.get("data.batch_size", 0) > fitting_rows:
        return True
    growth = open_settings.planned_steps / max(cached.planned_steps, 1)
    is_compile_open = "compile" not in open_settings.settled
    # what compiling takes must come back in the steps of the run
    is_too_short = cached.values.get("compile") and growth < 1 / 2
    if is_compile_open and (growth > _MORE_STEPS or is_too_short):
        return True
    if cached.is_complete:
        return False
    return allowed_seconds(open_settings, cached.step_s) > _MORE_TIME * cached.allowed_s


def combine_answers(answers_of_devices: Sequence[Answers]) -> Answers:
    """The one answer for several unlike devices: settings with which each of them can train.

    Rows are those of the device with the smallest batch, and feed, precision and compile the best
    that all have:

        64 rows, bf16, compiled  +  16 rows, fp16  →  16 rows, fp16, not compiled
    """
    smallest = min(answers_of_devices, key=lambda answers: answers.values.get("data.batch_size", 0))
    if len(answers_of_devices) == 1:
        return smallest
    # Where one device has no answer, all do as the settings say.
    shared = set.intersection(*(set(answers.values) for answers in answers_of_devices))
    values = {key: value for key, value in smallest.values.items() if key in shared}
    for key, best_first in _BEST_FIRST.items():
        if key in shared:
            wanted = [answers.values[key] for answers in answers_of_devices]
            values[key] = max(wanted, key=best_first.index)
    if "optim.lr" in shared:
        values["optim.lr"] = min(answers.values["optim.lr"] for answers in answers_of_devices)
    lines = [override_line(answers.values) or "nothing" for answers in answers_of_devices]
    choice = TuneAnswer(
        name="unlike devices",
        value=override_line(values),
        why="what the smallest can do",
        evidence="; ".join(lines),
    )
    return replace(smallest, values=values, choices=[*smallest.choices, choice])


def override_line(values: dict[str, Any], optim: OptimConfig | None = None) -> str:
    """Answers as words of a command line: `data.batch_size=16 compile=true`.

    `optim`: the settings that they are added to. Where those scale the learning rate, the line
    turns that off, as the rate was measured with the rows of a step.
    """
    if optim is not None and "optim.lr" in values and optim.scale_lr is not ScaleRate.none:
        values = values | {"optim.scale_lr": ScaleRate.none}
    words = []
    for key, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"{key}={text}")
    return " ".join(words)


def list_open_settings(question: Question) -> OpenSettings:
    """What the search may change, and from which values it starts."""
    config = question.config
    ranks = question.ranks
    device = question.device
    split = question.store.splits["train"]
    tokens_per_batch = config.data.tokens_per_batch
    is_capped = tokens_per_batch is not None
    rows, accumulate = config.data.batches(ranks.world)
    plan = PlanSettings(
        rows_per_batch=rows,
        tokens_per_batch=tokens_per_batch,
        accumulate=accumulate,
        world=ranks.world,
    )
    feed = Feed(split, plan, kind=FeedKind.threaded, device=device)
    steps_an_epoch = max(1, len(feed) // accumulate)
    step_rows = rows * accumulate
    if is_capped:
        # steps of many tokens have unequal rows: their mean
        step_rows = split.num_rows // (steps_an_epoch * ranks.world)
    feed_kind = _usual_feed(question)
    precision = choose_precision(config.precision, device).value
    return OpenSettings(
        settings=config.tune,
        start=ProbedSetting(feed=feed_kind, precision=precision, rows=rows, accumulate=accumulate),
        feeds=_list_feeds(feed_kind, question.confirmed.slower),
        precisions=_list_precisions(device, question.confirmed.slower),
        step_rows=step_rows,
        num_rows=split.num_rows,
        planned_steps=planned_steps(config.trainer, feed),
        settled=list_settled(
            config,
            question.overrides,
            usual_rows(config, question.store.splits["train"].num_rows, question.ranks.world),
        )
        | question.confirmed.why,
        room_bytes=int(_free_bytes(device, ranks) * (1 - config.tune.memory_margin)),
        is_cpu=device.type == "cpu",
        is_capped=is_capped,
        counts_time=question.counts_time,
        compile_why_not=why_not(device),
    )


def _usual_feed(question: Question) -> FeedKind:
    """The feed that the run would choose without measuring."""
    num_bytes = sum(split.num_bytes for split in question.store.splits.values())
    return choose_feed(question.config.data.feed, num_bytes, question.device).value


def _list_feeds(usual: FeedKind, slower: frozenset[str]) -> list[FeedKind]:
    """The usual feed, and those that may be faster; `slower` are overrides confirmed as slower."""
    feeds = []
    for feed in FeedKind:
        # a resident feed that is not usual does not fit into memory
        is_tried = feed not in (FeedKind.auto, FeedKind.resident)
        if feed is usual or (is_tried and f"data.feed={feed}" not in slower):
            feeds.append(feed)
    return feeds


def _list_precisions(device: torch.device, slower: frozenset[str]) -> list[Precision]:
    """Native precisions but those confirmed as slower; fp32 stays, to compare with."""
    return [
        precision
        for precision in native_precisions(device)
        if precision is Precision.fp32 or f"precision={precision}" not in slower
    ]


def _free_bytes(device: torch.device, ranks: Ranks) -> int:
    """Free memory of this rank's card, or its share of what the machine or container has free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_bytes() // ranks.local_world


def native_precisions(device: torch.device) -> list[Precision]:
    """Arithmetic that a device has in hardware, the most exact first."""
    precisions = [Precision.fp32]
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8  # Ampere and later
    else:
        has_bf16 = bf16_is_native_on_cpu()
    if has_bf16:
        precisions.append(Precision.bf16)
    if device.type == "cuda":
        precisions.append(Precision.fp16)
    return precisions


def list_settled(
    config: RunConfig, overrides: Sequence[str], usual_rows: int | None = None
) -> dict[str, str]:
    """Settings that the search leaves alone, each with its reason.

    `usual_rows`: of a batch, where the settings left it open and the rows decided.

    The reason is empty where `tune` itself was set to leave it alone, as in `tune.feed=false`.
    Without `overrides` (in Python) a value counts as asked for where it differs from its default.
    """
    tune = config.tune
    optim = config.optim
    has_lr = not overrides and optim.lr is not None
    is_compile_set = bool(config.compile) or is_typed("compile", overrides)
    is_feed_set = config.data.feed is not FeedKind.auto
    is_precision_set = config.precision is not Precision.auto
    is_lr_set = has_lr or is_typed("optim.lr", overrides)
    is_searched = {
        "data.feed": tune.feed,
        "precision": tune.precision,
        "data.batch_size": tune.batch_size,
        "compile": tune.compile,
        "optim.lr": tune.learning_rate,
    }
    reasons = {
        "data.feed": "asked for" if is_feed_set else "",
        "precision": "asked for" if is_precision_set else "",
        "data.batch_size": _why_rows_are_settled(config, overrides, usual_rows),
        "compile": "asked for" if is_compile_set else "",
        "optim.lr": "asked for" if is_lr_set else "",
    }
    settled = {}
    for key, reason in reasons.items():
        if not is_searched[key]:
            settled[key] = ""
        elif reason:
            settled[key] = reason
    return settled


def _why_rows_are_settled(
    config: RunConfig, overrides: Sequence[str], usual_rows: int | None
) -> str:
    """Why the batch size stays; empty where it is open."""
    data = config.data
    if data.tokens_per_batch is not None:
        return "data.tokens_per_batch decides"
    # from Python nothing is typed: values that differ from the usual ones were chosen
    default = type(data).__dataclass_fields__["batch_size"].default
    usual = (None, usual_rows) if default is None else (default,)
    is_changed = {
        "batch_size": not overrides and data.batch_size not in usual,
        "accumulate": not overrides and data.accumulate != 1,
    }
    for name, changed in is_changed.items():
        if changed or is_typed(f"data.{name}", overrides):
            return "asked for"
    for name in ("limit_train_batches", "val_check_interval"):
        # whole numbers count batches, fractions are shares of an epoch
        if type(config.trainer.get(name)) is int:
            return f"trainer.{name} counts batches"
    return ""


def list_dependencies(question: Question, open_settings: OpenSettings) -> dict[str, Any]:
    """Everything that the answers depend on, as plain values: the cache's key is their hash."""
    config = question.config
    ranks = question.ranks
    split = question.store.splits["train"]
    start = open_settings.start
    tune = config.tune
    data = config.data
    optim = plain(config.optim)
    if not tune.learning_rate:
        for name in _RATE_SETTINGS:
            optim.pop(name)
    lengths = np.asarray(split.lengths(TOKENS))
    quantiles = []
    if len(lengths):
        quantiles = np.quantile(lengths, _LENGTH_QUANTILES).round().tolist()
    classes = question.store.facts.get("class_counts") or []
    return {
        "model": [type(config.model).__name__, plain(config.model)],
        "task": [type(config.task).__name__, plain(config.task)],
        "optim": optim,
        "vocabulary": plain(getattr(data, "vocabulary", None)),
        "data": {
            "rows": split.num_rows,
            "lengths": quantiles,
            "classes": len(classes),
            "bytes": split.num_bytes,
        },
        "rows": [
            start.rows,
            start.accumulate,
            data.tokens_per_batch,
            data.effective_batch,
            ranks.world,
        ],
        "start": [str(start.feed), str(start.precision), data.workers],
        "device": [*device_key(question.device), torch.get_num_threads(), ranks.local_world],
        "versions": [torch.__version__, metadata.version("flatout"), metadata.version("lightning")],
        "kept": open_settings.settled,
        "tune": [str(tune.effective_batch), tune.memory_margin, tune.gain, tune.loss_tolerance],
        "confirmed": [question.confirmed.values, sorted(question.confirmed.slower)],
    }


def device_key(device: torch.device) -> list[str | int]:
    """Values that are equal for two devices only if timings of one are valid for the other."""
    if device.type == "cuda":
        return [memory_key(device)]
    memory = limits().memory_bytes or psutil.virtual_memory().total
    return [device.type, platform.machine(), processor_name(), round(memory / 2**30)]

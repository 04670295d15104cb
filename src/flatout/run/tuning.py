"""`tune=auto`: what a run leaves open is decided by measuring, once, before anything of it is
built.

What the person asked for stays: a value that was typed, or that differs from `auto`. The rest is
measured in processes that are thrown away (`tune/`), or taken from what was measured before. A
resumed run keeps the answers of its beginning. Of several ranks one measures for each kind of
device, and the smallest answer is everybody's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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

_WAIT_S = 30.0  # how much longer than its budget another process may take to measure the same
# from how much more time, or steps, on a search that was cut short begins again
_MORE_TIME = 1.5
_MORE_STEPS = 4.0
_ORDERS: dict[str, list[Any]] = {
    # A device that can do an earlier one can do the later ones.
    "data.feed": ["resident", "threaded", "workers"],
    "precision": ["bf16", "fp16", "fp32"],
    "compile": [True, False],
}


@dataclass(slots=True)
class FoundAnswers:
    answers: Answers
    key: str = ""
    is_known: bool = False
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    """What to decide: these settings, for this store and device."""

    config: RunConfig
    store: Store
    ranks: Ranks
    device: torch.device
    overrides: Sequence[str]  # what was typed: it stays
    prober: Child | Here  # measures the parts of the run, in another process
    counts_time: bool = True  # whether the expected run bounds the time; false for a search alone
    confirmed: Confirmed = field(default_factory=Confirmed)  # what is in the settings already


def of_all_devices(question: Question, say: Callable[[str], None]) -> FoundAnswers:
    """Measured by one rank for each kind of device; the smallest answer."""
    ranks = question.ranks
    devices = ranks.gathered("device", lambda: device_key(question.device))

    def measure() -> dict[str, Any] | None:
        # of the ranks that have such a device
        is_first = devices.index(devices[ranks.rank]) == ranks.rank
        return asdict(measured_for(question, say)) if is_first else None

    given = filter(None, ranks.gathered("answers", measure))
    each = [FoundAnswers(**{**found, "answers": Answers.of(found["answers"])}) for found in given]
    return replace(each[0], answers=smallest([found.answers for found in each]))


def measured_for(question: Question, say: Callable[[str], None]) -> FoundAnswers:
    """The answers for one device: measured before, or now."""
    tune = question.config.tune
    asked = asked_of(question)
    key = recipe_key(asked_about(question, asked))
    store = AnswerStore(question.config.data.cache)
    with store.measuring(key, tune.budget_s + _WAIT_S, say):
        known = None if tune.fresh else store.read(key)
        if known is not None and not is_outdated(known, asked, store):
            return FoundAnswers(
                known,
                key,
                True,
                [f"tune: cached ({store.path(key)}; tune.fresh=true measures again)"],
            )
        say(f"tune: measuring in a process apart, for {tune.budget_s:g} s at most")
        answers = Search(asked, question.prober, store).decide()
        answers.values |= question.confirmed.values
        if answers.step_s is not None:
            store.write(key, answers)
    count = sum(row.rows_per_s is not None for row in answers.tried)
    rest = "" if answers.is_complete else "; the time was not enough for all"
    lines = [f"tune: {count} probes in {answers.seconds:.1f} s{rest}"]
    if answers.unrest > 1.5:
        spread = (
            f"the same settings were {answers.unrest:.1f} times as fast at their best as at their"
            " worst"
        )
        lines.append(f"tune: this machine is busy: {spread}; tune.fresh=true measures again")
    return FoundAnswers(answers, key, False, lines)


def is_outdated(known: Answers, asked: OpenSettings, store: AnswerStore) -> bool:
    """Whether the time that there is now would find more, the run is another length, or the rows
    did not fit since.
    """
    if known.step_s is None:
        return True
    most = known_rows(store.cache, known.row_key) if known.row_key else None
    if most is not None and known.values.get("data.batch_size", 0) > most:
        return True
    growth = asked.planned_steps / max(known.planned_steps, 1)
    if "compile" not in asked.kept and (
        growth > _MORE_STEPS or (known.values.get("compile") and growth < 1 / 2)
    ):
        return True
    return (
        not known.is_complete
        and allowed_seconds(asked, known.step_s) > _MORE_TIME * known.allowed_s
    )


def smallest(found: Sequence[Answers]) -> Answers:
    """What every one of several unlike devices can do."""
    least = min(found, key=lambda each: each.values.get("data.batch_size", 0))
    if len(found) == 1:
        return least
    # Where one device has no answer, all do as the settings say.
    shared = set.intersection(*(set(each.values) for each in found))
    values = {name: value for name, value in least.values.items() if name in shared}
    for name, best_first in _ORDERS.items():
        if name in shared:
            values[name] = max((each.values[name] for each in found), key=best_first.index)
    if "optim.lr" in shared:
        values["optim.lr"] = min(each.values["optim.lr"] for each in found)
    evidence = "; ".join(override_line(each.values) or "nothing" for each in found)
    line = override_line(values)
    choice = TuneAnswer(
        name="unlike devices", value=line, why="what the smallest can do", evidence=evidence
    )
    return replace(least, values=values, choices=[*least.choices, choice])


def override_line(values: dict[str, Any], optim: OptimConfig | None = None) -> str:
    """Answers in the words of a command line; for settings that would scale the rate that was
    found, with that off.
    """
    if optim is not None and "optim.lr" in values and optim.scale_lr is not ScaleRate.none:
        values = values | {"optim.scale_lr": ScaleRate.none}
    shown = {
        name: str(value).lower() if isinstance(value, bool) else f"{value}"
        for name, value in values.items()
    }
    return " ".join(f"{name}={value}" for name, value in shown.items())


def asked_of(question: Question) -> OpenSettings:
    config = question.config
    ranks = question.ranks
    device = question.device
    data = config.data
    splits = question.store.splits
    tokens = config.data.tokens_per_batch
    split = splits["train"]
    slower = question.confirmed.slower
    rows, accumulate = data.batches(ranks.world)
    plan = PlanSettings(
        rows_per_batch=rows, tokens_per_batch=tokens, accumulate=accumulate, world=ranks.world
    )
    feed = Feed(split, plan, kind=FeedKind.threaded, device=device)
    kind = choose_feed(data.feed, sum(each.num_bytes for each in splits.values()), device).value
    fitting = [
        each for each in FeedKind if each is kind or each not in (FeedKind.auto, FeedKind.resident)
    ]
    precision = choose_precision(config.precision, device).value
    native = precisions(device)  # fp32 stands for comparison
    steps_an_epoch = max(1, len(feed) // accumulate)
    is_cut = tokens is not None
    # A rank has its card, or its share of what this machine, or this container, has free.
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else free_bytes() // ranks.local_world
    )
    return OpenSettings(
        settings=config.tune,
        start=ProbedSetting(feed=kind, precision=precision, rows=rows, accumulate=accumulate),
        feeds=[each for each in fitting if each is kind or f"data.feed={each}" not in slower],
        precisions=[
            each for each in native if each is Precision.fp32 or f"precision={each}" not in slower
        ],
        step_rows=split.num_rows // (steps_an_epoch * ranks.world) if is_cut else rows * accumulate,
        num_rows=split.num_rows,
        planned_steps=planned_steps(config.trainer, feed),
        kept=kept(config, question.overrides) | question.confirmed.why,
        room_bytes=int(free * (1 - config.tune.memory_margin)),
        is_cpu=device.type == "cpu",
        is_capped=is_cut,
        counts_time=question.counts_time,
        compile_why_not=why_not(device),
    )


def precisions(device: torch.device) -> list[Precision]:
    """Arithmetic that a device has in hardware, the most exact first."""
    is_gpu = device.type == "cuda"
    has_bf16 = (
        torch.cuda.get_device_capability(device)[0] >= 8 if is_gpu else bf16_is_native_on_cpu()
    )
    return [
        Precision.fp32,
        *([Precision.bf16] if has_bf16 else []),
        *([Precision.fp16] if is_gpu else []),
    ]


def kept(config: RunConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Settings that are not looked at, and why; an empty reason where the person asked to leave
    them alone.
    """
    tune = config.tune
    has_lr = not overrides and config.optim.lr is not None
    asked = "asked for"
    looked_at = {  # by the setting: whether it is wanted, and why it stays all the same
        "data.feed": (tune.feed, "" if config.data.feed is FeedKind.auto else asked),
        "precision": (tune.precision, "" if config.precision is Precision.auto else asked),
        "data.batch_size": (tune.batch_size, _why_rows_are_kept(config, overrides)),
        "compile": (
            tune.compile,
            asked if config.compile or is_typed("compile", overrides) else "",
        ),
        "optim.lr": (
            tune.learning_rate,
            asked if has_lr or is_typed("optim.lr", overrides) else "",
        ),
    }
    return {
        name: why if is_wanted else ""
        for name, (is_wanted, why) in looked_at.items()
        if why or not is_wanted
    }


def _why_rows_are_kept(config: RunConfig, overrides: Sequence[str]) -> str:
    data = config.data
    if data.tokens_per_batch is not None:
        return "data.tokens_per_batch decides"
    for name in ("batch_size", "accumulate"):
        default = type(data).__dataclass_fields__[name].default
        if is_typed(f"data.{name}", overrides) or (
            not overrides and getattr(data, name) != default
        ):
            return "asked for"
    counting = [
        name
        for name in ("limit_train_batches", "val_check_interval")
        if type(config.trainer.get(name)) is int
    ]
    return f"trainer.{counting[0]} counts batches" if counting else ""


def asked_about(question: Question, asked: OpenSettings) -> dict[str, Any]:
    """Everything that answers depend on, as plain values."""
    config = question.config
    ranks = question.ranks
    split = question.store.splits["train"]
    tune = config.tune
    data = config.data
    optim = plain(config.optim)
    lengths = np.asarray(split.lengths(TOKENS))
    quantiles = (
        np.quantile(lengths, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]).round().tolist()
        if len(lengths)
        else []
    )
    if not tune.learning_rate:
        for name in (
            "lr",
            "warmup",
            "schedule",
            "final_lr_share",
            "max_lr",
            "base_batch",
            "scale_lr",
        ):
            optim.pop(name)
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
            asked.start.rows,
            asked.start.accumulate,
            data.tokens_per_batch,
            data.effective_batch,
            ranks.world,
        ],
        "start": [str(asked.start.feed), str(asked.start.precision), data.workers],
        "device": [*device_key(question.device), torch.get_num_threads(), ranks.local_world],
        "versions": [torch.__version__, metadata.version("flatout"), metadata.version("lightning")],
        "kept": asked.kept,
        "tune": [str(tune.effective_batch), tune.memory_margin, tune.gain, tune.loss_tolerance],
        "confirmed": [question.confirmed.values, sorted(question.confirmed.slower)],
    }


def device_key(device: torch.device) -> list[Any]:
    """What tells this device from one that is unlike it."""
    if device.type == "cuda":
        return [memory_key(device)]
    memory = limits().memory_bytes or psutil.virtual_memory().total
    return [device.type, platform.machine(), processor_name(), round(memory / 2**30)]

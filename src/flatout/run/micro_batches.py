"""How much of a batch has fitted into memory: said once, and noted beside the stores for the next run like this one.

Alike are runs of the same model and its settings, precision, longest row and layout, on as many devices of the same
kind. What is noted are rows (or tokens) that were computed at once when memory did not suffice for more; a batch of
more is cut from the first step on. One small file each, written whole or not at all; whoever deletes it tries whole
batches again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.cache import Cache, recipe_key
from flatout.distributed.ranks import Ranks
from flatout.engine.fast_loop import FastLoop
from flatout.engine.passes import EVALUATION, TRAINING, running_statistics
from flatout.engine.precision import by_lightning_name
from flatout.files import sync_folder, write_synced
from flatout.perf.tune.answers import micro_batch_key, remember_micro_batch
from flatout.run.kinds.kind import Feeds
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task

FOLDER = "micro-batches"
_NAMES = {TRAINING: "micro-batch", EVALUATION: "evaluation batch"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that was computed at once."""

    most: int
    has_ended: bool = False
    """Whether it ended the run, so that one that goes on needs it at once."""


class MicroBatches:
    """The note of runs like this one."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self.path = folder / FOLDER / f"{recipe_key(self.about)}.json"

    def read(self) -> tuple[dict[str, Limit], str]:
        """What is noted, by what it was for; and a word where the file is damaged."""
        try:
            noted = json.loads(self.path.read_text(encoding="utf-8"))
            found = {
                str(name): Limit(_count(each["most"]), bool(each["has_ended"]))
                for name, each in noted["limits"].items()
            }
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return {}, f"{self.path} is damaged ({type(error).__name__}) and passed over"
        return found, ""

    def note(self, name: str, limit: Limit) -> None:
        """Write a limit down; `OSError` where the disk refuses."""
        limits = {**self.read()[0], name: limit}
        values = {each: {"most": kept.most, "has_ended": kept.has_ended} for each, kept in limits.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            text = json.dumps({"about": self.about, "limits": values}, indent=1, ensure_ascii=False)
            write_synced(beside, text.encode("utf-8", "surrogatepass"))
            beside.replace(self.path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
        sync_folder(self.path.parent)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of rows")
    return value


def _agreed_limits(notes: MicroBatches, ranks: Ranks, place: RunFolder) -> dict[str, Limit]:
    """What the first rank reads is what all go by."""

    def read() -> str:
        limits, word = notes.read()
        if word:
            place.log.say(word)
        return json.dumps({name: [each.most, each.has_ended] for name, each in limits.items()})

    return {name: Limit(*each) for name, each in json.loads(ranks.agreed("micro-batches", read)).items()}


def mind_memory(
    task: Task,
    loop: FastLoop,
    feeds: Feeds,
    about: Mapping[str, Any],
    ranks: Ranks,
    cache: str | None,
    place: RunFolder,
) -> None:
    """Begin with what fitted the last time, and let the task say and note what does not fit now."""
    plans = {TRAINING: feeds.train.plan, EVALUATION: feeds.validation.plan}
    notes = MicroBatches(Cache(cache).folder, about_memory(feeds, about))
    limits = _agreed_limits(notes, ranks, place)
    for name, plan in plans.items():
        whole, unit = capacity(plan)
        limit = limits.get(f"{name} {unit}")
        if limit is None or limit.most >= whole:
            continue
        pieces = loop.passes.pieces[name] = -(-whole // limit.most)
        if limit.has_ended:
            loop.passes.least[name] = pieces
        evidence = f"noted in {notes.path}; delete it to try whole batches again"
        value = f"{-(-whole // pieces)} {unit} of {whole}"
        place.choose(_NAMES[name], value, "an earlier run like this one ran out of memory", evidence, anew=True)

    def tell(name: str, pieces: int, before: int, step: int, why: str, has_ended: bool) -> None:
        whole, unit = capacity(plans[name])
        most = -(-whole // pieces)
        told = f"{most} {unit} (was {-(-whole // before)})"
        _say_how_it_goes_on(name, told, step, why, task, place)
        try:
            notes.note(f"{name} {unit}", Limit(most, has_ended))
            if name == TRAINING and unit == "rows":
                _tell_tuning(task, feeds, str(about["precision"]), most, cache)
        except OSError as error:
            place.log.say(f"{notes.path} cannot be written ({error.strerror}): the next run begins with whole batches")
        else:
            place.log.say(f"the next run like this one begins so; delete {notes.path} to try whole batches again")

    loop.passes.report = tell


def _say_how_it_goes_on(name: str, told: str, step: int, why: str, task: Task, place: RunFolder) -> None:
    at = f"at step {step + 1}, whose rows stay the same" if name == TRAINING else f"after step {step}"
    place.choose(_NAMES[name], told, f"out of memory {at}", why, anew=True)
    if name == TRAINING and running_statistics(task):
        place.log.say("batch normalisation sees the smaller pieces by themselves: results differ a little from now on")


def _tell_tuning(task: Task, feeds: Feeds, arithmetic: str, most: int, cache: str | None) -> None:
    """`tune=auto` tries no more rows than have fitted."""
    precision = by_lightning_name(arithmetic)
    longest, device = int(feeds.train.split.lengths(TOKENS).max()), feeds.train.device
    remember_micro_batch(micro_batch_key(task.model, longest=longest, device=device, precision=precision), most, cache)


def about_memory(feeds: Feeds, about: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how much memory a row takes, and how much there is."""
    device, plan = feeds.train.device, feeds.train.plan
    settings = about["settings"]
    is_cuda = device.type == "cuda"
    return {
        "model": about["model"],
        "settings": {name: settings[name] for name in sorted(settings) if name.partition(".")[0] == "model"},
        "average": bool(settings.get("optim.ema")),
        "precision": about["precision"],
        "longest": int(feeds.train.split.lengths(TOKENS).max()),
        "layout": str(plan.layout),
        "ranks": plan.world,
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "memory": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
    }


def capacity(plan: PlanSettings) -> tuple[int, str]:
    """The most that a plan puts into one batch, and of what."""
    return (plan.rows_per_batch, "rows") if plan.tokens_per_batch is None else (plan.tokens_per_batch, "tokens")

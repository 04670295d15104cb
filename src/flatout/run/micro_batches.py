"""How much of a batch fits into memory: a run prints and notes it once, and the next run like it begins with that.

The notes are those of `flatout.perf.notes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.cache import Cache
from flatout.distributed.ranks import Ranks
from flatout.engine.fast_loop import FastLoop
from flatout.engine.passes import EVALUATION, TRAINING, running_statistics
from flatout.engine.precision import by_lightning_name
from flatout.perf.notes import Limit, MicroBatches, micro_batch_key
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task

_NAMES = {TRAINING: "micro-batch", EVALUATION: "evaluation batch"}


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
        place.choose(_NAMES[name], value, "an earlier run like this one ran out of memory", evidence, replaces=True)

    def tell(name: str, pieces: int, before: int, step: int, why: str, has_ended: bool) -> None:
        whole, unit = capacity(plans[name])
        most = -(-whole // pieces)
        value = f"{most} {unit} (was {-(-whole // before)})"
        _report_pieces(name, value, step, why, task, place)
        try:
            notes.note(f"{name} {unit}", Limit(most, has_ended), _row_key(task, feeds, str(about["precision"])))
        except OSError as error:
            place.log.say(f"{notes.path} cannot be written ({error.strerror}): the next run begins with whole batches")
        else:
            place.log.say(f"the next run like this one begins so; delete {notes.path} to try whole batches again")

    loop.passes.report = tell


def _report_pieces(name: str, value: str, step: int, why: str, task: Task, place: RunFolder) -> None:
    at = f"at step {step + 1}, whose rows stay the same" if name == TRAINING else f"after step {step}"
    place.choose(_NAMES[name], value, f"out of memory {at}", why, replaces=True)
    if name == TRAINING and running_statistics(task):
        place.log.say("batch normalisation sees each smaller piece alone: results differ a little from now on")


def _row_key(task: Task, feeds: Feeds, arithmetic: str) -> str:
    """The key by which `tune=auto` finds the note, to try no more rows than have fitted."""
    longest, device = int(feeds.train.split.lengths(TOKENS).max()), feeds.train.device
    return micro_batch_key(task.model, longest=longest, device=device, precision=by_lightning_name(arithmetic))


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

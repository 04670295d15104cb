"""Runs that do not fit into memory: start with what fitted the last time, and note what fits now.

When a batch does not fit, the fast loop cuts it into pieces (`engine/pieces.py`); what is learned
stays the same. This module sets the number of pieces that an earlier run like this one has noted,
and notes it when it grows (`perf/notes.py`). Open it to change what counts as a run like this one,
or what the user reads about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.cache import Cache
from flatout.distributed.ranks import Ranks
from flatout.engine.fast_loop import FastLoop
from flatout.engine.pieces import EVALUATION, TRAINING, running_statistics
from flatout.engine.precision import by_lightning_name
from flatout.perf.notes import Limit, MicroBatches, micro_batch_key
from flatout.run.context import OurParts, Run
from flatout.run.run_folder import RunFolder

_NAMES = {TRAINING: "micro-batch", EVALUATION: "evaluation batch"}


def restore_micro_batches(loop: FastLoop, ours: OurParts, run: Run) -> None:
    """Start with the micro-batches that fitted into memory in an earlier run like this one.

    Log and note each change from now on.
    """
    folder = run.folder
    plans = {TRAINING: ours.feeds.train.plan, EVALUATION: ours.feeds.validation.plan}
    notes = MicroBatches(
        Cache(ours.data.config.cache).folder, facts_about_memory(ours.feeds, run.facts)
    )
    limits = _read_on_first_rank(notes, run.ranks, folder)
    for name, plan in plans.items():
        whole, unit = capacity(plan)
        limit = limits.get(f"{name} {unit}")
        if limit is None or limit.most >= whole:
            continue
        # 16 rows, of which 6 fit: 3 pieces of 6 rows at most
        pieces = -(-whole // limit.most)
        # `least`: the earlier run ended by it, so fewer pieces are never tried again
        loop.pieces.counts[name] = pieces
        if limit.has_ended:
            loop.pieces.least[name] = pieces
        folder.decision(
            _NAMES[name],
            f"{-(-whole // pieces)} {unit} of {whole}",
            "an earlier run like this one ran out of memory",
            f"noted in {notes.path}; delete it to try whole batches again",
            replaces=True,
        )
    precision = str(run.facts["precision"])
    loop.pieces.report = _MemoryReporter(ours, plans, notes, precision, folder)


def _read_on_first_rank(notes: MicroBatches, ranks: Ranks, folder: RunFolder) -> dict[str, Limit]:
    """The limits that the first rank reads, on all ranks."""

    def read() -> dict[str, Any]:
        limits, complaint = notes.read()
        if complaint:
            folder.say(complaint)
        return {name: [limit.most, limit.has_ended] for name, limit in limits.items()}

    agreed = ranks.agreed("micro-batches", read)
    return {name: Limit(most, has_ended) for name, (most, has_ended) in agreed.items()}


@dataclass(frozen=True, slots=True)
class _MemoryReporter:
    """Called by the loop when a batch is cut into more pieces: prints that, and notes it."""

    ours: OurParts
    plans: dict[str, PlanSettings]
    notes: MicroBatches
    precision: str  # by Lightning's name
    folder: RunFolder

    def __call__(
        self, name: str, pieces: int, pieces_before: int, step: int, error: str, has_ended: bool
    ) -> None:
        whole, unit = capacity(self.plans[name])
        most = -(-whole // pieces)
        if name == TRAINING:
            moment = f"at step {step + 1}, whose rows stay the same"
        else:
            moment = f"after step {step}"
        self.folder.decision(
            _NAMES[name],
            f"{most} {unit} (was {-(-whole // pieces_before)})",
            f"out of memory {moment}",
            error,
            replaces=True,
        )
        if name == TRAINING and running_statistics(self.ours.task):
            self.folder.say(
                "batch normalisation sees each smaller piece alone: results differ a little from"
                " now on"
            )
        self._note(f"{name} {unit}", Limit(most, has_ended))

    def _note(self, name: str, limit: Limit) -> None:
        train = self.ours.feeds.train
        # By this key `tune=auto` finds the note, to try no more rows than have fitted.
        key = micro_batch_key(
            self.ours.task.model,
            longest=int(train.split.lengths(TOKENS).max()),
            device=train.device,
            precision=by_lightning_name(self.precision),
        )
        path = self.notes.path
        try:
            self.notes.note(name, limit, key)
        except OSError as error:
            self.folder.say(
                f"{path} cannot be written ({error.strerror}): the next run begins with whole"
                " batches"
            )
            return
        self.folder.say(
            f"the next run like this one begins so; delete {path} to try whole batches again"
        )


def facts_about_memory(feeds: Feeds, facts: dict[str, Any]) -> dict[str, Any]:
    """What decides how much memory a row takes, and how much there is.

    Runs with equal values share a note. `facts` are those that resumed runs are compared by.
    """
    device = feeds.train.device
    plan = feeds.train.plan
    settings = facts["settings"]
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        device_name = device.type
        memory = None
    # Settings of the data count by what they lead to, such as the longest row.
    model_settings = {
        key: settings[key] for key in sorted(settings) if key.partition(".")[0] == "model"
    }
    return {
        "model": facts["model"],
        "settings": model_settings,
        "average": bool(settings.get("optim.ema")),
        "precision": facts["precision"],
        "longest": int(feeds.train.split.lengths(TOKENS).max()),
        "layout": str(plan.layout),
        "ranks": plan.world,
        "device": device_name,
        "memory": memory,
    }


def capacity(plan: PlanSettings) -> tuple[int, str]:
    """The most that a plan puts into one batch, and its unit: `(16, "rows")`."""
    if plan.tokens_per_batch is None:
        return plan.rows_per_batch, "rows"
    return plan.tokens_per_batch, "tokens"

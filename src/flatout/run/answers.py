"""Settle what the settings leave open, before the network is built, by measured answers.

There are three sources, asked in this order:

- the answers with which a resumed run began
- answers that `doctor --confirm` has confirmed for an earlier run of the same settings
  (`run/confirmed.py`)
- measurements of now, or from the cache (`run/tuning.py`)

Open this file to change which settings an answer may set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.config import RunConfig
from flatout.data.batches.store_data import StoreData
from flatout.distributed.ranks import Ranks
from flatout.errors import UserError
from flatout.perf.tune.probe import Child
from flatout.perf.tune.settings import TuneConfig, is_typed
from flatout.report.summary import plain, read_summary
from flatout.run.confirmed import CONFIRMABLE, find_confirmed
from flatout.run.context import RunContext
from flatout.run.tuning import Question, measure_on_all_devices, override_line

# settings that an answer may set; others in a changed file are ignored
_SETTABLE = (*CONFIRMABLE, "optim.lr")


def tune(config: RunConfig, data: StoreData[Any, Any], context: RunContext) -> RunConfig:
    """The settings with measured values where they were left open.

    A resumed run keeps the answers of its beginning; without `tune` the settings return unchanged.
    The answers are printed and stand in the summary under `tune`.
    """
    folder = context.folder
    ranks = context.ranks
    overrides = context.overrides
    earlier = ranks.agreed("earlier answers", lambda: read_answers(config.resume, folder.path))
    if earlier:
        folder.summary.set("tune", earlier)
        values = {
            key: value for key, value in earlier["values"].items() if not is_typed(key, overrides)
        }
        changes = override_line(values) or "nothing is changed"
        folder.say(f"tune: as at the beginning of this run ({changes})")
        return apply_answers(config, values)
    if not config.tune.enabled:
        return config
    if config.resume is not None and any((folder.path / CHECKPOINTS).glob("step-*")):
        folder.say("tune: this run began without it and continues without it")
        return config
    question = build_question(config, data, ranks, context.device, overrides)
    measured = measure_on_all_devices(question, folder.say)
    for line in measured.lines:
        folder.say(line)
    for choice in measured.answers.choices:
        folder.decision(choice.name, choice.value, choice.why, choice.evidence)
    facts = {"key": measured.key, "cached": measured.is_cached, **asdict(measured.answers)}
    folder.summary.set("tune", facts)
    folder.summary.write()
    return apply_answers(config, measured.answers.values)


def read_answers(resumed: str | None, folder: Path) -> dict[str, Any] | None:
    """The section `tune` in the summary of the run that `resumed` continues.

    None for a new run, and where the summary cannot be read or holds no such section.
    """
    if resumed is None:
        return None
    try:
        section = read_summary(folder).get("tune")
    except UserError:
        return None
    has_values = isinstance(section, dict) and isinstance(section.get("values"), dict)
    return section if has_values else None


def settable_answers(summary: dict[str, Any]) -> dict[str, Any]:
    """What a run has measured, by key, from its summary.

    Other keys are left out, and values of more than a word: the folder of a run may come from
    others, and each answer becomes a word of a command line.
    """
    values = (summary.get("tune") or {}).get("values")
    if not isinstance(values, dict):
        return {}
    return {key: values[key] for key in _SETTABLE if key in values and _is_a_word(values[key])}


def _is_a_word(value: object) -> bool:
    is_name = isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value, re.ASCII) is not None
    return value is None or is_name or isinstance(value, int | float)


def build_question(
    config: RunConfig,
    data: StoreData[Any, Any],
    ranks: Ranks,
    device: torch.device,
    overrides: Sequence[str],
) -> Question:
    """What the search is to decide, for settings in which confirmed answers are filled in.

    The search measures in another process. That one builds the parts of the run without the user's
    callbacks, without `tune` (it would measure again), and uncompiled.
    """
    # imported here: few runs measure, and a worker builds the parts by this function's name
    from flatout.run.parts import build_parts

    runs = Path(config.output, config.name)
    confirmed = find_confirmed(runs, plain(config), device, overrides)
    config = apply_answers(config, confirmed.values)
    probed = replace(config, callbacks={}, tune=TuneConfig(), compile=False)
    prober = Child(partial(build_parts, probed, ranks, device), torch.get_num_threads())
    return Question(config, data.store, ranks, device, overrides, prober, confirmed=confirmed)


def apply_answers(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The settings with these values, by key (`data.batch_size`); unknown keys are ignored.

    They are ignored as files in the cache may come from another version, or be edited.
    """
    values = {key: value for key, value in values.items() if key in _SETTABLE}
    data_values = {
        key.removeprefix("data."): value for key, value in values.items() if key.startswith("data.")
    }
    if config.data.effective_batch is not None:
        # accumulation follows from the effective batch and the batch size
        data_values.pop("accumulate", None)
    changes: dict[str, Any] = {}
    if data_values:
        changes["data"] = replace(config.data, **data_values)
    if "optim.lr" in values:
        # measured with the rows of a step, so it must not be scaled to them again
        changes["optim"] = config.optim.at_rate(values["optim.lr"])
    for key in ("precision", "compile"):
        if key in values:
            changes[key] = values[key]
    return replace(config, **changes) if changes else config

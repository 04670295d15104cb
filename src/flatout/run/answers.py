"""Answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.config import RunConfig
from flatout.distributed.ranks import Ranks
from flatout.engine.optimizer import ScaleRate
from flatout.errors import UserError
from flatout.perf.tune.answers import Answers
from flatout.perf.tune.probe import Child
from flatout.perf.tune.settings import TuneConfig, is_typed
from flatout.report.summary import plain, read_summary
from flatout.run.confirmed import CONFIRMABLE, find_confirmed
from flatout.run.cut import CUT, measure_cut
from flatout.run.parts import build_parts
from flatout.run.run_folder import RunFolder
from flatout.run.tuning import FoundAnswers, Question, of_all_devices, override_line

_ANSWERED = (*CONFIRMABLE, "optim.lr", CUT)  # settings that `tune` may set by what it measured


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

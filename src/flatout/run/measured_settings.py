"""Settings that are measured before a run begins: by `tune`, or by `doctor --confirm` for an earlier run.

What is measured is the run itself: its parts are built in a process apart, by the function that the caller names. A
resumed run keeps the answers of its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.checkpoints.same_run import have_same_settings
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks
from flatout.engine.optimizer import ScaleRate
from flatout.errors import UserError
from flatout.perf.tune.answers import Answers
from flatout.perf.tune.probe import Child
from flatout.perf.tune.settings import TuneConfig, is_typed
from flatout.perf.tune.tuning import FoundAnswers, Question, RunSettings, of_all_devices, override_line
from flatout.perf.verdict.confirmation import FILE, Confirmed, read_confirmations
from flatout.report.summary import hardware, plain, read_summary, versions
from flatout.run.cuts import CUT, Build, measure_cut
from flatout.run.run_folder import SETTINGS, RunFolder, folder_of_runs

if TYPE_CHECKING:
    from flatout.config import RunConfig


def tune(
    config: RunConfig,
    data: StoreData[Any, Any],
    build: Build,
    ranks: Ranks,
    device: torch.device,
    overrides: Sequence[str],
    folder: RunFolder,
) -> RunConfig:
    """The settings with everything decided that they leave open: from the run's beginning, or measured now."""
    if known := ranks.agreed("earlier answers", lambda: answers_in(config.resume, folder.path)):
        folder.summary.set("tune", known)
        kept = {name: value for name, value in known["values"].items() if not is_typed(name, overrides)}
        folder.say(f"tune: as at the beginning of this run ({override_line(kept) or 'nothing is changed'})")
        return with_answers(config, kept)
    if not config.tune.enabled:
        return config
    if config.resume is not None and any((folder.path / CHECKPOINTS).glob("step-*")):
        folder.say("tune: this run began without it and continues without it")
        return config
    if config.tune.cut:
        answers = ranks.agreed("cut", lambda: measure_cut(config, data, build, device, folder.say).as_dict())
        found = FoundAnswers(Answers.of(answers))
    else:
        found = of_all_devices(question(config, data, build, ranks, device, overrides), folder.say)
    for line in found.lines:
        folder.say(line)
    for choice in found.answers.choices:
        folder.decision(choice.name, choice.value, choice.why, choice.evidence)
    folder.summary.set("tune", {"key": found.key, "cached": found.is_known, **found.answers.as_dict()})
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
    data: StoreData[Any, Any],
    build: Build,
    ranks: Ranks,
    device: torch.device,
    overrides: Sequence[str],
    *,
    counts_time: bool = True,
) -> Question:
    """What these settings leave open."""
    confirmed = find_confirmed(folder_of_runs(config.output, config.name), plain(config), device, overrides)
    config = with_answers(config, confirmed.values)
    measured = replace(config, callbacks={}, tune=TuneConfig(), compile=False)
    prober = Child(partial(build, measured, ranks, device), torch.get_num_threads())
    return Question(open_settings(config), data.store, ranks, device, overrides, prober, counts_time, confirmed)


def open_settings(config: RunConfig) -> RunSettings:
    """The settings that measuring decides, and those that its answers depend on."""
    return RunSettings(
        data=config.data,
        network=config.model,
        task=config.task,
        optim=config.optim,
        trainer=config.trainer,
        precision=config.precision,
        compile=bool(config.compile),
        tune=config.tune,
    )


def with_answers(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The same settings with the measured ones."""
    of_data = {name.removeprefix("data."): value for name, value in values.items() if name.startswith("data.")}
    if config.data.effective_batch is not None:
        of_data.pop("accumulate", None)  # it follows
    changed: dict[str, Any] = {"data": replace(config.data, **of_data)} if of_data else {}
    if "optim.lr" in values:  # measured with the rows of a step: it is not scaled to them again
        changed["optim"] = replace(config.optim, lr=values["optim.lr"], scale_lr=ScaleRate.none)
    if CUT in values:
        changed["model"] = replace(config.model, freeze_layers=values[CUT])
    changed |= {name: values[name] for name in ("precision", "compile") if name in values}
    return replace(config, **changed) if changed else config


# What `doctor --confirm` has measured.

_NAMED = ("data.feed", "data.batch_size", "precision", "compile")
"""Settings that a run names its choice of."""
_TUNED = (*_NAMED, "data.workers", "data.accumulate")
"""Settings that `tune` may set by a confirmation."""
_OF_DATA = ("feed", "workers", "batch_size", "accumulate", "effective_batch", "tokens_per_batch")


def find_confirmed(
    runs: Path, settings: dict[str, Any], device: torch.device, overrides: Sequence[str] = ()
) -> Confirmed:
    """Open settings that were confirmed to be faster, and the overrides that slow a run."""
    paths = sorted(runs.glob(f"*/{FILE}"), key=lambda path: path.parent.name, reverse=True)
    same = [path.parent for path in paths if _is_same(path.parent, settings)]
    here = (hardware(device, 1, "")["device"], versions()["flatout"])
    known = [(run, each) for run in same for each in read_confirmations(run) if (each.device, each.version) == here]
    confirmed = Confirmed(slower=frozenset(each.override for _, each in known if each.slows))
    for run, each in known:
        values = _values(each.override)
        is_new = bool(values) and not values.keys() & confirmed.values.keys()
        is_open = all(_is_open(name, settings, overrides) for name in values)
        if each.helps and is_new and is_open and _keeps_step(values, settings):
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


def _values(override: str) -> dict[str, Any]:
    """An override as values by their keys; empty where `tune` does not decide on one of them."""
    values = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in override.split())}
    return values if values.keys() <= set(_TUNED) else {}


def _is_open(name: str, settings: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the settings leave it to `tune`."""
    chosen = {"data.feed": settings["data"]["feed"], "precision": settings["precision"]}
    return chosen.get(name, "auto") == "auto" and not is_typed(name, overrides)


def _keeps_step(values: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a step has as many rows as before: what is learned does not change."""
    data = settings["data"]
    rows, accumulate = (values.get(f"data.{name}", data[name]) for name in ("batch_size", "accumulate"))
    return bool(rows * accumulate == data["batch_size"] * data["accumulate"])

"""Confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from flatout.checkpoints.same_run import have_same_settings
from flatout.perf.tune.settings import is_typed
from flatout.perf.verdict.confirmation import FILE, Confirmed, read_confirmations
from flatout.report.summary import hardware, versions
from flatout.run.run_folder import SETTINGS, newest_runs

_NAMED = ("data.feed", "data.batch_size", "precision", "compile")
CONFIRMABLE = (*_NAMED, "data.workers", "data.accumulate")
_OF_DATA = ("feed", "workers", "batch_size", "accumulate", "effective_batch", "tokens_per_batch")


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
        if not values or not values.keys() <= set(CONFIRMABLE):
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

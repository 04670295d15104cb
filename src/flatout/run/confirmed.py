"""Answers for `tune` that need no measurement: earlier runs have confirmed them.

`python -m flatout doctor --confirm` runs a fix of the verdict beside the original settings and
writes `confirmation.json` into the run's folder. This module reads those files of runs that had the
settings of the new run. Open it to change when a confirmation counts for another run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from flatout.checkpoints.same_run import have_same_settings
from flatout.files import load_yaml
from flatout.perf.tune.settings import is_typed
from flatout.perf.verdict.confirmation import (
    FILE,
    Confirmed,
    OverrideConfirmation,
    read_confirmations,
)
from flatout.report.summary import hardware, versions
from flatout.run.claimed_folders import SETTINGS, newest_runs

# settings whose choice a run prints, so the reason of a confirmed value is kept for them
_PRINTED = ("data.feed", "data.batch_size", "precision", "compile")
# settings that a confirmation may set
CONFIRMABLE = (*_PRINTED, "data.workers", "data.accumulate")
# settings below `data` that two runs must share, beside what a resumed run must share
_DATA_KEYS = ("feed", "workers", "batch_size", "accumulate", "effective_batch", "tokens_per_batch")


def find_confirmed(
    runs: Path, settings: dict[str, Any], device: torch.device, overrides: Sequence[str]
) -> Confirmed:
    """What confirmations say about a new run, from the folders of runs below `runs`.

    `settings` are those of the new run as plain values; `overrides` are the words that were typed.
    Only confirmations on the same kind of device, by this version of flatout, count. The newest
    one wins, and a value that was typed, or set to other than `auto`, stays.
    """
    confirmations = _read_matching(runs, settings, device)
    slower = frozenset(
        confirmation.override for _, confirmation in confirmations if confirmation.slows
    )
    confirmed = Confirmed(slower=slower)
    for run, confirmation in confirmations:
        values = _values_of(confirmation.override)
        is_settable = bool(values) and values.keys() <= set(CONFIRMABLE)
        is_new = not values.keys() & confirmed.values.keys()
        if (
            confirmation.helps
            and is_settable
            and is_new
            and _are_open(values, settings, overrides)
            and _keeps_step_rows(values, settings["data"])
        ):
            confirmed.values |= values
            why = f"confirmed by doctor: {confirmation.measured} in {run.name}"
            confirmed.why |= {key: why for key in values if key in _PRINTED}
    return confirmed


def _read_matching(
    runs: Path, settings: dict[str, Any], device: torch.device
) -> list[tuple[Path, OverrideConfirmation]]:
    """Confirmations of runs with these settings, each with its run's folder, newest run first."""
    device_and_version = (hardware(device, 1, "")["device"], versions()["flatout"])
    matching = []
    for run in newest_runs(runs, FILE):
        if not _had_settings(run, settings):
            continue
        for confirmation in read_confirmations(run):
            if (confirmation.device, confirmation.version) == device_and_version:
                matching.append((run, confirmation))
    return matching


def _values_of(override: str) -> dict[str, Any]:
    """`data.feed=threaded data.workers=2` → {"data.feed": "threaded", "data.workers": 2}."""
    words = (word.partition("=") for word in override.split())
    return {key: yaml.safe_load(value) for key, _, value in words}


def _are_open(values: dict[str, Any], settings: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the user has left all of these settings to flatout."""
    chosen = {"data.feed": settings["data"]["feed"], "precision": settings["precision"]}
    return all(chosen.get(key, "auto") == "auto" and not is_typed(key, overrides) for key in values)


def _keeps_step_rows(values: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether an optimizer step has as many rows as before: then what is learned stays the same.

    Batches whose size was left open follow the rows: nothing may change them.
    """
    before = [data["batch_size"], data["accumulate"]]
    after = [values.get("data.batch_size", before[0]), values.get("data.accumulate", before[1])]
    if after == before:
        return True
    are_numbers = all(type(number) is int and number > 0 for number in (*before, *after))
    return are_numbers and math.prod(after) == math.prod(before)


def _had_settings(run: Path, settings: dict[str, Any]) -> bool:
    """Whether a run had these settings; false where its file cannot be read or lacks some."""
    try:
        theirs = load_yaml(run / SETTINGS)
        for key in _DATA_KEYS:
            # A batch size that was left open followed the rows, which are the same.
            is_open = key == "batch_size" and theirs["data"].get(key) is None
            if not is_open and theirs["data"].get(key) != settings["data"].get(key):
                return False
        for key in ("precision", "compile"):
            if theirs[key] != settings[key]:
                return False
        return have_same_settings(theirs, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False

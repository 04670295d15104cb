"""Find what `doctor --confirm` has measured for the same settings on this device, for `tune` to use."""

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
from flatout.run.run_folder import SETTINGS

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

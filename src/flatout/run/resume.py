"""Going on with a run: which one the same command began, from which checkpoint, and whether it is still the same run.

`resume=auto` finds the newest run that this command has begun; `resume=FOLDER` names one. What a checkpoint is of
(data, model, plan, settings) stands in its manifest and must be what this run is of, or the difference is shown. A
fresh start is always reported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml

from flatout.checkpoints.kept import CHECKPOINTS, newest_first
from flatout.checkpoints.same_training import plan_facts
from flatout.data.batches.feed import Feed
from flatout.errors import UserError
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import plain, read_summary
from flatout.run.run_folder import OVERRIDES, SETTINGS

AUTO = "auto"
_FREE = (
    # Settings that may differ: they decide how long, where and how fast to train, not what.
    *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "accelerator", "strategy", "logger")),
    *(f"trainer.{name}" for name in ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")),
    *(f"data.{name}" for name in ("feed", "workers", "cache", "eval_batch_size")),
    *("tune", "compile"),  # a resumed run keeps the answers of its beginning
    # Compared as what they make: rows a step, steps an epoch, arithmetic.
    *("data.batch_size", "data.accumulate", "data.effective_batch", "precision", "trainer.limit_train_batches"),
    *("experiment", "data.builtin", "data.tweets", "data.tagged_tweets"),  # of checkpoints of earlier versions
    *(
        "monitor",
        "checkpoint",
        "callbacks",
        "output",
        "name",
        "resume",
        "resume_anyway",
        "allow_targets",
        "threads",
    ),
)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a command asks for, as the search for an earlier run compares it."""

    resume: str | None
    runs: Path
    """The folder of the runs of this name."""
    settings: dict[str, Any]
    """All settings as plain values."""
    overrides: Sequence[str]

    @property
    def length(self) -> dict[str, Any]:
        """How long it shall train."""
        return length_of(self.settings)


@dataclass(frozen=True, slots=True)
class Found:
    """A run to resume, or a new one."""

    folder: Path | None
    """None: a new run begins."""
    lines: list[str] = field(default_factory=list)
    """What the search has to report."""
    is_finished: bool = False
    """Whether everything it was asked for is done."""


def find_run(request: RunRequest) -> Found:
    """The run that `resume` asks for."""
    if request.resume is None:
        return Found(None)
    if request.resume != AUTO:
        folder = Path(request.resume).expanduser()
        read_summary(folder)  # refuses what is not the folder of a run
        return _found(request, folder.absolute())
    runs = sorted(request.runs.glob(f"*/{SUMMARY}"), key=lambda path: path.parent.name, reverse=True)
    same = [path.parent for path in runs if _is_same_command(path.parent, request)]
    if not same:
        count = f"none of the {len(runs)} runs" if runs else "no run"
        hint = "; resume=FOLDER resumes one of your choice" if runs else ""
        return Found(None, [f"resume: {count} in {request.runs} was begun by this command; a new one begins{hint}"])
    return _found(request, same[0].absolute())


def _found(request: RunRequest, folder: Path) -> Found:
    if read_summary(folder)["status"] == "finished" and _is_all_done(request, folder):
        return Found(folder, [f"resume: {folder} has finished; there is nothing left to train"], is_finished=True)
    return Found(folder)


def _is_same_command(folder: Path, request: RunRequest) -> bool:
    """Whether a run began with the same words, or from Python with the same settings; free ones may differ."""
    try:
        words = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
        if words or request.overrides:
            return _deciding(words) == _deciding(request.overrides)
        return deciding_settings(request.settings) == deciding_settings(_settings_in(folder))
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _settings_in(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    return settings


def _deciding(words: Sequence[str]) -> list[str]:
    free = (
        "data.batch_size",
        "data.accumulate",
        "data.effective_batch",
        "precision",
    )  # typed otherwise, it is another command
    kept = [word for word in words if not _is_free(word.lstrip("+~").partition("=")[0], but=free)]
    return sorted(kept)


_ADDED = {"optim.name": "adamw"}
"""Settings that earlier versions did not have, and what their runs did."""


def _is_free(key: str, but: Sequence[str] = ()) -> bool:
    return key not in but and any(key == name or key.startswith(f"{name}.") for name in _FREE)


def _is_all_done(request: RunRequest, folder: Path) -> bool:
    """Whether a finished run did all that is asked for: the same settings, and no more epochs, steps or time."""
    try:
        then = _settings_in(folder)
        now = deciding_settings(request.settings)
        is_same = now == _with_added(deciding_settings(then), now)
        return is_same and request.length == length_of(then)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False


def length_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide how long a run trains."""
    trainer = settings["trainer"]
    lengths = {name: plain(trainer.get(name)) for name in ("max_epochs", "max_steps", "max_time")}
    return {**lengths, "patience": settings["checkpoint"]["patience"]}


def about_run(
    settings: dict[str, Any], data_key: str, model: torch.nn.Module, feed: Feed, batches_in_epoch: int, precision: str
) -> dict[str, Any]:
    """The data, model, plan and settings of a run, as its checkpoints keep them; `settings` as plain values."""
    shapes = [(name, list(weight.shape)) for name, weight in model.named_parameters()]
    return {
        "data": data_key,
        "model": xxhash.xxh3_128_hexdigest(json.dumps(shapes).encode()),
        "plan": plan_facts(feed, batches_in_epoch),
        "precision": precision,
        "asked": length_of(settings),
        "settings": deciding_settings(settings),
        "torch": torch.__version__,
    }


def deciding_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings that decide what is trained, by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if _is_free(key):
            continue
        if isinstance(value, dict) and value:
            flat |= deciding_settings(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def require_same_run(then: dict[str, Any], now: dict[str, Any], *, anyway: bool) -> list[str]:
    """Refuse a checkpoint of another run, with the difference; the lines to print where it is taken anyway."""
    differences = list(_differences(then, now))
    lines = []
    if then.get("torch") != now["torch"]:
        lines.append(f"resume: saved with torch {then.get('torch')}, this is {now['torch']}: last digits may differ")
    if then.get("model") != now["model"]:
        what = "; ".join(["the model has other weights", *differences])
        hint = "Set the model back, or leave resume out: a new run begins."
        raise UserError("resume", f"this is not the run that was begun: {what}", hint=hint)
    if differences and not anyway:
        hint = "Set it back, or add resume_anyway=true to go on all the same; without resume a new run begins."
        raise UserError("resume", f"this is not the run that was begun: {'; '.join(differences)}", hint=hint)
    return [*lines, *(f"resume: resuming although {each}" for each in differences)]


def _with_added(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version, with those that it did not have yet as it ran."""
    return {**{key: value for key, value in _ADDED.items() if key in now}, **then}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    settings = _with_added(then.get("settings", {}), now["settings"]), now["settings"]
    plans = then.get("plan", {}), now["plan"]
    has_same_data = then.get("data") == now["data"]  # then the settings of an unused sample do not matter
    for before, after in (settings, plans, ({"precision": then.get("precision")}, {"precision": now["precision"]})):
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key) and not (has_same_data and key.startswith("data.sample")):
                yield f"{key} was {_shown(before.get(key))} and is {_shown(after.get(key))}"
    if not has_same_data:
        yield "the data or its encoding has changed"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def unfinished_before(request: RunRequest) -> str | None:
    """A line about an earlier run of this command that did not finish; None without one."""
    try:
        newest = max(request.runs.glob(f"*/{SUMMARY}"), key=lambda path: path.parent.name, default=None)
        if newest is None or not _is_same_command(newest.parent, request):
            return None
        status = read_summary(newest.parent)["status"]
        has_any = bool(newest_first(newest.parent / CHECKPOINTS))
    except (OSError, UserError):
        return None
    if status == "finished" or not has_any:
        return None
    return f"an earlier run of this command ended early ({os.path.relpath(newest.parent)}): resume=auto resumes it"

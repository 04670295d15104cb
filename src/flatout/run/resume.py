"""Find the run and the checkpoint to resume: `auto` is the newest run that this command has begun,
FOLDER names one.

The checkpoint is found by `checkpoints/kept.py` and compared by `checkpoints/same_run.py`. A new
start is reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flatout.checkpoints.folder import require_whole
from flatout.checkpoints.kept import CHECKPOINTS, Start, find_checkpoint, newest_first, set_aside
from flatout.checkpoints.same_run import (
    deciding_settings,
    have_same_settings,
    is_free,
    length_of,
    require_same_run,
)
from flatout.config import RunConfig
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, require
from flatout.files import home_expanded, load_yaml, read_modest
from flatout.masking import mask_words
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import plain, read_summary
from flatout.run.claimed_folders import OVERRIDES, SETTINGS, newest_runs, sort_runs
from flatout.run.context import Run
from flatout.run.whose_parts import parts_of


@dataclass(frozen=True, slots=True)
class RunToResume:
    """A run to resume, or a new one."""

    folder: Path | None  # None: a new run begins
    lines: list[str] = field(default_factory=list)  # what the search has to report
    is_finished: bool = False  # whether everything it was asked for is done


def find_run(
    config: RunConfig, overrides: Sequence[str], named: Sequence[Path] = ()
) -> RunToResume:
    """Find the run that `resume` asks for.

    `named` are folders that a user names for this run: `auto` then searches them and no others.
    """
    if config.resume is None:
        return RunToResume(None)
    settings = plain(config)
    if config.resume != "auto":
        folder = home_expanded(config.resume)
        read_summary(folder)  # refuses what is not the folder of a run
    else:
        searched = named[0] if named else Path(config.output, config.name)
        runs = _earlier_runs(config, named)
        if not (same := [run for run in runs if _is_same_command(run, settings, overrides)]):
            count = f"none of the {len(runs)} runs" if runs else "no run"
            hint = "; resume=FOLDER resumes one of your choice" if runs else ""
            begun = f"resume: {count} in {searched} was begun by this command"
            return RunToResume(None, [f"{begun}; a new one begins{hint}"])
        folder = same[0]
    folder = folder.absolute()
    compares_words = parts_of(config).compares_words
    is_same = not compares_words or _is_same_command(folder, settings, overrides)
    if is_same and read_summary(folder)["status"] == "finished" and _is_all_done(settings, folder):
        return RunToResume(
            folder,
            [f"resume: {folder} has finished; there is nothing left to train"],
            is_finished=True,
        )
    return RunToResume(folder)


def _earlier_runs(config: RunConfig, named: Sequence[Path]) -> list[Path]:
    """Runs that lie where this one would, the newest first."""
    if named:
        return sort_runs(folder for folder in named if (folder / SUMMARY).is_file())
    return newest_runs(Path(config.output, config.name), SUMMARY)


def _is_same_command(folder: Path, settings: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a run began with the same words, or from Python with the same settings; free ones may
    differ.
    """
    try:
        words = read_modest(folder / OVERRIDES).splitlines()
        if words or overrides:
            return _deciding(words) == _deciding(overrides)
        return have_same_settings(load_yaml(folder / SETTINGS), settings)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _deciding(words: Sequence[str]) -> list[str]:
    # Typed, it is another command.
    but = ("data.batch_size", "data.accumulate", "data.effective_batch", "precision", "model.reuse")
    return sorted(
        word for word in mask_words(words) if not is_free(word.lstrip("+~").partition("=")[0], but)
    )


def _is_all_done(settings: dict[str, Any], folder: Path) -> bool:
    """Whether a finished run did all that is asked for: the same settings, and no more epochs,
    steps or time.
    """
    try:
        then = load_yaml(folder / SETTINGS)
        return have_same_settings(then, settings) and length_of(settings) == length_of(then)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False


def unfinished_before(
    config: RunConfig, overrides: Sequence[str], named: Sequence[Path] = ()
) -> str | None:
    """A line about an earlier run of this command that did not finish; None without one."""
    # A hint, so whatever is wrong with that folder is passed over.
    try:
        newest = next(iter(_earlier_runs(config, named)), None)
        if newest is None or not _is_same_command(newest, plain(config), overrides):
            return None
        if read_summary(newest)["status"] == "finished" or not newest_first(newest / CHECKPOINTS):
            return None
    except (OSError, UserError):
        return None
    return (
        f"an earlier run of this command ended early ({os.path.relpath(newest)}): resume=auto"
        " resumes it"
    )


def find_start(run: Run) -> Start | None:
    """The checkpoint to resume from, where the run is still the same; None at the beginning."""
    config = run.settings.asked
    about = run.facts
    folder = run.folder
    starts = list[Start]()

    def look() -> str:
        if config.resume is None:
            return ""
        start, lines = find_checkpoint(folder.path / CHECKPOINTS)
        for line in lines:
            folder.say(line)
        # If all checkpoints are damaged, the user must decide. None at all is usual: the run was
        # killed before its first one.
        if start is None:
            why = (
                f"{folder.path} has {'no whole checkpoint left' if lines else 'no checkpoint yet'}"
            )
            require(
                not lines or config.resume_anyway,
                "resume",
                why,
                hint="Add resume_anyway=true to train it from the beginning.",
            )
            for line in [] if lines else _require_same_settings(folder.path, config, about):
                folder.say(line)
            folder.say(f"resume: {why}: it starts from the beginning")
            return ""
        starts.append(start)
        return str(start.checkpoint)

    # The first rank looks for all: every rank must resume from the same step.
    start = None
    if path := run.ranks.agreed("checkpoint", look):
        start = starts[0] if starts else read_same_start(Path(path), run.ranks.rank)
        for line in require_same_run(start.about, about, anyway=config.resume_anyway):
            folder.say(line)
        _require_more_to_train(run.settings.trainer, start)
        folder.summary.set("training.resumed_from", start.step)
        position = start.about["position"]
        folder.say(
            f"resume: continuing from step {start.step}, in epoch {position['epoch'] + 1} ({path})"
        )
    folder.begin()
    if start is None:
        folder.replaced.clear()  # what was there before is not continued
    if folder.is_first:
        # A resume has looked at all that are newer than its start, and found them damaged.
        set_aside(start, folder.path / CHECKPOINTS, are_damaged=config.resume is not None)
    return start


def read_same_start(checkpoint: Path, rank: int) -> Start:
    """The checkpoint that the first rank has found whole, as another rank sees it."""
    # Not require_whole's advice: here the first rank's disk has a good checkpoint, and its folder
    # must stay.
    hint = "Set output=FOLDER to a folder on it, or resume on the first rank's machine alone."
    require(
        checkpoint.is_dir(),
        "resume",
        f"rank {rank} does not see {checkpoint}: resume needs one disk",
        hint=hint,
    )
    try:
        return Start(checkpoint, require_whole(checkpoint))
    except UserError as error:
        raise UserError(
            "resume",
            f"rank {rank} sees other files in {checkpoint} than the first rank ({error.what}):"
            " resume needs one disk",
            hint=hint,
        ) from None


def _require_same_settings(folder: Path, config: RunConfig, about: dict[str, Any]) -> list[str]:
    """Of a run without a checkpoint only the settings can be compared; the lines to print."""
    try:
        then = deciding_settings(load_yaml(folder / SETTINGS))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return []
    now = about | {"settings": deciding_settings(plain(config))}
    return require_same_run(about | {"settings": then}, now, anyway=config.resume_anyway)


def _require_more_to_train(trainer: dict[str, Any], start: Start) -> None:
    epochs, most = trainer.get("max_epochs") or EPOCHS, trainer.get("max_steps") or -1
    begun = start.about["position"]["epoch"] + 1
    hint = "The run's model/ and report are what it has reached so far."
    require(
        epochs >= begun, "trainer.max_epochs", f"{epochs}, but epoch {begun} has begun", hint=hint
    )
    require(
        most == -1 or most >= start.step,
        "trainer.max_steps",
        f"{most}, but {start.step} are done",
        hint=hint,
    )

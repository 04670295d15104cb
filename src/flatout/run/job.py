"""`RunJob`: one run that a sweep, a ladder or Hydra's launcher can start, and can ask about.

It knows its metric before there is any data, and trains in a folder that it is given. It finds out
whether this very run has begun or finished in a folder. It can be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint
from flatout.config import RunConfig
from flatout.engine.run_length import validations
from flatout.errors import UserError
from flatout.files import read_modest
from flatout.masking import mask_words
from flatout.report.run_report import RunReport
from flatout.report.summary import read_summary
from flatout.run.claimed_folders import OVERRIDES
from flatout.run.closing import Result
from flatout.run.resume import find_run
from flatout.run.whose_parts import parts_of


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run, by its settings."""

    config: RunConfig

    def __post_init__(self) -> None:
        # its trials may train in other processes, on one device each
        parts_of(self.config).require_startable(self.config, 1, is_here=False)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.config.name

    @property
    def command(self) -> list[str]:
        """What is typed before its words to train it."""
        return ["python", "-m", "train"]

    @property
    def metric(self) -> str:
        """The validation metric that the settings name, else the usual one of the data's kind."""
        return parts_of(self.config).metric_of(self.config)

    @property
    def mode(self) -> str:
        """Whether its metric is better when higher (`max`) or lower (`min`)."""
        return parts_of(self.config).mode_of(self.config)

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from; some depend on the data, as those of two classes do."""
        return parts_of(self.config).metrics_of(self.config)

    @property
    def validations(self) -> int | None:
        """How many times it validates, if nothing stops it early; None: the data decide."""
        if parts_of(self.config).leaves_length_open(self.config):
            return None
        return validations(self.config.trainer)

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> Result:
        """Train it in a folder, from the beginning or from its last checkpoint."""
        # imported here: most jobs are only asked about
        from flatout.run.launch import start

        # trials of a sweep wait for each other, so neither a verdict nor a simple model is tried
        monitor = replace(self.config.monitor, verdict=False, rival=False)
        resume = str(folder) if resumes else None
        config = replace(self.config, monitor=monitor, resume=resume)
        # the folder is its trial's: nothing is claimed
        return start(config, folder=folder, overrides=overrides, claim=Path.absolute)

    def has_begun(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this run, with these words typed, has begun in a folder."""
        try:
            words = read_modest(folder / OVERRIDES).splitlines()
        except (OSError, UserError):
            return False
        return mask_words(words) == mask_words(overrides) and not folder.is_symlink()

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this run left an undamaged checkpoint in the folder."""
        if not self.has_begun(folder, overrides):
            return False
        start, _ = find_checkpoint(folder / CHECKPOINTS)
        return start is not None

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this run has nothing left to train in the folder."""
        if not self.has_begun(folder, overrides):
            return False
        try:
            return find_run(replace(self.config, resume=str(folder)), overrides).is_finished
        except UserError:  # no summary, or half of one: it is trained
            return False

    def read_ending(self, folder: Path) -> tuple[float, dict[str, float]]:
        """The seconds and the metrics of a run that has finished in a folder."""
        summary = read_summary(folder)
        report = RunReport(summary)
        return summary["training"]["seconds"] or 0.0, report.metrics | report.spent

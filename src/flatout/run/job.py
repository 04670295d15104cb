"""A run as a sweep sees it: what it compares, and how to train it in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint
from flatout.engine.run_length import validations
from flatout.errors import UserError
from flatout.run.build import RunBuilder
from flatout.run.launch import start
from flatout.run.resume import find_run
from flatout.run.run_folder import OVERRIDES
from flatout.run.stages import Result


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run that a sweep can start; it can be pickled."""

    build: RunBuilder

    @property
    def name(self) -> str:
        return self.build.name

    @property
    def seed(self) -> int:
        return self.build.seed

    @property
    def metric(self) -> str:
        """The validation metric that decides."""
        return self.build.metric

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from."""
        return self.build.metrics

    @property
    def validations(self) -> int:
        """How many times it validates, if nothing stops it early."""
        return validations(self.build.trainer)

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> Result:
        """Train it in a folder, from the beginning or from its last checkpoint."""
        build = self.build.without_trials().resuming(str(folder) if resumes else None)
        return start(build, folder=folder, overrides=overrides, claim=Path.absolute)  # the folder is its trial's

    def has_begun(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether a folder is of this very run, and of no other."""
        try:
            words = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return words == list(overrides) and not folder.is_symlink()

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run left a whole checkpoint in the folder."""
        return self.has_begun(folder, overrides) and find_checkpoint(folder / CHECKPOINTS)[0] is not None

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run has nothing left to train."""
        if not self.has_begun(folder, overrides):
            return False
        try:
            return find_run(self.build.resuming(str(folder)).request(overrides)).is_finished
        except UserError:  # no summary, or half of one: it is trained
            return False

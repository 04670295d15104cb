"""What a sweep searches and how: its settings, and the trial that some chosen values make."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.errors import UserError, as_choice, require
from flatout.sweep.durations import seconds
from flatout.sweep.space import Choice, Interval, Part, Space, words
from flatout.sweep.study import Pruner, Sampler
from flatout.sweep.trial import Job, Trial

Compose = Callable[[Sequence[str], int], Job]
"""Composes the run of a trial from what is typed for it; a user's mistake is a `UserError`."""


@dataclass(kw_only=True, slots=True)
class SweepSettings:
    """How a sweep searches."""

    trials: int = 20
    sampler: Sampler = Sampler.tpe
    pruner: Pruner = Pruner.asha
    metric: str | None = None
    time: str | None = None
    confirm: int = 0
    seed: int = 0
    resume: bool = False
    parallel: int = 1
    limit: str | None = None

    def __post_init__(self) -> None:
        self.sampler = as_choice(Sampler, self.sampler, "sampler")
        self.pruner = as_choice(Pruner, self.pruner, "pruner")
        require(self.trials >= 1, "trials", f"{self.trials}", allowed="1 or more")
        require(self.confirm >= 0, "confirm", f"{self.confirm}", allowed="0 or more")
        seconds(self.time, "for"), seconds(self.limit, "trial_for")
        if self.metric is not None:
            self.metric = self.metric.removeprefix("val/")

    def of_the_search(self) -> dict[str, Any]:
        """What must be the same when a sweep is resumed; you may ask for more trials, time or slots."""
        kept = {name: value for name, value in asdict(self).items() if name in ("sampler", "pruner", "metric", "seed")}
        return kept | ({"trials": None} if self.sampler is Sampler.grid else {})


@dataclass(frozen=True, slots=True)
class Begun:
    """The command that began a sweep."""

    typed: Sequence[str] = ()
    """Its words, to resume it by."""
    conf: str | None = None
    """The folder behind `--config-dir`."""
    command: str = ""
    """All of it, as a line to copy."""
    train: Sequence[str] = ()
    """What `python -m train` needs before the words of a trial."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What makes a trial of some settings."""

    settings: SweepSettings
    space: Space
    fixed: list[str]
    """Words that are the same in all trials."""
    compose: Compose
    folder: Path
    begun: Begun = Begun()

    def typed(self, chosen: Mapping[str, str]) -> list[str]:
        metric = self.settings.metric
        return [*self.fixed, *([f"checkpoint.metric={metric}"] if metric else []), *words(chosen)]

    def command(self, chosen: Mapping[str, str]) -> str:
        """The line that trains these settings again."""
        return shlex.join(["python", "-m", "train", *self.begun.train, *self.typed(chosen)])

    def trial(self, number: int, chosen: Mapping[str, str], name: str = "", *more: str) -> Trial:
        typed = [*self.typed(chosen), *more]
        folder = self.folder / (name or str(number))
        job = self.compose(typed, number)
        return Trial(number, folder, job, typed, [*words(chosen), *more], is_again=True, name=name)

    def first_that_fits(self, key: str | None = None, text: str = "") -> Trial:
        """A trial that can be composed, with this value where one is named; else what is wrong with the plainest one.

        Where others forbid a value (heads that do not divide a width), one of them is changed at a time.
        """
        plainest = {name: _example(part) for name, part in self.space.items()} | ({key: text} if key else {})
        mistake: UserError | None = None
        for chosen in (plainest, *self._near(plainest, key)):
            try:
                return self.trial(0, chosen)
            except UserError as error:
                mistake = mistake or error
        assert mistake is not None
        raise mistake

    def require_that_all_fit(self) -> None:
        """Refuse a value that no trial could have."""
        for key, part in self.space.items():
            for text in part.values if isinstance(part, Choice) else ():
                self.first_that_fits(key, text)

    def _near(self, chosen: dict[str, str], kept: str | None) -> Iterator[dict[str, str]]:
        for key, part in self.space.items():
            if key != kept and isinstance(part, Choice):
                yield from (chosen | {key: text} for text in part.values if text != chosen[key])


def _example(part: Part) -> str:
    return part.text(part.low) if isinstance(part, Interval) else part.values[0]

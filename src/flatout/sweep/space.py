"""The space of settings that a sweep searches: listed values or an interval for each.

Hydra's words, `optim.lr=tag(log,interval(1e-4,1e-1))`, become one `SettingValues` or
`SettingInterval` for each key. Each kind checks itself, suggests a value for a trial and writes it
as the text behind `key=`. Open this file to add a kind of values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import optuna

from flatout.errors import UserError, did_you_mean, require


@dataclass(frozen=True, slots=True)
class SettingValues:
    """Some values, as texts that stand behind `key=`."""

    values: tuple[str, ...]

    def check(self, key: str) -> None:
        require(
            bool(self.values),
            f"sweep: {key}",
            "nothing to choose from",
            hint="List values: choice(1,2) or interval(0,1).",
        )

    def suggest(self, trial: optuna.Trial, key: str) -> str:
        """The value of a trial; asked again, it is the same."""
        return trial.suggest_categorical(key, self.values)

    def listed(self, key: str) -> tuple[str, ...]:
        """Every value, for a grid."""
        return self.values

    def text(self, value: object) -> str:
        return str(value)

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True, slots=True)
class SettingInterval:
    """Numbers from a least to a largest one, both among them."""

    low: float
    high: float
    is_log: bool = False  # whether equal factors count as equal steps
    is_whole: bool = False
    step: int = 1

    def check(self, key: str) -> None:
        where, span = f"sweep: {key}", f"{self.low:g} to {self.high:g}"
        require(
            self.low <= self.high,
            where,
            span,
            allowed="the least number first",
            hint=f"Write interval({self.high:g},{self.low:g}).",
        )
        require(
            not self.is_log or self.low > 0,
            where,
            f"{span} by factors",
            allowed="numbers above 0",
            hint="Raise the least number above 0, or leave out tag(log,…).",
        )

    def sample(self) -> tuple[str, ...]:
        """A value of its kind, to be checked: of numbers one that is not whole."""
        return () if self.is_whole else (self.text(self.low + (self.high - self.low) / math.pi),)

    def suggest(self, trial: optuna.Trial, key: str) -> str:
        if not self.is_whole:
            return self.text(trial.suggest_float(key, self.low, self.high, log=self.is_log))
        step = 1 if self.is_log else self.step
        return self.text(
            trial.suggest_int(key, int(self.low), int(self.high), log=self.is_log, step=step)
        )

    def listed(self, key: str) -> Sequence[int]:
        if not self.is_whole:
            raise UserError(
                f"sweep: {key}",
                "an interval has too many values for a grid",
                hint="List values, as in choice(1e-3,1e-2), or set sampler=tpe.",
            )
        return range(int(self.low), int(self.high) + 1, self.step)

    def text(self, value: object) -> str:
        """Whole numbers as they are, others in four digits, between near ends in more: what is
        tried is written.
        """
        if self.is_whole:
            return str(value)
        largest = max(abs(self.low), abs(self.high), 1e-300)
        digits = 4 + int(math.log10(max(1.0, largest / max(self.high - self.low, 1e-13 * largest))))
        text = f"{float(str(value)):.{digits}g}"
        return (
            text
            if self.low <= float(text) <= self.high
            else repr(min(max(self.low, float(text)), self.high))
        )

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (", by factors" if self.is_log else "")


Part = SettingValues | SettingInterval
Space = dict[str, Part]


def is_by_factors(key: str, tags: Collection[str], *, is_interval: bool) -> bool:
    """What the tags of a setting ask for: `log` is the only one, for numbers of an interval."""
    where = f"sweep: {key}"
    hint = "Write tag(log,interval(1e-4,1e-1)), or leave tag out."
    for tag in sorted(tags):
        require(
            tag == "log",
            where,
            f"no tag {tag!r}",
            allowed="log",
            hint=did_you_mean(tag, ["log"]) or hint,
        )
        require(is_interval, where, "listed values have no factors between them", hint=hint)
    return bool(tags)


def grid(space: Space) -> list[dict[str, object]]:
    """Every combination, the last setting changing fastest."""
    lists = [part.listed(key) for key, part in space.items()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def words(settings: Mapping[str, str]) -> list[str]:
    """Settings as they are typed."""
    return [f"{key}={value}" for key, value in settings.items()]

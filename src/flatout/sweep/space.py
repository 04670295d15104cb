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
from typing import ClassVar

import optuna
import yaml

from flatout.errors import UserError, did_you_mean, require


@dataclass(frozen=True, slots=True)
class SettingValues:
    """Listed values, as the texts that stand behind `key=`."""

    values: tuple[str, ...]
    is_log: ClassVar[bool] = False  # only an interval can be searched by factors

    @property
    def plainest(self) -> str:
        """The value to compose a first trial with."""
        return self.values[0]

    @property
    def num_values(self) -> float:
        return len(self.values)

    def check(self, key: str) -> None:
        require(
            bool(self.values),
            f"sweep: {key}",
            "nothing to choose from",
            hint="List values: choice(1,2) or interval(0,1).",
        )

    def sample(self) -> tuple[str, ...]:
        """Values to compose before the sweep starts: all of them."""
        return self.values

    def suggest(self, trial: optuna.Trial, key: str) -> str:
        """The value of a trial; asked again, it is the same."""
        return trial.suggest_categorical(key, self.values)

    def listed(self, key: str) -> tuple[str, ...]:
        """Every value, for a grid."""
        return self.values

    def holds(self, value: object) -> bool:
        """Whether a value that was suggested before is one of them."""
        return value in self.values

    def text(self, value: object) -> str:
        return str(value)

    def parse(self, text: str) -> object:
        """The value that a text stands for on the command line: `"3"` → 3, `"[1,2]"` → a list."""
        return yaml.safe_load(text)

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True, slots=True)
class SettingInterval:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False  # whether equal factors count as equal steps
    is_whole: bool = False
    step: int = 1

    @property
    def plainest(self) -> str:
        return self.text(self.low)

    @property
    def num_values(self) -> float:
        """How many values there are; infinitely many if they are fractions."""
        if self.low == self.high:
            return 1
        return len(self.listed("")) if self.is_whole else math.inf

    def check(self, key: str) -> None:
        where = f"sweep: {key}"
        span = f"{self.low:g} to {self.high:g}"
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
        """Values to compose before the sweep starts: a fraction, unless numbers are whole.

        A setting of whole numbers then refuses an interval of fractions at once.
        """
        if self.is_whole:
            return ()
        # pi is not rational: such a part of the way is hardly ever a whole number
        return (self.text(self.low + (self.high - self.low) / math.pi),)

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

    def holds(self, value: object) -> bool:
        """Whether a value that was suggested before is a number in it."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def text(self, value: object) -> str:
        """The text of a number, rounded to four digits or more; the run trains with the text.

        The nearer the ends are to each other, the more digits:

            1e-4 to 1e-1:        0.00123456 → "0.001235"
            1.0000 to 1.0001:    1.00004321 → "1.0000432"
        """
        if self.is_whole:
            return str(value)
        largest = max(abs(self.low), abs(self.high), 1e-300)
        # Leading digits that the whole interval shares tell no values apart, so as many more are
        # kept. A double has some sixteen digits, so there are never more than thirteen of them.
        width = max(self.high - self.low, 1e-13 * largest)
        digits = 4 + int(math.log10(max(1.0, largest / width)))
        text = f"{float(str(value)):.{digits}g}"
        rounded = float(text)
        if self.low <= rounded <= self.high:
            return text
        # rounding has passed an end: the end itself, in all its digits
        return repr(min(max(self.low, rounded), self.high))

    def parse(self, text: str) -> int | float:
        return int(text) if self.is_whole else float(text)

    def __str__(self) -> str:
        how = ", by factors" if self.is_log else ""
        return f"{self.low:g} to {self.high:g}{how}"


Part = SettingValues | SettingInterval
Space = dict[str, Part]


def is_by_factors(key: str, tags: Collection[str], *, is_interval: bool) -> bool:
    """Whether the tags of a setting ask for equal factors.

    `log` is the only tag there is, and only numbers of an interval can have it.
    """
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
    """Every combination of the listed values, the last setting changing fastest."""
    lists = [part.listed(key) for key, part in space.items()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def words(settings: Mapping[str, str]) -> list[str]:
    """Settings as the words of a command line: `{"optim.lr": "0.1"}` → `["optim.lr=0.1"]`."""
    return [f"{key}={value}" for key, value in settings.items()]

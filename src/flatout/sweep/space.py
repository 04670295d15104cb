"""What a sweep searches: for each setting a choice of values or an interval, in Optuna's terms and as you type it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from flatout.errors import UserError, did_you_mean, require


@dataclass(frozen=True, slots=True)
class Choice:
    """Some values, as texts that stand behind `key=`."""

    values: tuple[str, ...]

    def distribution(self, key: str) -> CategoricalDistribution:
        require(
            bool(self.values),
            f"sweep: {key}",
            "nothing to choose from",
            hint="List values: choice(1,2) or interval(0,1).",
        )
        return CategoricalDistribution(self.values)

    def listed(self, key: str) -> tuple[str, ...]:
        """Every value, for a grid."""
        return self.values

    def text(self, value: object) -> str:
        return str(value)

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from a least to a largest one, both among them."""

    low: float
    high: float
    is_log: bool = False
    """Whether equal factors count as equal steps."""
    is_whole: bool = False
    step: int = 1

    def distribution(self, key: str) -> FloatDistribution | IntDistribution:
        where, span = f"sweep: {key}", f"{self.low:g} to {self.high:g}"
        hint = f"Write interval({self.high:g},{self.low:g})."
        require(self.low <= self.high, where, span, allowed="the least number first", hint=hint)
        hint = "Raise the least number above 0, or leave out tag(log,…)."
        require(not self.is_log or self.low > 0, where, f"{span} by factors", allowed="numbers above 0", hint=hint)
        if self.is_whole:
            return IntDistribution(int(self.low), int(self.high), log=self.is_log, step=1 if self.is_log else self.step)
        return FloatDistribution(self.low, self.high, log=self.is_log)

    def listed(self, key: str) -> tuple[str, ...]:
        if not self.is_whole:
            hint = "List values, as in choice(1e-3,1e-2), or set sampler=tpe."
            raise UserError(f"sweep: {key}", "an interval has too many values for a grid", hint=hint)
        return tuple(str(number) for number in range(int(self.low), int(self.high) + 1, self.step))

    def text(self, value: object) -> str:
        """Whole numbers as they are, others in four digits: what is tried is what can be written down."""
        return str(value) if self.is_whole else f"{float(str(value)):.4g}"

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (", by factors" if self.is_log else "")


Part = Choice | Interval
Space = dict[str, Part]


def suggested(trial: optuna.Trial, key: str, part: Part) -> str:
    """One setting of a trial, as the text that stands behind `key=`; asked again, it is the same."""
    kind = part.distribution(key)
    if isinstance(kind, CategoricalDistribution):
        return part.text(trial.suggest_categorical(key, kind.choices))
    if isinstance(kind, IntDistribution):
        return part.text(trial.suggest_int(key, kind.low, kind.high, log=kind.log, step=kind.step))
    return part.text(trial.suggest_float(key, kind.low, kind.high, log=kind.log))


def is_by_factors(key: str, tags: Collection[str], *, is_interval: bool) -> bool:
    """What the tags of a setting ask for: `log` is the only one, for numbers of an interval."""
    where, hint = f"sweep: {key}", "Write tag(log,interval(1e-4,1e-1)), or leave tag out."
    for tag in sorted(tags):
        require(tag == "log", where, f"no tag {tag!r}", allowed="log", hint=did_you_mean(tag, ["log"]) or hint)
        require(is_interval, where, "listed values have no factors between them", hint=hint)
    return bool(tags)


def grid(space: Space) -> list[dict[str, object]]:
    """Every combination, the last setting changing fastest."""
    lists = [[_as_suggested(part, text) for text in part.listed(key)] for key, part in space.items()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def words(settings: Mapping[str, str]) -> list[str]:
    """Settings as they are typed."""
    return [f"{key}={value}" for key, value in settings.items()]


def _as_suggested(part: Part, text: str) -> object:
    return int(text) if isinstance(part, Interval) else text

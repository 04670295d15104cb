"""Measure settings within the time and memory that a search has, and remember their speeds.

`OpenSettings` says what is searched and within which limits. `Speeds` asks the prober for each
measurement, refuses sizes that would take too much memory, and adds a row to the table of attempts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flatout.data.feeding import FeedKind
from flatout.engine.precision import Precision
from flatout.perf.tune.answers import Answers, Attempt, NoAnswer
from flatout.perf.tune.reading import predicted_bytes
from flatout.perf.tune.settings import TuneConfig

if TYPE_CHECKING:
    from flatout.perf.tune.probe import Child, Here, ProbedSetting, SettingMeasurement

_PROBES_A_SEARCH = 6  # a probe takes at most this part of the time that is left
NO_TIME = "the time was spent"
"""Why a setting was not measured, where there was no time for it."""


@dataclass(slots=True, kw_only=True)
class OpenSettings:
    """Which settings are searched, and the limits of the search."""

    settings: TuneConfig
    # The settings as they are; where nothing was set, by the rules that need no measurement.
    start: ProbedSetting
    feeds: list[FeedKind] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)
    step_rows: int  # rows of one device in an optimizer step
    num_rows: int  # rows of the training split
    most_rows: int | None = None  # most rows at once that may be chosen; None: what fits
    planned_steps: int  # optimizer steps of the run
    # Settings that are not searched, with the reason; with "" nothing is printed of them.
    settled: dict[str, str] = field(default_factory=dict)
    room_bytes: int  # memory that may be taken; the margin is subtracted already
    is_cpu: bool
    is_capped: bool = False  # whether tokens, not rows, decide how much is computed at once
    counts_time: bool = True  # whether the search may take only a share of the expected run
    compile_why_not: str = ""  # why compiling is not tried


def allowed_seconds(open_settings: OpenSettings, step_s: float) -> float:
    """How long the search may take, if a step takes `step_s`."""
    settings = open_settings.settings
    if not open_settings.counts_time:
        return settings.budget_s
    return min(settings.budget_s, settings.share * open_settings.planned_steps * step_s)


class Speeds:
    """Measures settings, and remembers the speed of each; every attempt is a row of the table."""

    def __init__(self, open_settings: OpenSettings, prober: Child | Here, answers: Answers) -> None:
        self.open_settings = open_settings
        self.prober = prober
        self.answers = answers
        self.began = time.time()
        self.until = self.began + open_settings.settings.budget_s
        # Facts of the model, which the prober knows before anything is computed.
        self.about: dict[str, Any] = {}
        # All measurements of a setting, the latest last.
        self.seen: dict[ProbedSetting, list[SettingMeasurement]] = {}
        # Bytes of small sizes, by precision and rows; measured only to predict larger ones.
        self._small: dict[tuple[Precision, int], int] = {}
        self._probe_s = 0.0  # of the longest probe so far

    def attempt(self, setting: ProbedSetting, purpose: str) -> SettingMeasurement | NoAnswer:
        """Measure a setting if there is time for it; else note that there was none."""
        if self.affords(1):
            return self.measure(setting, purpose)
        self.answers.is_complete = False
        row = Attempt(what=purpose, value=_value(setting, purpose), verdict=f"not run: {NO_TIME}")
        self.answers.tried.append(row)
        return NoAnswer(NO_TIME)

    def measure(
        self, setting: ProbedSetting, purpose: str, steps: int | None = None
    ) -> SettingMeasurement | NoAnswer:
        """Measure a setting, even if the time is over.

        `NoAnswer` if it takes too much memory: by a prediction before, or as measured.
        """
        row = Attempt(what=purpose, value=_value(setting, purpose))
        self.answers.tried.append(row)
        room = f"{self.open_settings.room_bytes / 1e9:.1f} GB may be taken"
        # Only on a CPU: a GPU that is full raises an error, which does no harm.
        predicted = self._predict_bytes(setting) if self.open_settings.is_cpu else None
        if predicted is not None and predicted > self.open_settings.room_bytes:
            row.memory_gb = predicted / 1e9
            row.is_predicted = True
            row.verdict = f"not run: {room}"
            why = f"{setting.rows} rows at once would take {row.memory_gb:.1f} GB, {room}"
            return NoAnswer(why, is_memory=True)
        began = time.time()
        steps = steps or self.open_settings.settings.steps
        probes = 1 if purpose == "compile" else _PROBES_A_SEARCH
        soon = began + (self.until - began) / probes
        measured = self.prober.ask("measure", self.until, setting=setting, steps=steps, until=soon)
        took_s = time.time() - began
        if isinstance(measured, NoAnswer):
            row.verdict = measured.why
            return measured
        row.rows_per_s = measured.rows_per_s
        row.tokens_per_s = measured.tokens_per_s
        row.memory_gb = measured.peak_bytes / 1e9
        if purpose == "memory":
            row.verdict = "to predict what more rows take"
            self._small[setting.precision, setting.rows] = measured.peak_bytes
            return measured
        if purpose != "compile":  # a compile takes much longer than a probe
            self._probe_s = max(self._probe_s, took_s)
        if measured.peak_bytes > self.open_settings.room_bytes:
            row.verdict = f"too much memory: {room}"
            return NoAnswer(row.verdict, is_memory=True)
        self.seen.setdefault(setting, []).append(measured)
        row.verdict = f"{measured.steps} steps, {1000 * measured.step_s:.1f} ms each"
        return measured

    def _predict_bytes(self, setting: ProbedSetting) -> int | None:
        """Memory that a setting will take, from smaller sizes; None if they do not tell it.

        Sizes in another precision serve if there are none in its own. Then all memory that grows
        with the rows is counted twice, as the other numbers may be half as wide.
        """
        if self.open_settings.is_capped:
            return None
        peaks = dict(self._small)
        for measured, measurements in self.seen.items():
            if not measured.compile:
                peak = max(measurement.peak_bytes for measurement in measurements)
                peaks[measured.precision, measured.rows] = peak
        alike = []
        others = []
        for (precision, rows), peak in peaks.items():
            if precision is setting.precision and rows < setting.rows:
                alike.append((rows, peak))
            if rows <= setting.rows:
                others.append((rows, peak))
        base = self.about["base_bytes"]
        fixed = self.about["fixed_bytes"]
        if alike:
            return predicted_bytes(alike, setting.rows, base=base, fixed=fixed)
        if not others or (setting.precision, setting.rows) in peaks:
            return None
        predicted = predicted_bytes(others, setting.rows, base=base, fixed=fixed)
        return predicted + max(0, predicted - base - fixed)

    def rate(self, setting: ProbedSetting) -> float:
        """Rows a second, the best of all measurements: other processes can only slow one down.

        0 if it was not measured.
        """
        measurements = self.seen.get(setting, [])
        return max((measurement.rows_per_s for measurement in measurements), default=0.0)

    def affords(self, probes: int) -> bool:
        """Whether there is time for so many probes."""
        return time.time() + probes * self._probe_s <= self.until

    def unrest(self) -> float:
        """The fastest measurement of a setting over its slowest one: the largest such ratio."""
        largest = 1.0
        for measurements in self.seen.values():
            rates = [measurement.rows_per_s for measurement in measurements]
            largest = max(largest, max(rates) / min(rates))
        return round(largest, 2)


def _value(setting: ProbedSetting, purpose: str) -> str:
    rows = f"{setting.rows} × {setting.accumulate}"
    shown = {"feed": str(setting.feed), "precision": str(setting.precision), "compile": "true"}
    shown["as set"] = f"{setting.feed}, {setting.precision}, {rows}"
    return shown.get(purpose.removesuffix(" again"), rows)

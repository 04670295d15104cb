"""What was measured so far: the speed and the memory of each setting, within the time and the
memory there is.
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

_PROBES_A_SEARCH = 6


@dataclass(slots=True, kw_only=True)
class OpenSettings:
    """What is open, and what it is measured against."""

    settings: TuneConfig
    start: ProbedSetting  # the settings as they are, with the rules' answers where nothing was set
    feeds: list[FeedKind] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)
    step_rows: int  # rows of one device in an optimizer step
    num_rows: int  # rows of the training split
    most_rows: int | None = None  # most rows at once that may be chosen; None: what fits
    planned_steps: int
    # not looked at, and why; empty without a reason to print
    kept: dict[str, str] = field(default_factory=dict)
    room_bytes: int  # memory that may be taken, the margin left out
    is_cpu: bool
    is_capped: bool = False  # whether tokens, not rows, decide how much is computed at once
    counts_time: bool = True  # whether the expected run bounds the time; false for a search alone
    compile_why_not: str = ""


def allowed_seconds(asked: OpenSettings, step_s: float) -> float:
    """What measuring may take, once it is known what a step takes."""
    settings = asked.settings
    run_s = asked.planned_steps * step_s
    return (
        min(settings.budget_s, settings.share * run_s) if asked.counts_time else settings.budget_s
    )


class Speeds:
    """Measures settings and knows what each has reached; every try becomes a line of the answers'
    table.
    """

    def __init__(self, asked: OpenSettings, prober: Child | Here, answers: Answers) -> None:
        self.asked = asked
        self.prober = prober
        self.answers = answers
        self.began = time.time()
        self.until = self.began + asked.settings.budget_s
        # what the prober knows of the model before anything is computed
        self.about: dict[str, Any] = {}
        # each time that a setting was measured, the latest last
        self.seen: dict[ProbedSetting, list[SettingMeasurement]] = {}
        # most memory of sizes tried to predict others
        self._small: dict[tuple[Precision, int], int] = {}
        self._probe_s = 0.0

    def attempt(self, setting: ProbedSetting, what: str) -> None:
        """Measure where the time allows it."""
        if self.affords(1):
            self.measure(setting, what)
            return
        self.answers.is_complete = False
        row = Attempt(what=what, value=_value(setting, what), verdict="not run: the time was spent")
        self.answers.tried.append(row)

    def measure(
        self, setting: ProbedSetting, what: str, steps: int | None = None
    ) -> SettingMeasurement | NoAnswer:
        """Measure, whatever the time; what would take too much memory is refused before, or
        afterwards.
        """
        row = Attempt(what=what, value=_value(setting, what))
        self.answers.tried.append(row)
        room = f"{self.asked.room_bytes / 1e9:.1f} GB may be taken"
        predicted = self._predicted(setting) if self.asked.is_cpu else None
        if predicted is not None and predicted > self.asked.room_bytes:
            row.memory_gb = predicted / 1e9
            row.is_predicted = True
            row.verdict = f"not run: {room}"
            return NoAnswer(
                f"{setting.rows} rows at once would take {row.memory_gb:.1f} GB, {room}",
                is_memory=True,
            )
        began = time.time()
        steps = steps or self.asked.settings.steps
        soon = began + (self.until - began) / (_PROBES_A_SEARCH if what != "compile" else 1)
        found = self.prober.ask("measure", self.until, setting=setting, steps=steps, until=soon)
        took_s = time.time() - began
        if isinstance(found, NoAnswer):
            row.verdict = found.why
            return found
        row.rows_per_s = found.rows_per_s
        row.tokens_per_s = found.tokens_per_s
        row.memory_gb = found.peak_bytes / 1e9
        if what == "memory":
            row.verdict = "to predict what more rows take"
            self._small[setting.precision, setting.rows] = found.peak_bytes
            return found
        if what != "compile":  # which takes much longer than a probe
            self._probe_s = max(self._probe_s, took_s)
        if found.peak_bytes > self.asked.room_bytes:
            row.verdict = f"too near the edge: {room}"
            return NoAnswer(row.verdict, is_memory=True)
        self.seen.setdefault(setting, []).append(found)
        row.verdict = f"{found.steps} steps, {1000 * found.step_s:.1f} ms each"
        return found

    def _predicted(self, setting: ProbedSetting) -> int | None:
        """Memory that a size will take which was not tried yet; None where nothing was that tells
        it.
        """
        if self.asked.is_capped:
            return None
        seen = dict(self._small)
        for each, found in self.seen.items():
            if not each.compile:
                seen[each.precision, each.rows] = max(one.peak_bytes for one in found)
        base, fixed = self.about["base_bytes"], self.about["fixed_bytes"]
        fewer = [(name, rows, peak) for (name, rows), peak in seen.items() if rows <= setting.rows]
        if alike := [
            (rows, peak)
            for name, rows, peak in fewer
            if name is setting.precision and rows < setting.rows
        ]:
            return predicted_bytes(alike, setting.rows, base=base, fixed=fixed)
        if not fewer or (setting.precision, setting.rows) in seen:
            return None
        there = predicted_bytes([each[1:] for each in fewer], setting.rows, base=base, fixed=fixed)
        return there + max(0, there - base - fixed)  # as if all that grows were twice as wide

    def rate(self, setting: ProbedSetting) -> float:
        """Rows a second, the best of all tries: others on the machine only ever slow one down."""
        return max((found.rows_per_s for found in self.seen.get(setting, [])), default=0.0)

    def affords(self, probes: int) -> bool:
        return time.time() + probes * self._probe_s <= self.until

    def unrest(self) -> float:
        """The fastest of several tries of one setting, over the slowest; the largest
        such number.
        """
        rates = [[each.rows_per_s for each in found] for found in self.seen.values()]
        return round(max((max(each) / min(each) for each in rates), default=1.0), 2)


def _value(setting: ProbedSetting, what: str) -> str:
    rows = f"{setting.rows} × {setting.accumulate}"
    shown = {"feed": str(setting.feed), "precision": str(setting.precision), "compile": "true"}
    shown["as set"] = f"{setting.feed}, {setting.precision}, {rows}"
    return shown.get(what.removesuffix(" again"), rows)

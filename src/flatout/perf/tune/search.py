"""Search settings before training, one after the other and within a budget of seconds.

The order is feed, precision, rows at once, learning rate, compile (`_DECISIONS`). The settings as
they are get measured first. Another feed or precision must be faster by `gain` in two measurements,
in which the two values take turns. So must other rows at once, where a step keeps its rows. The
other settings have rules of their own (`_double`, `_decide_rate`, `_decide_compile`). Settings for
which there was no time stay unchanged, and the run reports that. Open this file to change how one
of the settings is chosen, or the reason that is printed for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from flatout.data.feeding import FeedKind
from flatout.engine.precision import Precision
from flatout.perf.notes import known_rows
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, NoAnswer, TuneAnswer
from flatout.perf.tune.probe import Child, Here, ProbedSetting, SettingMeasurement
from flatout.perf.tune.reading import (
    MOST_DOUBLED_ROWS,
    RANGE_STEPS,
    divisors,
    doublings,
    first_guess,
    suggested,
)
from flatout.perf.tune.settings import StepRows
from flatout.perf.tune.speeds import NO_TIME, OpenSettings, Speeds, allowed_seconds

_SMALL = 8  # rows; on a CPU their memory is measured first, to predict the memory of more
_LEAST_PROBES = 2  # if there is no time for so many more, no other value is tried
_COMPILE_S = 20.0  # a guess: what a compile takes at least
_COMPILE_GAIN = 0.4  # a guess: the fraction of a step that it saves at most
_LEAST_STEPS_AN_EPOCH = 8
_ROUNDS_AGAIN = 3  # chances of a precision whose first measurement fell into a slow moment
_MOST_MISSES = 2  # sizes in a row that are not faster; one may be noise
_LOSS_ROWS = 32  # most rows whose loss is compared between precisions

# The chosen value, the reason, and the measurements behind it.
Decision: TypeAlias = tuple[object, str, str]


class Search:
    """One search of the open settings. Call `decide` once."""

    def __init__(
        self, open_settings: OpenSettings, prober: Child | Here, store: AnswerStore
    ) -> None:
        self.open_settings = open_settings
        self.prober = prober
        self.store = store
        self.settings = open_settings.settings
        self.answers = Answers()
        self.speeds = Speeds(open_settings, prober, self.answers)
        self.now = open_settings.start
        # Most rows at once, from a note of an earlier run that ran out of memory.
        self._rows_that_fit: int | None = None
        # Why sizes were not measured, by their rows at once.
        self._refusals: dict[int, NoAnswer] = {}

    def decide(self) -> Answers:
        """Search all open settings; the answers also say why, if no other value was tried."""
        try:
            why_none = self._decide()
        finally:
            self.prober.close()
        if why_none:
            self.answers.values = {}
            self.answers.is_complete = False
            spent = f"{time.time() - self.speeds.began:.1f} s spent"
            self._note_choice("tune", "nothing is changed", why_none, spent)
        self.answers.seconds = round(time.time() - self.speeds.began, 2)
        self.answers.unrest = self.speeds.unrest()
        self.answers.row_key = self.speeds.about.get("row_keys", {}).get(
            str(self.now.precision), ""
        )
        return self.answers

    def _decide(self) -> str:
        """Search one setting after the other.

        Returns why no other value was tried; empty if some were.
        """
        start = self.open_settings.start
        as_set = {
            "data.feed": start.feed,
            "precision": start.precision,
            "data.batch_size": f"{start.rows}",
            "compile": str(start.compile).lower(),
        }
        for name, why in self.open_settings.settled.items():
            if why:
                shown = as_set.get(name, "as set")
                self._note_choice(_DECISIONS[name][0], shown, f"kept: {why}", f"{name}={shown}")
        first = self._begin()
        if isinstance(first, NoAnswer):
            return f"nothing was measured: {first.why}"
        self.answers.step_s = first.step_s
        self.answers.planned_steps = self.open_settings.planned_steps
        self.answers.allowed_s = allowed_seconds(self.open_settings, first.step_s)
        self.speeds.until = self.speeds.began + self.answers.allowed_s
        if not self.speeds.affords(_LEAST_PROBES):
            why = "too little to measure anything"
            settings = self.settings
            if self.answers.allowed_s < settings.budget_s:
                run_s = f"the run takes about {self._run_s(first):,.0f} s"
                return f"{run_s}, {settings.share:.0%} of it is {why}"
            return f"{settings.budget_s:g} s are {why}"
        for key, (name, decide) in _DECISIONS.items():
            if key not in self.open_settings.settled:
                self._note_choice(name, *decide(self))
        return ""

    def _note_choice(self, name: str, value: object, why: str, evidence: str) -> None:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self.answers.choices.append(TuneAnswer(name=name, value=shown, why=why, evidence=evidence))

    def _run_s(self, measured: SettingMeasurement) -> float:
        """Seconds of the whole run at this speed, by its rows: the number of steps may change."""
        return (
            self.open_settings.planned_steps
            * self.open_settings.step_rows
            / max(measured.rows_per_s, 1e-9)
        )

    def _begin(self) -> SettingMeasurement | NoAnswer:
        """Measure the settings as they are; with fewer rows at once if so many do not fit."""
        about = self.prober.ask("about", self.speeds.until)
        if isinstance(about, NoAnswer):
            return about
        self.speeds.about = about
        start = self.open_settings.start
        rows_are_open = "data.batch_size" not in self.open_settings.settled
        if rows_are_open:
            self._rows_that_fit = known_rows(self.store.cache, about["row_keys"][start.precision])
        sizes = self._sizes()
        if self._rows_that_fit is not None and start.rows > self._rows_that_fit:
            start = self._with_rows(start, sizes[-1])
        if self.open_settings.is_cpu and start.rows > _SMALL and not self.open_settings.is_capped:
            # The memory of a few rows predicts that of more: a CPU's memory must not run out.
            small = max([rows for rows in divisors(start.rows) if rows <= _SMALL])
            few_rows = replace(start, rows=small, accumulate=1)
            memory = self.speeds.measure(few_rows, "memory", steps=2)
            if isinstance(memory, NoAnswer):
                return memory
        smaller = [rows for rows in reversed(sizes) if rows < start.rows]
        measured = self.speeds.measure(start, "as set")
        while isinstance(measured, NoAnswer):
            if not measured.is_memory or not smaller or not rows_are_open:
                return measured
            start = self._with_rows(start, smaller.pop(0))
            measured = self.speeds.measure(start, "as set")
        self.now = start
        return measured

    def _sizes(self) -> list[int]:
        """Rows at once that may be chosen, smallest first; at least one size.

        Where the rows of a step are kept these are its divisors (12 → 1, 3, 6, 12), else also
        doublings, up to `MOST_DOUBLED_ROWS`. Sizes above a limit are left out; one is always left.
        """
        if self.settings.effective_batch is StepRows.kept:
            sizes = divisors(self.open_settings.step_rows)
        else:
            set_rows = self.open_settings.start.rows
            most = max(set_rows, self.open_settings.num_rows // _LEAST_STEPS_AN_EPOCH)
            sizes = [*divisors(set_rows), *doublings(2 * set_rows, most)]
        allowed = sizes
        for limit in (self._rows_that_fit, self.open_settings.most_rows):
            if limit is not None:
                allowed = [rows for rows in allowed if rows <= limit]
        return allowed or sizes[:1]

    def _with_rows(self, setting: ProbedSetting, rows: int) -> ProbedSetting:
        is_kept = self.settings.effective_batch is StepRows.kept
        accumulate = self.open_settings.step_rows // rows if is_kept else 1
        return replace(setting, rows=rows, accumulate=accumulate)

    def _decide_feed(self) -> Decision:
        """The fastest feed in the step; others are tried only if steps wait for this one."""
        kinds, before = self.open_settings.feeds, self.now.feed
        alone = self.prober.ask("feeds", self.speeds.until, kinds=[str(kind) for kind in kinds])
        if isinstance(alone, NoAnswer):
            return before, "not measured", alone.why
        row = Attempt(what="feed alone", value="", verdict="no model behind it")
        self.answers.tried += [
            replace(row, value=kind, rows_per_s=rate) for kind, rate in alone.items()
        ]
        share = self.speeds.seen[self.now][-1].wait_share
        listed = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in alone.items())
        evidence = f"alone, rows/s: {listed}; {share:.1%} of a step waits for {before}"
        self.answers.values["data.feed"] = str(before)
        if share < self.settings.gain:
            return before, "no other can save enough to count", evidence
        others = [kind for kind in kinds if kind is not before]
        for kind in sorted(others, key=lambda kind: -alone.get(kind, 0.0)):
            self.speeds.attempt(replace(self.now, feed=kind), "feed")
        self._keep_faster([replace(self.now, feed=kind) for kind in others], "feed")
        self.answers.values["data.feed"] = str(self.now.feed)
        if not all(self.speeds.rate(replace(self.now, feed=kind)) for kind in kinds):
            why = "fastest of those that could be measured in the step"
        elif self.now.feed is before:
            why = "nothing faster in the step"
        else:
            why = "fastest in the step"
        evidence += f"; in the step: {self._rates('feed', kinds)}"
        return self.now.feed, why, evidence

    def _decide_precision(self) -> Decision:
        """The fastest precision whose loss is near that of fp32; fp32 unless another is faster."""
        names = [str(precision) for precision in self.open_settings.precisions]
        if len(names) == 1:
            self.answers.values["precision"] = names[0]
            why = "the only one this device has in hardware"
            return names[0], why, "no native sixteen bits"
        rows = min(_LOSS_ROWS, self.now.rows)
        losses = self.prober.ask("losses", self.speeds.until, precisions=names, rows=rows)
        if isinstance(losses, NoAnswer):
            return self.now.precision, "not measured", losses.why
        listed = ", ".join(f"{name} {losses[name]:.4f}" for name in names)
        listed = f"loss on the same rows: {listed}"
        if not math.isfinite(losses[Precision.fp32]):
            return self.now.precision, "the loss in fp32 is not finite", listed
        sound = self._sound_precisions(losses)
        measured = [
            precision
            for precision in sound
            if self.speeds.rate(replace(self.now, precision=precision))
        ]
        if Precision.fp32 not in measured:
            return self.now.precision, "fp32 was not measured", listed
        # fp32 is exact, so a 16-bit format has to be faster to be chosen.
        before = self.now
        self.now = replace(before, precision=Precision.fp32)
        if before.precision in measured and before != self.now:
            self._measure_until_it_wins(before)
        others = [
            replace(self.now, precision=precision)
            for precision in measured
            if precision != Precision.fp32
        ]
        self._keep_faster(others, "precision")
        evidence = f"{self._rates('precision', measured)}; {listed}"
        refused = [name for name in names if name not in sound]
        if refused:
            tolerance = f"over {self.settings.loss_tolerance:.1%} from fp32"
            evidence += f"; refused: {', '.join(refused)}, {tolerance}"
        is_exact = self.now.precision is Precision.fp32
        if len(measured) < len(sound):
            why = "fastest of those that could be measured"
        elif is_exact:
            why = "nothing faster is as exact"
        else:
            why = "fastest, and the loss is that of fp32"
        self.answers.values["precision"] = str(self.now.precision)
        return self.now.precision, why, evidence

    def _measure_until_it_wins(self, challenger: ProbedSetting) -> None:
        """Measure the current setting and the challenger again, in turn, until it wins.

        The challenger is what the device's rule chooses, and a few slow moments are no reason to
        drop it. It gets `_ROUNDS_AGAIN` rounds, within the time.
        """
        for _ in range(_ROUNDS_AGAIN):
            if self._wins(challenger) or not self.speeds.affords(2):
                return
            self.speeds.measure(self.now, "precision again")
            self.speeds.measure(challenger, "precision again")

    def _sound_precisions(self, losses: dict[str, float]) -> list[Precision]:
        """Precisions whose loss is near enough to that of fp32; measures the speed of each."""
        exact = losses[Precision.fp32]
        tolerated = self.settings.loss_tolerance * abs(exact)
        sound = []
        for precision in self.open_settings.precisions:
            if abs(losses[precision] - exact) <= tolerated:
                sound.append(precision)
                setting = replace(self.now, precision=precision)
                if not self.speeds.rate(setting):
                    self.speeds.attempt(setting, "precision")
            else:
                verdict = f"refused: its loss is {losses[precision]:.4f}, that of fp32 {exact:.4f}"
                self.answers.tried.append(
                    Attempt(what="precision", value=str(precision), verdict=verdict)
                )
        return sound

    def _decide_rows(self) -> Decision:
        """The fastest number of rows at once that fits into memory."""
        before = self.now
        sizes = self._sizes()
        start = self.open_settings.start
        is_kept = self.settings.effective_batch is StepRows.kept
        if is_kept:
            self._climb(sizes)
        else:
            self._double(sizes)
        now = self.now
        self.answers.values["data.batch_size"] = now.rows
        self.answers.values["data.accumulate"] = now.accumulate
        step = f"{now.rows * now.accumulate} rows of a device in a step"
        start_did_not_fit = before.rows != start.rows
        if start_did_not_fit and now.rows <= before.rows:
            why = f"{start.rows} do not fit; {step}"
        elif not is_kept:
            why = f"{self._why_not_doubled(sizes)}; {step}, {self.open_settings.step_rows} were set"
        elif any(refusal.why == NO_TIME for refusal in self._refusals.values()):
            why = f"fastest of those that there was time for; still {step}"
        elif now.rows != start.rows:
            why = f"fastest; still {step}"
        else:
            why = f"nothing faster for {step}"
        rates = {rows: self.speeds.rate(self._with_rows(now, rows)) for rows in sizes}
        listed = ", ".join(f"{rows}: {rate:,.0f}" for rows, rate in rates.items() if rate)
        peak_gb = max(measured.peak_bytes for measured in self.speeds.seen[now]) / 1e9
        room_gb = self.open_settings.room_bytes / 1e9
        memory = f"with the longest rows {peak_gb:.1f} of {room_gb:.1f} GB"
        evidence = f"rows/s by rows at once: {listed}; {memory}"
        return f"{now.rows} × {now.accumulate}", why, evidence

    def _why_not_doubled(self, sizes: list[int]) -> str:
        """Why a step that may grow does not get twice as many rows."""
        rows = self.now.rows
        larger = [size for size in sizes if size > rows]
        if not larger:
            return self._why_no_larger_size()
        refusal = self._refusals.get(larger[0])
        if refusal is None:
            return f"twice as many bring less than {self.settings.gain:.0%}"
        if refusal.is_memory:
            return f"{larger[0]} do not fit"
        return f"{larger[0]} were not measured: {refusal.why}"

    def _why_no_larger_size(self) -> str:
        """Why the current size is the largest one that may be chosen."""
        double = 2 * self.now.rows
        if self._rows_that_fit is not None and double > self._rows_that_fit:
            return "an earlier run had no memory for twice as many"
        if self.open_settings.most_rows is not None and double > self.open_settings.most_rows:
            return f"at most {self.open_settings.most_rows:,} are allowed"
        if double > self.open_settings.num_rows // _LEAST_STEPS_AN_EPOCH:
            return f"with twice as many an epoch has fewer than {_LEAST_STEPS_AN_EPOCH} steps"
        return f"more than {MOST_DOUBLED_ROWS:,} are not tried"

    def _climb(self, sizes: list[int]) -> None:
        """Choose rows at once for steps of the same rows: larger sizes first, then smaller ones.

        Sizes 8, 16, 32, 64, 128 with 32 set: tries 64, then 128. Where neither is faster, tries 16,
        then 8.
        """
        start = self.now.rows
        larger = [rows for rows in sizes if rows > start]
        smaller = [rows for rows in reversed(sizes) if rows < start]
        for direction in (larger, smaller):
            self._follow(direction)
            if self.now.rows != start:
                return

    def _follow(self, sizes: list[int]) -> None:
        """Try sizes in this order, and take each that is faster, until some in a row are not."""
        misses = 0
        for rows in sizes:
            setting = self._with_rows(self.now, rows)
            self._attempt_rows(setting)
            is_faster = self._keep_faster([setting], "rows at once")
            misses = 0 if is_faster else misses + 1
            if misses == _MOST_MISSES:
                return

    def _double(self, sizes: list[int]) -> None:
        """Choose the smallest size, from the set one on, of which the double is hardly faster.

        Hardly: by less than `gain`. On a GPU the first size is a guess by its memory. It goes up
        while twice as many rows are faster by `gain`. Where the first step up is not, it goes down
        while the size below is about as fast.

        Sizes 8, 16, 32, 64, 128, of which 8 was set, and a guess of 32: 64 pays, 128 does not, so
        64 is taken. Where 64 does not pay, 32 is compared with 16. Where 32 does not pay either, 16
        is compared with 8, and so on.
        """
        ladder = [rows for rows in sizes if rows >= self.now.rows]
        about = self.speeds.about
        guess = ladder[0]
        if not self.open_settings.is_cpu:
            by_memory = first_guess(
                self.open_settings.room_bytes, about["weights"], about["longest"]
            )
            guess = max(guess, by_memory)
        rung = max(number for number, rows in enumerate(ladder) if rows <= guess)
        while rung and not self._rate_of_rows(ladder[rung]):
            rung -= 1  # so many do not fit, or there is no time
        first = rung
        while rung + 1 < len(ladder) and self._pays(ladder[rung], ladder[rung + 1]):
            rung += 1
        if rung == first:
            while rung and not self._pays(ladder[rung - 1], ladder[rung]):
                rung -= 1
        chosen = self._with_rows(self.now, ladder[rung])
        if self.speeds.rate(chosen):
            self.now = chosen

    def _pays(self, rows: int, more: int) -> bool:
        """Whether `more` rows at once are faster than `rows` by the gain that counts."""
        fewer_rate = self._rate_of_rows(rows)
        more_rate = self._rate_of_rows(more)
        return more_rate >= fewer_rate * (1 + self.settings.gain)

    def _rate_of_rows(self, rows: int) -> float:
        """Rows a second with so many at once, measured now if needed; 0 if that is impossible."""
        setting = self._with_rows(self.now, rows)
        if not self.speeds.rate(setting):
            self._attempt_rows(setting)
        return self.speeds.rate(setting)

    def _attempt_rows(self, setting: ProbedSetting) -> None:
        """Measure a number of rows at once, or remember why that was impossible."""
        measured = self.speeds.attempt(setting, "rows at once")
        if isinstance(measured, NoAnswer):
            self._refusals[setting.rows] = measured

    def _decide_rate(self) -> Decision:
        """A learning rate by a range test."""
        step_s = self.speeds.seen[self.now][-1].step_s
        until = self.speeds.until
        # The test ends with the time. Half of its steps may be enough.
        if time.time() + RANGE_STEPS * step_s / 2 > until:
            self.answers.is_complete = False
            why = f"{RANGE_STEPS} steps take longer than the time that is left"
            return "as set", "not measured", why
        self.prober.close()  # the next question starts a new process, with untrained weights
        tested = self.prober.ask("range", until, setting=self.now, until=until)
        if isinstance(tested, NoAnswer):
            return "as set", "not measured", tested.why
        rates = tested["rates"]
        suggestion = suggested(rates, tested["losses"])
        if suggestion is None:
            steps = f"{len(rates)} steps up to a rate of {rates[-1]:.1e}" if rates else "no step"
            return "as set", "the loss does not fall anywhere", steps
        rate, evidence = suggestion
        self.answers.values["optim.lr"] = rate
        self.prober.close()  # the range test has spoilt its weights
        return f"{rate:g}", "the loss falls fastest there", evidence

    def _decide_compile(self) -> Decision:
        """Whether compiling saves more seconds of the run than it takes."""
        self.answers.values["compile"] = False
        run_s = self._run_s(self.speeds.seen[self.now][-1])
        why_not_tried = self._why_no_compile(run_s)
        if why_not_tried:
            return False, "not tried", why_not_tried
        self.prober.close()  # compiling cannot be undone: a new process
        compiled = self.speeds.measure(
            replace(self.now, compile=True), "compile", steps=self.settings.steps
        )
        if isinstance(compiled, NoAnswer):
            return False, "a compiled step failed here", compiled.why
        saved_s = run_s - self._run_s(compiled)
        rate = self.speeds.rate(self.now)
        speeds = f"{compiled.rows_per_s:,.0f} rows/s against {rate:,.0f}"
        evidence = f"{speeds}; compiled in {compiled.warm_s:.0f} s"
        is_faster = compiled.rows_per_s > rate * (1 + self.settings.gain)
        if not is_faster or saved_s <= compiled.warm_s:
            evidence += f"; {max(saved_s, 0):.0f} s saved"
            return False, "it saves too little in this run", evidence
        self.answers.values["compile"] = True
        return True, f"it saves about {saved_s:,.0f} s of this run", evidence

    def _why_no_compile(self, run_s: float) -> str:
        """Why compiling is not tried in a run of so many seconds; empty if it is."""
        if self.open_settings.compile_why_not:
            return self.open_settings.compile_why_not
        if self.speeds.about["is_recurrent"]:
            return "recurrent layers break the compiled graph"
        if run_s * _COMPILE_GAIN < _COMPILE_S:
            return f"the run takes about {run_s:,.0f} s, a compile {_COMPILE_S:.0f} s or more"
        left_s = self.speeds.until - time.time()
        if left_s < _COMPILE_S:
            self.answers.is_complete = False
            return f"{max(left_s, 0):.0f} s are left, a compile takes {_COMPILE_S:.0f} s or more"
        return ""

    def _keep_faster(self, challengers: list[ProbedSetting], purpose: str) -> bool:
        """Replace the current setting by the fastest challenger that wins; return whether one did.

        It must win twice: by the measurements so far, and after both were measured again, if there
        is time for that.
        """
        measured = [challenger for challenger in challengers if self.speeds.rate(challenger)]
        for challenger in sorted(measured, key=self.speeds.rate, reverse=True):
            if not self._wins(challenger):
                return False
            if self.speeds.affords(2) and not self._wins_again(challenger, purpose):
                continue
            self.now = challenger
            return True
        return False

    def _wins_again(self, challenger: ProbedSetting, purpose: str) -> bool:
        now_again = self.speeds.measure(self.now, f"{purpose} again")
        challenger_again = self.speeds.measure(challenger, f"{purpose} again")
        if isinstance(now_again, NoAnswer) or isinstance(challenger_again, NoAnswer):
            return False
        return self._wins(challenger)

    def _wins(self, challenger: ProbedSetting) -> bool:
        return self.speeds.rate(challenger) > self.speeds.rate(self.now) * (1 + self.settings.gain)

    def _rates(self, name: str, values: Sequence[FeedKind] | Sequence[Precision]) -> str:
        """The speeds of the current setting with each of these values, as one text."""
        listed = []
        for value in values:
            changed: dict[str, Any] = {name: value}
            rate = self.speeds.rate(replace(self.now, **changed))
            if rate:
                listed.append(f"{value!s} {rate:,.0f} rows/s")
        return ", ".join(listed)


# The searched settings in their order: by key, the name that a run prints, and the method.
_DECISIONS: dict[str, tuple[str, Callable[[Search], Decision]]] = {
    "data.feed": ("feed", Search._decide_feed),
    "precision": ("precision", Search._decide_precision),
    "data.batch_size": ("micro-batch", Search._decide_rows),
    "optim.lr": ("optim.lr", Search._decide_rate),
    "compile": ("compile", Search._decide_compile),
}

"""The search before training: feed, precision, rows at once, learning rate, compile, in turn and
within a budget.

The settings as they are come first. Another value takes the place of one only where it is faster by
`gain` twice, the two measured in turn. What the time was too short for stays unchanged, and the run
reports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flatout.engine.precision import Precision
from flatout.perf.notes import known_rows
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, NoAnswer, TuneAnswer
from flatout.perf.tune.probe import Child, Here, ProbedSetting, SettingMeasurement
from flatout.perf.tune.reading import RANGE_STEPS, divisors, doublings, first_guess, suggested
from flatout.perf.tune.settings import StepRows
from flatout.perf.tune.speeds import OpenSettings, Speeds, allowed_seconds

_SMALL = 8  # rows at once on a CPU whose memory is seen before that of more is predicted
_LEAST_PROBES = 2  # where not even so many more fit into the time, nothing is measured
# a guess: what a compile takes at least, and can save of a step at most
_COMPILE_S = 20.0
_COMPILE_GAIN = 0.4
_LEAST_STEPS_AN_EPOCH = 8


class Search:
    """One search; `decide` once."""

    def __init__(self, asked: OpenSettings, prober: Child | Here, store: AnswerStore) -> None:
        self.asked = asked
        self.prober = prober
        self.store = store
        self.settings = asked.settings
        self.answers = Answers()
        self.speeds = Speeds(asked, prober, self.answers)
        self.now = asked.start
        self._most: int | None = None  # rows at once that are known to fit, where more once did not

    def decide(self) -> Answers:
        try:
            why_none = self._decide()
        finally:
            self.prober.close()
        if why_none:
            self.answers.values = {}
            self.answers.is_complete = False
            spent = f"{time.time() - self.speeds.began:.1f} s spent"
            self.answers.choices.append(_choice("tune", "nothing is changed", why_none, spent))
        self.answers.seconds = round(time.time() - self.speeds.began, 2)
        self.answers.unrest = self.speeds.unrest()
        self.answers.row_key = self.speeds.about.get("row_keys", {}).get(
            str(self.now.precision), ""
        )
        return self.answers

    def _decide(self) -> str:
        """Decide one after the other; why nothing is measured, where nothing is."""
        start = self.asked.start
        as_set = {
            "data.feed": start.feed,
            "precision": start.precision,
            "data.batch_size": f"{start.rows}",
        }
        as_set |= {"compile": str(start.compile).lower()}
        for name, why in self.asked.kept.items():
            if why:
                shown = as_set.get(name, "as set")
                self.answers.choices.append(
                    _choice(_DECISIONS[name][0], shown, f"kept: {why}", f"{name}={shown}")
                )
        if isinstance(first := self._begin(), NoAnswer):
            return f"nothing was measured: {first.why}"
        self.answers.step_s, self.answers.planned_steps = first.step_s, self.asked.planned_steps
        self.answers.allowed_s = allowed_seconds(self.asked, first.step_s)
        self.speeds.until = self.speeds.began + self.answers.allowed_s
        if not self.speeds.affords(_LEAST_PROBES):
            why = "too little to measure anything"
            settings = self.settings
            if self.answers.allowed_s < settings.budget_s:
                return (
                    f"the run takes about {self._run_s(first):,.0f} s, {settings.share:.0%} of it"
                    f" is {why}"
                )
            return f"{settings.budget_s:g} s are {why}"
        for name, (_, decide) in _DECISIONS.items():
            if name not in self.asked.kept:
                self.answers.choices.append(decide(self))
        return ""

    def _run_s(self, found: SettingMeasurement) -> float:
        """Seconds of the whole run at this speed, its rows and not its steps counted: these may
        change.
        """
        return self.asked.planned_steps * self.asked.step_rows / max(found.rows_per_s, 1e-9)

    def _begin(self) -> SettingMeasurement | NoAnswer:
        if isinstance(about := self.prober.ask("about", self.speeds.until), NoAnswer):
            return about
        self.speeds.about = about
        start = self.asked.start
        if "data.batch_size" not in self.asked.kept:
            self._most = known_rows(self.store.cache, about["row_keys"][start.precision])
        sizes = self._sizes()
        if self._most is not None and start.rows > self._most:
            start = self._with_rows(start, sizes[-1])
        if self.asked.is_cpu and start.rows > _SMALL and not self.asked.is_capped:
            small = max([rows for rows in divisors(start.rows) if rows <= _SMALL], default=1)
            seen = self.speeds.measure(replace(start, rows=small, accumulate=1), "memory", steps=2)
            if isinstance(seen, NoAnswer):
                return seen
        smaller = [rows for rows in reversed(sizes) if rows < start.rows]
        while isinstance(found := self.speeds.measure(start, "as set"), NoAnswer):
            if not found.is_memory or not smaller or "data.batch_size" in self.asked.kept:
                return found
            start = self._with_rows(start, smaller.pop(0))
        self.now = start
        return found

    def _sizes(self) -> list[int]:
        """Rows at once that may be chosen, smallest first."""
        if self.settings.effective_batch is StepRows.kept:
            sizes = divisors(self.asked.step_rows)
        else:
            most = max(self.asked.start.rows, self.asked.num_rows // _LEAST_STEPS_AN_EPOCH)
            sizes = [*divisors(self.asked.start.rows), *doublings(2 * self.asked.start.rows, most)]
        limits = [most for most in (self._most, self.asked.most_rows) if most is not None]
        return [rows for rows in sizes if all(rows <= most for most in limits)] or sizes[:1]

    def _with_rows(self, setting: ProbedSetting, rows: int) -> ProbedSetting:
        is_kept = self.settings.effective_batch is StepRows.kept
        return replace(
            setting, rows=rows, accumulate=self.asked.step_rows // rows if is_kept else 1
        )

    def _decide_feed(self) -> TuneAnswer:
        kinds, before = self.asked.feeds, self.now.feed
        alone = self.prober.ask("feeds", self.speeds.until, kinds=[str(kind) for kind in kinds])
        if isinstance(alone, NoAnswer):
            return _choice("feed", before, "not measured", alone.why)
        row = Attempt(what="feed alone", value="", verdict="no model behind it")
        self.answers.tried += [
            replace(row, value=kind, rows_per_s=rate) for kind, rate in alone.items()
        ]
        share = self.speeds.seen[self.now][-1].wait_share
        listed = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in alone.items())
        evidence = f"alone, rows/s: {listed}; {share:.1%} of a step waits for {before}"
        self.answers.values["data.feed"] = str(before)
        if share < self.settings.gain:
            return _choice("feed", before, "no other can save as much as counts", evidence)
        others = [kind for kind in kinds if kind is not before]
        for kind in sorted(others, key=lambda kind: -alone.get(kind, 0.0)):
            self.speeds.attempt(replace(self.now, feed=kind), "feed")
        self._keep_faster([replace(self.now, feed=kind) for kind in others], "feed")
        self.answers.values["data.feed"] = str(self.now.feed)
        why = "nothing faster in the step" if self.now.feed is before else "fastest in the step"
        return _choice(
            "feed", self.now.feed, why, f"{evidence}; in the step: {self._rates('feed', kinds)}"
        )

    def _decide_precision(self) -> TuneAnswer:
        names = [str(each) for each in self.asked.precisions]
        if len(names) == 1:
            self.answers.values["precision"] = names[0]
            return _choice(
                "precision",
                names[0],
                "the only one this device has in hardware",
                "no native sixteen bits",
            )
        found = self.prober.ask(
            "losses", self.speeds.until, precisions=names, rows=min(32, self.now.rows)
        )
        if isinstance(found, NoAnswer):
            return _choice("precision", self.now.precision, "not measured", found.why)
        sound = self._sound(found)
        losses = ", ".join(f"{name} {found[name]:.4f}" for name in names)
        losses = f"loss on the same rows: {losses}"
        seen = [each for each in sound if self.speeds.rate(replace(self.now, precision=each))]
        if Precision.fp32 not in seen:
            return _choice("precision", self.now.precision, "fp32 was not measured", losses)
        # From the exact one: sixteen bits must bring something.
        ruled, self.now = self.now, replace(self.now, precision=Precision.fp32)
        # a try may be unlucky
        for _ in range(3 if ruled.precision in seen and ruled != self.now else 0):
            if self._wins(ruled) or not self.speeds.affords(2):
                break
            # what the rule says is not given up for a few slow moments
            for setting in (self.now, ruled):
                self.speeds.measure(setting, "precision again")
        self._keep_faster(
            [replace(self.now, precision=each) for each in seen if each != Precision.fp32],
            "precision",
        )
        evidence = f"{self._rates('precision', seen)}; {losses}"
        if refused := [name for name in names if name not in sound]:
            evidence += (
                f"; refused: {', '.join(refused)}, over {self.settings.loss_tolerance:.1%} from"
                " fp32"
            )
        is_exact = self.now.precision is Precision.fp32
        why = "nothing faster is as exact" if is_exact else "fastest, and the loss is that of fp32"
        self.answers.values["precision"] = str(self.now.precision)
        return _choice("precision", self.now.precision, why, evidence)

    def _sound(self, losses: dict[str, float]) -> list[Precision]:
        """Arithmetic whose loss is near enough to that of fp32; each is measured."""
        exact = losses[Precision.fp32]
        sound = []
        tolerated = self.settings.loss_tolerance * abs(exact)  # of one that is no number nothing is
        for each in self.asked.precisions:
            if abs(losses[each] - exact) <= tolerated:
                sound.append(each)
                if not self.speeds.rate(setting := replace(self.now, precision=each)):
                    self.speeds.attempt(setting, "precision")
            else:
                verdict = f"refused: its loss is {losses[each]:.4f}, that of fp32 {exact:.4f}"
                self.answers.tried.append(
                    Attempt(what="precision", value=str(each), verdict=verdict)
                )
        return sound

    def _decide_rows(self) -> TuneAnswer:
        before = self.now
        sizes = self._sizes()
        start = self.asked.start
        is_kept = self.settings.effective_batch is StepRows.kept
        (self._climb if is_kept else self._double)(sizes)
        now = self.now
        self.answers.values |= {"data.batch_size": now.rows, "data.accumulate": now.accumulate}
        rates = {rows: self.speeds.rate(self._with_rows(now, rows)) for rows in sizes}
        listed = ", ".join(f"{rows}: {rate:,.0f}" for rows, rate in rates.items() if rate)
        step = f"{now.rows * now.accumulate} rows of a device in a step"
        if before.rows != start.rows and now.rows <= before.rows:
            why = f"{start.rows} do not fit; {step}"
        elif is_kept:
            why = (
                f"fastest; still {step}" if now.rows != start.rows else f"nothing faster for {step}"
            )
        else:
            why = (
                f"twice as many bring less than {self.settings.gain:.0%}; {step},"
                f" {self.asked.step_rows} were set"
            )
        peak = max(each.peak_bytes for each in self.speeds.seen[now]) / 1e9
        memory = f"with the longest rows {peak:.1f} of {self.asked.room_bytes / 1e9:.1f} GB"
        evidence = f"rows/s by rows at once: {listed}; {memory}"
        return _choice("micro-batch", f"{now.rows} × {now.accumulate}", why, evidence)

    def _climb(self, sizes: list[int]) -> None:
        """To larger sizes, or else to smaller ones, until two in a row are not faster; the rows of
        a step stay.
        """
        for up in (True, False):
            start = self.now.rows
            misses = 0
            for rows in sizes if up else reversed(sizes):
                if rows <= start if up else rows >= start:
                    continue
                setting = self._with_rows(self.now, rows)
                self.speeds.attempt(setting, "rows at once")
                misses = 0 if self._keep_faster([setting], "rows at once") else misses + 1
                if misses == 2:  # one may be noise
                    break
            if self.now.rows != start:
                return

    def _double(self, sizes: list[int]) -> None:
        """From the first guess up, or else down, to the fewest rows as fast as twice as many; not
        below what is set.
        """
        ladder = [rows for rows in sizes if rows >= self.now.rows]
        about = self.speeds.about
        guess = (
            0
            if self.asked.is_cpu
            else first_guess(self.asked.room_bytes, about["weights"], about["longest"])
        )
        place = max(number for number, rows in enumerate(ladder) if rows <= max(guess, ladder[0]))
        while place and not self._rate_of_rows(ladder[place]):
            place -= 1
        first = place
        while place + 1 < len(ladder) and self._pays(ladder[place], ladder[place + 1]):
            place += 1
        while place == first and place and not self._pays(ladder[place - 1], ladder[place]):
            place, first = place - 1, first - 1
        chosen = self._with_rows(self.now, ladder[place])
        if self.speeds.rate(chosen):
            self.now = chosen

    def _pays(self, rows: int, more: int) -> bool:
        slow, fast = self._rate_of_rows(rows), self._rate_of_rows(more)
        return fast >= slow * (1 + self.settings.gain)

    def _rate_of_rows(self, rows: int) -> float:
        setting = self._with_rows(self.now, rows)
        if not self.speeds.rate(setting):
            self.speeds.attempt(setting, "rows at once")
        return self.speeds.rate(setting)

    def _decide_rate(self) -> TuneAnswer:
        step_s, until = self.speeds.seen[self.now][-1].step_s, self.speeds.until
        if time.time() + RANGE_STEPS * step_s / 2 > until:
            self.answers.is_complete = False
            why = f"{RANGE_STEPS} steps take longer than the time that is left"
            return _choice("optim.lr", "as set", "not measured", why)
        self.prober.close()  # what was measured before has trained its weights
        found = self.prober.ask("range", until, setting=self.now, until=until)
        if isinstance(found, NoAnswer):
            return _choice("optim.lr", "as set", "not measured", found.why)
        rates = found["rates"]
        if (suggestion := suggested(rates, found["losses"])) is None:
            seen = f"{len(rates)} steps up to a rate of {rates[-1]:.1e}" if rates else "no step"
            return _choice("optim.lr", "as set", "the loss does not fall anywhere", seen)
        self.answers.values["optim.lr"], evidence = suggestion
        self.prober.close()  # such steps have spoilt the weights
        return _choice("optim.lr", f"{suggestion[0]:g}", "the loss falls fastest there", evidence)

    def _decide_compile(self) -> TuneAnswer:
        self.answers.values["compile"] = False
        run_s = self._run_s(self.speeds.seen[self.now][-1])
        left_s = self.speeds.until - time.time()
        why = self.asked.compile_why_not
        if not why and self.speeds.about["is_recurrent"]:
            why = "recurrent layers break the compiled graph"
        if not why and run_s * _COMPILE_GAIN < _COMPILE_S:
            why = f"the run takes about {run_s:,.0f} s, a compile {_COMPILE_S:.0f} s or more"
        if not why and left_s < _COMPILE_S:
            why = f"{max(left_s, 0):.0f} s are left, a compile takes {_COMPILE_S:.0f} s or more"
            self.answers.is_complete = False
        if why:
            return _choice("compile", False, "not tried", why)
        self.prober.close()  # what is compiled stays so
        found = self.speeds.measure(
            replace(self.now, compile=True), "compile", steps=self.settings.steps
        )
        if isinstance(found, NoAnswer):
            return _choice("compile", False, "it did not come to an end here", found.why)
        saved_s = run_s - self._run_s(found)
        rate = self.speeds.rate(self.now)
        evidence = (
            f"{found.rows_per_s:,.0f} rows/s against {rate:,.0f}; compiled in {found.warm_s:.0f} s"
        )
        if found.rows_per_s <= rate * (1 + self.settings.gain) or saved_s <= found.warm_s:
            evidence += f"; {max(saved_s, 0):.0f} s saved"
            return _choice("compile", False, "it does not pay in this run", evidence)
        self.answers.values["compile"] = True
        return _choice("compile", True, f"it saves about {saved_s:,.0f} s of this run", evidence)

    def _keep_faster(self, challengers: list[ProbedSetting], what: str) -> bool:
        """Put the fastest challenger in the place of what is, if it wins twice; whether one did."""
        for challenger in sorted(
            filter(self.speeds.rate, challengers), key=self.speeds.rate, reverse=True
        ):
            if not self._wins(challenger):
                return False
            if self.speeds.affords(2):
                again = [
                    self.speeds.measure(each, f"{what} again") for each in (self.now, challenger)
                ]
                if any(isinstance(each, NoAnswer) for each in again) or not self._wins(challenger):
                    continue
            self.now = challenger
            return True
        return False

    def _wins(self, challenger: ProbedSetting) -> bool:
        return self.speeds.rate(challenger) > self.speeds.rate(self.now) * (1 + self.settings.gain)

    def _rates(self, what: str, values: Any) -> str:
        settings = {str(value): replace(self.now, **{what: value}) for value in values}
        known = {name: self.speeds.rate(setting) for name, setting in settings.items()}
        return ", ".join(f"{name} {rate:,.0f} rows/s" for name, rate in known.items() if rate)


def _choice(name: str, value: object, why: str, evidence: str) -> TuneAnswer:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return TuneAnswer(name=name, value=shown, why=why, evidence=evidence)


_DECISIONS: dict[str, tuple[str, Callable[[Search], TuneAnswer]]] = {
    "data.feed": ("feed", Search._decide_feed),
    "precision": ("precision", Search._decide_precision),
    "data.batch_size": ("micro-batch", Search._decide_rows),
    "optim.lr": ("optim.lr", Search._decide_rate),
    "compile": ("compile", Search._decide_compile),
}  # what is decided, in this order: the name that a run prints, and how

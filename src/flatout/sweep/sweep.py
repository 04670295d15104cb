"""A sweep, from its first trial to its page: settings are suggested, trials run and pruned, the
best one confirmed.

Everything lies in the sweep's folder: `sweep.json` (what was asked for), `journal.log` (Optuna's
study), a run's folder for each trial, and `sweep.csv` and `sweep.html`. A sweep that was killed
resumes from there. `confirmed.json` holds the best settings' results with other seeds.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from optuna.trial import FrozenTrial
from rich.console import Console

from flatout.errors import RunBroke, UserError, as_seconds, require
from flatout.files import write_atomically
from flatout.report.dashboard import write_hyperparameters
from flatout.report.summary import json_safe
from flatout.report.sweep_page import SweepReport, TrialRow, spread, write_sweep
from flatout.sweep.many import to_go_on
from flatout.sweep.searched import Searched, forget, held
from flatout.sweep.settings import Pruner, Sampler
from flatout.sweep.space import Part, SettingInterval, SettingValues, grid, words
from flatout.sweep.study import ENDED, Study
from flatout.sweep.trial import Ask, Board, Ending, Judge, Status, Trial
from flatout.sweep.trials import TOO_LONG, Slots, endings, last_line, slots
from flatout.tasks.metrics import require_metric

if TYPE_CHECKING:
    from flatout.run.job import RunJob

_SAME_MISTAKES = 3  # so many trials in a row that fail by the same mistake end the sweep
_OF_METRIC = "checkpoint.metric: "
_SHARE = 0.02  # of the time, the most that is spent on writing the page while trials run
# runs trials that it asks for, so many; each as it ends
Runner = Callable[[Ask, int], Iterator[tuple[Trial, Ending]]]


def sweep(searched: Searched) -> None:
    """Search a space of settings, or resume the search."""
    started = time.monotonic()
    folder = searched.folder
    first = _checked(searched)
    shares = slots(searched.launcher.parallel, searched.launcher.place)
    with held(searched):
        run = _Run(searched, first.job, shares, started)
        try:
            with to_go_on(f"python -m flatout sweep resume {shlex.quote(str(folder))}"):
                run.search()
                run.confirm()
        except _NoSuchMetric:
            forget(folder, run.study.total)
            raise
        except BaseException:
            run.write()
            raise
        run.say_best(run.write())


def _checked(searched: Searched) -> Trial:
    """Refuse a wrong sweep before it has a folder; a trial that can be composed."""
    settings, space = searched.settings, searched.space
    as_seconds(searched.launcher.limit, "trial_for")
    require(
        bool(space),
        "sweep",
        "nothing to search",
        hint="Set +sweep=NAME, or write key=choice(a,b) for a setting.",
    )
    for key, part in space.items():
        part.check(key)
    if settings.sampler is Sampler.grid:
        grid(space)
    first = searched.first_that_fits()
    if not settings.resume:  # a resumed sweep keeps its space: such a trial fails
        for key, part in space.items():
            for text in part.values if isinstance(part, SettingValues) else part.sample():
                searched.first_that_fits(key, text)
    if settings.metric is not None:
        require_metric(first.job.metric, first.job.metrics, "metric")
    return first


class _NoSuchMetric(UserError):
    """The data of a sweep has no such metric."""


class _Run:
    """A sweep from its start, or its resumption, to its end, and what is known of its trials, as
    files and lines.
    """

    def __init__(self, searched: Searched, job: RunJob, slots: Slots, started: float) -> None:
        self.searched = searched
        self.slots = slots
        self.metric = job.metric
        self.name = job.config.name
        self.confirmation = SweepConfirmation()
        self._next_page = 0.0
        settings = searched.settings
        self.study = Study(
            searched.folder, searched.space, settings, mode=job.mode, validations=job.validations
        )
        self.limit_s = as_seconds(searched.launcher.limit, "trial_for")
        time_s = as_seconds(settings.time, "for")
        self.until = None if time_s is None else started + time_s
        self._mistakes: list[str] | None = []

    def search(self) -> None:
        """Run trials until there are enough, or the time is over."""
        ended = self.study.ended()
        settings = self.searched.settings
        folder = self.searched.folder
        how_many = (
            "trials, each setting there is," if settings.sampler is Sampler.grid else "trials"
        )
        how = f"{self.study.total} {how_many} by {settings.sampler}, pruning: {settings.pruner}"
        print(f"sweep in {folder}: {how}, by val/{self.metric}")
        if ended:
            print(f"resumed: {len(ended)} of {max(len(ended), self.study.total)} trials have ended")
        for known in ended:
            self._count_mistake(
                bool(known.user_attrs.get("is_mistake")), known.user_attrs.get("note", "")
            )
        judge = None if settings.pruner is Pruner.none else self._judge
        for trial, ending in self._endings(self._ask, self.study.total, judge):
            self.study.tell(trial.number, ending)
            # Some metrics are known not to be there once the data is: of two classes, for one.
            is_of_metric = ending.is_mistake and ending.note.startswith(_OF_METRIC)
            if is_of_metric and settings.metric and self.study.best() is None:
                raise _NoSuchMetric("metric", ending.note.removeprefix(_OF_METRIC))
            self.keep()
            self._count_mistake(ending.is_mistake, ending.note)
        if len(self.study.ended()) < self.study.total:
            print(
                "the time is over; to resume: python -m flatout sweep resume"
                f" {shlex.quote(str(folder))} for=TIME"
            )

    def confirm(self) -> None:
        """The best settings again, with other seeds."""
        if (best := self.study.best()) is None or not self.searched.settings.confirm:
            return
        is_over = self.until is not None and time.monotonic() >= self.until
        chosen = self.study.settings(best)
        self.confirmation = confirm(self.searched, chosen, best.number, self._endings, is_over)

    def _ask(self) -> Trial | None:
        """The next trial that can be composed; settings that do not go together are a
        failed trial.
        """
        while (asked := self.study.ask()) is not None:
            number, chosen = asked
            try:
                return self.searched.trial(number, chosen)
            except Exception as error:
                # your own classes are made here and may raise anything: this trial failed
                is_mistake = isinstance(error, UserError)
                if not is_mistake:
                    traceback.print_exc()
                note = str(error) if is_mistake else f"{type(error).__name__}: {last_line(error)}"
                print(f"trial {number}: failed, {note}  {' '.join(words(chosen))}")
                self.study.tell(
                    number, Ending(Status.failed, 0.0, note=note, is_mistake=is_mistake)
                )
                self.keep()
                self._count_mistake(is_mistake, note)
        return None

    def _judge(self, trial: Trial, count: int, value: float) -> bool:
        """A trial at its last validation has cost all it can: it is not pruned any more."""
        return self.study.should_end(trial.number, count, value) and count < (
            trial.job.validations or math.inf
        )

    def _endings(
        self, ask: Ask, total: int, judge: Judge | None = None
    ) -> Iterator[tuple[Trial, Ending]]:
        board = Board(
            f"sweep in {self.searched.folder}", f"val/{self.metric}", self.study.mode, total
        )
        limits = {"limit_s": self.limit_s, "until": self.until}
        running = endings(ask, self.slots, board, metric=self.metric, judge=judge, **limits)
        with closing(board), closing(running):
            yield from running

    def _count_mistake(self, is_mistake: bool, note: str) -> None:
        """End a sweep of which every trial would fail in the same way."""
        if self._mistakes is None or not is_mistake:
            self._mistakes = None  # one did not: others are worth trying
            return
        self._mistakes.append(note)
        if len(self._mistakes) == _SAME_MISTAKES and len(set(self._mistakes)) == 1:
            printed = Path(self.searched.folder, "0", "output.txt")
            raise UserError(
                "sweep",
                f"the first {_SAME_MISTAKES} trials failed alike: {note}",
                hint=(
                    "The output of the first is in"
                    f" {printed if printed.is_file() else self.searched.folder}."
                ),
            )

    def keep(self) -> None:
        """Write table and page while trials run, so that a sweep that is killed has them; not more
        often than pays.
        """
        if time.monotonic() >= self._next_page:
            began = time.monotonic()
            write_sweep(self.searched.folder, self.report())
            self._next_page = time.monotonic() + (time.monotonic() - began) / _SHARE

    def write(self) -> SweepReport:
        report = self.report()
        write_sweep(self.searched.folder, report)
        best = self.study.best()
        params = {} if best is None else self._params(best)
        place, ended = self.searched.folder, self.confirmation.ended
        ran: list[Any] = [
            (place / row.folder, row.number, row.params, row.status, row) for row in report.trials
        ]
        ran += [
            (trial.folder, seed, params | {"seed": seed}, each.status.value, each)
            for trial, seed, each in ended
        ]
        for folder, step, searched, status, found in ran:
            # the HPARAMS page shows what was searched in the place of all settings
            if folder.is_dir():
                metrics = {f"val/{self.metric}": found.value} | dict(found.metrics)
                write_hyperparameters(folder, {"status": status, **searched}, metrics, step)
        return report

    def say_best(self, report: SweepReport) -> None:
        if (best := self.study.best()) is None or best.value is None:
            notes = [f"trial {row.number}: {row.note}" for row in report.trials if row.note]
            has_run = any((self.searched.folder / row.folder).is_dir() for row in report.trials)
            printed = (
                f" The output of each is in {self.searched.folder}/*/output.txt." if has_run else ""
            )
            advice = (
                "Correct what the lines above name."
                if notes
                else "Give it more time: for=, trial_for=."
            )
            raise RunBroke("\n".join([*notes, f"sweep: no trial was completed. {advice}{printed}"]))
        test = best.user_attrs.get("metrics", {}).get(f"test/{self.metric}")
        shown = f"{report.metric} {best.value:.4f}" + (
            "" if test is None else f", test/{self.metric} {test:.4f}"
        )
        lines = [
            _counts(report),
            f"best: trial {best.number}, {shown}",
            *self.confirmation.lines(self.metric),
        ]
        lines += [f"again: {report.best_overrides}", f"page: {self.searched.folder / 'sweep.html'}"]
        Console(highlight=False, soft_wrap=True).print("\n".join(lines), markup=False)

    def report(self) -> SweepReport:
        space = self.searched.space
        best = self.study.best()
        rows = [self._row(trial) for trial in self.study.ended()]
        return SweepReport(
            name=self.name,
            command=self.searched.line,
            metric=f"val/{self.metric}",
            mode=self.study.mode,
            space={key: str(part) for key, part in space.items()},
            log_keys=frozenset(
                key
                for key, part in space.items()
                if isinstance(part, SettingInterval) and part.is_log
            ),
            trials=rows,
            best_overrides="" if best is None else self.searched.command(self.study.settings(best)),
            importance=self.study.importance(),
            confirmed=self.confirmation.done,
            seconds=sum(row.seconds or 0.0 for row in rows),
        )

    def _row(self, trial: FrozenTrial) -> TrialRow:
        facts = trial.user_attrs
        values = sorted(trial.intermediate_values.items())
        return TrialRow(
            number=trial.number,
            status=ENDED[trial.state],
            value=trial.value if trial.value is not None or not values else values[-1][1],
            params=self._params(trial),
            seconds=facts.get("seconds"),
            note=facts.get("note", ""),
            folder=str(trial.number),
            curve=values,
            metrics=facts.get("metrics", {}),
        )

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        return {
            key: _plain(self.searched.space[key], text)
            for key, text in self.study.settings(trial).items()
        }


def _counts(report: SweepReport) -> str:
    counts = {
        status: sum(row.status == status for row in report.trials)
        for status in ("complete", "pruned", "failed")
    }
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    late = sum(row.status == "failed" and row.note.startswith(TOO_LONG) for row in report.trials)
    return f"{words} ({late} of them {TOO_LONG} trial_for allows)" if late else words


def _plain(part: Part, text: str) -> Any:
    return (
        yaml.safe_load(text)
        if isinstance(part, SettingValues)
        else int(text)
        if part.is_whole
        else float(text)
    )


@dataclass(slots=True)
class SweepConfirmation:
    """What became of the confirming runs."""

    wanted: int = 0
    # metrics of the complete ones, by their seeds
    done: dict[int, dict[str, float]] = field(default_factory=dict)
    # those that have just run, with their seeds
    ended: list[tuple[Trial, int, Ending]] = field(default_factory=list)
    why_not: str = ""  # what kept one of them from being complete

    def lines(self, metric: str) -> list[str]:
        """What there is to tell; nothing where none was asked for."""
        if not self.wanted:
            return []
        runs = list(self.done.values())
        spreads = [
            spread(name, runs)
            for name in sorted(runs[0] if runs else ())
            if name.endswith(f"/{metric}")
        ]
        lines = (
            [f"confirmed by {len(self.done)} of {self.wanted} seeds: {', '.join(spreads)}"]
            if self.done
            else []
        )
        if left := self.wanted - len(self.done):
            lines.append(f"not confirmed by {left} of {self.wanted} seeds: {self.why_not}")
        return lines


def confirm(
    searched: Searched, chosen: Mapping[str, str], number: int, run: Runner, is_over: bool
) -> SweepConfirmation:
    """Run settings again with other seeds, but for those that ran before an interruption."""
    count = searched.settings.confirm
    path = searched.folder / "confirmed.json"
    first = searched.trial(number, chosen).job.config.seed + 1
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = {each["seed"]: each["metrics"] for each in known if each["settings"] == chosen}
    seeds = {each: first + each for each in range(count)}
    missing = {each: seed for each, seed in seeds.items() if seed not in found}
    confirmation = SweepConfirmation(count, why_not="the time was over" if missing else "")
    if missing and not is_over:
        print(f"confirming trial {number} with {len(missing)} other seeds")
        waiting = (
            searched.trial(each, chosen, f"confirm-{each}", f"seed={seed}")
            for each, seed in missing.items()
        )
        for trial, ending in run(lambda: next(waiting, None), len(missing)):
            seed = seeds[trial.number]
            confirmation.ended.append((trial, seed, ending))
            if ending.status is Status.complete:
                found[seed] = ending.metrics
                kept = [
                    {"settings": dict(chosen), "seed": each, "metrics": found[each]}
                    for each in sorted(found)
                ]
                write_atomically(path, json.dumps(json_safe(kept), indent=1))
            elif ending.status is Status.failed:
                confirmation.why_not = f"{trial.name}: {ending.note}"
    confirmation.done = {seed: found[seed] for seed in seeds.values() if seed in found}
    return confirmation

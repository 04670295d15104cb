"""A sweep, from its first trial to its page.

The study suggests settings, trials run with them in processes and are pruned, and the best settings
run again with other seeds. Everything lies in the sweep's folder: `sweep.json` (what was asked
for), `journal.log` (Optuna's study) and a run folder for each trial. Beside them are
`confirmed.json` (the results of other seeds), `sweep.csv` and `sweep.html`. A sweep that was killed
resumes from there. Open this file to change the order of these steps, or what a sweep prints.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from optuna.trial import FrozenTrial
from rich.console import Console

from flatout.errors import RunBroke, UserError, as_seconds, require
from flatout.files import load_json, values_of, write_atomically
from flatout.report.dashboard import write_hyperparameters
from flatout.report.summary import json_safe
from flatout.report.sweep_page import SweepReport, TrialRow, spread, write_sweep
from flatout.sweep.many import print_resuming
from flatout.sweep.searched import Searched, hold_folder, remove_sweep
from flatout.sweep.settings import Pruner, Sampler
from flatout.sweep.space import grid, words
from flatout.sweep.study import ENDED, Study, finite_numbers
from flatout.sweep.trial import Ask, Board, Ending, Judge, Status, Trial, TrialJob
from flatout.sweep.trials import TOO_LONG, Slots, TimeLimits, last_line, make_slots, run_trials
from flatout.tasks.metrics import require_metric

_SAME_MISTAKES = 3  # so many trials in a row that fail by the same mistake end the sweep
_OF_METRIC = "checkpoint.metric: "  # how a message about the metric begins
_PAGE_SHARE = 0.02  # fraction of the time that is spent on writing the page while trials run
# runs the trials that it asks for, and yields each as it ends; the number is for the board
Runner = Callable[[Ask, int], Iterator[tuple[Trial, Ending]]]


def sweep(searched: Searched) -> None:
    """Search a space of settings, or resume the search."""
    started = time.monotonic()
    folder = searched.folder
    first = _check(searched)
    shares = make_slots(searched.launcher.parallel, searched.launcher.place)
    with hold_folder(searched):
        run = _SweepRun(searched, first.job, shares, started)
        try:
            with print_resuming(f"python -m flatout sweep resume {shlex.quote(str(folder))}"):
                run.search()
                run.confirm()
        except _NoSuchMetric:
            # no trial has a value to compare: another sweep may start in this folder
            remove_sweep(folder, run.study.total)
            raise
        except BaseException:
            run.write()
            raise
        run.say_best(run.write())


def _check(searched: Searched) -> Trial:
    """Refuse a wrong sweep before it has a folder; returns a trial that can be composed."""
    settings = searched.settings
    space = searched.space
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
    # A resumed sweep must keep its space, so there such a trial fails later.
    if not settings.resume:
        for key, part in space.items():
            for text in part.sample():
                searched.first_that_fits(key, text)
    if settings.metric is not None:
        require_metric(first.job.metric, first.job.metrics, "metric")
    return first


class _NoSuchMetric(UserError):
    """The data of a sweep has no such metric."""


class _SweepRun:
    """One command's part of a sweep: it runs trials, and writes and prints what they gave."""

    def __init__(self, searched: Searched, job: TrialJob, slots: Slots, started: float) -> None:
        self.searched = searched
        self.slots = slots
        self.metric = job.metric
        self.name = job.name
        self.confirmation = SweepConfirmation()
        self._next_page = 0.0
        settings = searched.settings
        self.study = Study(
            searched.folder, searched.space, settings, mode=job.mode, validations=job.validations
        )
        time_s = as_seconds(settings.time, "for")
        self.limits = TimeLimits(
            trial_s=as_seconds(searched.launcher.limit, "trial_for"),
            until=None if time_s is None else started + time_s,
        )
        # notes of the trials so far, which all failed by a user's mistake; None once one did not
        self._mistakes: list[str] | None = []

    def search(self) -> None:
        """Run trials until there are enough, or the time is over."""
        ended = self.study.ended()
        settings = self.searched.settings
        folder = self.searched.folder
        is_grid = settings.sampler is Sampler.grid
        how_many = "trials, each setting there is," if is_grid else "trials"
        how = f"{self.study.total} {how_many} by {settings.sampler}, pruning: {settings.pruner}"
        print(f"sweep in {folder}: {how}, by val/{self.metric}")
        if ended:
            print(f"resumed: {len(ended)} of {max(len(ended), self.study.total)} trials have ended")
        for earlier in ended:
            facts = earlier.user_attrs
            self._count_mistake(bool(facts.get("is_mistake")), facts.get("note", ""))
        judge = None if settings.pruner is Pruner.none else self._judge
        for trial, ending in self._endings(self._ask, self.study.total, judge):
            self.study.tell(trial.number, ending)
            # Which metrics there are may depend on the data: some are of two classes only.
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
        """Run the best settings again, with other seeds."""
        best = self.study.best()
        if best is None or not self.searched.settings.confirm:
            return
        chosen = self.study.settings(best)
        is_over = self.limits.are_over()
        self.confirmation = confirm(self.searched, chosen, best.number, self._endings, is_over)

    def _ask(self) -> Trial | None:
        """The next trial that can be composed; one that cannot is recorded as failed."""
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
        """Whether to prune a trial after a validation.

        At its last validation it has cost all it can, so it may as well be complete.
        """
        last = trial.job.validations or math.inf
        return self.study.should_end(trial.number, count, value) and count < last

    def _endings(
        self, ask: Ask, total: int, judge: Judge | None = None
    ) -> Iterator[tuple[Trial, Ending]]:
        title = f"sweep in {self.searched.folder}"
        board = Board(title, f"val/{self.metric}", self.study.mode, total)
        running = run_trials(ask, self.slots, board, limits=self.limits, judge=judge)
        with closing(board), closing(running):
            yield from running

    def _count_mistake(self, is_mistake: bool, note: str) -> None:
        """End a sweep whose first trials all failed by the same mistake: the rest would, too."""
        if self._mistakes is None or not is_mistake:
            self._mistakes = None
            return
        self._mistakes.append(note)
        if len(self._mistakes) == _SAME_MISTAKES and len(set(self._mistakes)) == 1:
            printed = Path(self.searched.folder, "0", "output.txt")
            output = printed if printed.is_file() else self.searched.folder
            raise UserError(
                "sweep",
                f"the first {_SAME_MISTAKES} trials failed alike: {note}",
                hint=f"The output of the first is in {output}.",
            )

    def keep(self) -> None:
        """Write table and page while trials run: a sweep that is killed then has them.

        Writing takes 2 % of the time: after a page that took 0.1 s, the next one waits for 5 s.
        """
        began = time.monotonic()
        if began >= self._next_page:
            write_sweep(self.searched.folder, self.report())
            now = time.monotonic()
            self._next_page = now + (now - began) / _PAGE_SHARE

    def write(self) -> SweepReport:
        """Write table and page, and what TensorBoard shows of each trial."""
        report = self.report()
        folder = self.searched.folder
        write_sweep(folder, report)
        for row in report.trials:
            self._write_hyperparameters(folder / row.folder, row.params, row.number, row)
        best = self.study.best()
        params = {} if best is None else self._params(best)
        for trial, seed, ending in self.confirmation.ended:
            self._write_hyperparameters(trial.folder, params | {"seed": seed}, seed, ending)
        return report

    def _write_hyperparameters(
        self, folder: Path, searched: Mapping[str, object], step: int, outcome: TrialRow | Ending
    ) -> None:
        """Replace a run's row on TensorBoard's HPARAMS page, which lists all of its settings, by
        the settings that were searched.
        """
        if folder.is_dir():
            settings = {"status": str(outcome.status), **searched}
            metrics = {f"val/{self.metric}": outcome.value, **outcome.metrics}
            write_hyperparameters(folder, settings, metrics, step)

    def say_best(self, report: SweepReport) -> None:
        """Print the best trial and where to read on; `RunBroke` if no trial is complete."""
        best = self.study.best()
        if best is None or best.value is None:
            raise RunBroke(self._explain_failure(report))
        shown = f"{report.metric} {best.value:.4f}"
        test = best.user_attrs.get("metrics", {}).get(f"test/{self.metric}")
        if test is not None:
            shown = f"{shown}, test/{self.metric} {test:.4f}"
        lines = [
            _counts(report),
            f"best: trial {best.number}, {shown}",
            *self.confirmation.lines(self.metric),
            f"again: {report.best_overrides}",
            f"page: {self.searched.folder / 'sweep.html'}",
        ]
        Console(highlight=False, soft_wrap=True).print("\n".join(lines), markup=False)

    def _explain_failure(self, report: SweepReport) -> str:
        """Why no trial is complete, what helps, and where the trials' output lies."""
        folder = self.searched.folder
        notes = [f"trial {row.number}: {row.note}" for row in report.trials if row.note]
        advice = "Give it more time: for=, trial_for=."
        if notes:
            advice = "Correct what the lines above name."
        if any((folder / row.folder).is_dir() for row in report.trials):
            advice = f"{advice} The output of each is in {folder}/*/output.txt."
        return "\n".join([*notes, f"sweep: no trial was completed. {advice}"])

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
            log_keys=frozenset(key for key, part in space.items() if part.is_log),
            trials=rows,
            best_overrides="" if best is None else self.searched.command(self.study.settings(best)),
            importance=self.study.importance(),
            confirmed=self.confirmation.done,
            seconds=sum(row.seconds or 0.0 for row in rows),
        )

    def _row(self, trial: FrozenTrial) -> TrialRow:
        facts = trial.user_attrs
        curve = sorted(trial.intermediate_values.items())
        value = trial.value
        if value is None and curve:
            value = curve[-1][1]  # of a pruned trial the last one seen
        return TrialRow(
            number=trial.number,
            status=ENDED[trial.state],
            value=value,
            params=self._params(trial),
            seconds=facts.get("seconds"),
            note=facts.get("note", ""),
            folder=str(trial.number),
            curve=curve,
            metrics=facts.get("metrics", {}),
        )

    def _params(self, trial: FrozenTrial) -> dict[str, object]:
        space = self.searched.space
        return {key: space[key].parse(text) for key, text in self.study.settings(trial).items()}


def _counts(report: SweepReport) -> str:
    """`3 complete, 1 pruned`, and how many failed because they ran too long."""
    counts = Counter(row.status for row in report.trials)
    words = ", ".join(f"{counts[status]} {status}" for status in ENDED.values() if counts[status])
    late = sum(row.status == "failed" and row.note.startswith(TOO_LONG) for row in report.trials)
    return f"{words} ({late} of them {TOO_LONG} trial_for allows)" if late else words


@dataclass(slots=True)
class SweepConfirmation:
    """Runs of the best settings with other seeds: how many are wanted, and what they gave."""

    wanted: int = 0
    # metrics of the complete runs, by their seeds
    done: dict[int, dict[str, float]] = field(default_factory=dict)
    # runs of this command, with their seeds
    ended: list[tuple[Trial, int, Ending]] = field(default_factory=list)
    why_not: str = ""  # what kept one of them from being complete

    def lines(self, metric: str) -> list[str]:
        """What to print: the metric's mean and spread, and what is missing."""
        lines = []
        if self.done:
            runs = list(self.done.values())
            names = [name for name in sorted(runs[0]) if name.endswith(f"/{metric}")]
            spreads = ", ".join(spread(name, runs) for name in names)
            lines.append(f"confirmed by {len(runs)} of {self.wanted} seeds: {spreads}")
        left = self.wanted - len(self.done)
        if left:
            lines.append(f"not confirmed by {left} of {self.wanted} seeds: {self.why_not}")
        return lines


def confirm(
    searched: Searched, chosen: Mapping[str, str], number: int, run: Runner, is_over: bool
) -> SweepConfirmation:
    """Run settings with the seeds after the run's own: 0 → 1, 2, 3.

    Seeds that finished before an interruption are read from `confirmed.json`. `number`: of the
    trial with these settings.
    """
    count = searched.settings.confirm
    path = searched.folder / "confirmed.json"
    first = searched.compose(searched.typed(chosen), number).config.seed + 1
    entries = load_json(path) if path.is_file() else []
    with values_of(path):
        # a resumed sweep may have found better settings since
        metrics_of = {
            int(each["seed"]): finite_numbers(each["metrics"])
            for each in entries
            if each["settings"] == chosen
        }
    seeds = {each: first + each for each in range(count)}
    missing = {each: seed for each, seed in seeds.items() if seed not in metrics_of}
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
                metrics_of[seed] = ending.metrics
                entries_now = [
                    {"settings": dict(chosen), "seed": each, "metrics": metrics_of[each]}
                    for each in sorted(metrics_of)
                ]
                write_atomically(path, json.dumps(json_safe(entries_now), indent=1))
            elif ending.status is Status.failed:
                confirmation.why_not = f"{trial.name}: {ending.note}"
    confirmation.done = {seed: metrics_of[seed] for seed in seeds.values() if seed in metrics_of}
    return confirmation

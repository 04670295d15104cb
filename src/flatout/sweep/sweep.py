"""A sweep, from its first trial to its page: settings are suggested, trials run and pruned, the best one confirmed.

Everything lies in the sweep's folder: `sweep.json` (what was asked for), `journal.log` (Optuna's study), a run's folder
for each trial, and `sweep.csv` and `sweep.html`. A sweep that was killed resumes from there.
`confirmed.json` holds the best settings' results with other seeds.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from flatout.checkpoints.settings import best_mode
from flatout.errors import UserError, as_seconds, require
from flatout.sweep.board import Board
from flatout.sweep.findings import Findings, Outcome, confirm
from flatout.sweep.many import metric_of, to_go_on
from flatout.sweep.searched import Searched, forget, held
from flatout.sweep.space import grid, words
from flatout.sweep.study import Pruner, Sampler, Study
from flatout.sweep.trial import Ending, Judge, Status, Trial
from flatout.sweep.trials import Slot, endings, last_line, slots
from flatout.tasks.metrics import require_metric

_SAME_MISTAKES = 3
"""So many trials in a row that fail by the same mistake end the sweep."""
_OF_METRIC = "checkpoint.metric: "


def sweep(searched: Searched) -> Outcome:
    """Search a space of settings, or resume the search."""
    started = time.monotonic()
    settings, folder = searched.settings, searched.folder
    first = _checked(searched)
    shares, metric = slots(settings.parallel), metric_of([first])
    with held(searched):
        study = Study(
            folder,
            searched.space,
            mode=best_mode(metric),
            trials=settings.trials,
            sampler=settings.sampler,
            pruner=settings.pruner,
            seed=settings.seed,
            most_validations=first.job.validations,
        )
        findings = Findings(searched, study, metric, first.job.name)
        run = _Run(searched, study, findings, shares, started)
        try:
            with to_go_on(f"python -m flatout sweep resume {folder}"):
                run.search()
                run.confirm()
        except _NoSuchMetric as mistake:
            forget(folder, study.total)
            raise mistake.error from None
        except BaseException:
            findings.write()
            raise
        return findings.outcome(findings.write())


def _checked(searched: Searched) -> Trial:
    """Refuse a wrong sweep before it has a folder; a trial that can be composed."""
    settings, space = searched.settings, searched.space
    require(bool(space), "sweep", "nothing to search", hint="Set +sweep=NAME, or write key=choice(a,b) for a setting.")
    for key, part in space.items():
        part.distribution(key)
    if settings.sampler is Sampler.grid:
        grid(space)
    first = searched.first_that_fits()
    if not settings.resume:  # a resumed sweep keeps its space: such a trial fails
        searched.require_that_all_fit()
    if settings.metric is not None:
        require_metric(settings.metric, first.job.metrics, "metric")
    return first


class _NoSuchMetric(Exception):
    """The data of a sweep has no such metric."""

    def __init__(self, error: UserError) -> None:
        self.error = error


class _Run:
    """A sweep from its start, or its resumption, to its end."""

    def __init__(self, searched: Searched, study: Study, findings: Findings, slots: list[Slot], started: float) -> None:
        self.searched, self.study, self.findings, self.slots = searched, study, findings, slots
        settings = searched.settings
        self.limit_s, time_s = as_seconds(settings.limit, "trial_for"), as_seconds(settings.time, "for")
        self.until = None if time_s is None else started + time_s
        self._mistakes: list[str] | None = []

    def search(self) -> None:
        """Run trials until there are enough, or the time is over."""
        ended, settings, folder = self.study.ended(), self.searched.settings, self.searched.folder
        how_many = "trials, each setting there is," if settings.sampler is Sampler.grid else "trials"
        how = f"{self.study.total} {how_many} by {settings.sampler}, pruning: {settings.pruner}"
        print(f"sweep in {folder}: {how}, by val/{self.findings.metric}")
        if ended:
            print(f"resumed: {len(ended)} of {self.study.total} trials have ended")
        for known in ended:
            self._count_mistake(bool(known.user_attrs.get("is_mistake")), known.user_attrs.get("note", ""))
        judge = None if settings.pruner is Pruner.none else self._judge
        for trial, ending in self._endings(self._ask, self.study.total, judge):
            self.study.tell(trial.number, ending)
            self._require_metric(ending)
            self.findings.keep()
            self._count_mistake(ending.is_mistake, ending.note)
        if len(self.study.ended()) < self.study.total:
            print(f"the time is over; to resume: python -m flatout sweep resume {folder} for=TIME")

    def confirm(self) -> None:
        """The best settings again, with other seeds."""
        best = self.study.best()
        if best is None or not self.searched.settings.confirm:
            return
        is_over = self.until is not None and time.monotonic() >= self.until
        self.findings.confirmation = confirm(
            self.searched,
            self.study.settings(best),
            best.number,
            lambda ask, total: self._endings(ask, total, None),
            is_over,
        )

    def _ask(self) -> Trial | None:
        """The next trial that can be composed; settings that do not go together are a failed trial."""
        while (asked := self.study.ask()) is not None:
            try:
                return self.searched.trial(asked.number, asked.settings)
            except Exception as error:  # your own classes are made here and may raise anything: this trial failed
                is_mistake = isinstance(error, UserError)
                if not is_mistake:
                    traceback.print_exc()
                note = str(error) if is_mistake else f"{type(error).__name__}: {last_line(error)}"
                print(f"trial {asked.number}: failed, {note}  {' '.join(words(asked.settings))}")
                self.study.tell(asked.number, Ending(Status.failed, 0.0, note=note, is_mistake=is_mistake))
                self.findings.keep()
                self._count_mistake(is_mistake, note)
        return None

    def _judge(self, trial: Trial, count: int, value: float) -> bool:
        """A trial at its last validation has cost all it can: it is not pruned any more."""
        should_end = self.study.should_end(trial.number, count, value)
        return should_end and count < trial.job.validations

    def _endings(
        self, ask: Callable[[], Trial | None], total: int, judge: Judge | None
    ) -> Iterator[tuple[Trial, Ending]]:
        metric = self.findings.metric
        board = Board(f"sweep in {self.searched.folder}", f"val/{metric}", self.study.mode, total, print)
        running = endings(ask, self.slots, board, metric=metric, judge=judge, limit_s=self.limit_s, until=self.until)
        with closing(board), closing(running):
            yield from running

    def _require_metric(self, ending: Ending) -> None:
        """Some metrics are known not to be there once the data is: of two classes, for one."""
        is_of_metric = ending.is_mistake and ending.note.startswith(_OF_METRIC)
        if is_of_metric and self.searched.settings.metric and self.study.best() is None:
            raise _NoSuchMetric(UserError("metric", ending.note.removeprefix(_OF_METRIC)))

    def _count_mistake(self, is_mistake: bool, note: str) -> None:
        """End a sweep of which every trial would fail in the same way."""
        if self._mistakes is None or not is_mistake:
            self._mistakes = None  # one did not: others are worth trying
            return
        self._mistakes.append(note)
        if len(self._mistakes) == _SAME_MISTAKES and len(set(self._mistakes)) == 1:
            printed = Path(self.searched.folder, "0", "output.txt")
            hint = f"The output of the first is in {printed if printed.is_file() else self.searched.folder}."
            raise UserError("sweep", f"the first {_SAME_MISTAKES} trials failed alike: {note}", hint=hint)

"""A sweep, from its first trial to its page: settings are suggested, trials run and pruned, the best one confirmed.

Everything lies in the sweep's folder: `sweep.json` (what was asked for), `journal.log` (Optuna's study), a run's folder
for each trial, and at the end `sweep.csv` and `sweep.html`. A sweep that was killed goes on from there.
"""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from hydra.errors import HydraException
from optuna.trial import FrozenTrial
from rich.console import Console

from flatout.checkpoints import best_mode
from flatout.compose import ComposeError
from flatout.config import RunConfig
from flatout.errors import RunBroke, UserError, as_choice, require
from flatout.report.hyperparameters import write_hyperparameters
from flatout.report.summary import json_safe, write_atomically
from flatout.report.sweep_page import Confirmed, SweepReport, TrialRow, write_sweep
from flatout.scale.board import Board
from flatout.scale.durations import seconds
from flatout.scale.many import metric_of
from flatout.scale.slots import Slot, slots
from flatout.scale.space import Choice, Interval, Part, Space, grid, words
from flatout.scale.study import Pruner, Sampler, Study
from flatout.scale.trials import Ending, Judge, Status, Trial, endings
from flatout.trainer import EPOCHS

FILE = "sweep.json"
_CONFIRMED = "confirmed.json"
_SCHEMA = 1
_SAME_MISTAKES = 3
"""So many trials in a row that fail by the same mistake of a person's end the sweep."""

ConfigOf = Callable[[Sequence[str], int], RunConfig]
"""Composes the settings of a trial from what is typed for it."""


@dataclass(kw_only=True, slots=True)
class SweepSettings:
    """How a sweep searches."""

    trials: int = 20
    sampler: Sampler = Sampler.tpe
    pruner: Pruner = Pruner.asha
    metric: str | None = None
    time: str | None = None
    confirm: int = 0
    seed: int = 0
    resume: bool = False
    parallel: int = 1
    limit: str | None = None

    def __post_init__(self) -> None:
        self.sampler = as_choice(Sampler, self.sampler, "sampler")
        self.pruner = as_choice(Pruner, self.pruner, "pruner")
        require(self.trials >= 1, "trials", f"{self.trials}", allowed="1 or more")
        require(self.confirm >= 0, "confirm", f"{self.confirm}", allowed="0 or more")
        seconds(self.time, "for"), seconds(self.limit, "trial_for")
        if self.metric is not None:
            self.metric = self.metric.removeprefix("val/")

    def of_the_search(self) -> dict[str, Any]:
        """What must be the same when a sweep is taken up again; more trials, more time or helpers may be asked for."""
        kept = {name: value for name, value in asdict(self).items() if name in ("sampler", "pruner", "metric", "seed")}
        return kept | ({"trials": None} if self.sampler is Sampler.grid else {})


@dataclass(slots=True)
class Outcome:
    """What a sweep found."""

    folder: Path
    best: dict[str, str]
    """The best settings, as texts behind `key=`."""
    value: float
    """Their validation metric."""
    report: SweepReport = field(repr=False)


def sweep(
    settings: SweepSettings,
    space: Space,
    fixed: Sequence[str],
    config_of: ConfigOf,
    folder: Path,
    typed: Sequence[str] = (),
) -> Outcome:
    """Search a space; `fixed` is the same in all trials, `typed` what the person wrote, so that it can be taken up."""
    started = time.monotonic()
    require(bool(space), "sweep", "nothing to search", mend="Set +sweep=NAME, or write key=choice(a,b) for a setting.")
    for key, part in space.items():
        part.distribution(key)
    if settings.sampler is Sampler.grid:
        grid(space)
    shares = slots(settings.parallel)
    searched = _Searched(settings, space, list(fixed), config_of, folder)
    first = searched.trial(0, {key: _example(part) for key, part in space.items()})  # unknown keys end it here
    metric = metric_of([first])
    with _held(folder, settings, space, list(fixed), list(typed)):
        study = Study(
            folder,
            space,
            mode=best_mode(metric),
            trials=settings.trials,
            sampler=settings.sampler,
            pruner=settings.pruner,
            seed=settings.seed,
            most_validations=validations(first.config.trainer),
        )
        run = _Run(searched, study, metric, shares, first.config.experiment, started)
        run.search()
        run.confirm()
        return run.close()


@dataclass(frozen=True, slots=True)
class _Searched:
    """What makes a trial of some settings."""

    settings: SweepSettings
    space: Space
    fixed: list[str]
    config_of: ConfigOf
    folder: Path

    def typed(self, chosen: Mapping[str, str]) -> list[str]:
        metric = self.settings.metric
        return [*self.fixed, *([f"checkpoint.metric={metric}"] if metric else []), *words(chosen)]

    def trial(self, number: int, chosen: Mapping[str, str], name: str = "", *more: str) -> Trial:
        typed = [*self.typed(chosen), *more]
        folder = self.folder / (name or str(number))
        config = self.config_of(typed, number)
        return Trial(number, folder, config, typed, [*words(chosen), *more], is_again=True)


class _Run:
    """One sitting of a sweep."""

    def __init__(
        self, searched: _Searched, study: Study, metric: str, slots: list[Slot], experiment: str, started: float
    ) -> None:
        self.searched, self.study, self.metric, self.slots, self.experiment = searched, study, metric, slots, experiment
        settings = searched.settings
        self.limit_s, time_s = seconds(settings.limit, "trial_for"), seconds(settings.time, "for")
        self.until = None if time_s is None else started + time_s
        self.confirmed: list[Confirmed] = []
        self._mistakes: list[str] | None = []

    def search(self) -> None:
        """Run trials until there are enough, or the time is over."""
        ended, settings = self.study.ended(), self.searched.settings
        how = f"{self.study.total} trials by {settings.sampler}, pruning: {settings.pruner}, by val/{self.metric}"
        print(f"sweep in {self.searched.folder}: {how}")
        if ended:
            print(f"taken up again: {len(ended)} of {self.study.total} trials have ended")
        for known in ended:
            self._count_mistake(bool(known.user_attrs.get("is_mistake")), known.user_attrs.get("note", ""))
        judge = None if settings.pruner is Pruner.none else self._judge
        try:
            for trial, ending in self._endings(self._ask, self.study.total, judge):
                self.study.tell(trial.number, ending)
                self._count_mistake(ending.is_mistake, ending.note)
        except KeyboardInterrupt:
            print(f"to go on: python -m flatout sweep resume {self.searched.folder}")
            raise
        if len(self.study.ended()) < self.study.total:
            folder = self.searched.folder
            print(f"the time is over; to go on: python -m flatout sweep resume {folder} for=TIME")

    def confirm(self) -> None:
        """The best settings again, with other seeds."""
        best, count = self.study.best(), self.searched.settings.confirm
        if best is None or not count:
            return
        chosen, path = self.study.settings(best), self.searched.folder / _CONFIRMED
        first = self.searched.trial(best.number, chosen).config.seed + 1
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        found = {each["seed"]: each["metrics"] for each in known if each["settings"] == chosen}
        seeds = {number: first + number for number in range(count) if first + number not in found}
        if seeds:
            print(f"confirming trial {best.number} with {len(seeds)} other seeds")
        waiting = iter(
            self.searched.trial(number, chosen, f"confirm-{number}", f"seed={seed}") for number, seed in seeds.items()
        )
        for trial, ending in self._endings(lambda: next(waiting, None), len(seeds), None):
            if ending.status is Status.complete:
                found[seeds[trial.number]] = ending.metrics
                kept = [{"settings": chosen, "seed": seed, "metrics": metrics} for seed, metrics in found.items()]
                write_atomically(path, json.dumps(json_safe(kept), indent=1))
        self.confirmed = [Confirmed(seed=seed, metrics=found[seed]) for seed in sorted(found)]

    def close(self) -> Outcome:
        """Write the table and the page, and say what is best."""
        best = self.study.best()
        chosen = {} if best is None else self.study.settings(best)
        report = self._report(chosen)
        write_sweep(self.searched.folder, report)
        for row in report.trials:
            folder = self.searched.folder / row.folder
            if row.status == "complete" and row.value is not None and folder.is_dir():
                write_hyperparameters(folder, row.params, row.metrics, row.number)
        if best is None or best.value is None:
            notes = "\n".join(f"trial {row.number}: {row.note}" for row in report.trials if row.note)
            raise RunBroke(f"{notes}\nno trial was completed; what each printed: {self.searched.folder}/*/output.txt")
        self._say(report, best, chosen)
        return Outcome(self.searched.folder, chosen, float(best.value), report)

    def _ask(self) -> Trial | None:
        """The next trial that can be composed; settings that do not go together are a failed trial."""
        while (asked := self.study.ask()) is not None:
            try:
                return self.searched.trial(asked.number, asked.settings)
            except (UserError, HydraException) as error:  # Hydra wraps what a settings class refuses
                mistake = ComposeError.of(error).mistake
                if mistake is None:
                    raise
                print(f"trial {asked.number}: failed, {mistake}  {' '.join(words(asked.settings))}")
                self.study.tell(asked.number, Ending(Status.failed, 0.0, note=str(mistake), is_mistake=True))
                self._count_mistake(True, str(mistake))
        return None

    def _judge(self, trial: Trial, count: int, value: float) -> bool:
        """A trial at its last validation has cost all it can: it is not pruned any more."""
        should_end = self.study.should_end(trial.number, count, value)
        return should_end and count < validations(trial.config.trainer)

    def _endings(
        self, ask: Callable[[], Trial | None], total: int, judge: Judge | None
    ) -> Iterator[tuple[Trial, Ending]]:
        board = Board(f"sweep in {self.searched.folder}", f"val/{self.metric}", self.study.mode, total, print)
        running = endings(
            ask, self.slots, board, metric=self.metric, judge=judge, limit_s=self.limit_s, until=self.until
        )
        with closing(board), closing(running):
            yield from running

    def _count_mistake(self, is_mistake: bool, note: str) -> None:
        """End a sweep of which every trial would fail in the same way."""
        if self._mistakes is None or not is_mistake:
            self._mistakes = None  # one did not: others are worth trying
            return
        self._mistakes.append(note)
        if len(self._mistakes) == _SAME_MISTAKES and len(set(self._mistakes)) == 1:
            raise UserError("", f"the first {_SAME_MISTAKES} trials failed alike: {note}")

    def _report(self, chosen: Mapping[str, str]) -> SweepReport:
        space, rows = self.searched.space, [self._row(trial) for trial in self.study.ended()]
        return SweepReport(
            name=self.experiment,
            command=shlex.join(["python", "-m", "flatout", "sweep", *read_asked(self.searched.folder)["typed"]]),
            metric=f"val/{self.metric}",
            mode=self.study.mode,
            space={key: str(part) for key, part in space.items()},
            log_keys=frozenset(key for key, part in space.items() if isinstance(part, Interval) and part.is_log),
            trials=rows,
            best_overrides=" ".join(words(chosen)),
            importance=self.study.importance(),
            confirmed=self.confirmed,
            seconds=sum(row.seconds or 0.0 for row in rows),
        )

    def _row(self, trial: FrozenTrial) -> TrialRow:
        facts = trial.user_attrs
        values = trial.intermediate_values
        last = values[max(values)] if values else None
        texts = self.study.settings(trial)
        return TrialRow(
            number=trial.number,
            status=self.study.status(trial),
            value=trial.value if trial.value is not None else last,
            params={key: _plain(self.searched.space[key], text) for key, text in texts.items()},
            seconds=facts.get("seconds"),
            note=facts.get("note", ""),
            folder=str(trial.number),
            curve=sorted(values.items()),
            metrics=facts.get("metrics", {}),
        )

    def _say(self, report: SweepReport, best: FrozenTrial, chosen: Mapping[str, str]) -> None:
        counts = {
            status: sum(row.status == status for row in report.trials) for status in ("complete", "pruned", "failed")
        }
        console = Console(highlight=False, soft_wrap=True)
        console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count), markup=False)
        metrics = best.user_attrs.get("metrics", {})
        shown = [f"{report.metric} {best.value:.4f}", *_test_metric(metrics, self.metric)]
        console.print(f"best: trial {best.number}, {', '.join(shown)}", markup=False)
        for name, values in _over_seeds(self.confirmed).items():
            if name.endswith(f"/{self.metric}") and len(values) > 1:
                spread = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
                console.print(f"confirmed: {name} {spread} over {len(values)} other seeds", markup=False)
        console.print(f"settings: {' '.join(words(chosen))}", markup=False)
        console.print(f"page: {self.searched.folder / 'sweep.html'}", markup=False)


@contextmanager
def _held(folder: Path, settings: SweepSettings, space: Space, fixed: list[str], typed: list[str]) -> Iterator[None]:
    """The sweep's folder, for this process alone; what was asked for is written down, or compared with what was."""
    asked = {
        "schema": _SCHEMA,
        "typed": typed,
        "place": str(Path.cwd()),
        "search": json_safe(settings.of_the_search()),
        "space": {key: str(part) for key, part in space.items()},
        "fixed": fixed,
    }
    path = folder / FILE
    if path.exists() and not settings.resume:
        mend = f"Go on with it by: python -m flatout sweep resume {folder}. Or leave hydra.sweep.dir out."
        raise UserError("sweep", f"{folder} holds a sweep already", mend=mend)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("hydra.sweep.dir", f"cannot make {folder}: {error.strerror}") from None
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError("sweep", f"another process is at work in {folder}", mend="Wait for it, or end it.") from None
    try:
        if settings.resume:
            _require_same(read_asked(folder), asked, folder)
        write_atomically(path, json.dumps(asked, indent=1, ensure_ascii=False))
        yield
    finally:
        lock.release()


def read_asked(folder: Path) -> dict[str, Any]:
    """What a sweep was begun with."""
    path = folder / FILE
    try:
        asked = json.loads(path.read_text(encoding="utf-8"))
        if asked["schema"] != _SCHEMA:
            raise UserError(str(path), f"schema {asked['schema']}", allowed=f"{_SCHEMA} in this version")
        if not all(isinstance(asked[name], list) for name in ("typed", "fixed")):
            raise ValueError("not what a sweep writes there")
        if not Path(asked["place"]).is_dir():
            mend = "Make it again: files of the sweep may be named from there."
            raise UserError(str(path), f"was begun in {asked['place']}, which is gone", mend=mend)
    except FileNotFoundError:
        mend = "Name the folder that a sweep printed when it began."
        raise UserError(str(folder), f"no {FILE} there", mend=mend) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(str(path), f"cannot be read: {error}", mend="Begin a new sweep.") from None
    return asked


def _require_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """A sweep that goes on must search the same space in the same way."""
    for section in ("search", "space"):
        old, new = before.get(section, {}), now[section]
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                what = f"{folder} was begun with {key}: {old.get(key)}, and now it is {new.get(key)}"
                raise UserError("sweep", what, mend="Begin a new sweep, or take the change back.")
    if before["fixed"] != now["fixed"]:
        other = sorted(set(before["fixed"]) ^ set(now["fixed"]))
        raise UserError(
            "sweep", f"{folder} was begun with other settings: {', '.join(other)}", mend="Begin a new sweep."
        )


def validations(trainer: Mapping[str, Any]) -> int:
    """How many times a run validates, if nothing stops it early."""
    epochs = trainer.get("max_epochs") or EPOCHS
    share = trainer.get("val_check_interval") or 1.0
    in_epoch = int(1 / share) if isinstance(share, float) and share < 1 else 1
    return max(1, epochs * in_epoch // int(trainer.get("check_val_every_n_epoch") or 1))


def _example(part: Part) -> str:
    return part.text(part.low) if isinstance(part, Interval) else part.values[0]


def _plain(part: Part, text: str) -> Any:
    """A setting's text as what it says."""
    return yaml.safe_load(text) if isinstance(part, Choice) else int(text) if part.is_whole else float(text)


def _over_seeds(confirmed: Sequence[Confirmed]) -> dict[str, list[float]]:
    names = confirmed[0].metrics if confirmed else {}
    return {name: [each.metrics[name] for each in confirmed if name in each.metrics] for name in names}


def _test_metric(metrics: Mapping[str, float], metric: str) -> list[str]:
    name = f"test/{metric}"
    return [f"{name} {metrics[name]:.4f}"] if name in metrics else []

"""What a sweep has found: its table and its page, TensorBoard's HPARAMS, and the last lines on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial
from rich.console import Console

from flatout.errors import RunBroke
from flatout.report.hyperparameters import write_hyperparameters
from flatout.report.sweep_page import SweepReport, TrialRow, write_sweep
from flatout.sweep.confirming import Confirmation
from flatout.sweep.searched import Searched
from flatout.sweep.space import Choice, Interval, Part
from flatout.sweep.study import Study
from flatout.sweep.trials import TOO_LONG

_SHARE = 0.02
"""Of the time, the most that is spent on writing the page while trials run."""


@dataclass(slots=True)
class Outcome:
    """What a sweep found."""

    folder: Path
    best: dict[str, str]
    """The best settings, as texts behind `key=`."""
    value: float
    """Their validation metric."""
    report: SweepReport = field(repr=False)


class Findings:
    """What is known of a sweep's trials, as files and lines."""

    def __init__(self, searched: Searched, study: Study, metric: str, experiment: str) -> None:
        self.searched, self.study, self.metric, self.experiment = searched, study, metric, experiment
        self.confirmation = Confirmation()
        self._next = 0.0

    def keep(self) -> None:
        """Write table and page while trials run, so that a sweep that is killed has them; not more often than pays."""
        if time.monotonic() >= self._next:
            began = time.monotonic()
            write_sweep(self.searched.folder, self.report())
            self._next = time.monotonic() + (time.monotonic() - began) / _SHARE

    def write(self) -> SweepReport:
        """Write everything that is left behind."""
        report = self.report()
        write_sweep(self.searched.folder, report)
        for row in report.trials:
            self._compare(self.searched.folder / row.folder, row.number, row.params, row.status, row.value, row.metrics)
        best = self.study.best()
        params = {} if best is None else self._params(best)
        for folder, run in self.confirmation.folders.items():
            own = params | {"seed": run["seed"]}
            self._compare(folder, run["seed"], own, run["status"], run["value"], run["metrics"])
        return report

    def outcome(self, report: SweepReport) -> Outcome:
        """Say what is best."""
        best = self.study.best()
        if best is None or best.value is None:
            notes = [f"trial {row.number}: {row.note}" for row in report.trials if row.note]
            has_run = any((self.searched.folder / row.folder).is_dir() for row in report.trials)
            printed = f" The output of each is in {self.searched.folder}/*/output.txt." if has_run else ""
            advice = "Correct what the lines above name." if notes else "Give it more time: for=, trial_for=."
            raise RunBroke("\n".join([*notes, f"sweep: no trial was completed. {advice}{printed}"]))
        self._say(report, best)
        return Outcome(self.searched.folder, self.study.settings(best), float(best.value), report)

    def report(self) -> SweepReport:
        space, rows, best = self.searched.space, [self._row(trial) for trial in self.study.ended()], self.study.best()
        return SweepReport(
            name=self.experiment,
            command=self.searched.begun.command,
            metric=f"val/{self.metric}",
            mode=self.study.mode,
            space={key: str(part) for key, part in space.items()},
            log_keys=frozenset(key for key, part in space.items() if isinstance(part, Interval) and part.is_log),
            trials=rows,
            best_overrides="" if best is None else self.searched.command(self.study.settings(best)),
            importance=self.study.importance(),
            confirmed=self.confirmation.done,
            seconds=sum(row.seconds or 0.0 for row in rows),
        )

    def _compare(
        self,
        folder: Path,
        step: int,
        params: Mapping[str, Any],
        status: str,
        value: float | None,
        metrics: Mapping[str, float],
    ) -> None:
        """Put what has run on the HPARAMS page, with what was searched in the place of all its settings."""
        if folder.is_dir():
            known = {f"val/{self.metric}": value} | dict(metrics)
            write_hyperparameters(folder, {"status": status, **params}, known, step)

    def _row(self, trial: FrozenTrial) -> TrialRow:
        facts = trial.user_attrs
        values = trial.intermediate_values
        last = values[max(values)] if values else None
        return TrialRow(
            number=trial.number,
            status=self.study.status(trial),
            value=trial.value if trial.value is not None else last,
            params=self._params(trial),
            seconds=facts.get("seconds"),
            note=facts.get("note", ""),
            folder=str(trial.number),
            curve=sorted(values.items()),
            metrics=facts.get("metrics", {}),
        )

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        texts = self.study.settings(trial)
        return {key: _plain(self.searched.space[key], text) for key, text in texts.items()}

    def _say(self, report: SweepReport, best: FrozenTrial) -> None:
        lines = [_counts(report)]
        metrics = best.user_attrs.get("metrics", {})
        shown = [f"{report.metric} {best.value:.4f}", *_test_metric(metrics, self.metric)]
        lines += [f"best: trial {best.number}, {', '.join(shown)}", *self.confirmation.lines(self.metric)]
        lines += [f"again: {report.best_overrides}", f"page: {self.searched.folder / 'sweep.html'}"]
        Console(highlight=False, soft_wrap=True).print("\n".join(lines), markup=False)


def _counts(report: SweepReport) -> str:
    counts = {status: sum(row.status == status for row in report.trials) for status in ("complete", "pruned", "failed")}
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    late = sum(row.status == "failed" and row.note.startswith(TOO_LONG) for row in report.trials)
    return f"{words} ({late} of them {TOO_LONG} trial_for allows)" if late else words


def _plain(part: Part, text: str) -> Any:
    """A setting's text as what it says."""
    return yaml.safe_load(text) if isinstance(part, Choice) else int(text) if part.is_whole else float(text)


def _test_metric(metrics: Mapping[str, float], metric: str) -> list[str]:
    name = f"test/{metric}"
    return [f"{name} {metrics[name]:.4f}"] if name in metrics else []

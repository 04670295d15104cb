"""The memory of a sweep: Optuna's study in a journal in the sweep's folder.

The study suggests settings from the space (`sweep/space.py`) and is given results. Every suggestion
depends on the seed, the trial's number and earlier results, and on nothing else. A sweep that was
killed and is resumed therefore suggests what it would have suggested without the interruption.
Trials that ran at that moment are run again. Open this file to add a sampler or a pruner.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from flatout.errors import UserError
from flatout.sweep.settings import Pruner, Sampler, SweeperSettings
from flatout.sweep.space import Space, grid
from flatout.sweep.trial import Ending, Status

JOURNAL = "journal.log"
_FEW = 9  # two cuts to a third each
_STATES = {
    Status.complete: TrialState.COMPLETE,
    Status.pruned: TrialState.PRUNED,
    Status.failed: TrialState.FAIL,
}
ENDED = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Study:
    """The trials of one sweep, those that have ended and those to come."""

    def __init__(
        self,
        folder: Path,
        space: Space,
        search: SweeperSettings,
        *,
        mode: str,
        validations: int | None,
    ) -> None:
        """`validations`: the most that a trial has; None: nobody knows."""
        self.space = space
        self.search = search
        self.mode = mode
        self._grid = grid(space) if search.sampler is Sampler.grid else []
        self.total = len(self._grid) or search.trials
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _as_it_is():
            self._study = optuna.create_study(
                study_name="sweep",
                storage=JournalStorage(JournalFileBackend(str(mended_journal(folder / JOURNAL)))),
                direction="maximize" if mode == "max" else "minimize",
                pruner=_pruner(Pruner(search.pruner), validations, self.total),
                load_if_exists=True,
            )
        self._trials: dict[int, optuna.Trial] = {}
        self._left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def ask(self) -> tuple[int, dict[str, str]] | None:
        """Number and settings of the next trial; None when there are enough."""
        with _as_it_is():
            # First come those that ran when the sweep was killed.
            trial = (
                optuna.Trial(self._study, self._left.pop(0)._trial_id)
                if self._left
                else self._next()
            )
            if trial is None:
                return None
            self._trials[trial.number] = trial
            settings = {}
            for key, part in self.space.items():
                self._study.sampler = self._sampler(trial.number, key)
                settings[key] = part.suggest(trial, key)
            return trial.number, settings

    def should_end(self, number: int, count: int, value: float) -> bool:
        """Whether a trial is to be pruned, now that its validation of that count is known."""
        if math.isfinite(value):
            with _as_it_is():
                self._trials[number].report(value, count)
        return self._trials[number].should_prune()

    def tell(self, number: int, ending: Ending) -> None:
        """How a trial ended; one that was only stopped runs again when the sweep is resumed."""
        if ending.status is Status.stopped:
            return
        trial = self._trials[number]
        is_lost = ending.status is Status.complete and not (
            ending.value is not None and math.isfinite(ending.value)
        )
        note = "its metric is not a number" if is_lost else ending.note
        facts = {
            "seconds": ending.seconds,
            "note": note,
            "metrics": ending.metrics,
            "is_mistake": ending.is_mistake,
        }
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        state = TrialState.FAIL if is_lost else _STATES[ending.status]
        self._study.tell(trial, ending.value if state is TrialState.COMPLETE else None, state=state)

    def ended(self) -> list[FrozenTrial]:
        """Trials of which the ending is known."""
        return self._study.get_trials(deepcopy=False, states=tuple(ENDED))

    def settings(self, trial: FrozenTrial) -> dict[str, str]:
        """A trial's settings as texts."""
        return {
            key: part.text(trial.params[key])
            for key, part in self.space.items()
            if key in trial.params
        }

    def best(self) -> FrozenTrial | None:
        with suppress(ValueError):  # none is complete
            return self._study.best_trial
        return None

    def importance(self) -> dict[str, float]:
        """The share of each setting in how trials differ; empty where too few are complete."""
        done = [trial for trial in self.ended() if trial.state is TrialState.COMPLETE]
        if len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        with _as_it_is():
            found = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        total = sum(found.values())
        return {key: value / total for key, value in found.items()} if total > 0 else {}

    def _next(self) -> optuna.Trial | None:
        known = self._study.get_trials(deepcopy=False)
        waiting = [trial for trial in known if trial.state is TrialState.WAITING]
        number = len(known) - len(waiting)
        if number >= self.total:
            return None
        if self._grid and not waiting:
            self._study.enqueue_trial(self._grid[number])
        return self._study.ask()

    def _sampler(self, number: int, key: str) -> BaseSampler:
        """A new one for each setting of each trial, so that no state is lost when the sweep is
        killed.
        """
        seed = zlib.crc32(f"{self.search.seed} {number} {key}".encode())
        if self.search.sampler is Sampler.tpe:
            return _Tpe(
                seed=seed, n_startup_trials=max(4, min(10, self.total // 3)), constant_liar=True
            )
        return RandomSampler(seed=seed)


class _Tpe(TPESampler):
    """Optuna's, without its look at the settings of all trials before each: here every trial has
    the same.
    """

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        known = next(
            (one.distributions for one in study.get_trials(deepcopy=False, states=states)), {}
        )
        return {key: values for key, values in sorted(known.items()) if not values.single()}


def _pruner(kind: Pruner, most: int | None, trials: int) -> BasePruner:
    """Of few trials, or of few validations, a third after the first would leave hardly one: half,
    in the middle.
    """
    known = most or _FEW
    first, factor = (max(1, known // 2), 2) if min(known, trials) < _FEW else (1, 3)
    made: dict[Pruner, BasePruner] = {
        Pruner.asha: SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor),
        Pruner.hyperband: HyperbandPruner(
            min_resource=1, max_resource=most or "auto", reduction_factor=3
        ),
        Pruner.median: MedianPruner(n_startup_trials=4, n_warmup_steps=1),
        Pruner.none: NopPruner(),
    }
    return made[kind]


def mended_journal(journal: Path) -> Path:
    """Take away what a killed process has left: its lock, and a last line that it has not finished.

    The caller holds the folder. A journal that is damaged elsewhere is refused.
    """
    # Optuna waits half a minute for a lock without an owner, and for ever where the folder was
    # moved.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.is_file():
        return journal
    data = journal.read_bytes()
    if data and not data.endswith(b"\n"):
        # in place: a disk that is full takes no second copy
        os.truncate(journal, data.rfind(b"\n") + 1)
    for number, line in enumerate(data.splitlines()[: data.count(b"\n")], 1):
        try:
            json.loads(line)
        except ValueError:
            raise UserError(
                str(journal),
                f"line {number} is damaged",
                hint="Start a new sweep; the folders of finished trials stay.",
            ) from None
    return journal


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Optuna warns of what it calls experimental, and of a validation that is reported a second
    time after a kill.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings(
            "ignore", message="The reported value is ignored because this `step`"
        )
        yield

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError
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

from flatout.errors import UserError, first_line, printable, require
from flatout.files import require_ordinary, values_of
from flatout.sweep.settings import Pruner, Sampler, SweeperSettings
from flatout.sweep.space import Space, grid
from flatout.sweep.trial import Ending, Status
from flatout.sweep.untried import UntriedSampler

JOURNAL = "journal.log"
_FEW = 9  # so many trials or validations allow two cuts to a third each
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
        """`validations`: the most that a trial has; None if the data decide."""
        self.space = space
        self.search = search
        self.mode = mode
        self._grid = grid(space) if search.sampler is Sampler.grid else []
        self.total = len(self._grid) or search.trials
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = repair_journal(folder / JOURNAL)
        with values_of(journal), quiet_optuna(), _optuna_s_errors():
            self._study = optuna.create_study(
                study_name="sweep",
                storage=JournalStorage(JournalFileBackend(str(journal))),
                direction="maximize" if mode == "max" else "minimize",
                pruner=make_pruner(Pruner(search.pruner), validations, self.total),
                load_if_exists=True,
            )
            is_as_asked = self._study.direction.name.lower() == f"{mode}imize"
            require(is_as_asked, str(journal), "its trials were compared the other way")
            self._require_own_settings(journal)
        self._trials: dict[int, optuna.Trial] = {}
        # trials that ran when the sweep was killed: they come first
        self._left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _require_own_settings(self, journal: Path) -> None:
        """Refuse trials of other values: the best one is trained again, with words as if typed."""
        for trial in self._study.get_trials(deepcopy=False):
            _require_facts(trial, journal)
            queued = trial.system_attrs.get("fixed_params", {})
            for key, value in (*trial.params.items(), *queued.items()):
                require(
                    key in self.space and self.space[key].holds(value),
                    str(journal),
                    f"trial {trial.number} has {key}={value}, which this sweep does not search",
                    hint="Start a new sweep.",
                )

    def ask(self) -> tuple[int, dict[str, str]] | None:
        """Number and settings of the next trial; None when there are enough."""
        with quiet_optuna():
            trial = self._next()
            if trial is None:
                return None
            self._trials[trial.number] = trial
            settings = {}
            for key, part in self.space.items():
                # Each setting has a sampler of its own. Whatever one of them draws, the others of
                # a resumed trial draw the same.
                self._study.sampler = self._sampler(trial.number, key)
                settings[key] = part.suggest(trial, key)
            return trial.number, settings

    def should_end(self, number: int, count: int, value: float) -> bool:
        """Report a trial's validation number `count`; whether the trial should be pruned now."""
        if math.isfinite(value):
            with quiet_optuna():
                self._trials[number].report(value, count)
        return self._trials[number].should_prune()

    def tell(self, number: int, ending: Ending) -> None:
        """Record how a trial ended; a stopped one runs again when the sweep is resumed."""
        if ending.status is Status.stopped:
            return
        trial = self._trials[number]
        state = _STATES[ending.status]
        value = ending.value
        note = ending.note
        # Optuna refuses a complete trial without a finite value, so it counts as failed here.
        if state is TrialState.COMPLETE and (value is None or not math.isfinite(value)):
            state = TrialState.FAIL
            note = "its metric is not a number"
        trial.set_user_attr("seconds", ending.seconds)
        trial.set_user_attr("note", note)
        trial.set_user_attr("metrics", ending.metrics)
        trial.set_user_attr("is_mistake", ending.is_mistake)
        self._study.tell(trial, value if state is TrialState.COMPLETE else None, state=state)

    def ended(self) -> list[FrozenTrial]:
        """Trials whose ending is known: complete, pruned and failed ones."""
        return self._study.get_trials(deepcopy=False, states=tuple(ENDED))

    def settings(self, trial: FrozenTrial) -> dict[str, str]:
        """A trial's settings as texts; none for a key that it was never asked for."""
        return {
            key: part.text(trial.params[key])
            for key, part in self.space.items()
            if key in trial.params
        }

    def best(self) -> FrozenTrial | None:
        """The complete trial with the best value; None while no trial is complete."""
        with suppress(ValueError):  # Optuna raises it when no trial is complete
            return self._study.best_trial
        return None

    def importance(self) -> dict[str, float]:
        """How much of the difference between trials each setting explains; the shares sum to 1.

        Empty if fewer than four trials are complete, or if all have one value.
        """
        done = [trial for trial in self.ended() if trial.state is TrialState.COMPLETE]
        if len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        with quiet_optuna():
            weights = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        total = sum(weights.values())
        if total <= 0:
            return {}
        return {key: weight / total for key, weight in weights.items()}

    def _next(self) -> optuna.Trial | None:
        """An interrupted trial, else a new one; None when there are as many as were asked for."""
        if self._left:
            return optuna.Trial(self._study, self._left.pop(0)._trial_id)
        trials = self._study.get_trials(deepcopy=False)
        waiting = [trial for trial in trials if trial.state is TrialState.WAITING]
        # A waiting trial was put into the queue by a process that was killed before it asked.
        number = len(trials) - len(waiting)
        if number >= self.total:
            return None
        if self._grid and not waiting:
            self._study.enqueue_trial(self._grid[number])
        return self._study.ask()

    def _sampler(self, number: int, key: str) -> BaseSampler:
        """A new sampler for one setting of one trial.

        Its seed follows from the names alone, so a killed sweep loses no state of a sampler.
        """
        seed = zlib.crc32(f"{self.search.seed} {number} {key}".encode())
        drawing: BaseSampler = RandomSampler(seed=seed)
        if self.search.sampler is Sampler.tpe:
            # TPE learns from earlier trials. The first ones, a third but 4 to 10, are random.
            num_random = max(4, min(10, self.total // 3))
            drawing = _Tpe(seed=seed, n_startup_trials=num_random, constant_liar=True)
        # Of infinitely many settings none is drawn twice.
        if math.isinf(math.prod(part.num_values for part in self.space.values())):
            return drawing
        return UntriedSampler(drawing, self._study, self.space, seed)


def finite_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Metrics by their names, from a file of others: those that are numbers."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and math.isfinite(value):
            numbers[printable(name)] = float(value)
    return numbers


def _require_facts(trial: FrozenTrial, journal: Path) -> None:
    """Refuse a trial whose results are not what a sweep notes."""
    facts = trial.user_attrs
    seconds = facts.get("seconds", 0.0)
    metrics = facts.get("metrics", {})
    fits = isinstance(facts.get("note", ""), str) and isinstance(metrics, dict)
    fits &= isinstance(seconds, int | float) and math.isfinite(seconds)
    fits &= all(math.isfinite(value) for value in trial.intermediate_values.values())
    rungs = [value for name, value in trial.system_attrs.items() if "rung" in name]
    results = [trial.value] if trial.state is TrialState.COMPLETE else []
    fits &= all(
        isinstance(value, float | int) and math.isfinite(value) for value in (*rungs, *results)
    )
    fits = fits and all(value is None or float(value) is not None for value in metrics.values())
    require(
        fits,
        str(journal),
        f"trial {trial.number} has results that no sweep notes",
        hint="Start a new sweep.",
    )


@contextmanager
def _optuna_s_errors() -> Iterator[None]:
    """What Optuna says of a journal that contradicts itself, as a ValueError."""
    try:
        yield
    except (OptunaError, AssertionError, RuntimeError) as error:
        raise ValueError(first_line(error)) from error


class _Tpe(TPESampler):
    """Optuna's TPE, which compares the settings of all trials before each new one.

    All trials of a sweep have the same settings, so this one reads those of a single trial.
    """

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = study.get_trials(deepcopy=False, states=states)
        if not trials:
            return {}
        distributions = sorted(trials[0].distributions.items())
        return {key: values for key, values in distributions if not values.single()}


def make_pruner(kind: Pruner, validations: int | None, trials: int) -> BasePruner:
    match kind:
        case Pruner.hyperband:
            most = validations or "auto"
            return HyperbandPruner(min_resource=1, max_resource=most, reduction_factor=3)
        case Pruner.median:
            return MedianPruner(n_startup_trials=4, n_warmup_steps=1)
        case Pruner.none:
            return NopPruner()
    # Successive halving keeps the best third after the first validation, a third of these after
    # the third one, and so on. Of few trials, or few validations, that would leave hardly one, so
    # the better half is kept once, in the middle.
    count = validations or _FEW
    if min(count, trials) < _FEW:
        return SuccessiveHalvingPruner(min_resource=max(1, count // 2), reduction_factor=2)
    return SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)


def repair_journal(journal: Path) -> Path:
    """Remove what a killed process has left in a journal: its lock, and an unfinished last line.

    The caller holds the folder. A journal that is damaged elsewhere is refused.
    """
    # Optuna waits half a minute for a lock without an owner, and for ever if the folder was moved.
    lock = journal.with_name(f"{journal.name}.lock")
    require(not lock.is_dir(), str(lock), "is a folder", hint="Remove it.")
    lock.unlink(missing_ok=True)
    require_ordinary(journal)
    is_ours = not journal.is_symlink() and not journal.is_dir()
    require(is_ours, str(journal), "is a link or a folder", hint="Remove it.")
    if not journal.is_file():
        return journal
    data = journal.read_bytes()
    if data and not data.endswith(b"\n"):
        # in place: a full disk has no room for a second copy
        os.truncate(journal, data.rfind(b"\n") + 1)
    # the unfinished line has no line end of its own, so it is not counted
    whole_lines = data.splitlines()[: data.count(b"\n")]
    for number, line in enumerate(whole_lines, 1):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                str(journal),
                f"line {number} is damaged",
                hint="Start a new sweep; the folders of finished trials stay.",
            ) from None
    return journal


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence two warnings of Optuna: of features that it calls experimental, and of values that a
    trial reports again after it was killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings(
            "ignore", message="The reported value is ignored because this `step`"
        )
        yield

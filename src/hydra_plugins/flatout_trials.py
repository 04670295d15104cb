"""Hydra's side of trials: the launcher behind `-m`, and the sweeper behind `python -m flatout sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from flatout.errors import UserError, require
from flatout.scale.hydra_groups import LauncherSettings, register

register()


class _Composer:
    """Composes the settings of one trial after the other."""

    def __init__(self, hydra_context: HydraContext, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        composed = self.loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        return composed

    def folder(self, composed: DictConfig) -> Path:
        return Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)).absolute()


class TrialLauncher(Launcher):
    """Runs the trials of any sweeper, each in a clean process; one that fails does not end the others."""

    def __init__(self, parallel: int = 1, limit: str | None = None) -> None:
        self.parallel, self.limit = parallel, limit

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.composer = _Composer(hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from flatout.boundary import read_config
        from flatout.scale.many import run_all
        from flatout.scale.trials import Trial

        _require_one_process()
        common = set.intersection(*(set(words) for words in job_overrides)) if len(job_overrides) > 1 else set()
        trials, composed = [], []
        for number, words in enumerate(job_overrides, initial_job_idx):
            composed.append(self.composer.compose(words, number))
            shown = [word for word in filter_overrides(words) if word not in common]
            config = read_config(without_hydra(composed[-1]), words)
            trials.append(Trial(number, self.composer.folder(composed[-1]), config, list(words), shown))
        found = run_all(trials, parallel=self.parallel, limit=self.limit)
        return [_returned(*parts) for parts in zip(job_overrides, composed, found, strict=True)]


class TrialSweeper(Sweeper):
    """Searches a space of settings with Optuna, trial by trial."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.composer, self.hydra_config = _Composer(hydra_context, config), config.hydra

    def sweep(self, arguments: list[str]) -> Any:
        from flatout.boundary import read_config
        from flatout.scale.sweep import SweepSettings, sweep

        _require_one_process()
        launcher = self.hydra_config.launcher
        if launcher.get("_target_") != LauncherSettings._target_:
            raise UserError("hydra/launcher", "a sweep starts its own trials", mend="Leave hydra/launcher out.")
        written = [f"{key}={value}" for key, value in (self.settings.pop("space") or {}).items()]
        for override in OverridesParser.create(config_loader=self.composer.loader).parse_overrides(written):
            mend = "Write choice(…), interval(…) or range(…)."
            require(override.is_sweep_override(), f"space: {override.get_key_element()}", "has one value", mend=mend)
        fixed, space = _fixed_and_searched(self.composer, [*written, *arguments])

        def config_of(words: Sequence[str], number: int) -> Any:
            return read_config(without_hydra(self.composer.compose(words, number)), words)

        settings = SweepSettings(**self.settings, parallel=launcher.parallel, limit=launcher.limit)
        folder = Path(str(self.hydra_config.sweep.dir)).absolute()
        typed = [*self.hydra_config.overrides.hydra, *self.hydra_config.overrides.task]
        return sweep(settings, space, fixed, config_of, folder, [word for word in typed if not _is_of_resuming(word)])


def _require_one_process() -> None:
    from flatout.ranks import Ranks

    mend = "Start it once, and set trainer.devices for the devices of each trial."
    require(not Ranks.here().are_several, "-m", "several ranks are running, and each would start all trials", mend=mend)


def _is_of_resuming(word: str) -> bool:
    return word.partition("=")[0] in ("hydra.mode", "hydra.sweep.dir", "hydra.sweeper.resume")


def without_hydra(composed: DictConfig) -> DictConfig:
    """What the run is told, without what Hydra is told."""
    with open_dict(composed):
        kept = composed.copy()
        del kept["hydra"]
    return kept


def _returned(words: Sequence[str], composed: DictConfig, ending: Any) -> JobReturn:
    """What became of a trial in Hydra's words; one that was stopped has no value to compare."""
    done = JobReturn(overrides=list(words), cfg=without_hydra(composed), hydra_cfg=composed, status=JobStatus.COMPLETED)
    done.return_value = float("nan") if ending.value is None else ending.value
    return done


def _fixed_and_searched(composer: _Composer, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """What is the same in all trials, and what is searched: later words win over earlier ones."""
    parsed = OverridesParser.create(config_loader=composer.loader).parse_overrides(list(words))
    last = {override.get_key_element(): override for override in parsed}
    fixed, space = [], {}
    for key, override in last.items():
        if override.is_sweep_override():
            space[key] = _part(override)
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
    return fixed, space


def _part(override: Override) -> Any:
    """One dimension of the space."""
    from flatout.scale.space import Choice, Interval

    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        is_whole = isinstance(value.start, int) and isinstance(value.end, int)
        return Interval(value.start, value.end, is_log="log" in value.tags, is_whole=is_whole)
    if isinstance(value, RangeSweep) and isinstance(numbers := value.range(), range):
        require(bool(numbers), f"sweep: {override.get_key_element()}", "a range without numbers")
        is_log, step = "log" in value.tags, abs(numbers.step)
        return Interval(min(numbers), max(numbers), is_log=is_log, is_whole=True, step=step)
    return Choice(tuple(override.sweep_string_iterator()))

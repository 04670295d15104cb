"""Hydra's side of trials: the launcher behind `-m`, the sweeper behind `python -m flatout sweep`.

The launcher serves `python -m train`, and any script with `@hydra.main` and
`override hydra/launcher: flatout` in its settings.

Hydra finds plugins in a package of this name. The launcher turns the words of each trial into a
`Trial` and passes all of them to `sweep/many.py`. The sweeper turns its words into a space and
passes it to `sweep/sweep.py`. Nothing below knows Hydra. What takes long to import is imported
inside functions, as Hydra imports every plugin at each start.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from flatout.cli.composing import explain_errors
from flatout.cli.masked_settings import mask_settings_in
from flatout.cli.words import command_of_sweep, conf_words
from flatout.errors import EXIT_CODE, RunBroke, UserError, require
from flatout.masking import mask_words
from flatout.sweep.settings import LauncherSettings, SweeperSettings

if TYPE_CHECKING:
    from flatout.run.job import RunJob
    from flatout.sweep.space import Part
    from flatout.sweep.trial import Ending, TrialJob

# keys of the words that resume a sweep; the command that began it has its own
_OF_RESUMING = ("hydra.mode", "hydra.sweep.dir", "hydra.sweeper.resume")
for _group, _settings in (("launcher", LauncherSettings), ("sweeper", SweeperSettings)):
    ConfigStore.instance().store(
        group=f"hydra/{_group}", name="flatout", node=_settings, provider="flatout"
    )


class TrialLauncher(Launcher):
    """Runs the trials of any sweeper, each in a clean process.

    A trial that fails does not end the others. Trials of a script of the user's own are resumed by
    the same words with their folder: its settings need no `resume`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = LauncherSettings(**settings)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader = hydra_context.config_loader
        self.config = config
        self.context = hydra_context
        self.task = task_function
        self.is_script = not _is_of_runs(config)
        with self._errors_end():
            self._find_folder(config)

    def _find_folder(self, config: DictConfig) -> None:
        from flatout.sweep.many import WORDS

        task_words = [str(word) for word in config.hydra.overrides.task]
        hydra_words = [str(word) for word in config.hydra.overrides.hydra]
        # `resume` belongs to the command and not to its trials: without it, the words are those
        # that began the trials
        self.words = [word for word in task_words if not _is_resume(word)]
        is_named = any(word.startswith("hydra.sweep.dir=") for word in hydra_words)
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        if self.is_script:
            self.is_again = is_named and (folder / WORDS).is_file()
        else:
            self.is_again = _asks_to_resume(task_words)
        self.begun: Path | None = None
        if self.is_again:
            self.begun = _find_begun(folder, self.words, is_named=is_named)
        self.folder = self.begun or folder
        self.conf = conf_words(config.hydra.runtime.config_sources)
        self.again = self._line_to_resume(hydra_words)
        # Hydra makes the folder, and writes into it
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = str(self.folder)

    def _line_to_resume(self, hydra_words: Sequence[str]) -> str:
        kept_words = [word for word in hydra_words if not word.startswith("hydra.mode=")]
        if self.is_script:
            others = [word for word in kept_words if not word.startswith("hydra.sweep.dir=")]
            typed = [*others, *self.words, f"hydra.sweep.dir={self.folder}"]
            return shlex.join(["python", sys.argv[0], *self.conf, "-m", *mask_words(typed)])
        typed = [*kept_words, *self.words, "resume=auto"]
        return shlex.join(["python", "-m", "train", *self.conf, "-m", *mask_words(typed)])

    def _compose(self, words: list[str], number: int) -> tuple[DictConfig, TrialJob]:
        if not self.is_script:
            return _compose(self.loader, self.config, words, number)
        from flatout.cli.script_job import ScriptJob, name_of_function

        function = name_of_function(self.task)
        composed = _load(self.loader, self.config, words, number)
        return composed, ScriptJob(composed, self.context, function)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        with self._errors_end():
            return self._launch(job_overrides, initial_job_idx)

    @contextmanager
    def _errors_end(self) -> Iterator[None]:
        """Let an error end a script as it ends `python -m train`: one message, no traceback."""
        try:
            yield
        except (UserError, RunBroke) as error:
            if not self.is_script:
                raise
            print(error, file=sys.stderr)
            sys.exit(EXIT_CODE if isinstance(error, UserError) else 1)

    def _launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from flatout.sweep.many import Multirun, run_all
        from flatout.sweep.trial import Trial

        _require_one_process()
        mask_settings_in(self.folder / "multirun.yaml")
        # Words that all trials share are not shown; of a single trial all are.
        common: set[str] = set()
        if len(job_overrides) > 1:
            common = set.intersection(*map(set, job_overrides))
        trials = []
        composed = []
        for number, typed in enumerate(job_overrides, initial_job_idx):
            words = [word for word in typed if not _is_resume(word)]
            cfg, job = self._compose(words, number)
            folder = Path(str(cfg.hydra.sweep.dir)).absolute()
            # Trials of several experiments lie in several places, each below the moment at which
            # the command began: a resumed one looks below that of the first time.
            if self.begun is not None:
                folder = folder.with_name(self.begun.name)
            trials.append(
                Trial(
                    number,
                    folder=folder / str(cfg.hydra.sweep.subdir),
                    job=job,
                    overrides=[*self.conf, *words],
                    changed=[word for word in filter_overrides(words) if word not in common],
                    is_again=self.begun is not None,
                )
            )
            composed.append(cfg)
        multirun = Multirun(self.folder, self.words, self.again, self.is_again)
        endings = run_all(trials, of=multirun, launcher=self.settings)
        return [_returned(*parts) for parts in zip(job_overrides, composed, endings, strict=True)]


class TrialSweeper(Sweeper):
    """Searches a space of settings with Optuna, trial by trial."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader = hydra_context.config_loader
        self.job_config = config
        self.hydra_config = config.hydra

    def sweep(self, arguments: list[str]) -> Any:
        from flatout.sweep.searched import Searched
        from flatout.sweep.sweep import sweep

        _require_one_process()
        require(
            not any(map(_is_resume, arguments)),
            "resume",
            "is of runs, and this is a sweep",
            hint="Resume it by: python -m flatout sweep resume FOLDER.",
        )
        launcher = self.hydra_config.launcher
        require(
            launcher.get("_target_") == LauncherSettings._target_,
            "hydra/launcher",
            "a sweep starts its own trials",
            hint="Leave hydra/launcher out.",
        )
        # settings of the `space` in a file, then those of the command line, which win
        space_in_file = self.settings.pop("space") or {}
        written = [f"{key}={value}" for key, value in space_in_file.items()]
        for override in OverridesParser.create(config_loader=self.loader).parse_overrides(written):
            require(
                override.is_sweep_override(),
                f"space: {override.get_key_element()}",
                "has one value",
                hint="Write choice(…), interval(…) or range(…).",
            )
        fixed, space = fixed_and_searched([*written, *arguments], self.loader)
        settings = SweeperSettings(**self.settings)
        slots = LauncherSettings(**launcher)
        folder = Path(str(self.hydra_config.sweep.dir)).absolute()
        return sweep(
            Searched(settings, space, fixed, self._compose, folder, slots, **self._begun(fixed))
        )

    def _compose(self, words: Sequence[str], number: int) -> RunJob:
        return _compose(self.loader, self.job_config, words, number)[1]

    def _begun(self, fixed: list[str]) -> dict[str, Any]:
        """The fields of `Searched` that say what was typed: to resume it, and to train one trial.

        In an experiment that is several runs by itself, a trial alone needs `hydra.mode=RUN`.
        """
        typed = [*self.hydra_config.overrides.hydra, *self.hydra_config.overrides.task]
        typed = [word for word in typed if word.partition("=")[0] not in _OF_RESUMING]
        conf = conf_words(self.hydra_config.runtime.config_sources)
        alone = self.loader.load_configuration(
            self.hydra_config.job.config_name, list(fixed), RunMode.RUN
        )
        mode = ["hydra.mode=RUN"] if alone.hydra.mode is RunMode.MULTIRUN else []
        conf_folder = conf[0].partition("=")[2] if conf else None
        line = command_of_sweep(mask_words(typed), conf_folder)
        return {"begun_by": typed, "conf": conf_folder, "line": line, "train": [*conf, *mode]}


def _require_one_process() -> None:
    from flatout.distributed.ranks import Ranks

    require(
        not Ranks.here().are_several,
        "-m",
        "several ranks are running, and each would start all trials",
        hint="Start it once, and set trainer.devices for the devices of each trial.",
    )


def _is_resume(word: str) -> bool:
    return word.lstrip("+").partition("=")[0] == "resume"


def _asks_to_resume(words: Sequence[str]) -> bool:
    values = [word.partition("=")[2].strip("\"'") for word in words if _is_resume(word)]
    asked = values[-1] if values else "null"  # the last word wins
    require(
        asked in ("auto", "null"),
        "resume",
        f"{asked} is one run, and -m are many",
        hint="Set resume=auto, and hydra.sweep.dir=FOLDER where it is not the newest one.",
    )
    return asked == "auto"


def _find_begun(folder: Path, words: list[str], *, is_named: bool) -> Path | None:
    """The folder of trials to resume: the named one, or the newest beside it with these words.

    None if these words have begun no trials.
    """
    from flatout.sweep.many import begun_with, newest_of

    if is_named:
        searched = folder
        before = begun_with(folder)
        require(
            before in (None, mask_words(words)),
            "hydra.sweep.dir",
            f"{folder} holds trials of other words: {shlex.join(before or [])}",
            hint="Choose another hydra.sweep.dir, or give that command again.",
        )
        begun = None if before is None else folder
    else:
        searched = folder.parent
        begun = newest_of(words, folder.parent)
    line = f"resume: continuing in {begun}"
    if begun is None:
        line = f"resume: this command began no trials in {searched}; all start from the beginning"
    print(line, flush=True)
    return begun


def _compose(
    loader: ConfigLoader, config: DictConfig, words: Sequence[str], number: int
) -> tuple[DictConfig, RunJob]:
    """The settings of a trial, with Hydra's own, and its run."""
    from flatout.cli.boundary import read_config
    from flatout.run.job import RunJob

    with explain_errors():
        composed = _load(loader, config, words, number)
        return composed, RunJob(read_config(without_hydra(composed), words))


def _load(
    loader: ConfigLoader, config: DictConfig, words: Sequence[str], number: int
) -> DictConfig:
    composed = loader.load_sweep_config(config, list(words))
    with open_dict(composed):
        composed.hydra.job.id = number
        composed.hydra.job.num = composed.hydra.job.id
    return composed


def _is_of_runs(config: DictConfig) -> bool:
    """Whether settings are those of `python -m train`, and not of a script of the user's own."""
    from flatout.config import RunConfig

    return OmegaConf.get_type(config) is RunConfig


def without_hydra(composed: DictConfig) -> DictConfig:
    """The run's settings, without Hydra's own."""
    with open_dict(composed):
        kept = composed.copy()
        del kept["hydra"]
    return kept


def _returned(words: Sequence[str], composed: DictConfig, ending: Ending) -> JobReturn:
    """How a trial ended, as Hydra's sweepers read it; without a value it is not a number."""
    done = JobReturn(
        overrides=list(words),
        cfg=without_hydra(composed),
        hydra_cfg=composed,
        status=JobStatus.COMPLETED,
    )
    done.return_value = float("nan") if ending.value is None else ending.value
    return done


def fixed_and_searched(
    words: Sequence[str], loader: ConfigLoader | None = None
) -> tuple[list[str], dict[str, Part]]:
    """Words that are the same in all trials, and the settings that are searched.

    model=bilstm model.hidden=choice(64,128) seed=1    →    [model=bilstm, seed=1], {hidden: …}

    `loader`: that of Hydra, which knows the options that a `glob(…)` names.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    # later words win over earlier ones
    last = {override.get_key_element(): override for override in parsed}
    space = {key: _part(override) for key, override in last.items() if override.is_sweep_override()}
    fixed = [
        f"{key}={each.get_value_element_as_str()}" for key, each in last.items() if key not in space
    ]
    return fixed, space


def _part(override: Override) -> Part:
    """The values of a setting in our words.

    choice(64,128) → listed 64, 128    interval(0,1) → 0 to 1    range(1,9,2) → 1, 3, 5, 7
    """
    from flatout.sweep.space import SettingInterval, SettingValues, is_by_factors

    key = override.get_key_element()
    value = override.value()
    # a range of fractions is a list of numbers here
    numbers = value.range() if isinstance(value, RangeSweep) else None
    is_interval = isinstance(value, IntervalSweep) or isinstance(numbers, range)
    tags = value.tags if isinstance(value, Sweep) else set()
    is_log = is_by_factors(key, tags, is_interval=is_interval)
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        is_whole = isinstance(value.start, int) and isinstance(value.end, int)
        return SettingInterval(value.start, value.end, is_log=is_log, is_whole=is_whole)
    if isinstance(numbers, range):
        require(bool(numbers), f"sweep: {key}", "a range without numbers")
        return SettingInterval(
            min(numbers), max(numbers), is_log=is_log, is_whole=True, step=abs(numbers.step)
        )
    return SettingValues(tuple(override.sweep_string_iterator()))

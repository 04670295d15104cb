"""Start a run: from a command (`start`), from Python (`fit`), or on workers of Ray.

`start` trains in this process where there is one device, or where torchrun, srun or Ray has started
the ranks already. Otherwise it starts a process for each device (`run/spawn.py`) and returns what
the first rank found. Before that it refuses what cannot be started, and chooses the run's folder:
a new one, or that of the run to resume.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch import nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from flatout.bits.settings import BitsDataConfig
from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig, RunConfig
from flatout.data.batches.store_data import StoreData
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.tables.sources import is_rows
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.engine import device_of, train_on_ray
from flatout.distributed.processes import end_with_parent, interrupt_once, redirect_output
from flatout.distributed.ranks import Ranks
from flatout.engine.lightning_internals import overrides
from flatout.engine.optimizer import OptimConfig
from flatout.errors import (
    EXIT_CODE,
    OtherRankEnded,
    RunBroke,
    UserError,
    about_settings,
    did_you_mean,
    require,
    write_for_launcher,
)
from flatout.report.summary import mark_broken
from flatout.run.claimed_folders import claim_folder, list_numbered, name_folder
from flatout.run.closing import Result, finished_result
from flatout.run.devices import choose_devices
from flatout.run.kinds import KINDS
from flatout.run.resume import find_run, unfinished_before
from flatout.run.run import run
from flatout.run.spawn import environment_for_ranks, explain_failure, run_on_ranks, take_environment
from flatout.run.whose_parts import parts_of
from flatout.tasks.task import Task
from flatout.tasks.task_class import TaskClass

# makes the folder of a new run: the one that was asked for, or one beside it
Claim = Callable[[Path], Path]
# how long a rank that misses another one waits before it ends: the launcher should see the other
# one's end first
_WAIT_FOR_CAUSE_S = 2


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The folder of a run."""

    folder: str
    resume: str | None  # the same folder, where an earlier run is resumed
    is_finished: bool  # whether that one has nothing left to train


def start(
    config: RunConfig,
    *,
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    claim: Claim = claim_folder,
    named: Sequence[Path] = (),
) -> Result:
    """One run, here or on as many processes as devices are asked for.

    `claim` makes the folder of a new run, from `folder` or from a name after this moment.
    `overrides` are the words that were typed. `named` are the folders in which `resume=auto` looks
    for this run; without them it looks below `output/name`.
    """
    ranks = Ranks.here()
    choose = partial(_choose_folder, config, folder, overrides, claim, named)
    with ranks.train_together():
        return _start(config, ranks, overrides, choose)


def _start(
    config: RunConfig, ranks: Ranks, overrides: Sequence[str], choose: Callable[[], _Chosen]
) -> Result:
    devices = choose_devices(config.trainer)
    is_here = ranks.are_several or len(devices) == 1
    _require_startable(config, ranks, devices, is_here=is_here)

    # the first rank chooses; others get plain values from it
    agreed = ranks.agreed("folder", lambda: asdict(choose()))
    path = Path(agreed["folder"])
    if agreed["is_finished"]:
        return finished_result(path, parts_of(config).open_answers(config, path))
    config = replace(config, resume=agreed["resume"])
    if is_here:
        return run(config, path, overrides=overrides, number=devices[0])
    return _train_on_ranks(config, devices, path, overrides)


def _require_startable(
    config: RunConfig, ranks: Ranks, devices: Sequence[int], *, is_here: bool
) -> None:
    """Refuse settings that do not fit the ranks that run already, or those to be started."""
    if ranks.are_several:
        is_counted = config.trainer.get("devices") not in (None, "auto", -1)
        require(
            not is_counted or len(devices) == ranks.local_world,
            "trainer.devices",
            f"{ranks.local_world} ranks are running on this machine",
            hint="Leave trainer.devices out: who starts the ranks decides.",
        )
    num_nodes = config.trainer.get("num_nodes", 1)
    require(
        ranks.are_several or num_nodes == 1,
        "trainer.num_nodes",
        f"{num_nodes}, but no rank runs on another machine",
        hint="Start the run on each machine with torchrun or srun.",
    )
    is_alone = not ranks.are_several and is_here
    require(
        not (config.is_sharded and is_alone),
        "trainer.strategy: fsdp",
        "a single device has no other to share weights with",
        hint="Set trainer.devices=N, or leave it out.",
    )
    require(
        is_here or not isinstance(config.model, nn.Module),
        "trainer.devices",
        "a model of your own cannot be handed to other processes",
        hint="Start your script with torchrun, or name the model's settings.",
    )
    world = max(ranks.world, len(devices))
    parts_of(config).require_startable(config, world, is_here=is_here)


def _choose_folder(
    config: RunConfig,
    folder: Path | None,
    overrides: Sequence[str],
    claim: Claim,
    named: Sequence[Path],
) -> _Chosen:
    """Find the run to resume, or claim a folder for a new one; print what the search reports."""
    search = find_run(config, overrides, named)
    lines = list(search.lines)
    if search.folder is not None:
        chosen = _Chosen(str(search.folder), str(search.folder), search.is_finished)
    else:
        # Claimed before anything is printed: a folder that is refused begins no new run.
        asked = folder or name_folder(Path(config.output, config.name))
        chosen = _Chosen(str(claim(asked.absolute())), None, search.is_finished)
        if config.resume is None:
            hint = unfinished_before(config, overrides, named)
            if hint:
                lines.append(hint)
    for line in lines:
        print(line, flush=True)
    return chosen


def start_on_ray(
    config: RunConfig,
    *,
    folder: Path,
    overrides: Sequence[str],
    workers: int,
    claim: Claim = claim_folder,
    named: Sequence[Path] = (),
) -> Result:
    """One run whose ranks are workers of Ray Train, on any machines that see the run's folder."""
    parts_of(config).require_startable(config, workers, is_here=False)
    device = device_of(workers)  # what the cluster lacks is refused before there is a folder
    chosen = _choose_folder(config, folder, overrides, claim, named)
    path = Path(chosen.folder)
    if not chosen.is_finished:
        started = time.time()
        work = partial(_begin_or_resume, config, path, list(overrides))
        try:
            train_on_ray(work, workers, device, path.parent)
        except BaseException as error:
            # Ray ends the ranks before they can write how the run ended
            is_asked = isinstance(error, KeyboardInterrupt | SystemExit)
            mark_broken(path, started, "interrupted" if is_asked else "failed")
            raise
    return finished_result(path, parts_of(config).open_answers(config, path))


def _begin_or_resume(config: RunConfig, folder: Path, overrides: Sequence[str]) -> None:
    """A rank's part of the run in this folder, from the last checkpoint if there is one.

    Ray restarts ranks that it has lost, and they continue there.
    """

    def has_checkpoint() -> bool:
        return any(find_checkpoint(folder / CHECKPOINTS))

    ranks = Ranks.here()
    with ranks.train_together():
        has_begun = ranks.agreed("begun", has_checkpoint)
    config = replace(config, resume=str(folder) if has_begun else None)
    start(config, folder=folder, overrides=overrides, claim=Path.absolute)


def _train_on_ranks(
    config: RunConfig, devices: Sequence[int], folder: Path, overrides: Sequence[str]
) -> Result:
    """Train in a process for each device; how it ended stands in the summary in any case."""
    started = time.time()
    # each rank counts the devices it sees
    config_of_rank = replace(config, trainer={**config.trainer, "devices": None})
    environment = environment_for_ranks(str(config.trainer.get("accelerator", "auto")), devices)
    arguments = (config_of_rank, folder, list(overrides), environment)
    try:
        facts = run_on_ranks(_run_rank, arguments, len(devices))
    except ChildFailedError as error:
        failure = explain_failure(error, len(devices), folder)
        mark_broken(folder, started, "interrupted" if isinstance(failure, SystemExit) else "failed")
        raise failure from None
    except SignalException as stopped:
        mark_broken(folder, started, "interrupted")
        if stopped.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    return Result(predictor=parts_of(config).open_answers(config, folder), **facts)


@record
def _run_rank(
    config: RunConfig, folder: Path, overrides: list[str], environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """In a process of its own: one rank's part; the first rank returns the result's fields."""
    end_with_parent()
    signal.signal(signal.SIGINT, interrupt_once)
    take_environment(environment)
    redirect_output()
    ranks = Ranks.here()
    try:
        with ranks.train_together():
            result = run(parts_of(config).of_this_process(config), folder, overrides=overrides)
    except UserError as mistake:
        if isinstance(mistake, OtherRankEnded):
            time.sleep(_WAIT_FOR_CAUSE_S)
        write_for_launcher(mistake)
        sys.exit(EXIT_CODE)
    except RunBroke:
        time.sleep(_WAIT_FOR_CAUSE_S)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if not ranks.is_first:
        return None
    # the predictor holds the network: it is read from the folder instead
    return {
        "folder": result.folder,
        "metrics": result.metrics,
        "per_class": result.per_class,
        "summary": result.summary,
        "metric": result.metric,
    }


def _part_from_task(model: object, settings: dict[str, Any]) -> tuple[object, dict[str, Any]]:
    """The network of a model, and the settings with its task: the user's own module is all task."""
    if isinstance(model, Task):
        is_ours = type(model) in [kind.task for kind in KINDS]
        task = model.config if is_ours else TaskClass(type(model), model.config)
        network = model.model if model.model_config is None else model.model_config
        return network, {"task": task, "optim": model.optim, **settings}
    trains_itself = isinstance(model, L.LightningModule) and overrides(
        model, "training_step", L.LightningModule
    )
    if trains_itself:
        return None, {"task": model, **settings}
    return model, settings


def _one_length(
    epochs: int | None, max_epochs: int | None, settings: Mapping[str, Any]
) -> int | None:
    """The epochs of `fit` under either name; refused where something else says how long, too."""
    require(
        epochs is None or max_epochs is None,
        "fit",
        "epochs and max_epochs",
        hint="Leave one of them out.",
    )
    asked = epochs if max_epochs is None else max_epochs
    require(
        asked is None or "max_epochs" not in (settings.get("trainer") or {}),
        "fit",
        f"epochs={asked}, and trainer has max_epochs, too",
        hint="Leave one of them out.",
    )
    require(
        asked is None or settings.get("budget") is None,
        "fit",
        f"epochs={asked}, and budget={settings.get('budget')}, too",
        hint="Leave one of them out.",
    )
    return asked


def _hint_for(name: str, names: Sequence[str], data: object, model: object) -> str:
    """Where a setting belongs that `fit` does not take, or the nearest one that it takes."""
    groups: dict[str, Any] = {
        "optim": OptimConfig,
        "checkpoint": CheckpointConfig,
        "monitor": MonitorConfig,
    }
    for group, kind in groups.items():
        if name in about_settings(kind):
            return f"It is one of {group}: write fit(…, {group}={{'{name}': …}})."
    for part in (data, model):
        if is_dataclass(part) and name in about_settings(part):
            return f"It is one of {type(part).__name__}: write {type(part).__name__}({name}=…)."
    return did_you_mean(name, names)


def fit(
    data: (
        TextDataConfig
        | BitsDataConfig
        | SequenceDataConfig
        | StoreData[Any, Any]
        | str
        | Path
        | Any
    ) = None,
    model: Any = None,
    *,
    epochs: int | None = None,
    max_epochs: int | None = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Train a model on a table.

    `data` is a DataModule or its Config, or a table of texts in a file or in memory. `model` is a
    task, the Config of a network, a network, or your own LightningModule. `settings` are fields of
    RunConfig; `max_epochs` is short for `trainer.max_epochs`, and `epochs` another name for it.
    """
    max_epochs = _one_length(epochs, max_epochs, settings)
    # A process that multiprocessing spawns reads the script once more before it begins its work.
    is_reading_script = getattr(multiprocessing.current_process(), "_inheriting", False)
    require(
        not is_reading_script,
        "fit",
        "is called while another process reads this script",
        hint="Put it below: if __name__ == '__main__':",
    )
    if isinstance(data, str | Path | list) or is_rows(data):
        data = TextDataConfig(source=data)
    if isinstance(data, StoreData):
        settings.setdefault("seed", data.seed)
        data = data.config
    model, settings = _part_from_task(model, settings)
    names = ("epochs", "max_epochs", "folder", *RunConfig.__dataclass_fields__)
    unknown = sorted(settings.keys() - set(names))
    require(
        not unknown,
        "fit",
        f"no setting {', '.join(unknown)}",
        allowed=", ".join(names),
        hint=_hint_for(unknown[0], names, data, model) if unknown else "",
    )
    config = RunConfig(data=data, model=model, **settings)
    if max_epochs is not None:
        config = replace(config, trainer={**config.trainer, "max_epochs": max_epochs})
    if folder is None:
        return start(config)
    return start(config, folder=Path(folder), named=list_numbered(Path(folder)))

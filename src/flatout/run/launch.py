"""Start a run: on one device or several, from a command, from Python (`fit`), or as the job of a
sweep (`RunJob`).

`start` trains in this process where there is one device, or where torchrun, srun or Ray has started
the ranks already. Otherwise it starts a process a device by the launcher behind torchrun, passes on
what the first rank found, and when one dies says which and why.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    record,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flatout.bits.settings import BitsDataConfig
from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint
from flatout.config import RunConfig
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.store_data import StoreData
from flatout.data.tables.sources import is_rows
from flatout.data.text import TextDataConfig
from flatout.distributed.engine import device_of, train_on_ray
from flatout.distributed.processes import (
    end_with_parent,
    interrupt_once,
    redirect_output,
    warm_start,
)
from flatout.distributed.ranks import Ranks, cores_here, why_no_gpu
from flatout.distributed.signals import ASKING
from flatout.engine.run_length import validations
from flatout.errors import EXIT_CODE, RunBroke, UserError, require, write_for_launcher
from flatout.masking import mask_words
from flatout.report.summary import mark_broken
from flatout.run.closing import Result, finished_result, open_answers
from flatout.run.kinds import kind_of
from flatout.run.own_parts import plain_name
from flatout.run.resolve import trainer_of_own
from flatout.run.resume import find_run, unfinished_before
from flatout.run.run import run
from flatout.run.run_folder import OVERRIDES, claim_folder, list_numbered, name_folder
from flatout.tasks.metrics import BEST_MODE, require_metric
from flatout.tasks.task import Task

# makes the folder of a new run: the one that was asked for, or one beside it
Claim = Callable[[Path], Path]
_SHUTDOWN_S = 20  # how long a rank may take to end when another has died, before it is killed
_OF_TORCHRUN = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
)
_ITS_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
"""Variables that tell a rank who it is: their names, and how the names of others begin."""
_BEGINNINGS = (EXIT_CODE, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""How a rank ends that begins a failure."""
# how long a rank that only misses another one waits, so that the launcher sees the other one's end
# first
_LATER_S = 2


def start(
    config: RunConfig,
    *,
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    claim: Claim = claim_folder,
    named: Sequence[Path] = (),
) -> Result:
    """One run, here or on as many processes as devices are asked for; `claim` makes the folder of a
    new one.

    `named` are the folders in which `resume=auto` looks for this run; without them it looks below
    `output/name`.
    """
    ranks = Ranks.here()
    wanted = devices_wanted(config.trainer)
    if ranks.are_several:
        given = config.trainer.get("devices") not in (None, "auto", -1)
        started = f"{ranks.local_world} ranks are running on this machine"
        require(
            not given or len(wanted) == ranks.local_world,
            "trainer.devices",
            started,
            hint="Leave trainer.devices out: who starts the ranks decides.",
        )
    nodes = config.trainer.get("num_nodes", 1)
    require(
        ranks.are_several or nodes == 1,
        "trainer.num_nodes",
        f"{nodes}, but no rank runs on another machine",
        hint="Start the run on each machine with torchrun or srun.",
    )
    are_alone = not ranks.are_several and len(wanted) == 1
    what, hint = (
        "a single device has no other to share weights with",
        "Set trainer.devices=N, or leave it out.",
    )
    require(not (config.is_sharded and are_alone), "trainer.strategy: fsdp", what, hint=hint)
    is_here = ranks.are_several or are_alone
    hint = "Start your script with torchrun, or name the model's settings."
    is_own = isinstance(config.model, nn.Module)
    require(
        is_here or not is_own,
        "trainer.devices",
        "a model of your own cannot be handed to other processes",
        hint=hint,
    )
    if config.has_own_parts:
        if not is_here:
            require_picklable(config)
        trainer_of_own(config, max(ranks.world, len(wanted)))
    chosen = ranks.agreed("folder", lambda: _choose_folder(config, folder, overrides, claim, named))
    path = Path(chosen["folder"])
    if chosen["is_finished"]:
        return finished_result(path, open_answers(config, path))
    config = replace(config, resume=chosen["resume"])
    if is_here:
        return run(config, path, overrides=overrides, number=wanted[0])
    return _on_ranks(config, wanted, path, overrides)


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
    if config.has_own_parts:
        require_picklable(config)
    device = device_of(workers)  # what the cluster lacks is said before there is a folder
    chosen = _choose_folder(config, folder, overrides, claim, named)
    path = Path(chosen["folder"])
    if not chosen["is_finished"]:
        started = time.time()
        ranks = partial(_begin_or_resume, config, path, list(overrides))
        try:
            train_on_ray(ranks, workers, device, path.parent)
        except BaseException as ended:  # Ray ends the ranks, before they can write how it ended
            mark_broken(
                path,
                started,
                "interrupted" if isinstance(ended, KeyboardInterrupt | SystemExit) else "failed",
            )
            raise
    return finished_result(path, open_answers(config, path))


def _begin_or_resume(config: RunConfig, folder: Path, overrides: Sequence[str]) -> None:
    """A rank's part of the run in this folder, from the last checkpoint if there is one: Ray
    restarts lost ranks.
    """
    has_any = Ranks.here().agreed("begun", lambda: any(find_checkpoint(folder / CHECKPOINTS)))
    config = replace(config, resume=str(folder) if has_any else None)
    start(config, folder=folder, overrides=overrides, claim=Path.absolute)


def require_picklable(config: RunConfig) -> None:
    """Refuse parts of the user's that cannot be sent to other processes."""
    for where, part in (("task", config.task), ("data", config.data)):
        try:
            ForkingPickler.dumps(part)
        except Exception as error:
            # pickling runs methods of all its attributes, which may raise anything
            raise UserError(
                where,
                f"{type(part).__name__} cannot be sent to other processes: {error}",
                hint=(
                    "Make it picklable, or start one run with torchrun: each process then builds"
                    " its parts."
                ),
            ) from None


def _choose_folder(
    config: RunConfig,
    folder: Path | None,
    overrides: Sequence[str],
    claim: Claim,
    named: Sequence[Path],
) -> dict[str, Any]:
    found = find_run(config, overrides, named)
    chosen = found.folder
    lines = list(found.lines)
    if chosen is None:
        # Claimed before anything is printed: a folder that is refused begins no new run.
        chosen = claim((folder or name_folder(Path(config.output, config.name))).absolute())
        if config.resume is None and (hint := unfinished_before(config, overrides, named)):
            lines.append(hint)
    for line in lines:
        print(line, flush=True)
    resume = None if found.folder is None else str(found.folder)
    return {"folder": str(chosen), "resume": resume, "is_finished": found.is_finished}


def devices_wanted(trainer: dict[str, Any]) -> list[int]:
    """Numbers of the devices that these settings ask for; on a CPU they only count processes."""
    accelerator, asked = trainer.get("accelerator", "auto"), trainer.get("devices")
    count = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0
    is_missing = accelerator in ("gpu", "cuda") and not count
    why, remedy = ("", "") if count else why_no_gpu()
    hint = remedy or "Set trainer=cpu, or leave it out."
    require(not is_missing, "trainer.accelerator", f"{accelerator}, but {why}", hint=hint)
    if accelerator == "auto" and remedy and Ranks.here().is_first:
        print(f"devices: the CPU, as {why}. {remedy}", flush=True)
    there = count or len(cores_here())
    here = f"this machine has {there} {'GPU' if count else 'core'}{'s'[: there != 1]}"
    if count and "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        here = "CUDA gives a process one slice of a MIG card"
    if isinstance(asked, str) and asked != "auto":
        numbers = [
            int(part) if part.isdecimal() else part for part in map(str.strip, asked.split(","))
        ]
        asked = numbers if "," in asked else numbers[0]
    is_list = isinstance(asked, list | tuple) and all(isinstance(each, int) for each in asked)
    is_known = (
        asked is None
        or asked == "auto"
        or (isinstance(asked, int) and not isinstance(asked, bool))
        or is_list
    )
    require(
        is_known, "trainer.devices", f"{asked!r}", allowed="a number, auto, or a list of numbers"
    )
    if asked is None:
        return [0]
    if asked in ("auto", -1):
        return list(range(max(1, count)))
    if isinstance(asked, int):
        require(asked >= 1, "trainer.devices", f"{asked}", allowed="1 or more, or auto")
        require(asked <= there, "trainer.devices", f"{asked}", allowed=f"at most {there}: {here}")
        return list(range(asked))
    require(
        bool(asked) and len(set(asked)) == len(asked),
        "trainer.devices",
        f"{asked}",
        allowed="each number once",
    )
    for number in asked:
        require(
            0 <= number < there,
            "trainer.devices",
            f"no device {number}",
            allowed=f"0 to {there - 1}: {here}",
        )
    return list(asked)


def _on_ranks(
    config: RunConfig, devices: list[int], folder: Path, overrides: Sequence[str]
) -> Result:
    warm_start()
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        # they tell in pages what we say in a line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    launch = elastic_launch(_launch_of(len(devices)), _rank)
    started = time.time()
    # each rank counts the devices it sees
    alone = replace(config, trainer={**config.trainer, "devices": None})
    try:
        with _handlers_given_back():
            environment = _environment(str(config.trainer.get("accelerator", "auto")), devices)
            found = launch(alone, folder, list(overrides), environment)[0]
    except ChildFailedError as error:
        failure = explain_failure(error, len(devices), folder)
        mark_broken(folder, started, "interrupted" if isinstance(failure, SystemExit) else "failed")
        raise failure from None
    except SignalException as stopped:
        mark_broken(folder, started, "interrupted")
        if stopped.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    return Result(predictor=open_answers(config, folder), **found)


def _launch_of(count: int) -> LaunchConfig:
    """So many processes on this machine, on ports that are free; one that dies is not started
    again.
    """
    # Older releases pass on no other signals than their own four, and wait half a minute.
    newer = {
        "signals_to_handle": ",".join(each.name for each in ASKING),
        "shutdown_timeout": _SHUTDOWN_S,
    }
    known: Any = {
        name: value for name, value in newer.items() if name in LaunchConfig.__dataclass_fields__
    }
    known |= {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    known |= {"local_addr": "localhost", "max_restarts": 0, "start_method": "forkserver"}
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, **known)


@contextmanager
def _handlers_given_back() -> Iterator[None]:
    """Torch's launcher takes the handlers of signals and keeps them."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ASKING} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one of native code cannot be given back
                signal.signal(number, handler)


def _environment(accelerator: str, devices: list[int]) -> dict[str, str]:
    """What the ranks shall find in theirs; they are forked from a process that may be older than
    our variables.
    """
    environment = dict(os.environ)
    if accelerator != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = (
            visible.split(",")
            if visible
            else [str(number) for number in range(torch.cuda.device_count())]
        )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in devices)
    return environment


@record
def _rank(
    config: RunConfig, folder: Path, overrides: list[str], environment: dict[str, str]
) -> dict[str, Any] | None:
    end_with_parent()
    signal.signal(signal.SIGINT, interrupt_once)
    ours = {name for name in os.environ if name in _OF_TORCHRUN or name.startswith(_ITS_PREFIXES)}
    os.environ |= {name: value for name, value in environment.items() if name not in ours}
    redirect_output()
    try:
        if config.has_own_parts:
            # a module that came from another process shares its memory
            config = copy.deepcopy(config)
        result = run(config, folder, overrides=overrides)
    except UserError as mistake:
        write_for_launcher(mistake)
        sys.exit(EXIT_CODE)
    except RunBroke:
        time.sleep(_LATER_S)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if not Ranks.here().is_first:
        return None
    return {
        name: getattr(result, name)
        for name in ("folder", "metrics", "per_class", "summary", "metric")
    }


def explain_failure(error: ChildFailedError, count: int, folder: Path) -> BaseException:
    rank, failure = _first_cause(error)
    words = failure.error_file_data.get("message")
    details = words.get("extraInfo", {}) if isinstance(words, dict) else {}
    if mistake := details.get("mistake"):
        return UserError(**mistake)
    kept = folder / CHECKPOINTS / "last"
    rest = f" The last checkpoint is {kept}." if kept.exists() else " There was no checkpoint yet."
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " Out of memory is the usual cause." if name == "SIGKILL" else ""
        return RunBroke(
            f"rank {rank} of {count} was ended by {name}; the other ranks were stopped.{hint}{rest}"
        )
    if failure.exitcode > 128:
        return (
            KeyboardInterrupt()
            if failure.exitcode == 128 + signal.SIGINT
            else SystemExit(failure.exitcode)
        )
    trace = details.get("py_callstack", "")
    return RunBroke(
        f"{trace}\nrank {rank} of {count} failed; the other ranks were stopped.{rest}".strip()
    )


def _first_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that began it: one that was killed, else one with a mistake to tell, else the
    earliest.
    """

    # Those that only noticed that another was gone fail within the same second: times alone do not
    # tell.
    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        was_stopped = failure.exitcode == -signal.SIGTERM
        return (
            2 if was_stopped else 0 if failure.exitcode in _BEGINNINGS else 1,
            failure.timestamp,
            rank,
        )

    return min(error.failures.items(), key=order)


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
    """Train a model on a table. `settings` are fields of RunConfig; `max_epochs` is short for
    `trainer.max_epochs`.

    `data` is a DataModule or its Config, or a table of texts in a file or in memory; `model` a
    task, the Config of a network, or a network. `epochs` is another name for `max_epochs`.
    """
    require(
        epochs is None or max_epochs is None,
        "fit",
        "epochs and max_epochs",
        hint="Leave one of them out.",
    )
    epochs = epochs if max_epochs is None else max_epochs
    is_inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    require(
        not is_inheriting,
        "fit",
        "is called while another process reads this script",
        hint="Put it below: if __name__ == '__main__':",
    )
    if isinstance(data, str | Path | list) or is_rows(data):
        data = TextDataConfig(source=data)
    if isinstance(data, StoreData):
        settings.setdefault("seed", data.seed)
        data = data.config
    if isinstance(model, Task):
        settings = {"task": model.config, "optim": model.optim, **settings}
        model = model.model if model.model_config is None else model.model_config
    given: dict[str, Any] = {
        name: value for name, value in (("data", data), ("model", model)) if value is not None
    }
    unknown = settings.keys() - RunConfig.__dataclass_fields__.keys()
    allowed = ", ".join(RunConfig.__dataclass_fields__)
    require(not unknown, "fit", f"no setting {', '.join(sorted(unknown))}", allowed=allowed)
    config = RunConfig(**given, **settings)
    if epochs is not None:
        config = replace(config, trainer={**config.trainer, "max_epochs": epochs})
    if folder is None:
        return start(config)
    return start(config, folder=Path(folder), named=list_numbered(Path(folder)))


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run that a sweep can start; it can be pickled."""

    config: RunConfig

    def __post_init__(self) -> None:
        if self.config.has_own_parts:
            require_picklable(self.config)
            trainer_of_own(self.config, 1)

    @property
    def metric(self) -> str:
        """The validation metric that the settings name, else the usual one; known before there is
        any data.
        """
        named = self.config.checkpoint.metric
        if self.config.has_own_parts:
            return plain_name(named or "loss", "val")
        return named or kind_of(self.config.data).usual_metric(self.config.data)

    @property
    def mode(self) -> str:
        """Whether its metric is better when higher (`max`) or lower (`min`)."""
        if not self.config.has_own_parts:
            require_metric(self.metric, [*BEST_MODE, "loss"], "checkpoint.metric")
        return self.config.checkpoint.mode_of(self.metric)

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from; some depend on the data, as those of two classes do."""
        if self.config.has_own_parts:  # whatever the module logs
            return [self.metric]
        return kind_of(self.config.data).metrics(self.config.data)

    @property
    def validations(self) -> int | None:
        """How many times it validates, if nothing stops it early; None: not known before there is
        any data.
        """
        return validations(self.config.trainer)

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> Result:
        """Train it in a folder, from the beginning or from its last checkpoint."""
        # trials of a sweep wait for each other
        monitor = replace(self.config.monitor, verdict=False, rival=False)
        config = replace(self.config, monitor=monitor, resume=str(folder) if resumes else None)
        # the folder is its trial's
        return start(config, folder=folder, overrides=overrides, claim=Path.absolute)

    def has_begun(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether a folder is of this very run, and of no other."""
        try:
            words = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return mask_words(words) == mask_words(overrides) and not folder.is_symlink()

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run left a whole checkpoint in the folder."""
        return (
            self.has_begun(folder, overrides)
            and find_checkpoint(folder / CHECKPOINTS)[0] is not None
        )

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run has nothing left to train."""
        if not self.has_begun(folder, overrides):
            return False
        try:
            return find_run(replace(self.config, resume=str(folder)), overrides).is_finished
        except UserError:  # no summary, or half of one: it is trained
            return False

"""One run on several devices: a process a device, started by the launcher behind torchrun, watched until all are done.

`start` trains in this process where there is one device, or where torchrun, srun or Ray has started the ranks already.
Otherwise it starts them, passes on what the first rank found, and when one dies ends the others and says which and why.
"""

from __future__ import annotations

import json
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
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.distributed.processes import end_with_parent, interrupt_once, redirect_output, warm_start
from flatout.distributed.ranks import Ranks, cores_here, why_no_gpu
from flatout.distributed.signals import asking
from flatout.errors import EXIT_CODE, RunBroke, UserError, require, write_for_launcher
from flatout.inference.folder import Answers
from flatout.report.summary import mark_broken, read_summary
from flatout.run.build import RunBuilder
from flatout.run.kinds import load_predictor
from flatout.run.own_parts import NoAnswers, run_own_parts
from flatout.run.resume import find_run, unfinished_before
from flatout.run.run import run
from flatout.run.run_folder import claim_folder, name_folder
from flatout.run.stages import Result

_SHUTDOWN_S = 20
"""How long a rank may take to end when another has died, before it is killed."""
_LATER_S = 2
"""How long a rank that only misses another one waits, so that the launcher sees the other one's end first."""


def start(
    build: RunBuilder,
    *,
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    claim: Callable[[Path], Path] = claim_folder,
) -> Result:
    """One run, here or on as many processes as devices are asked for.

    `claim` makes the folder of a new run; a resumed run keeps its old one.
    """
    ranks = Ranks.here()
    wanted = devices_wanted(build.trainer)
    if ranks.are_several:
        given = build.trainer.get("devices") not in (None, "auto", -1)
        started = f"{ranks.local_world} ranks are running on this machine"
        hint = "Leave trainer.devices out: who starts the ranks decides."
        require(not given or len(wanted) == ranks.local_world, "trainer.devices", started, hint=hint)
    elif build.trainer.get("num_nodes", 1) != 1:
        what = f"{build.trainer['num_nodes']}, but no rank runs on another machine"
        raise UserError("trainer.num_nodes", what, hint="Start the run on each machine with torchrun or srun.")
    are_alone = not ranks.are_several and len(wanted) == 1
    what = "a single device has no other to share weights with"
    hint = "Set trainer.devices=N, or leave it out."
    require(not (build.shards_weights and are_alone), "trainer.strategy: fsdp", what, hint=hint)
    if not (ranks.are_several or are_alone):
        _require_copies(build)
    chosen = json.loads(ranks.agreed("folder", lambda: json.dumps(_choose_folder(build, folder, overrides, claim))))
    path = Path(chosen["folder"])
    if chosen["is_finished"]:
        return finished_result(path, _answers_of(build, path))
    build = build.resuming(chosen["resume"])
    if ranks.are_several or are_alone:
        return _run_here(build, path, overrides, wanted[0])
    return _on_ranks(build, wanted, path, overrides)


def _require_copies(build: RunBuilder) -> None:
    """Refuse what cannot be handed to the processes that train."""
    if build.has_own_network:
        hint = "Start your script with torchrun, or name the model's settings."
        raise UserError("trainer.devices", "a model of your own cannot be handed to other processes", hint=hint)
    if build.has_own_parts:
        build.require_picklable()


def _run_here(build: RunBuilder, folder: Path, overrides: Sequence[str], number: int = 0) -> Result:
    train = run_own_parts if build.has_own_parts else run
    return train(build, folder, overrides=overrides, number=number)


def _answers_of(build: RunBuilder, folder: Path) -> Answers:
    """What a finished run answers with."""
    return NoAnswers(build.own_settings.name_of_module) if build.has_own_parts else load_predictor(folder)


def _choose_folder(
    build: RunBuilder, folder: Path | None, overrides: Sequence[str], claim: Callable[[Path], Path]
) -> dict[str, Any]:
    """The run's folder, and whether it holds a run to resume."""
    request = build.request(overrides)
    found = find_run(request)
    for line in found.lines:
        print(line, flush=True)
    if found.folder is not None:
        return {"folder": str(found.folder), "resume": str(found.folder), "is_finished": found.is_finished}
    if not build.is_resumed and (hint := unfinished_before(request)):
        print(hint, flush=True)
    claimed = claim((folder or name_folder(build.runs)).absolute())
    return {"folder": str(claimed), "resume": None, "is_finished": False}


def finished_result(folder: Path, answers: Answers) -> Result:
    """What a run has left that has finished before."""
    summary = read_summary(folder)
    metrics = {name: float(value) for name, value in summary["metrics"].items() if value is not None}
    return Result(folder, metrics, [], answers, summary, summary["metric"] or "loss")


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
        parts = [part.strip() for part in asked.split(",")]
        numbers = [int(part) if part.isdecimal() else part for part in parts]
        asked = numbers if "," in asked else numbers[0]
    is_list = isinstance(asked, list | tuple) and all(isinstance(each, int) for each in asked)
    is_known = asked is None or asked == "auto" or (isinstance(asked, int) and not isinstance(asked, bool)) or is_list
    require(is_known, "trainer.devices", f"{asked!r}", allowed="a number, auto, or a list of numbers")
    if asked is None:
        return [0]
    if asked in ("auto", -1):
        return list(range(max(1, count)))
    if isinstance(asked, int):
        require(asked >= 1, "trainer.devices", f"{asked}", allowed="1 or more, or auto")
        require(asked <= there, "trainer.devices", f"{asked}", allowed=f"at most {there}: {here}")
        return list(range(asked))
    require(bool(asked) and len(set(asked)) == len(asked), "trainer.devices", f"{asked}", allowed="each number once")
    for number in asked:
        known = f"0 to {there - 1}: {here}"
        require(0 <= number < there, "trainer.devices", f"no device {number}", allowed=known)
    return list(asked)


def _on_ranks(build: RunBuilder, devices: list[int], folder: Path, overrides: Sequence[str]) -> Result:
    """Start a process a device, wait for all of them, and tell what the first one found."""
    warm_start()
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell in pages what we say in a line
    launch = elastic_launch(_launch_of(len(devices)), _rank)
    started = time.time()
    try:
        with _handlers_given_back():
            environment = _environment(build.accelerator, devices)
            found = launch(build.for_one_rank(), folder, list(overrides), environment)[0]
    except ChildFailedError as error:
        failure = explain_failure(error, len(devices), folder)
        mark_broken(folder, started, "interrupted" if isinstance(failure, SystemExit) else "failed")
        raise failure from None
    except SignalException as stopped:
        mark_broken(folder, started, "interrupted")
        if stopped.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    return Result(predictor=_answers_of(build, folder), **found)


def _launch_of(count: int) -> LaunchConfig:
    """So many processes on this machine, on ports that are free; one that dies is not started again."""
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    # Older releases pass on no other signals than their own four, and wait half a minute.
    newer = {"signals_to_handle": ",".join(each.name for each in asking()), "shutdown_timeout": _SHUTDOWN_S}
    known: Any = {name: value for name, value in newer.items() if name in LaunchConfig.__dataclass_fields__}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver" if has_server else multiprocessing.get_start_method(),
        **known,
    )


@contextmanager
def _handlers_given_back() -> Iterator[None]:
    """Torch's launcher takes the handlers of signals and keeps them."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in asking()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one of native code cannot be given back
                signal.signal(number, handler)


def _environment(accelerator: str, devices: list[int]) -> dict[str, str]:
    """What the ranks shall find in theirs; they are forked from a process that may be older than our variables."""
    environment = dict(os.environ)
    if accelerator != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in devices)
    return environment


@record
def _rank(build: RunBuilder, folder: Path, overrides: list[str], environment: dict[str, str]) -> dict[str, Any] | None:
    """One rank of a run, in its own process."""
    end_with_parent()
    signal.signal(signal.SIGINT, interrupt_once)
    ours = _of_torchrun() & os.environ.keys()
    os.environ |= {name: value for name, value in environment.items() if name not in ours}
    redirect_output()
    try:
        result = _run_here(build.with_copied_weights(), folder, overrides)
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
    return {name: getattr(result, name) for name in ("folder", "metrics", "per_class", "summary", "metric")}


def _of_torchrun() -> set[str]:
    """Variables that tell a rank who it is."""
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    prefixes = ("TORCHELASTIC_", "GROUP_", "ROLE_")
    return names | {name for name in os.environ if name.startswith(prefixes)}


def explain_failure(error: ChildFailedError, count: int, folder: Path) -> BaseException:
    """The first failure, as an error to raise."""
    rank, failure = _first_cause(error)
    words = failure.error_file_data.get("message")
    details = words.get("extraInfo", {}) if isinstance(words, dict) else {}
    if mistake := details.get("mistake"):
        where = mistake.pop("where")
        return UserError(where, mistake.pop("what"), **mistake)
    kept = folder / CHECKPOINTS / "last"
    rest = f" The last checkpoint is {kept}." if kept.exists() else " There was no checkpoint yet."
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " Out of memory is the usual cause." if name == "SIGKILL" else ""
        return RunBroke(f"rank {rank} of {count} was ended by {name}; the other ranks were stopped.{hint}{rest}")
    if failure.exitcode > 128:
        return KeyboardInterrupt() if failure.exitcode == 128 + signal.SIGINT else SystemExit(failure.exitcode)
    trace = details.get("py_callstack", "")
    return RunBroke(f"{trace}\nrank {rank} of {count} failed; the other ranks were stopped.{rest}".strip())


def _first_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that began it: one that was killed, else one with a mistake to tell, else the earliest.

    Those that only noticed that another was gone fail within the same second, so that times alone do not tell.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        was_stopped = failure.exitcode == -signal.SIGTERM
        return (2 if was_stopped else 0 if failure.exitcode in _BEGINNINGS else 1, failure.timestamp, rank)

    return min(error.failures.items(), key=order)


_BEGINNINGS = (EXIT_CODE, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)

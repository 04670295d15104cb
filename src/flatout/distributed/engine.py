"""Work in parts, by processes of this machine or by Ray on a cluster; training on Ray's workers.

A part is a function of its number, such as part 2 of 8, that writes to a disk which all machines
share. Its results do not depend on the machine, and a part that is started again finds what it has
written. Ray starts a part again when its machine is lost. Open this file for the options `--part`,
`--parts` and `--on`.
"""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flatout.distributed.processes import OUTPUT, end_with_parent, redirect_output, warm_start
from flatout.errors import OtherRankEnded, RunBroke, UserError, first_line, require
from flatout.files import load_json

_AGAIN = 3  # how often a training is started again after workers were lost
# Files that workers write to the shared folder of a training.
_MISTAKES = "mistake-*.json"
_OUTPUT = "output.txt"
_LOOK_S = 0.2  # between two reads of the first rank's output
_REACHED_S = 10  # seconds to reach a cluster's address
_PARTS = 8  # of `--on ray` without `--parts`
_SAME = "Every machine of the cluster needs this package and its requirements in the same versions."
# Packages whose version decides what a part writes.
_DECIDING = ("flatout", "pyarrow", "tokenizers", "torch")
_SHARED = "Name a folder of a disk that they share, and that you may write to."
Work = Callable[[], Any]
Place = StrEnum("Place", "here ray")


def part_of(text: str) -> tuple[int, int]:
    """The number of a part and the number of all parts: "2/8" is (2, 8)."""
    number, _, count = text.partition("/")
    is_known = number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
    require(
        is_known, "--part", repr(text), allowed="I/N with I from 1 to N", hint="Write --part 2/8."
    )
    return int(number), int(count)


def connect() -> Any:
    """The package `ray`, connected to the cluster of RAY_ADDRESS, else to this machine."""
    try:
        import ray
    except ImportError:
        raise UserError("on", "Ray is not installed", hint="pip install 'flatout[ray]'.") from None
    host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal() and not ray.is_initialized():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
        ray.init(
            ignore_reinit_error=True,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            "on",
            f"no Ray cluster ({first_line(error)})",
            hint="Set RAY_ADDRESS to a cluster that runs, or leave it out.",
        ) from None
    return ray


class RayTask:
    """A function that runs on some machine of a cluster, with one core.

    It also gets one GPU if it uses any and the cluster has some.
    """

    def __init__(
        self, do: Work, *, uses_gpu: bool = False, times: int = 0, folder: Path | None = None
    ) -> None:
        """`times`: how often Ray starts it again when its machine is lost; -1: always.

        `folder`: a folder that its machine must see.
        """
        self._ray = connect()
        self.why = ""  # why its result is lost; empty if it is not
        num_gpus = 1 if uses_gpu and self._ray.cluster_resources().get("GPU") else 0
        # Several tasks share a machine: tokenizers use one core, the one that Ray counts for it.
        remote = self._ray.remote(
            num_cpus=1,
            num_gpus=num_gpus,
            runtime_env={"env_vars": {"RAYON_NUM_THREADS": "1"}},
            max_retries=times,
            max_calls=1,
        )
        task = remote(_run_work)
        self._reference = task.remote(do, versions_here(), Path.cwd(), folder)

    def is_alive(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[1])

    def join(self, timeout: float | None = None) -> None:
        self._ray.wait([self._reference], timeout=timeout)

    def cancel(self, *, is_forced: bool) -> None:
        """End it as Ctrl-C does, or with `is_forced` at once; do nothing if it has ended."""
        self._ray.cancel(self._reference, force=is_forced)

    def is_lost(self) -> bool:
        """Whether its machine, or its process there, is gone."""
        self.result()
        return bool(self.why)

    def result(self) -> Any:
        """Wait for the end and return what the function returned.

        None if the task was cancelled, or its result is lost, which sets `why`. A `UserError` of
        the function is raised here.
        """
        from ray import exceptions

        try:
            return self._ray.get(self._reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            _, _, missing = str(error).rpartition("ModuleNotFoundError: ")
            if "ModuleNotFoundError" in str(error):
                raise UserError(
                    "on",
                    f"a machine of the cluster lacks a package ({missing.splitlines()[0]})",
                    hint=_SAME,
                ) from None
            raise
        except exceptions.TaskCancelledError:
            return None
        except exceptions.RayError as error:
            self.why = f"Ray lost it ({first_line(error)})"
            return None


def on_ray(
    do: Callable[[int, int], Any], count: int, folder: Path, *, uses_gpu: bool = False
) -> list[Any]:
    """Run `count` parts as tasks of a Ray cluster; return the result of each, in their order.

    `do` gets a part's number and the count. All parts write to `folder`, which is on a shared disk.
    """
    require(count > 0, "--parts", f"{count}", allowed="1 or more")
    ray = connect()
    try:
        with _mark(folder) as mark:
            tasks = [
                RayTask(partial(do, number, count), uses_gpu=uses_gpu, times=20, folder=mark)
                for number in range(1, count + 1)
            ]
            results = [task.result() for task in tasks]
    finally:
        ray.shutdown()
    for task in tasks:
        require(
            not task.why, "--on", task.why, hint="The same command continues with what is there."
        )
    return results


def in_processes(do: Callable[[int, int], Any], count: int) -> list[Any]:
    """Run `count` parts in processes of this machine, which share its cores; as `on_ray`."""
    from flatout.distributed.ranks import cores_here

    warm_start()
    cores = max(1, len(cores_here()) // count)
    try:
        with ProcessPoolExecutor(
            count, multiprocessing.get_context("forkserver"), _take_cores, (cores,)
        ) as processes:
            return list(processes.map(do, range(1, count + 1), [count] * count))
    except BrokenProcessPool:
        raise UserError(
            "--parts",
            "the process of a part was killed",
            hint="The same command continues with what is there; fewer parts take less memory.",
        ) from None


def _take_cores(number: int) -> None:
    """In a process of a part: use `number` cores, show no bar, and end silently on Ctrl-C."""
    os.environ |= {"RAYON_NUM_THREADS": str(number), "TTY_COMPATIBLE": "0"}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


@contextmanager
def _mark(folder: Path) -> Iterator[Path]:
    """Context manager: a temporary folder in `folder`, by which machines see that they share it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = tempfile.TemporaryDirectory(prefix=".ray-", dir=folder)
    except OSError as error:
        raise UserError("--on", f"cannot write {folder}: {error.strerror}", hint=_SHARED) from None
    with mark as name:
        yield Path(name).absolute()


def device_of(workers: int) -> str:
    """The device that each rank takes one of: "GPU" if the cluster has any, else "CPU"."""
    resources = connect().cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    most = int(resources.get(kind, 0))
    require(
        1 <= workers <= most,
        "workers",
        f"{workers}",
        allowed=f"1 to {most}: the {kind}s of the cluster",
    )
    return kind


def train_on_ray(train: Callable[[], Any], workers: int, device: str, folder: Path) -> None:
    """Train on the workers of Ray Train, one rank each. A `UserError` of a worker is raised here.

    Ray starts the training again up to three times after workers were lost. `folder`: a folder on a
    disk that all machines share.
    """
    ray = connect()
    notes = Path(tempfile.mkdtemp(prefix=".ray-", dir=folder))
    work = {"train": train, "versions": versions_here(), "here": Path.cwd(), "notes": notes}
    try:
        with _show_output(notes / _OUTPUT):
            _fit(work, workers, uses_gpu=device == "GPU")
        if mistakes := sorted(notes.glob(_MISTAKES)):
            raise UserError(**load_json(mistakes[0]))
    finally:
        ray.shutdown()
        shutil.rmtree(notes, ignore_errors=True)


@contextmanager
def _show_output(output: Path) -> Iterator[None]:
    """Context manager: print what the first rank writes to the file `output`, as it comes."""
    is_over = threading.Event()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a letter

    def follow() -> None:
        output.touch()
        with suppress(BrokenPipeError), output.open("rb") as file:
            while not is_over.wait(_LOOK_S):
                print(decoder.decode(file.read()), end="", flush=True)
            print(decoder.decode(file.read()), end="", flush=True)

    thread = threading.Thread(target=follow, name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _fit(work: dict[str, Any], workers: int, *, uses_gpu: bool) -> None:
    """Let Ray's workers run `_rank`; `work` are its arguments."""
    from ray import train
    from ray.train.torch import TorchTrainer

    config = train.RunConfig(
        storage_path=str(work["notes"]),
        failure_config=train.FailureConfig(max_failures=_AGAIN),
        # Else each line appears twice.
        worker_runtime_env={"env_vars": {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}},
    )
    ranks = train.ScalingConfig(num_workers=workers, use_gpu=uses_gpu)
    try:
        TorchTrainer(_rank, train_loop_config=work, scaling_config=ranks, run_config=config).fit()
    except train.TrainingFailedError as error:
        if not any(work["notes"].glob(_MISTAKES)):
            hint = "The same command with resume=auto resumes from the last checkpoint."
            raise RunBroke(
                f"workers of Ray failed {_AGAIN + 1} times: {first_line(error)}. {hint}"
            ) from None


def _rank(work: dict[str, Any]) -> None:
    """Train as one rank, in a worker of Ray.

    Relative paths of the settings refer to the folder where the command was given.
    """
    notes = work["notes"]
    rank = int(os.environ["RANK"])
    require(
        notes.is_dir(),
        "on",
        f"not all machines of the cluster see {notes}",
        hint="Start the run in a folder that they share.",
    )
    if any(notes.glob(_MISTAKES)):
        return
    try:
        if rank == 0:
            os.environ[OUTPUT] = str(notes / _OUTPUT)
            redirect_output()
        _run_work(work["train"], work["versions"], work["here"])
    except UserError as error:
        # `OtherRankEnded`: that rank has written its mistake, or was lost, and Ray starts again.
        if not isinstance(error, OtherRankEnded):
            note = notes / _MISTAKES.replace("*", f"{rank:06}")
            note.write_text(json.dumps(error.parts), encoding="utf-8")
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # it would print a traceback
        raise  # else the other ranks would wait for this one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--part`, `--on` and `--parts` to a command that works in parts."""
    either = parser.add_mutually_exclusive_group()
    places = [place.value for place in Place]
    either.add_argument(
        "--part",
        metavar="I/N",
        help="do every N-th part of the work, from the I-th on, and no other",
    )
    either.add_argument(
        "--on", choices=places, default=Place.here, help="where parts are done (default: here)"
    )
    parser.add_argument(
        "--parts", metavar="N", type=int, help=f"parts that are done at once (--on ray: {_PARTS})"
    )


def parts_of(arguments: argparse.Namespace, *, may_be_here: bool) -> int | None:
    """How many parts run at once, by Ray or in processes here; None: this process does all.

    `may_be_here`: whether the command can run its parts in processes of this machine.
    """
    is_here = arguments.on == Place.here
    is_allowed = may_be_here and arguments.part is None
    require(
        arguments.parts is None or not is_here or is_allowed,
        "--parts",
        "is for all parts" if may_be_here else "is for --on ray alone",
        hint="Add it." if arguments.part is None else "Leave it out.",
    )
    count = arguments.parts
    require(count is None or count > 0, "--parts", f"{count}", allowed="1 or more")
    return count if is_here or count is not None else _PARTS


def versions_here() -> dict[str, str]:
    """Versions of the packages that decide what a part writes, without the build ("+cu128")."""
    return {package: version(package).partition("+")[0] for package in _DECIDING}


def _run_work(do: Work, versions: dict[str, str], here: Path, folder: Path | None = None) -> Any:
    """Run `do` on a machine of the cluster; refused if its packages differ or it lacks the folder.

    `versions` and `here` are the packages and the working folder of the command.
    """
    for package, there in versions_here().items():
        needed = versions[package]
        require(
            there == needed,
            "on",
            f"a machine of the cluster has {package} {there}, not {needed}",
            hint=_SAME,
        )
    if folder is not None:
        require(
            folder.is_dir(),
            "on",
            f"not all machines of the cluster see {folder.parent}",
            hint=_SHARED,
        )
    # If this machine does not see the folder, only relative names fail.
    with suppress(OSError):
        os.chdir(here)
    return do()

"""Work in parts and trials: which part a process does, and Ray's tasks, where the machines of a
cluster do them.

A part is a function of its number that writes to a disk all machines see. Where it is computed
changes nothing, and one that is begun again finds what it has done. Ray starts a part again when
its machine is lost.
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

_AGAIN = 3  # how often lost workers are begun again
# what workers leave among the notes
_MISTAKES = "mistake-*.json"
_OUTPUT = "output.txt"
_LOOK_S = 0.2
_REACHED_S = 10
_PARTS = 8
_SAME = "Every machine of the cluster needs this package and its requirements in the same versions."
_DECIDING = ("flatout", "pyarrow", "tokenizers", "torch")
_SHARED = "Name a folder of a disk that they share, and that you may write to."
Work = Callable[[], Any]
Place = StrEnum("Place", "here ray")


def part_of(text: str) -> tuple[int, int]:
    """A part's number and their count, as `2/8` names them."""
    number, _, count = text.partition("/")
    is_known = number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
    require(
        is_known, "--part", repr(text), allowed="I/N with I from 1 to N", hint="Write --part 2/8."
    )
    return int(number), int(count)


def connect() -> Any:
    """Ray, of the cluster that RAY_ADDRESS names; of this machine where it names none."""
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
    """A function under way on some machine of a cluster: one core, and one GPU where it uses any
    and there are some.
    """

    def __init__(
        self, do: Work, *, uses_gpu: bool = False, times: int = 0, place: Path | None = None
    ) -> None:
        """`times`: how often Ray begins it again when its machine is lost; -1: always.

        `place`: what it must see.
        """
        self._ray = connect()
        self.why = ""
        num_gpus = 1 if uses_gpu and self._ray.cluster_resources().get("GPU") else 0
        # A task is one of several on its machine: its tokenizer takes one core, as Ray counts it.
        needs = {
            "num_cpus": 1,
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": {"RAYON_NUM_THREADS": "1"}},
        }
        task = self._ray.remote(**needs, max_retries=times, max_calls=1)(_done)
        self._reference = task.remote(do, versions_here(), Path.cwd(), place)

    def is_alive(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[1])

    def join(self, timeout: float | None = None) -> None:
        self._ray.wait([self._reference], timeout=timeout)

    def cancel(self, *, is_forced: bool) -> None:
        """End it as Ctrl-C does, or at once; nothing where it has ended."""
        self._ray.cancel(self._reference, force=is_forced)

    def is_lost(self) -> bool:
        """Whether its machine, or its process there, is gone."""
        self.result()
        return bool(self.why)

    def result(self) -> Any:
        """What it gave, once it has ended; None with `why`, where that is lost.

        A mistake in it is raised here.
        """
        from ray import exceptions

        try:
            return self._ray.get(self._reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            if "ModuleNotFoundError" in (said := str(error)):
                missing = next(
                    line for line in reversed(said.splitlines()) if "ModuleNotFoundError" in line
                )
                raise UserError(
                    "on",
                    (
                        "a machine of the cluster lacks a package"
                        f" ({missing.partition('ModuleNotFoundError: ')[2]})"
                    ),
                    hint=_SAME,
                ) from None
            raise
        except exceptions.TaskCancelledError:
            return None
        except exceptions.RayError as error:
            self.why = f"Ray lost it ({first_line(error)})"
            return None


def on_ray(
    do: Callable[[int, int], Any], count: int, place: Path, *, uses_gpu: bool = False
) -> list[Any]:
    """What each of so many parts gave, by the tasks of a Ray cluster; `do` does one, and all write
    to `place`.
    """
    require(count > 0, "--parts", f"{count}", allowed="1 or more")
    ray = connect()
    try:
        with _mark(place) as mark:
            given: dict[str, Any] = {"uses_gpu": uses_gpu, "times": 20, "place": mark}
            tasks = [RayTask(partial(do, number, count), **given) for number in range(1, count + 1)]
            found = [task.result() for task in tasks]
    finally:
        ray.shutdown()
    for task in tasks:
        require(
            not task.why, "--on", task.why, hint="The same command continues with what is there."
        )
    return found


def in_processes(do: Callable[[int, int], Any], count: int) -> list[Any]:
    """The same by processes of this machine, which share its cores."""
    require(count > 0, "--parts", f"{count}", allowed="1 or more")
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
    """Be one of several processes: with some of the cores, no bar on the terminal, and silent when
    Ctrl-C ends it.
    """
    os.environ |= {"RAYON_NUM_THREADS": str(number), "TTY_COMPATIBLE": "0"}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


@contextmanager
def _mark(place: Path) -> Iterator[Path]:
    """A folder by which machines see that `place` is on their disk too."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        mark = tempfile.TemporaryDirectory(prefix=".ray-", dir=place)
    except OSError as error:
        raise UserError("--on", f"cannot write {place}: {error.strerror}", hint=_SHARED) from None
    with mark as name:
        yield Path(name).absolute()


def device_of(workers: int) -> str:
    """The kind of device that so many ranks take, one each: GPU where the cluster has any, else
    CPU.
    """
    there = connect().cluster_resources()
    kind = "GPU" if there.get("GPU") else "CPU"
    most = int(there.get(kind, 0))
    require(
        1 <= workers <= most,
        "workers",
        f"{workers}",
        allowed=f"1 to {most}: the {kind}s of the cluster",
    )
    return kind


def train_on_ray(train: Callable[[], Any], workers: int, device: str, place: Path) -> None:
    """Train on the workers of Ray Train, a rank each, begun again up to three times; a mistake is
    raised here.
    """
    ray = connect()
    notes = Path(tempfile.mkdtemp(prefix=".ray-", dir=place))
    given = {"train": train, "versions": versions_here(), "here": Path.cwd(), "notes": notes}
    try:
        with _shown(notes / _OUTPUT):
            _fit(given, workers, uses_gpu=device == "GPU")
        if mistakes := sorted(notes.glob(_MISTAKES)):
            raise UserError(**json.loads(mistakes[0].read_text(encoding="utf-8")))
    finally:
        ray.shutdown()
        shutil.rmtree(notes, ignore_errors=True)


@contextmanager
def _shown(output: Path) -> Iterator[None]:
    """Print what the first rank writes to its output, as it comes."""
    is_over = threading.Event()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a look may end within a letter

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


def _fit(given: dict[str, Any], workers: int, *, uses_gpu: bool) -> None:
    from ray import train
    from ray.train.torch import TorchTrainer

    settings: dict[str, Any] = {
        "storage_path": str(given["notes"]),
        "failure_config": train.FailureConfig(max_failures=_AGAIN),
        # else lines stand there twice
        "worker_runtime_env": {"env_vars": {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}},
    }
    ranks = train.ScalingConfig(num_workers=workers, use_gpu=uses_gpu)
    around = train.RunConfig(**settings)
    try:
        TorchTrainer(_rank, train_loop_config=given, scaling_config=ranks, run_config=around).fit()
    except train.TrainingFailedError as error:
        if not any(given["notes"].glob(_MISTAKES)):
            hint = "The same command with resume=auto resumes from the last checkpoint."
            raise RunBroke(
                f"workers of Ray failed {_AGAIN + 1} times: {first_line(error)}. {hint}"
            ) from None


def _rank(given: dict[str, Any]) -> None:
    """What a worker does: the settings' paths are those of the folder where the command
    was given.
    """
    notes = given["notes"]
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
        _done(given["train"], given["versions"], given["here"])
    except UserError as error:
        # that one was lost, and Ray begins again, or has written its own
        if not isinstance(error, OtherRankEnded):
            (notes / _MISTAKES.replace("*", f"{rank:06}")).write_text(
                json.dumps(error.parts), encoding="utf-8"
            )
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # it would print a traceback
        raise  # or the other ranks would wait for this one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where parts are computed, for the verbs that have any."""
    one = parser.add_mutually_exclusive_group()
    places = [place.value for place in Place]
    one.add_argument(
        "--part",
        metavar="I/N",
        help="do every N-th part of the work, from the I-th on, and no other",
    )
    one.add_argument(
        "--on", choices=places, default=Place.here, help="where parts are done (default: here)"
    )
    parser.add_argument(
        "--parts", metavar="N", type=int, help=f"parts that are done at once (--on ray: {_PARTS})"
    )


def parts_of(arguments: argparse.Namespace, *, may_be_here: bool) -> int | None:
    """How many parts are done at once, by Ray or here by processes; None: one process does all."""
    is_here = arguments.on == Place.here
    hint = "Add it." if arguments.part is None else "Leave it out."
    is_fine = arguments.parts is None or not is_here or (may_be_here and arguments.part is None)
    require(
        is_fine,
        "--parts",
        "is for all parts" if may_be_here else "is for --on ray alone",
        hint=hint,
    )
    count = arguments.parts
    require(count is None or count > 0, "--parts", f"{count}", allowed="1 or more")
    return count if is_here or count is not None else _PARTS


def versions_here() -> dict[str, str]:
    """Versions of the packages that decide what a part writes, without the kind of their build."""
    return {package: version(package).partition("+")[0] for package in _DECIDING}


def _done(do: Work, versions: dict[str, str], here: Path, place: Path | None = None) -> Any:
    """Do the work on a machine whose packages are those of the machine that asks."""
    for package, here_is in versions_here().items():
        asked = versions[package]
        require(
            here_is == asked,
            "on",
            f"a machine of the cluster has {package} {here_is}, not {asked}",
            hint=_SAME,
        )
    if place is not None:
        require(
            place.is_dir(),
            "on",
            f"not all machines of the cluster see {place.parent}",
            hint=_SHARED,
        )
    # a folder that this machine does not see matters to relative names alone
    with suppress(OSError):
        os.chdir(here)
    return do()

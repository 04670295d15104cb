"""Work in parts and trials: which part a process does, and Ray's tasks, where the machines of a cluster do them.

A part is a function of its number that writes to a disk all machines see. Where it is computed changes nothing, and
one that is begun again finds what it has done. Ray starts a part again when its machine is lost; nothing here
schedules, watches or retries.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from typing import Any

from flatout.errors import UserError, first_line, require

Part = Callable[[int, int], Any]
"""Does a part, from 1 on, of so many."""


def part_of(text: str) -> tuple[int, int]:
    """A part's number and their count, as `2/8` names them."""
    number, _, count = text.partition("/")
    are_numbers = number.isdecimal() and count.isdecimal()
    is_known = are_numbers and 1 <= int(number) <= int(count)
    require(is_known, "--part", repr(text), allowed="I/N with I from 1 to N", hint="Write --part 2/8.")
    return int(number), int(count)


class Place(StrEnum):
    """Where work is done."""

    here = "here"
    ray = "ray"


def connect() -> Any:
    """Ray, of the cluster that RAY_ADDRESS names; of this machine where it names none."""
    try:
        import ray
    except ImportError:
        raise UserError("on", "Ray is not installed", hint="pip install 'flatout[ray]'.") from None
    try:
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        hint = "Set RAY_ADDRESS to a cluster that runs, or leave it out."
        raise UserError("on", f"no Ray cluster ({first_line(error)})", hint=hint) from None
    return ray


class RayTask:
    """A function under way on some machine of a cluster: one core, and one GPU where it uses any and there are some."""

    def __init__(self, do: Callable[[], Any], *, uses_gpu: bool = False, times: int = 0) -> None:
        """`times`: how often Ray begins it again when its machine is lost; -1: always."""
        self._ray, self.why = connect(), ""
        num_gpus = 1 if uses_gpu and self._ray.cluster_resources().get("GPU") else 0
        # A task is one of several on its machine: its tokenizer takes one core, as Ray counts it.
        needs = {"num_cpus": 1, "num_gpus": num_gpus, "runtime_env": {"env_vars": {"RAYON_NUM_THREADS": "1"}}}
        task = self._ray.remote(**needs, max_retries=times, max_calls=1)(_done)
        self._reference = task.remote(do, version("flatout"))

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
        """What it gave, once it has ended; None with `why`, where nobody knows. A mistake in it is raised here."""
        from ray import exceptions

        try:
            return self._ray.get(self._reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except exceptions.TaskCancelledError:
            return None
        except exceptions.RayError as error:
            self.why = f"Ray lost it ({first_line(error)})"
            return None


def on_ray(do: Part, count: int, *, uses_gpu: bool = False) -> list[Any]:
    """What each of so many parts gave, computed by the tasks of a Ray cluster."""
    require(count > 0, "--parts", f"{count}", allowed="1 or more")
    ray = connect()
    try:
        tasks = [RayTask(partial(do, number, count), uses_gpu=uses_gpu, times=-1) for number in range(1, count + 1)]
        found = [task.result() for task in tasks]
    finally:
        ray.shutdown()
    for task in tasks:
        require(not task.why, "--on", task.why, hint=_SAME)
    return found


_SAME = "Every machine of the cluster needs this package and its requirements in the same versions."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where parts are computed, for the verbs that have any."""
    one, places = parser.add_mutually_exclusive_group(), [place.value for place in Place]
    one.add_argument("--part", metavar="I/N", help="do every N-th part of the work, from the I-th on, and no other")
    one.add_argument("--on", choices=places, default=Place.here, help="where parts are done (default: here)")
    parser.add_argument("--parts", metavar="N", type=int, default=8, help="parts for --on ray (default: 8)")


def _done(do: Callable[[], Any], asked: str) -> Any:
    own = version("flatout")
    require(own == asked, "on", f"a machine of the cluster has flatout {own}, not {asked}", hint=_SAME)
    return do()

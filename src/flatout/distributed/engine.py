"""Work in parts: which part a process does, and Ray's tasks, where the machines of a cluster do them.

A part is a function of its number that writes to a disk all machines see. Where it is computed changes nothing, and
one that is begun again finds what it has done. Ray starts a part again when its machine is lost; nothing here
schedules, watches or retries.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from flatout.errors import UserError, require

Part = Callable[[int, int], Any]
"""Does a part, from 1 on, of so many."""


def part_of(text: str, where: str = "--part") -> tuple[int, int]:
    """A part's number and their count, as `2/8` names them."""
    number, _, count = text.partition("/")
    are_numbers = number.isdecimal() and count.isdecimal()
    is_known = are_numbers and 1 <= int(number) <= int(count)
    require(is_known, where, repr(text), allowed="I/N with I from 1 to N", hint="Write --part 2/8.")
    return int(number), int(count)


def on_ray(do: Part, count: int, *, uses_gpu: bool = False) -> list[Any]:
    """What each of so many parts gave, computed by the tasks of a Ray cluster; of this machine where there is none.

    `uses_gpu`: each part takes one, where the cluster has any.
    """
    require(count > 0, "--parts", f"{count}", allowed="1 or more")
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError:
        raise UserError("--on", "Ray is not installed", hint="pip install 'flatout[ray]'.") from None
    try:
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        hint = "Set RAY_ADDRESS to a cluster that runs, or leave it out."
        raise UserError("--on", f"no Ray cluster ({_first_line(error)})", hint=hint) from None
    # A task is one of several on its machine: each part's tokenizer takes one core, as Ray counts it.
    num_gpus = 1 if uses_gpu and ray.cluster_resources().get("GPU") else 0
    environment = {"env_vars": {"RAYON_NUM_THREADS": "1"}}
    task = ray.remote(num_cpus=1, num_gpus=num_gpus, max_retries=-1, runtime_env=environment)(_done)
    try:
        return list(ray.get([task.remote(do, number, count, version("flatout")) for number in range(1, count + 1)]))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
    except RayError as error:
        raise UserError("--on", f"Ray cannot run a part ({_first_line(error)})", hint=_SAME) from None
    finally:
        ray.shutdown()


_SAME = "Every machine of the cluster needs this package and its requirements in the same versions."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where parts are computed, for the verbs that have any."""
    parser.add_argument("--part", metavar="I/N", help="do every N-th part of the work, from the I-th on, and no other")
    parser.add_argument("--on", choices=["here", "ray"], default="here", help="where parts are done (default: here)")
    parser.add_argument("--parts", metavar="N", type=int, default=8, help="parts for --on ray (default: 8)")


def _done(do: Part, number: int, count: int, asked: str) -> Any:
    own = version("flatout")
    require(own == asked, "--on", f"a machine of the cluster has flatout {own}, not {asked}", hint=_SAME)
    return do(number, count)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

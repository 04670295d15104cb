"""Agents of torchrun, as on two machines: each starts one rank of a small run, and starts it again
when it dies.

The agents and their ranks are forked from the warm server, which saves their imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flatout.distributed.meeting import SharedValues
from flatout.distributed.processes import end_with_parent, redirect_output
from flatout.run.spawn import take_environment
from tests.faults.plants import PLACES, KillAt, KillInSave
from tests.faults.runs import Spec, code_of, differences, finished, run_folder, train
from tests.started import free_port, said_by_all
from tests.warm import Command, begin_function

_CLONE_NEWNS = 0x20000  # of Linux: a process gets mounts of its own
SMALL = Spec(batch_size=6)
"""Thirty steps in three epochs, with a checkpoint after every third step."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a rank is killed, in its first process."""

    rank: int
    # `start`: before it meets the others; `save`: in the middle of a checkpoint; a hook of a
    # callback; or the name of a value, when it is about to exchange it. `hidden`: it is not killed,
    # but does not see the runs
    name: str
    step: int = 0  # of a hook: how many steps are done; of a save: its number

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.name}, {self.step}"


MOMENTS = (
    Moment(1, "start"),
    Moment(0, "start"),
    Moment(1, "folder"),
    Moment(0, "store"),
    Moment(1, "ready"),
    Moment(0, "group"),
    Moment(1, "on_train_batch_end", 1),
    Moment(0, "save", 2),
    Moment(1, "on_validation_start", 10),
    Moment(0, "on_train_end", 30),
)


def killed_once(place: Path, moments: Sequence[Moment], kind: str = "c10d") -> list[list[str]]:
    """A rank on one of two machines is killed: both begin again, and end as if nothing was."""
    reference = finished(replace(SMALL, trainer={"devices": 2}), place / "reference")
    problems = []
    for number, moment in enumerate(moments):
        folder = place / f"killed-{number}"
        found = kill_once(SMALL, folder, moment, kind) or differences(run_of(folder), reference)
        problems.append([f"{moment}: {problem}" for problem in found])
    return problems


def kill_once(spec: Spec, folder: Path, moment: Moment, kind: str = "c10d") -> list[str]:
    """Train with two agents, with a kill at that moment; what did not go as it should."""
    agents = begin_agents(spec, folder, moment, kind=kind)
    try:
        printed = said_by_all(agents, 600)
    finally:
        for agent in agents:
            agent.kill()
    if any(agent.returncode for agent in agents):
        return [
            f"{agent.returncode}: {words}" for agent, words in zip(agents, printed, strict=True)
        ]
    return [] if starts_of(folder, moment.rank) == 2 else ["the rank was not killed"]


def begin_agents(
    spec: Spec,
    folder: Path,
    moment: Moment | None = None,
    *,
    second: Path | None = None,
    restarts: int = 3,
    kind: str = "c10d",
) -> list[Command]:
    """An agent for each of two machines, with a rank each.

    `kind`: how the agents meet. Those of c10d restart together, those of static each for itself.
    `second`: where the rows of the second machine are; without it both read those in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    return [
        begin_function(
            _run_agent, node, port, kind, restarts, (spec, folder, second or folder, moment)
        )
        for node in (0, 1)
    ]


def run_of(folder: Path) -> Path:
    return run_folder(folder / "runs")


def starts_of(folder: Path, rank: int) -> int:
    """How many processes a rank had."""
    return len(list(folder.glob(f"start-{rank}-*")))


def _run_agent(node: int, port: int, kind: str, restarts: int, work: tuple[Any, ...]) -> None:
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="two machines",
        rdzv_backend=kind,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node} if kind == "static" else {},
        local_addr="127.0.0.1",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    try:
        elastic_launch(config, _run_rank)(*work, dict(os.environ))
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)


def _run_rank(
    spec: Spec,
    folder: Path,
    second: Path,
    moment: Moment | None,
    environment: dict[str, str],
) -> None:
    end_with_parent()
    take_environment(environment)
    redirect_output()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    (folder / f"start-{rank}-{os.getpid()}").touch()
    if moment is not None and moment.rank == rank and starts_of(folder, rank) == 1:
        spec = _plant(spec, moment, folder / "runs")
    place = folder if rank == 0 else second
    sys.exit(code_of(lambda: train(spec, place / "runs"), sys.stderr))


def _plant(spec: Spec, moment: Moment, runs: Path) -> Spec:
    """Have this process killed at that moment; the run's settings, with a callback where it needs
    one.
    """
    if moment.name == "start":
        _kill()
    if moment.name == "hidden":
        _hide(runs)
        return spec
    if moment.name == "save":
        return spec.planted(KillInSave, number=moment.step)
    if moment.name in PLACES:
        return spec.planted(KillAt, place=moment.name, step=moment.step, rank=moment.rank)
    next_key = SharedValues.next_key

    def next_key_or_kill(values: SharedValues, name: str) -> str:
        if name == moment.name:
            _kill()
        return next_key(values, name)

    mock.patch.object(SharedValues, "next_key", next_key_or_kill).start()
    return spec


def _hide(folder: Path) -> None:
    """Put an empty disk over a folder, for this process alone."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        raise RuntimeError("no mount namespaces here")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

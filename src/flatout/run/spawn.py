"""Start a process for each device, by the launcher behind torchrun, and explain one that failed.

When a rank dies, the launcher stops the others, and all of them leave reports. `explain_failure`
finds the one that began it and makes the exception that this process ends with. Open this file to
change how ranks are started, or the message about one that died; what they do is in
`run/launch.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.distributed.processes import warm_start
from flatout.distributed.signals import ASKING
from flatout.errors import EXIT_CODE, RunBroke, UserError

_SHUTDOWN_S = 20  # how long a rank may take to end when another has died, before it is killed
# variables that tell a rank who it is: their names, and how the names of others begin
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
_RANK_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# exit codes of a rank that failed by itself, rather than as another one was gone
_FIRST_CAUSES = (
    EXIT_CODE,
    -signal.SIGKILL,
    -signal.SIGSEGV,
    -signal.SIGBUS,
    -signal.SIGABRT,
)


def run_on_ranks(work: Callable[..., Any], arguments: Sequence[Any], count: int) -> Any:
    """Call `work` in `count` processes of this machine; what the first rank returns.

    Raises `ChildFailedError` if one fails, and `SignalException` if a signal ends this process.
    """
    warm_start()
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        # their reports take pages; `explain_failure` takes a line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _restored_handlers():
        return elastic_launch(_launch_config(count), work)(*arguments)[0]


def _launch_config(count: int) -> LaunchConfig:
    """Processes on this machine, on free ports; one that dies is not started again."""
    options: dict[str, Any] = {
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,
        "start_method": "forkserver",
    }
    # Older releases pass on no other signals than their own four, and wait half a minute.
    newer_options = {
        "signals_to_handle": ",".join(number.name for number in ASKING),
        "shutdown_timeout": _SHUTDOWN_S,
    }
    for name, value in newer_options.items():
        if name in LaunchConfig.__dataclass_fields__:
            options[name] = value
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, **options)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Torch's launcher takes the handlers of signals; afterwards they are as before."""
    # Python sets and reads handlers in the main thread only.
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one of native code cannot be given back
                signal.signal(number, handler)


def environment_for_ranks(accelerator: str, devices: Sequence[int]) -> dict[str, str]:
    """The variables that ranks should have: those of this process, and the GPUs that were chosen.

    They are sent, as ranks are forked from a server that may be older than our variables.
    """
    # Devices are numbered among the visible ones: with CUDA_VISIBLE_DEVICES=4,6 the devices [1]
    # become CUDA_VISIBLE_DEVICES=6.
    environment = dict(os.environ)
    if accelerator != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible:
            names = visible.split(",")
        else:
            names = [str(number) for number in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in devices)
    return environment


def take_environment(environment: Mapping[str, str]) -> None:
    """In a rank: set these variables, but for those that say which rank it is."""
    for name, value in environment.items():
        is_of_rank = name in _RANK_VARIABLES or name.startswith(_RANK_PREFIXES)
        if not (is_of_rank and name in os.environ):
            os.environ[name] = value


def explain_failure(error: ChildFailedError, count: int, folder: Path) -> BaseException:
    """The exception to end with when one of `count` ranks has failed.

    A user's mistake comes from the rank unchanged. A rank that a signal asked to end ends this
    process so, too. Anything else names the rank, its traceback, and the last checkpoint in
    `folder`.
    """
    rank, failure = _first_cause(error)
    message = failure.error_file_data.get("message")
    details = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    mistake = details.get("mistake")
    if mistake:
        return UserError(**mistake)
    if failure.exitcode > 128:
        if failure.exitcode == 128 + signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(failure.exitcode)
    checkpoint = folder / CHECKPOINTS / "last"
    rest = " There was no checkpoint yet."
    if checkpoint.exists():
        rest = f" The last checkpoint is {checkpoint}."
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " Out of memory is the usual cause." if name == "SIGKILL" else ""
        return RunBroke(
            f"rank {rank} of {count} was ended by {name}; the other ranks were stopped.{hint}{rest}"
        )
    trace = details.get("py_callstack", "")
    return RunBroke(
        f"{trace}\nrank {rank} of {count} failed; the other ranks were stopped.{rest}".strip()
    )


def _first_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and its report.

    Times alone do not tell: ranks that only notice that another is gone fail in the same second.
    """
    return min(error.failures.items(), key=_order_of_failure)


def _order_of_failure(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
    """Ranks that were killed or made a mistake come first, those that were stopped last."""
    rank, failure = item
    if failure.exitcode == -signal.SIGTERM:
        likelihood = 2
    elif failure.exitcode in _FIRST_CAUSES:
        likelihood = 0
    else:
        likelihood = 1
    return likelihood, failure.timestamp, rank

"""Commands as processes of their own: begun, waited for, listened to; and the small run that
launchers start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.warm import Command, begin_warm

WAIT_S = 90.0
SMALL = [
    "data.sample.rows=201",
    "data.sample.eval_rows=51",
    "data.batch_size=32",
    "model.hidden=8",
    "model.embedding=8",
    "trainer.max_epochs=2",
    "precision=fp32",
    "monitor.flush_every=1",
    "trainer.accelerator=cpu",
]
"""A run of seconds."""
Process = subprocess.Popen[str] | Command


def begin(
    words: Sequence[str], before: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """`python -m` these words, at the head of a group of processes; what it says can be read as one
    text.
    """
    return subprocess.Popen(
        [*before, sys.executable, "-m", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def said_by_all(processes: Sequence[Process], seconds: float) -> list[str]:
    """What each of them says until all have ended."""
    until = time.monotonic() + seconds
    return [
        process.communicate(timeout=max(1, until - time.monotonic()))[0] for process in processes
    ]


def wait_for(path: Path, process: Process) -> None:
    """Return when a process has written a file."""
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"no {path} in {WAIT_S:g} s"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def slurm(rank: int, port: int) -> dict[str, str]:
    """What srun tells the second of two tasks on one machine, and the first."""
    return {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes to end when the test is over, whatever became of it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is None or not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the small run on two ranks, started by `trainer.devices=2`, and all that it
    printed.
    """
    folder = tmp_path_factory.mktemp("ours")
    words = ["train", *SMALL, f"hydra.run.dir={folder}/run", "trainer.devices=2"]
    process = begin_warm(words, FLATOUT_CACHE=str(folder / "cache"))
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return folder / "run", said

"""Commands as processes of their own: begun, waited for, listened to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

WAIT_S = 90.0


def begin(words: Sequence[str], before: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """`python -m` these words, at the head of a group of processes; what it says can be read as one text."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def said_by_all(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each of them says until all have ended."""
    until = time.monotonic() + seconds
    return [process.communicate(timeout=max(1, until - time.monotonic()))[0] for process in processes]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
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

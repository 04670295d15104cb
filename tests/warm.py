"""Commands in children of the warm server: they start in a tenth of a second, as everything is
imported there.

A test whose subject is the start of a process takes `tests.started` instead.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.processes import end_with_parent, redirect_output, warm_start

_MAIN = {"train": "train", "flatout": "flatout.__main__"}
"""Where `main` is of what stands behind `python -m`."""
_OF_SERVER = ("_forkserver_address", "_forkserver_authkey")
"""How a process reaches the server that it was forked from, so that its own children come from
there too."""


class Command:
    """A running command, with the methods of `subprocess.Popen` that tests use; all that it prints
    is one text.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        warm_start()
        number, name = tempfile.mkstemp(suffix=".txt")
        os.close(number)
        self._output = Path(name)
        self._said = ""
        environment = {
            **os.environ,
            **(environment or {}),
            "FLATOUT_OUTPUT": str(self._output),
        }
        here = (str(Path.cwd()), environment, _of_server())
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_child, args=(here, function, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout = None

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def printed(self) -> str:
        """What it has printed until now."""
        if self._output.exists():
            self._said = self._output.read_text(encoding="utf-8", errors="replace")
        return self._said

    def wait_for_words(self, words: str, seconds: float = 90.0) -> None:
        """Return when it has printed these words."""
        until = time.monotonic() + seconds
        while words not in self.printed():
            assert self.poll() is None and time.monotonic() < until, self.printed()
            time.sleep(0.05)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a command of the warm server", timeout or 0)
        said = self.printed()
        self._output.unlink(missing_ok=True)
        return said, None


def begin_warm(words: Sequence[str], **environment: str) -> Command:
    """`python -m` these words, in a session of its own."""
    return Command(_run_words, list(words), environment=environment)


def begin_function(function: Callable[..., object], *arguments: Any, **environment: str) -> Command:
    """A function of a module in a process, and its arguments."""
    return Command(function, *arguments, environment=environment)


def _of_server() -> dict[str, Any]:
    server = vars(multiprocessing.forkserver)["_forkserver"]
    return {name: vars(server)[name] for name in _OF_SERVER if name in vars(server)}


def _child(
    here: tuple[str, dict[str, str], dict[str, Any]],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    folder, environment, of_server = here
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    end_with_parent()
    redirect_output()
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    vars(vars(multiprocessing.forkserver)["_forkserver"]).update(of_server)
    for owner in (multiprocessing.forkserver, vars(multiprocessing.forkserver)["_forkserver"]):
        vars(owner)["ensure_running"] = lambda: None  # it runs: this process was forked from it
    function(*arguments)


def _run_words(words: list[str]) -> None:
    sys.argv[:] = words
    importlib.import_module(_MAIN[words[0]]).main(words[1:])

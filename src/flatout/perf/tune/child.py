"""A process that measures and is thrown away: whatever happens in it is an answer, and nothing of it is left.

The parts of the run are built there, so that this process keeps its memory, its random numbers and its model. Several
questions share one child; one that dies, hangs or runs out of memory is replaced for the next.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from flatout.distributed.processes import end_with_parent, use_own_resource_tracker, warm_start
from flatout.engine.allocator import keep_freed_memory
from flatout.errors import UserError
from flatout.perf.tune.answers import NoAnswer
from flatout.perf.tune.probe import Parts, about, feeds_alone, losses, measure
from flatout.perf.tune.range_test import range_test

Build = Callable[[], Parts]
"""Makes what would be trained; pickled by its name."""
_GRACE_S = 1.0
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Child:
    """The process that is asked; started by the first question, and again after it was lost."""

    def __init__(self, build: Build, threads: int) -> None:
        self.build, self.threads = build, threads
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        """The answer to a question, or a NoAnswer; soon after `latest` (of the system's clock) the child is killed."""
        if self._process is None:
            started = self._start(latest)
            if isinstance(started, NoAnswer):
                return started
        return self._exchange((what, asked), latest)

    def close(self) -> None:
        """End the child, at once."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self, latest: float) -> NoAnswer | None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        warm_start()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.build, self.threads, _environment(), theirs))
        self._process.start()
        theirs.close()
        built = self._exchange(None, latest)
        if isinstance(built, NoAnswer) and built.why.startswith(_UNREAD):
            raise UserError(
                "tune",
                "the process that measures could not read this script",
                hint="Put what trains below: if __name__ == '__main__':",
            )
        return built if isinstance(built, NoAnswer) else None

    def _exchange(self, question: Any, latest: float) -> Any:
        assert self._pipe is not None
        is_reading = False
        try:
            if question is not None:
                self._pipe.send(question)
            while self._pipe.poll(max(0.0, latest + _GRACE_S - time.time())):
                kind, answer = self._pipe.recv()
                if kind == "begun":
                    is_reading = True
                    continue
                if kind == "answer":
                    return answer
                self.close()  # what it has left in memory would count for the next question
                return NoAnswer(answer, is_memory=kind == "memory")
            self.close()
            return NoAnswer("the time was over, and its process was ended")
        except (EOFError, ConnectionError):
            code = self._ended()
            if question is None and not is_reading and code == 1:
                return NoAnswer(f"{_UNREAD} it ended with exit code 1")
            if code < 0:
                name = signal.Signals(-code).name
                words = ", out of memory is the usual cause" if name == "SIGKILL" else ""
                return NoAnswer(f"its process was ended by {name}{words}", is_memory=name == "SIGKILL")
            return NoAnswer(f"its process ended with exit code {code}")

    def _ended(self) -> int:
        """The exit code of a child that is gone, or is going."""
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        self.close()
        return 1 if code is None else int(code)


_MOST_WORDS = 200
_UNREAD = "before it could begin,"


def _environment() -> dict[str, str]:
    """This process's, without what tells a rank who it is: the child is none."""
    return {name: text for name, text in os.environ.items() if name not in _RANKS and not name.startswith(_LAUNCHERS)}


def _serve(build: Build, threads: int, environment: dict[str, str], pipe: Connection) -> None:
    """Build the parts, and answer until no question is left."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells it too; who started it ends it
    pipe.send(("begun", None))
    os.environ.clear()
    os.environ |= environment
    _be_silent()
    use_own_resource_tracker()
    torch.set_num_threads(threads)
    try:
        parts = build()
        if parts.device.type == "cpu":
            keep_freed_memory()
        pipe.send(("answer", None))
        while True:
            what, asked = pipe.recv()
            pipe.send(("answer", _ANSWERS[what](parts, **asked)))
    except EOFError:
        return
    except UserError as mistake:
        pipe.send(("mistake", str(mistake)))
    except (torch.OutOfMemoryError, MemoryError):
        pipe.send(("memory", "out of memory"))
    except Exception as error:  # your own model may raise anything; the run continues without this answer
        words = (str(error).strip().splitlines() or [""])[0]
        is_memory = any(sign in words for sign in ("ALLOC_FAILED", "out of memory", "can't allocate memory"))
        why = "out of memory" if is_memory else f"{type(error).__name__}: {words}"[:_MOST_WORDS]
        pipe.send(("memory" if is_memory else "error", why))


def _be_silent() -> None:
    """What libraries print here has been printed by the run, or will be."""
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        os.close(nothing)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (for the process's life)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "about": about,
    "feeds": feeds_alone,
    "losses": losses,
    "measure": measure,
    "range": range_test,
}

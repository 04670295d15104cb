"""Measure in a separate process, which may fail or run out of memory without harm.

`run` calls one function in such a process. `Apart` keeps a process that makes an object and answers
several questions about it. If the process fails, `Failed` says why. It is forked from the warm
server (`distributed/processes.py`). Tuning, ladders and `doctor --confirm` measure this way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flatout.distributed.processes import OUTPUT, stand_apart, use_own_resource_tracker, warm_start
from flatout.engine.pieces import is_out_of_memory
from flatout.errors import UserError, first_line

Answer = TypeVar("Answer")
_GRACE_S = 1.0  # that a process may take to end, or to answer late
# Environment variables that tell a rank its number. The process is no rank: it must not see them.
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Failed(Exception):
    """Why there is no answer."""

    def __init__(
        self, why: str, *, is_memory: bool = False, code: int | None = None, is_unread: bool = False
    ) -> None:
        """`why`: a clause, such as "out of memory".

        `is_memory`: whether memory was, or may have been, the reason.
        `code`: exit code of a process that ended without an answer; below 0 a signal.
        `is_unread`: whether the process could not even start the function.
        """
        super().__init__(why)
        self.why = why
        self.is_memory = is_memory
        self.code = code
        self.is_unread = is_unread


def run(
    function: Callable[[], Answer],
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Call a function in a separate process, and return what it returns.

    `Failed` if the process ends before that, or `limit_s` is over. `environment`: as of `Apart`.
    """
    apart = Apart(function, environment)
    try:
        latest = None if limit_s is None else time.time() + limit_s
        answer: Answer = apart.ask(_itself, latest)
        apart.close(_GRACE_S)  # time to close files and to remove temporary ones
        return answer
    finally:
        apart.close()


def _itself(made: Answer) -> Answer:
    return made


class Apart:
    """A process that makes an object and answers questions about it."""

    def __init__(
        self, make: Callable[[], Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: variables in addition to this process's own.

        The process prints to the file of the variable `OUTPUT`; without it, nothing is printed.
        """
        context: Any = multiprocessing.get_context("forkserver")
        warm_start()
        self.output = (environment or {}).get(OUTPUT, "")
        inherited = {
            key: text
            for key, text in os.environ.items()
            if not key.startswith(_LAUNCHERS) and key not in _RANKS
        }
        variables = {**inherited, OUTPUT: os.devnull, **(environment or {})}
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, variables, theirs))
        self._process.start()
        self._has_begun = False
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def ask(self, question: Callable[[Any], Answer], latest: float | None = None) -> Answer:
        """Call `question` with the object, in its process, and return the answer.

        `latest`: a time of `time.time` to wait until. `Failed` if there is no answer by then, or
        the process ended; close it then.
        """
        try:
            # If the process has ended, its last message may still be in the pipe.
            with suppress(ConnectionError):
                self._pipe.send(question)
            while True:
                left_s = None if latest is None else max(0.0, latest + _GRACE_S - time.time())
                if not self._pipe.poll(left_s):
                    break
                kind, content = self._pipe.recv()
                if kind == "answer":
                    return content
                if kind == "failed":
                    raise Failed(**content)
                self._has_begun = True
        except (EOFError, ConnectionError):
            raise self._why_ended() from None
        raise Failed("the time was over, and its process was ended")

    def close(self, grace_s: float = 0.0) -> None:
        """End the process and all processes that it started.

        It may take `grace_s` seconds to end by itself first.
        """
        if self._process is None:
            return
        self._pipe.close()
        self._process.join(grace_s)
        if self._process.is_alive():
            self._process.kill()
            # Python's tracker of semaphores ignores this signal: it must outlive the process, to
            # remove them.
            with suppress(ProcessLookupError):  # the process was not yet the head of a group
                os.killpg(self.pid, signal.SIGTERM)
        self._process.join()
        self._process.close()
        self._process = None

    def _why_ended(self) -> Failed:
        """Why the process ended without an answer, from its exit code."""
        self._process.join(_GRACE_S)
        code = 1 if self._process.exitcode is None else int(self._process.exitcode)
        where = f"; {self.output} has its output" if self.output else ""
        if code >= 0:
            is_unread = code == 1 and not self._has_begun
            return Failed(
                f"its process ended with exit code {code}{where}", code=code, is_unread=is_unread
            )
        name = signal.Signals(-code).name
        words = ", out of memory is the usual cause" if name == "SIGKILL" else ""
        return Failed(
            f"its process was ended by {name}{words}{where}", is_memory=name == "SIGKILL", code=code
        )


def _serve(make: Callable[[], Any], environment: Mapping[str, str], pipe: Connection) -> None:
    """Run in the process: make the object, and answer questions until the pipe is closed."""
    pipe.send(("begun", None))
    stand_apart(environment)
    use_own_resource_tracker()
    try:
        parts = make()
        while True:
            try:
                question = pipe.recv()
            except EOFError:
                return
            pipe.send(("answer", question(parts)))
    except UserError as mistake:
        pipe.send(("failed", {"why": str(mistake)}))
    except Exception as error:
        # Your own model may raise anything. The other process continues without this answer.
        traceback.print_exc()
        first = first_line(error)
        if is_out_of_memory(error) or "ALLOC_FAILED" in first or "out of memory" in first:
            pipe.send(("failed", {"why": "out of memory", "is_memory": True}))
        else:
            pipe.send(("failed", {"why": f"{type(error).__name__}: {first}"[:200]}))

"""Measure in a process of its own: whatever happens there is an answer, and nothing of it is left.

`run` calls one function there. An `Apart` keeps its process for several questions about one thing
that is made there. Tuning, ladders and the short runs of `doctor --confirm` measure so. The process
is forked from the warm server.
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
from flatout.engine.passes import is_out_of_memory
from flatout.errors import UserError

Answer = TypeVar("Answer")
_GRACE_S = 1.0
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Failed(Exception):
    """Why there is no answer."""

    def __init__(
        self, why: str, *, is_memory: bool = False, code: int | None = None, is_unread: bool = False
    ) -> None:
        # `is_memory`: it took, or may have taken, too much memory; `is_unread`: the process could
        # not even begin; `code`: of a process that ended without a word, as a shell knows it; below
        # 0 the signal that ended it.
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
    """What a function answers in a process of its own; `Failed` where it ended early, or ran beyond
    `limit_s`.
    """
    apart = Apart(function, environment)
    try:
        answer: Answer = apart.ask(_itself, None if limit_s is None else time.time() + limit_s)
        apart.close(_GRACE_S)  # it may leave in peace: files are closed, temporary ones removed
        return answer
    finally:
        apart.close()


def _itself(made: Answer) -> Answer:
    return made


class Apart:
    """A process that makes something and answers questions about it."""

    def __init__(
        self, make: Callable[[], Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: words beside this process's own; without OUTPUT among them nothing is
        printed.
        """
        context: Any = multiprocessing.get_context("forkserver")
        warm_start()
        self.output = (environment or {}).get(OUTPUT, "")
        # Without what tells a rank who it is.
        own = {
            key: text
            for key, text in os.environ.items()
            if not key.startswith(_LAUNCHERS) and key not in _RANKS
        }
        given = {**own, OUTPUT: os.devnull, **(environment or {})}
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, given, theirs))
        self._process.start()
        self._has_begun = False
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def ask(self, question: Callable[[Any], Answer], latest: float | None = None) -> Answer:
        """What a function says of the thing; `Failed` where the process ended, or was at `latest`:
        then close it.
        """
        try:
            with suppress(ConnectionError):  # it is gone already; its last words may be there
                self._pipe.send(question)
            while self._pipe.poll(
                None if latest is None else max(0.0, latest + _GRACE_S - time.time())
            ):
                kind, said = self._pipe.recv()
                if kind == "answer":
                    return said
                if kind == "failed":
                    raise Failed(**said)
                self._has_begun = True
        except (EOFError, ConnectionError):
            raise self._without_a_word() from None
        raise Failed("the time was over, and its process was ended")

    def close(self, grace_s: float = 0.0) -> None:
        """End the process with all that it started; `grace_s`: how long it may take to end by
        itself.
        """
        if self._process is None:
            return
        self._pipe.close()
        self._process.join(grace_s)
        if self._process.is_alive():
            # Python's tracker of semaphores, which outlives its process to remove them, ignores the
            # group's signal.
            self._process.kill()
            with suppress(ProcessLookupError):  # it was not yet the head of a group
                os.killpg(self.pid, signal.SIGTERM)
        self._process.join()
        self._process.close()
        self._process = None

    def _without_a_word(self) -> Failed:
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
    pipe.send(("begun", None))
    stand_apart(environment)
    use_own_resource_tracker()
    try:
        made = make()
        while True:
            try:
                question = pipe.recv()
            except EOFError:
                return
            pipe.send(("answer", question(made)))
    except UserError as mistake:
        pipe.send(("failed", {"why": str(mistake)}))
    except Exception as error:
        # your own model may raise anything; who asks continues without this answer
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        if is_out_of_memory(error) or any(
            sign in first for sign in ("ALLOC_FAILED", "out of memory")
        ):
            pipe.send(("failed", {"why": "out of memory", "is_memory": True}))
        else:
            pipe.send(("failed", {"why": f"{type(error).__name__}: {first}"[:200]}))

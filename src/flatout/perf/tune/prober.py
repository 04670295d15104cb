"""Who answers the search's questions: a process that is thrown away, or, for a callback, this one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flatout.distributed.limits import keep_freed_memory
from flatout.engine.passes import is_out_of_memory
from flatout.errors import UserError
from flatout.perf.measure.apart import Apart, Failed
from flatout.perf.tune.answers import NoAnswer
from flatout.perf.tune.probe import Parts, about, feeds_alone, losses, measure, range_test

ANSWERS: dict[str, Callable[..., Any]] = {
    "about": about,
    "feeds": feeds_alone,
    "losses": losses,
    "measure": measure,
    "range": range_test,
}


class Child:
    """Builds the parts of a run in a process apart, at the first question and again after that process was lost.

    So the one that asks keeps its memory, its random numbers and its model.
    """

    def __init__(self, build: Callable[[], Parts], threads: int) -> None:
        """`build`: makes what would be trained; pickled by its name."""
        self.build, self.threads = build, threads
        self._apart: Apart | None = None

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        """The answer to a question, or a NoAnswer; soon after `latest` the process is killed."""
        if self._apart is None:
            self._apart = Apart(partial(_build, self.build, self.threads))
        try:
            return self._apart.ask(partial(ANSWERS[what], **asked), latest)
        except Failed as failed:
            self.close()  # what it has left in memory would count for the next question
            if failed.is_unread:
                what = "the process that measures could not read this script"
                hint = "Put what trains below: if __name__ == '__main__':"
                raise UserError("tune", what, hint=hint) from None
            return NoAnswer(failed.why, failed.is_memory)

    def close(self) -> None:
        """End the process, at once."""
        if self._apart is not None:
            self._apart.close()
        self._apart = None


class Here:
    """Measures parts of this process: whoever asks gives a copy of the task, and puts random numbers back."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        try:
            return ANSWERS[what](self.parts, **asked)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return NoAnswer("out of memory", is_memory=True)
        except UserError as error:  # a single row at once was too much
            return NoAnswer(str(error), is_memory=True)

    def close(self) -> None:
        return


def _build(build: Callable[[], Parts], threads: int) -> Parts:
    torch.set_num_threads(threads)
    parts = build()
    if parts.device.type == "cpu":
        keep_freed_memory()
    return parts

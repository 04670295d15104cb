"""Answers of tuning, saved so that a later run with the same key does not measure again.

The key covers all that the answers depend on. Each key has a file in the folder `tune/` of the
cache.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from filelock import Timeout

from flatout.data.store.cache import default_cache_folder
from flatout.data.store.lock import acquire, file_lock
from flatout.files import load_json, sync_folder, write_atomically

FOLDER = "tune"
_SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class TuneAnswer:
    """The value chosen for one setting, the reason, and the measurements behind it."""

    name: str
    value: str
    why: str
    evidence: str


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A row of the table of all that was measured."""

    what: str  # the setting that is searched, such as "feed"
    value: str
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    memory_gb: float | None = None
    is_predicted: bool = False  # whether the memory was computed from smaller batches, not measured
    verdict: str = ""


@dataclass(slots=True, kw_only=True)
class Answers:
    """The result of one search."""

    # By the dotted keys of settings, also of those that stay as they were.
    values: dict[str, Any] = field(default_factory=dict)
    choices: list[TuneAnswer] = field(default_factory=list)
    tried: list[Attempt] = field(default_factory=list)
    seconds: float = 0.0  # how long measuring took
    allowed_s: float = 0.0  # how long it was allowed to take
    step_s: float | None = None  # of an optimizer step with the settings as they were
    planned_steps: int = 0  # optimizer steps of the run
    # The fastest measurement of a setting over its slowest one: above 1 on a busy machine.
    unrest: float = 1.0
    row_key: str = ""  # `micro_batch_key` of the model in the chosen precision
    is_complete: bool = True  # whether the time was enough to measure everything

    @classmethod
    def of(cls, values: dict[str, Any]) -> Answers:
        """The answers whose `asdict` this is; ValueError for anything else."""
        try:
            arguments = {field.name: values[field.name] for field in fields(cls)}
            arguments["choices"] = [TuneAnswer(**choice) for choice in values["choices"]]
            arguments["tried"] = [Attempt(**attempt) for attempt in values["tried"]]
            answers = cls(**arguments)
            # Raises a TypeError where they are no numbers.
            total_s = answers.seconds + answers.allowed_s
            if isinstance(answers.values, dict) and isinstance(total_s, int | float):
                return answers
        except (KeyError, TypeError) as error:
            raise ValueError(f"no answers: {error}") from None
        raise ValueError("no answers")


class AnswerStore:
    """Reads and writes answers by their key."""

    def __init__(self, cache: Path | str | None = None) -> None:
        self.cache = Path(cache).expanduser() if cache else default_cache_folder()
        self.folder = self.cache / FOLDER

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str) -> Answers | None:
        """The saved answers; None if there are none, or with a warning if the file is damaged."""
        try:
            values = load_json(self.path(key))
            if isinstance(values, dict) and values.pop("schema", None) == _SCHEMA:
                return Answers.of(values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            pass
        warnings.warn(
            f"tune: {self.path(key)} is damaged: measured again", UserWarning, stacklevel=2
        )
        return None

    def write(self, key: str, answers: Answers) -> None:
        """Replace the file in one step. If that fails there is a warning: a later run measures."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"schema": _SCHEMA, **asdict(answers)}, indent=1))
            sync_folder(self.folder)
        except OSError as error:
            warnings.warn(
                f"tune: {path} cannot be written: {error.strerror}", UserWarning, stacklevel=2
            )

    @contextmanager
    def measuring(
        self, key: str, patience_s: float, say: Callable[[str], None] = print
    ) -> Iterator[None]:
        """Context manager in which only one process at a time measures what has this key.

        Others wait up to `patience_s`, and find the answers in the store then.
        """
        lock = None
        # If the cache is read-only, or the other process takes too long, measure without the lock.
        with suppress(OSError, Timeout):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = file_lock(self.folder / f".{key}.lock")
            try:
                acquire(lock, 0)
            except Timeout:
                say("tune: another process is measuring the same; waiting for its answers")
                acquire(lock, patience_s)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why something could not be measured."""

    why: str
    is_memory: bool = False  # whether memory was, or may have been, the reason

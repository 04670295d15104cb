"""What was measured before is not measured again: answers by a key of all that they depend on, a
file each.

The files lie in the cache folder, in `tune/`.
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
from flatout.files import sync_folder, write_atomically

FOLDER = "tune"
_SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class TuneAnswer:
    """One answer: of what, why, and what that was read off."""

    name: str
    value: str
    why: str
    evidence: str


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A line of the table of what was tried."""

    what: str
    value: str
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    memory_gb: float | None = None
    is_predicted: bool = False  # whether the memory was not seen, but reckoned from smaller batches
    verdict: str = ""


@dataclass(slots=True, kw_only=True)
class Answers:
    """What was decided, by the dotted keys of settings, and how."""

    values: dict[str, Any] = field(default_factory=dict)  # to be set; those that stay, too
    choices: list[TuneAnswer] = field(default_factory=list)
    tried: list[Attempt] = field(default_factory=list)
    seconds: float = 0.0  # what measuring took
    allowed_s: float = 0.0  # what it might have taken
    step_s: float | None = None  # seconds of an optimizer step with the settings as they were
    planned_steps: int = 0  # optimizer steps of the run that was to come
    # how many times as fast a setting was at its best as at its worst: above 1 on a busy machine
    unrest: float = 1.0
    row_key: str = ""  # `micro_batch_key` of the model in the arithmetic that was decided
    is_complete: bool = True  # whether the time was enough for everything that was asked

    @classmethod
    def of(cls, values: dict[str, Any]) -> Answers:
        """From what `asdict` gave; anything else is a ValueError."""
        try:
            plain = {each.name: values[each.name] for each in fields(cls)}
            plain["choices"] = [TuneAnswer(**each) for each in values["choices"]]
            plain["tried"] = [Attempt(**each) for each in values["tried"]]
            found = cls(**plain)
            if isinstance(found.values, dict) and isinstance(
                found.seconds + found.allowed_s, int | float
            ):
                return found
        except (KeyError, TypeError) as error:
            raise ValueError(f"no answers: {error}") from None
        raise ValueError("no answers")


class AnswerStore:
    def __init__(self, cache: Path | str | None = None) -> None:
        self.cache = Path(cache).expanduser() if cache else default_cache_folder()
        self.folder = self.cache / FOLDER

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str) -> Answers | None:
        """What is known; a file that is not whole is named, and counts as not there."""
        try:
            values = json.loads(self.path(key).read_text(encoding="utf-8"))
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
        """Replace the file in one step. Answers that a disk refuses are only measured again."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"schema": _SCHEMA, **asdict(answers)}, indent=1))
            sync_folder(self.folder)
        except OSError as error:
            warnings.warn(
                f"tune: {path} cannot be kept: {error.strerror}", UserWarning, stacklevel=2
            )

    @contextmanager
    def measuring(
        self, key: str, patience_s: float, say: Callable[[str], None] = print
    ) -> Iterator[None]:
        """Let one process measure at a time; a process that waits finds the answers afterwards."""
        lock = None
        # a cache that is read-only, or one who takes too long: measure all the same
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
    """Why a question has none."""

    why: str
    is_memory: bool = False  # whether it was, or may have been, too much memory

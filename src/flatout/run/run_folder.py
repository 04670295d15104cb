"""A run's folder: made at the start, with a summary that is never missing and never
half written.
"""

from __future__ import annotations

import errno
import os
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from flatout.data.store.store import Store
from flatout.distributed.ranks import Ranks
from flatout.errors import REFUSALS, RunBroke, UserError, first_line, out_of_space, require
from flatout.files import (
    part_from_links,
    refused_folder,
    require_ordinary,
    write_atomically,
    write_synced,
    written_aside,
)
from flatout.masking import mask_words
from flatout.report.page import read_curves, write_page
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import Summary, empty_summary, plain, read_summary
from flatout.run.claimed_folders import LOCK, LOG, OVERRIDES, SETTINGS
from flatout.run_log import LogFile, RunLog, decision_line

if TYPE_CHECKING:
    from flatout.config import RunConfig

SPLIT_ROWS = "splits.parquet"
# a resumed run goes on in these; any other file is replaced whole
_WRITTEN_IN_PLACE = (LOG, "metrics.csv")
_ROWS_AT_ONCE = 1 << 20


@dataclass(slots=True)
class RunFolder(RunLog):
    """Where one run puts everything, and the two things it always writes: its summary
    and its log.
    """

    path: Path
    summary: Summary
    log: LogFile
    is_first: bool = True  # whether this rank prints and writes; the others only read here
    files: dict[str, str] = field(default_factory=dict)  # what `begin` writes
    # what a resumed run chose at its beginning
    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    # files of the run whose checkpoint is resumed, as they were; empty once it has gone on
    replaced: dict[str, bytes] = field(default_factory=dict)
    is_trained: bool = False  # whether the last step is done: evaluation and report remain

    def begin(self) -> None:
        """Write the run's settings and its summary into the folder.

        A run that resumes in an older run's folder calls this only once its settings and its
        checkpoint are checked.
        """
        if not self.is_first or self.summary.path is not None:
            return
        for name in (*self.files, SUMMARY):
            with suppress(FileNotFoundError):
                self.replaced[name] = (self.path / name).read_bytes()
        for name, text in self.files.items():
            write_atomically(self.path / name, text)
        self.summary.path = self.path / SUMMARY
        choices = self.summary.values["choices"]
        names = {choice["name"] for choice in choices}
        # Killed before it has made these choices again, a resumed run leaves them as it found them.
        earlier = [choice for name, choice in self.before.items() if name not in names]
        self.summary.values["choices"] = [*choices, *earlier]
        self.summary.write()
        self.summary.values["choices"] = choices

    def put_back(self) -> None:
        """Give the folder the files again that `begin` has replaced: nothing was resumed."""
        for name, content in self.replaced.items():
            with written_aside(self.path / name) as beside:
                write_synced(beside, content)
        self.summary.path = None

    def note_trained(self) -> None:
        """Note that the last step is done: a run that is ended now says what is missing."""
        self.is_trained = True

    def advise_resume(self, does: str) -> str:
        """How to resume this run, in words; `does`: what the resume then does."""
        if self.files.get(OVERRIDES):
            return f"the same command with resume=auto {does}"
        # no words were typed: most likely a script called `fit`
        return f'resume=auto {does}, in a script fit(…, resume="auto")'

    def put(self, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            self.summary.set(name, value)

    def say(self, text: str) -> None:
        self.log.say(text)

    def decision(
        self,
        name: str,
        value: object,
        why: str,
        evidence: str,
        *,
        replaces: bool = False,
        prints: bool = True,
    ) -> None:
        """Keep and print one choice of the run, if none has its name; `replaces`: it takes the
        earlier one's place.
        """
        choices = self.summary.values["choices"]
        if not replaces and any(choice["name"] == name for choice in choices):
            return
        choices.append({"name": name, "value": value, "why": why, "evidence": evidence})
        (self.log.say if prints else self.log.keep)(decision_line(name, value, why, evidence))


@contextmanager
def open_run_folder(
    path: Path, config: RunConfig, overrides: Sequence[str], ranks: Ranks
) -> Iterator[RunFolder]:
    """The folder of a run that is about to begin or resume; closes its summary with how the run
    ended.
    """
    is_again = config.resume is not None
    has_run = (path / SUMMARY).is_file()
    is_old = is_again or has_run
    earlier = read_summary(path) if ranks.is_first and is_again and has_run else {}
    # The first rank replaces the summary soon: a rank that is late would read another one.
    choices = ranks.agreed("choices", lambda: earlier.get("choices", []))
    # the folder may come from others
    named = [choice for choice in choices if isinstance(choice, dict) and "name" in choice]
    before = {str(choice["name"]): choice for choice in reversed(named)}
    if not ranks.is_first:
        with unwritten_run(path) as folder:
            folder.before = before
            yield folder
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_folder(error, path) from None
    require_no_link_outside(path)
    summary = Summary(empty_summary() | _describe_run(config, overrides, earlier))
    files = _files_of_run(config, overrides)
    with _full_disk_told(path):
        for name in _WRITTEN_IN_PLACE:
            part_from_links(path / name)
    with _full_disk_told(path), LogFile(path / LOG) as log:
        folder = RunFolder(path, summary, log, files=files, before=before)
        if not is_old:
            folder.begin()
        try:
            yield folder
        except BaseException as error:
            # however a run ends, its summary says so
            told = _of_worker(error, path)
            _close_early(folder, told or error, is_old=is_old)
            if told is not None:
                raise told from None
            raise
        _require_in_place(path)
        summary.finish("finished")


def _describe_run(
    config: RunConfig, overrides: Sequence[str], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """What a summary says of a run from its start on; `earlier`: that of the run it resumes."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {
        "begun": earlier.get("begun") if earlier else now,
        "experiment": config.name,
        "command": shlex.join(["python", "-m", "train", *mask_words(overrides)]),
        "seed": config.seed,
    }


def _files_of_run(config: RunConfig, overrides: Sequence[str]) -> dict[str, str]:
    """The texts of the files that say what a run is, by their names; secrets are masked."""
    settings = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    words = "".join(f"{override}\n" for override in mask_words(overrides))
    return {SETTINGS: settings, OVERRIDES: words}


@contextmanager
def _full_disk_told(path: Path) -> Iterator[None]:
    """Context manager: a disk that refuses a write of the run in `path` is a user's mistake."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            _require_in_place(path)
        if error.errno not in REFUSALS:
            raise
        hint = (
            "Make room, or set output=FOLDER on another disk. Checkpoints that are there are kept."
        )
        raise out_of_space(error, path, None, "output", hint) from None


def _require_in_place(path: Path) -> None:
    """Refuse to go on without the folder of a run.

    Its settings and its log are there from the first second on. A rotation of logs takes away one
    of them. A folder that was made anew, as TensorBoard does, has none.
    """
    require(
        any(_is_there(path / name) for name in (SETTINGS, OVERRIDES, LOG)),
        "output",
        f"{path} is gone: it was removed or moved while the run trained",
        hint="Leave it in place until the run ends, and begin again.",
    )


def _is_there(path: Path) -> bool:
    """Whether a file is there; true, too, where the disk does not answer: the next write tells."""
    # `Path.exists` of Python 3.14 takes every error for an absence
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class FolderWatch:
    """A listener of curves that ends a run whose folder is gone: it would train for nothing."""

    path: Path

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        _require_in_place(self.path)

    on_validation = on_flush

    def close(self) -> None:
        """Do nothing: it holds no file."""


def require_no_link_outside(path: Path) -> None:
    """Refuse a folder with links that lead out of it: what is written there would land elsewhere.

    A folder may come from others, with its log.txt a link to a file of yours. What is copied from
    it, as in an export, would be that file. A pipe in it would be waited for without end.
    """
    root = os.path.realpath(path)  # takes a link that leads to itself, too
    for folder, folders, files in os.walk(path):
        for name in [*folders, *files]:
            entry = Path(folder, name)
            require(
                not entry.is_symlink() or Path(os.path.realpath(entry)).is_relative_to(root),
                str(entry),
                "is a link that leads out of the folder of its run",
                hint="Remove the link.",
            )
            require_ordinary(entry)


@contextmanager
def unwritten_run(path: Path = Path()) -> Iterator[RunFolder]:
    """The folder of a run that prints and writes nothing.

    Ranks but the first have one, and parts that are built only to be measured.
    """
    with LogFile(None) as silent:
        yield RunFolder(path, Summary(empty_summary()), silent, is_first=False)


def _of_worker(error: BaseException, path: Path) -> RunBroke | None:
    """The error if the system ended a worker of a loader; torch raises it at any place of a run."""
    if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker (pid"):
        return None
    words = (
        "Out of memory is the usual cause: use fewer workers (data.workers), or data.feed=threaded."
    )
    return RunBroke(f"{first_line(error)}. {words} Checkpoints are kept: resume={path}")


def _close_early(folder: RunFolder, error: BaseException, *, is_old: bool) -> None:
    """Say how a run ended before its end; what cannot be written then is not worth
    another error.
    """
    if isinstance(error, UserError) and not is_old and _took_away(folder):
        return
    if not _is_by_signal(error):
        folder.log.keep(
            str(error) if isinstance(error, UserError | RunBroke) else traceback.format_exc()
        )
    if isinstance(error, UserError) and folder.replaced:
        # a mistake that was found before the first step: the run stays what it was
        with suppress(OSError):
            folder.put_back()
    if folder.summary.path is None:  # it has not begun
        return
    status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
    with suppress(OSError):
        folder.summary.finish(status)
        write_page(folder.path, folder.summary.values, read_curves(folder.path), [])
    folder.log.say(f"{status}: {folder.path}")
    if folder.is_trained and _is_by_signal(error):
        missing = "evaluation and report are missing"
        does = "makes them"
        if folder.summary.values["metrics"]:
            missing = "the report is missing"
            does = "makes it"
        folder.log.say(f"training is complete; {missing}: {folder.advise_resume(does)}")


def _is_by_signal(error: BaseException) -> bool:
    """Whether Ctrl-C or another signal ended a run: nothing has gone wrong, so a traceback explains
    nothing.
    """
    is_exit_of_signal = (
        isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128
    )
    return isinstance(error, KeyboardInterrupt) or is_exit_of_signal


def _took_away(folder: RunFolder) -> bool:
    """Take away the folder of a mistake that was found before anything was computed; whether it was
    one.
    """
    names = {*folder.files, SUMMARY, LOG}
    with suppress(OSError):
        if {each.name for each in folder.path.iterdir()} <= {*names, LOCK}:
            for name in names:
                (folder.path / name).unlink(missing_ok=True)
            if not (folder.path / LOCK).exists():  # else it goes when the lock is released
                folder.path.rmdir()
            return True
    return False


def save_split_rows(store: Store, path: Path) -> None:
    """Write which row of its table, counted from 1, each row of each split is."""
    schema = pa.schema([("split", pa.dictionary(pa.int8(), pa.string())), ("row", pa.int64())])
    encoding = {"row": "DELTA_BINARY_PACKED"}
    with pq.ParquetWriter(path, schema, column_encoding=encoding, use_dictionary=["split"]) as file:
        for name, split in store.splits.items():
            for first in range(0, split.num_rows, _ROWS_AT_ONCE):
                rows = pa.array(split.fixed("rows")[first : first + _ROWS_AT_ONCE] + 1)
                words = pa.DictionaryArray.from_arrays(
                    pa.array(np.zeros(len(rows), np.int8)), pa.array([name])
                )
                file.write_table(pa.Table.from_arrays([words, rows], schema=schema))

"""Write files that are there whole or not at all, also after a power cut: beside, synced, renamed.

Stores, checkpoints, summaries and pages are written by these functions. A rename alone is atomic
for other processes, not for the disk. Three syncs are needed: the file's bytes, the names in its
folder, the name in the parent's. Without them a power cut may leave a name with nothing behind it.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flatout.errors import UserError

# errors of a disk rather than of a name
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_ASIDE = "-replaced"
# how a cell begins that a spreadsheet runs, or that looks guarded
_MAY_RUN = re.compile(r"'*[=+\-@\t\r]")
_SECOND_NS = 1_000_000_000
_TICK_S = 0.02  # most file systems keep the time of a change in steps of up to ten milliseconds
_COARSE_TICK_S = 2.0  # others in whole seconds (sshfs), or in two (FAT)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk; the disk reports late errors here only."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's names are on the disk, where its file system can do that."""
    try:
        # the number of an open folder: `open` takes files only
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def sync_tree(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, and its names."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            sync_file(path)
    sync_folder(folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file with these bytes; they are on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, after its new text is on the disk.

    Half characters, which UTF-8 cannot hold, become escape codes.
    """
    # machines that share a disk may share numbers
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_synced(beside, text.encode("utf-8", "backslashreplace"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file in one step, without formulas; the first row names the columns."""
    # in memory first: an error in a row leaves the file of before
    text = io.StringIO()
    csv.writer(text).writerows(map(guard_row, rows))
    write_atomically(path, text.getvalue())


def guard_row(row: Sequence[object]) -> list[object]:
    """The cells of a row of a CSV file, texts guarded by `guard_cell`."""
    cells = []
    for cell in row:
        cells.append(guard_cell(cell) if isinstance(cell, str) else cell)
    return cells


def guard_cell(text: str) -> str:
    """Put a `'` before what a spreadsheet would run as a formula; numbers stay numbers.

    A text that looks guarded already gets one more, so `unguard_cell` gives back every text: `=1` →
    `'=1` → `=1`, `'=1` → `''=1` → `'=1`.
    """
    if _MAY_RUN.match(text) is None:
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def unguard_cell(text: str) -> str:
    """The text that `guard_cell` was given."""
    is_guarded = text.startswith("'") and _MAY_RUN.match(text) is not None
    return text[1:] if is_guarded else text


def stamp_of(path: Path) -> list[int]:
    """Values of a file's entry that change when the file does: size, mtime, ctime, inode.

    A program can set mtime back, but not ctime.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def has_time_moved(changed_ns: int) -> bool:
    """Whether a file that is written now gets another modification time than `changed_ns`.

    False, too, while the disk's clock is ahead of ours.
    """
    return (time.time_ns() - changed_ns) / _SECOND_NS >= _tick_s(changed_ns)


def wait_for_new_mtime(changed_ns: int) -> None:
    """Sleep until a file that is written now gets another modification time than `changed_ns`."""
    if not has_time_moved(changed_ns):
        time.sleep(_tick_s(changed_ns))


def _tick_s(changed_ns: int) -> float:
    """Seconds within which two changes of a file may get the same time on its file system."""
    return _COARSE_TICK_S if changed_ns % _SECOND_NS == 0 else _TICK_S


def refused_folder(error: OSError, folder: Path) -> UserError:
    """The message for a run folder that cannot be made, such as below a file."""
    existing = (path for path in (folder, *folder.parents) if os.path.lexists(path))
    nearest = next(existing, Path())
    if nearest.is_dir():
        problem = f"cannot make {folder}: {error.strerror or error}"
    else:
        problem = f"{nearest} is no folder"
    return UserError("output", problem, hint="Set output=FOLDER to a writable folder.")


def put_in_place(beside: Path, target: Path) -> None:
    """Rename a finished folder to `target`, replacing a folder of that name.

    The old one is renamed first and removed last, so a crash in between loses neither: `put_back`
    gives it its name again.
    """
    # its names must be on the disk before its own name is
    sync_folder(beside)
    aside = target.with_name(f".{target.name}{_ASIDE}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    # From here on to the next rename there is no folder `target`: that is what `put_back` undoes.
    try:
        beside.rename(target)
    except OSError:
        put_back(target.parent)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(parent: Path) -> None:
    """Undo a `put_in_place` that a crash has cut short, for all folders in `parent`."""
    # .step-40-replaced → step-40
    for aside in parent.glob(f".*{_ASIDE}"):
        target = parent / aside.name.removeprefix(".").removesuffix(_ASIDE)
        if not target.exists():
            aside.rename(target)


def numbered(path: Path) -> Iterator[Path]:
    """A path, and those to try where it is taken: `run`, `run_2`, `run_3`, …"""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}_{number}")


def is_plain_part(text: str) -> bool:
    """Whether `folder / text` lies below `folder`, on any system."""
    # a folder of Windows may be meant on Linux and the other way round, so both kinds are refused
    is_rooted = text.startswith(("/", "\\", "~")) or bool(re.match(r"[A-Za-z]:", text))
    climbs = ".." in re.split(r"[/\\]", text)
    return bool(text) and not is_rooted and not climbs and text.isprintable()


def require_inside(
    path: str, folders: Sequence[Path], where: str, hint: str = "Begin it with ${output}/."
) -> None:
    """Refuse a path that is not below one of the folders, once links are followed."""
    is_plain = path.isprintable() and not path.startswith("~")
    if is_plain:
        resolved = _resolve(Path(path))
        if any(resolved.is_relative_to(_resolve(folder)) for folder in folders):
            return
    raise UserError(
        where,
        f"{path!r} lies outside of the folder of all runs",
        allowed=str(folders[0]),
        hint=hint,
    )


def lies_inside(name: str, folder: Path) -> bool:
    """Whether a file named in a folder's manifest lies in that folder, once links are followed."""
    return is_plain_part(name) and _resolve(folder / name).is_relative_to(_resolve(folder))


def _resolve(path: Path) -> Path:
    """A path without links; one that leads to itself stays, where `Path.resolve` raises."""
    return Path(os.path.realpath(path))

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
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from flatout.errors import UserError, class_name, first_line, require

_ASIDE = "-replaced"
_MOST_BYTES = 50_000_000
_MOST_REFERENCES = 1_000  # in a file of settings
# limits of a file of settings
_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 20_000
_MOST_DIGITS = 1000
# a float has at most 309, and states of random numbers have 39
_MOST_DIGITS_OF_INT = 300
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


@contextmanager
def errors_of_the_disk() -> Iterator[None]:
    """Within it, an error of safetensors that is the disk's becomes the system's own error."""
    try:
        yield
    except SafetensorError as error:
        # One class for all errors; the number of the system's error stands in the message.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Context manager: a new path beside `path`, which takes its place at the end.

    After an error it is removed, and what stood at `path` stays.
    """
    # machines that share a disk may share numbers
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        # a write that the disk refuses does not name its file
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


def part_from_links(path: Path) -> None:
    """Make a file with a second name elsewhere, a hard link, a copy that has this name alone.

    What is then written into it changes nothing under the other name.
    """
    if path.is_file() and path.stat().st_nlink > 1:
        with written_aside(path) as beside:
            shutil.copyfile(path, beside)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, after its new text is on the disk.

    Half characters, which UTF-8 cannot hold, become escape codes.
    """
    with written_aside(path) as beside:
        write_synced(beside, text.encode("utf-8", "backslashreplace"))


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


def read_modest(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """The text of a file that may come from others.

    A pipe, which would never end, and a file that is too large for memory are refused unopened.
    """
    require_ordinary(path)
    size = path.stat().st_size
    if size > most_bytes:
        raise UserError(
            str(path),
            f"has {size:,} bytes",
            allowed=f"at most {most_bytes:,}",
            hint="It is damaged, or was not written by this program.",
        )
    try:
        with path.open(encoding="utf-8") as file:
            # files of the kernel have no size, and may have no end
            text = file.read(most_bytes + 1)
    except UnicodeDecodeError:
        raise UserError(str(path), "is not UTF-8", hint="Save it as UTF-8.") from None
    require(len(text) <= most_bytes, str(path), "has no end", allowed="a file that was written")
    return text


def load_json(path: Path) -> Any:
    """What a JSON file holds that may come from others; a UserError where it cannot be read."""
    text = read_modest(path)
    try:
        return json.loads(text, parse_int=_as_modest_int)
    except RecursionError:
        raise UserError(str(path), "is not valid JSON: nested too deeply") from None
    except ValueError as error:  # a number of many digits, too
        raise UserError(str(path), f"is not valid JSON: {first_line(error)}") from None


def _as_modest_int(digits: str) -> int:
    """A whole number that can become a float; a ValueError for a longer one."""
    if len(digits) > _MOST_DIGITS_OF_INT:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def load_yaml(path: Path) -> Any:
    """What a YAML file holds that may come from others; a UserError where it cannot be read."""
    text = read_modest(path)
    require_modest(text, str(path))
    try:
        return yaml.safe_load(text)
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        raise UserError(str(path), f"is not valid YAML: {first_line(error)}") from None


@contextmanager
def values_of(path: Path) -> Iterator[None]:
    """Within it, a value of an unexpected kind is a `UserError` that names its file.

    For files that may come from others, whose values are used in many ways.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # which of these an odd value raises depends on what is done with it first
        raise UserError(
            str(path),
            f"holds a value that does not fit: {class_name(type(error))}, {first_line(error)}",
            hint="It is damaged, or was not written by this program.",
        ) from error


def require_ordinary(*paths: Path) -> None:
    """Refuse pipes, sockets and devices: opening one may wait, or give bytes, without end."""
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(str(path), "is a pipe or a device", hint="Remove it.")


def home_expanded(path: str | Path) -> Path:
    """A path with the home folder in place of `~`; unchanged where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


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
    path: str,
    folders: Sequence[Path],
    where: str,
    hint: str = "Begin it with ${output}/.",
    *,
    of: str = "the folder of all runs",
) -> None:
    """Refuse a path that is not below one of the folders, once links are followed.

    `of`: words for the first of the folders.
    """
    is_plain = path.isprintable() and not path.startswith("~")
    if is_plain:
        resolved = _resolve(Path(path))
        if any(resolved.is_relative_to(_resolve(folder)) for folder in folders):
            return
    raise UserError(where, f"{path!r} lies outside of {of}", allowed=str(folders[0]), hint=hint)


def lies_inside(name: str, folder: Path) -> bool:
    """Whether a file named in a folder's manifest lies in that folder, once links are followed."""
    return is_plain_part(name) and _resolve(folder / name).is_relative_to(_resolve(folder))


def _resolve(path: Path) -> Path:
    """A path without links; one that leads to itself stays, where `Path.resolve` raises."""
    return Path(os.path.realpath(path))


def require_modest(text: str, where: str) -> None:
    """Refuse a YAML text that is very long, or that unfolds to very many values."""
    require(
        len(text) <= _MOST_CHARACTERS,
        where,
        f"{len(text):,} characters",
        allowed=f"at most {_MOST_CHARACTERS:,} of settings",
    )
    has_endless_number = re.search(rf"\d{{{_MOST_DIGITS + 1}}}", text) is not None
    require(not has_endless_number, where, f"a number of more than {_MOST_DIGITS:,} digits")
    # YAML reads 1:59:59 as a number in base sixty; references are parsed by a slow grammar
    has_many_places = re.search(r"(?<![\d_:])(?:\d[\d_]*+:){20}", text) is not None
    require(not has_many_places, where, "a number of more than 20 places in base sixty")
    has_long_reference = re.search(r"\$\{[^{}\n]{1000}", text) is not None
    is_modest = text.count("${") <= _MOST_REFERENCES and not has_long_reference
    require(is_modest, where, f"more than {_MOST_REFERENCES:,} references, or very long ones")
    if "&" not in text or "*" not in text:
        return  # without references nothing unfolds
    try:
        count = _values(yaml.compose(text, Loader=yaml.SafeLoader), {}, set())
    except (yaml.YAMLError, RecursionError):
        return  # the reader reports the error
    require(
        count <= _MOST_VALUES,
        where,
        "refers to its own parts too often",
        allowed=f"at most {_MOST_VALUES:,} values",
    )


def _values(node: yaml.Node | None, counts: dict[int, int], above: set[int]) -> int:
    """How many values a node unfolds to, each reference counted.

    `counts`: the counts so far, by node. `above`: the nodes that this one lies in.
    """
    # A list counts as a value too, so each line like the second triples what there is:
    #
    #     a: &a [x, x, x]         1 + 3 = 4 values
    #     b: &b [*a, *a, *a]      1 + 3 · 4 = 13 values; twenty such lines make billions
    #
    # A node is counted once, and its count is used at each reference, so this ends soon.
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in above:  # it holds itself, so it has no end
        return _MOST_VALUES + 1
    if id(node) not in counts:
        # the parts of a list are nodes, those of a mapping are pairs of them
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(node.value)
        counts[id(node)] = 1 + sum(_values(child, counts, above | {id(node)}) for child in children)
    return counts[id(node)]

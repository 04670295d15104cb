"""From what settings name to tables: a file, several, a folder, a data set of the Hub, or rows in
memory.

`data.source` names everything at once and `data.train`, `data.validation`, `data.test` a split
each. A folder is looked into: files or folders named after splits are the splits; folders of texts
are the classes; others follow each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.data.tables.fetched import fetch, is_address
from flatout.data.tables.formats.columnar import ArrowTable, Hdf5Table, NpyTable, ParquetTable
from flatout.data.tables.formats.csv_file import CsvTable
from flatout.data.tables.formats.file import FileTable, require_file
from flatout.data.tables.formats.in_memory import is_dataset, table_of
from flatout.data.tables.formats.json_file import JsonTable
from flatout.data.tables.formats.plain_text import ConllTable, TextFolder, is_text_folder
from flatout.data.tables.hub import from_disk, from_hub, is_saved_dataset, may_be_hub_name
from flatout.data.tables.reading import Format, ReadingConfig
from flatout.data.tables.table import ManyFiles, Table
from flatout.errors import UserError, require

_TABLES: dict[Format, tuple[Callable[[Path, str, ReadingConfig], FileTable], str]] = {
    Format.csv: (CsvTable, ".csv"),
    Format.tsv: (partial(CsvTable, promised="\t"), ".tsv"),
    Format.json: (JsonTable, ".json"),
    Format.jsonl: (JsonTable, ".jsonl .ndjson"),
    Format.conll: (ConllTable, ".conll .bio .iob"),
    Format.parquet: (ParquetTable, ".parquet"),
    Format.arrow: (ArrowTable, ".arrow .feather"),
    Format.npy: (NpyTable, ".npy"),
    Format.hdf5: (Hdf5Table, ".h5 .hdf5"),
}  # what reads each format, and the endings of names that promise it
ENDINGS = {ending: form for form, (_, endings) in _TABLES.items() for ending in endings.split()}
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "development", "eval"),
    "test": ("test", "testing"),
}


def open_splits(source: Any, given: Mapping[str, Any], reading: ReadingConfig) -> dict[str, Table]:
    """Tables by split: those that `source` holds, and those that are named one by one."""
    tables = {} if source is None else _splits_of(source, "data.source", reading)
    for split, each in given.items():
        if each is None:
            continue
        if split in tables:
            raise UserError(
                f"data.{split}",
                f"data.source has {split} rows already ({tables[split].name})",
                hint="Name the splits one by one, without data.source.",
            )
        tables[split] = open_source(each, where=f"data.{split}", reading=reading)
    return {split: tables[split] for split in _SPLIT_NAMES if split in tables}


def open_source(given: Any, *, where: str, reading: ReadingConfig | None = None) -> Table:
    """One table: of a file, of several, of a folder, or of rows in memory."""
    reading = reading or ReadingConfig()
    if isinstance(given, list | tuple):
        return _many(list(given), where, reading)
    if not isinstance(given, str | Path):
        return table_of(given, where=where)
    path = _path_of(given, where)
    if _is_pattern(path) or (_is_folder(path) and not is_text_folder(path)):
        return _many(files_in(path, where), where, reading)
    return open_table(path, where=where, reading=reading)


def files_in(given: str | Path, where: str) -> list[str]:
    """The files of a pattern, the tables of a folder, or the one file that is named."""
    path = _path_of(given, where)
    if _is_pattern(path):
        root, pattern = (
            (Path(path.anchor), str(path.relative_to(path.anchor)))
            if path.anchor
            else (Path(), str(path))
        )
        if found := sorted((str(file) for file in root.glob(pattern)), key=_by_number):
            return found
        hint = f"Patterns are looked up in {Path.cwd()}. Correct the pattern, or name the files."
        raise UserError(where, f"no file fits {given}", hint=hint)
    if not _is_folder(path):
        return [str(path)]
    files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    known = sorted(
        (file for file in files if format_of(file)), key=lambda file: _by_number(file.name)
    )
    # a lone .json beside the tables describes them
    forms = {format_of(file) for file in known} - {Format.json}
    if known:
        return [str(file) for file in known if len(forms) != 1 or format_of(file) in forms]
    allowed = "files of a format we read, or a folder of texts for each class"
    hint = f"Name a file: {where}=FILE."
    if where == "FILE":
        allowed, hint = (
            "files of a format we read",
            "A folder of texts for each class is answered into one file.",
        )
    raise UserError(where, f"nothing to read in the folder {path}", allowed=allowed, hint=hint)


def open_table(path: str | Path, *, where: str, reading: ReadingConfig | None = None) -> Table:
    """The table in a file, or of a folder of texts for each class; `where` is the setting that
    named it.
    """
    reading = reading or ReadingConfig()
    file = _path_of(path, where)
    if _is_folder(file) and is_text_folder(file):
        return TextFolder(file, where, reading)
    require_file(file, where)
    form = reading.format or format_of(file)
    if form is None:
        raise UserError(
            where,
            f"{file} is no format we read",
            allowed=f"{', '.join(ENDINGS)}; any of them also .gz",
            hint=f"Name the format: {'--read ' if where == 'FILE' else 'data.read.'}format=csv.",
        )
    return _TABLES[form][0](file, where, reading)


def format_of(file: Path) -> Format | None:
    """The format that a file's name promises."""
    return ENDINGS.get(Path(file.name.lower().removesuffix(".gz")).suffix)


def _path_of(given: str | Path, where: str) -> Path:
    """A path that is named, or where a copy lies of what an address names."""
    require(bool(str(given)), where, "is empty", hint="Name a file, or leave it out.")
    return Path(fetch(str(given), where) if is_address(given) else given).expanduser()


def _many(given: list[Any], where: str, reading: ReadingConfig) -> Table:
    require(bool(given), where, "an empty list", allowed="one file or more")
    are_rows = isinstance(given[0], Mapping) and any(
        isinstance(each, str | int | float) for each in given[0].values()
    )
    require(
        not are_rows,
        where,
        "is a list of rows",
        allowed="one file or more, or a table",
        hint="Pass one table: pandas.DataFrame(rows), or pyarrow.Table.from_pylist(rows).",
    )
    if twice := [name for name, count in Counter(map(str, given)).items() if count > 1]:
        raise UserError(where, f"{twice[0]} is named twice", hint="Name each file once.")
    tables = [open_source(each, where=where, reading=reading) for each in given]
    if len(tables) == 1:
        return tables[0]
    found = ManyFiles(tables, f"{tables[0].name} and {len(tables) - 1} more")
    require(
        bool(found.columns),
        where,
        f"{tables[0].name} and {tables[-1].name} have no column in common",
        hint="Name files of one kind.",
    )
    return found


def _splits_of(source: Any, where: str, reading: ReadingConfig) -> dict[str, Table]:
    if isinstance(source, Mapping) and source and all(map(is_rows, source.values())):
        named: dict[str | None, Any] = {}
        for name, rows in source.items():
            if (split := _split_of(str(name))) in named and (
                split or "train" not in map(_split_of, source)
            ):
                raise UserError(
                    where,
                    f"several parts hold {split or 'training'} rows",
                    allowed=f"parts: {', '.join(map(str, source))}",
                )
            named[split] = rows
        return _by_split(named, where, lambda rows: table_of(rows, where=where))
    if not isinstance(source, str | Path):
        return {"train": open_source(source, where=where, reading=reading)}
    path = _path_of(source, where)
    source = str(path) if is_address(source) else source  # what was fetched is not asked for again
    is_there = path.exists() or path.is_symlink()  # a link that leads nowhere names no data set
    if (
        not _is_pattern(path)
        and not is_there
        and may_be_hub_name(str(source))
        and format_of(path) is None
    ):
        return _splits_of(from_hub(str(source), where), where, reading)
    if _is_folder(path):
        if is_saved_dataset(path):
            return _splits_of(from_disk(path, where), where, reading)
        if splits := _splits_in(path):
            return _by_split(
                splits, where, lambda given: open_source(given, where=where, reading=reading)
            )
    return {"train": open_source(source, where=where, reading=reading)}


def _by_split(
    named: Mapping[str | None, Any], where: str, opened: Callable[[Any], Table]
) -> dict[str, Table]:
    if len(named) == 1:
        return {"train": opened(next(iter(named.values())))}
    require(
        "train" in named,
        where,
        f"no training rows among {', '.join(filter(None, named)) or 'its parts'}",
        allowed="train, and validation and test if there are any",
    )
    return {split: opened(given) for split, given in named.items() if split is not None}


def is_rows(value: Any) -> bool:
    """Whether this is a table of its own rather than a column."""
    is_pandas = hasattr(value, "iloc") and hasattr(value, "columns")
    return is_pandas or is_dataset(value) or isinstance(value, Mapping | pa.Table)


def _splits_in(folder: Path) -> dict[str | None, Any]:
    """What lies in a folder under the names of splits: files, files in pieces, or folders."""
    found: dict[str | None, list[str]] = {}
    places = [folder, folder / "data"] if (folder / "data").is_dir() else [folder]
    for path in (
        path
        for place in places
        for path in sorted(place.iterdir(), key=lambda path: _by_number(path.name))
    ):
        split = _split_of(path.name)
        is_table = path.is_file() and format_of(path) is not None
        if split and not path.name.startswith(".") and (is_table or _is_folder(path)):
            found.setdefault(split, []).append(str(path))
    if "train" not in found:
        return {}
    return {split: paths[0] if len(paths) == 1 else paths for split, paths in found.items()}


def _split_of(name: str) -> str | None:
    first = re.split(r"[-_. ]", name.lower())[0]
    return next((split for split, names in _SPLIT_NAMES.items() if first in names), None)


def _is_pattern(path: Path) -> bool:
    return any(sign in str(path) for sign in "*?[") and not path.exists()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _by_number(name: str) -> list[tuple[int, str]]:
    """Names in counting order: part-2 before part-10."""
    return [
        (int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]

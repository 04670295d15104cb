"""From what settings name to tables: files, folders, data sets of the Hub, or rows in memory.

`data.source` names everything at once; `data.train`, `data.validation` and `data.test` name a split
each. In a folder, files or folders with the names of splits are the splits. Folders of texts are
the classes. Other files are one table, one after the other. Open this file to add a format or a
kind of source.
"""

from __future__ import annotations

import os
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
from flatout.files import home_expanded

_TABLES: dict[Format, tuple[Callable[[Path, str, ReadingConfig], FileTable], str]] = {
    Format.csv: (CsvTable, ".csv"),
    Format.tsv: (partial(CsvTable, promised="\t"), ".tsv"),
    Format.json: (JsonTable, ".json"),
    Format.jsonl: (JsonTable, ".jsonl .ndjson"),
    Format.conll: (ConllTable, ".conll .conllu .bio .iob"),
    Format.parquet: (ParquetTable, ".parquet"),
    Format.arrow: (ArrowTable, ".arrow .feather"),
    Format.npy: (NpyTable, ".npy"),
    Format.hdf5: (Hdf5Table, ".h5 .hdf5"),
}
"""What reads each format, and the endings of names that promise it."""
ENDINGS = {ending: form for form, (_, endings) in _TABLES.items() for ending in endings.split()}
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "development", "eval"),
    "test": ("test", "testing"),
}


def open_splits(
    source: object, rows_of: Mapping[str, object], reading: ReadingConfig
) -> dict[str, Table]:
    """Tables by split: those that `source` holds, and those that `rows_of` names one by one."""
    tables = {} if source is None else _splits_of(source, "data.source", reading)
    for split, rows in rows_of.items():
        if rows is None:
            continue
        if split in tables:
            raise UserError(
                f"data.{split}",
                f"data.source has {split} rows already ({tables[split].name})",
                hint="Name the splits one by one, without data.source.",
            )
        tables[split] = open_source(rows, where=f"data.{split}", reading=reading)
    return {split: tables[split] for split in _SPLIT_NAMES if split in tables}


def open_source(rows: object, *, where: str, reading: ReadingConfig | None = None) -> Table:
    """One table: of a file, of several, of a folder, or of rows in memory.

    `where`: the setting that names it, for errors.
    """
    reading = reading or ReadingConfig()
    if isinstance(rows, list | tuple):
        return _join_files(list(rows), where, reading)
    if not isinstance(rows, str | Path):
        return table_of(rows, where=where)
    path = _path_of(rows, where)
    if _is_pattern(path) or (_is_folder(path) and not is_text_folder(path)):
        return _join_files(files_in(path, where), where, reading)
    return open_table(path, where=where, reading=reading)


def files_in(name: str | Path, where: str) -> list[str]:
    """The files of a pattern, the tables of a folder, or the one file that is named."""
    path = _path_of(name, where)
    if _is_pattern(path):
        # `glob` takes no pattern that begins with a root.
        root = Path(path.anchor)
        pattern = str(path.relative_to(path.anchor))
        # each one multiplies the ways through deep folders
        is_short = pattern.count("**") <= 2
        require(is_short, where, f"{name} has more than two **", hint="Write one of them.")
        try:
            matches = sorted(map(str, root.glob(pattern)), key=_by_number)
        # a folder on the way cannot be listed, or `**` stands beside letters
        except (OSError, RecursionError, ValueError) as error:
            raise UserError(
                where, f"{name} cannot be followed ({error})", hint="Name the files, or a folder."
            ) from None
        if matches:
            return matches
        hint = f"Patterns are looked up in {Path.cwd()}. Correct the pattern, or name the files."
        raise UserError(where, f"no file fits {name}", hint=hint)
    if not _is_folder(path):
        return [str(path)]
    tables = [
        file
        for file in sorted(path.iterdir(), key=lambda file: _by_number(file.name))
        if file.is_file() and not file.name.startswith(".") and format_of(file)
    ]
    # A lone .json beside tables of one other format describes them.
    forms = {format_of(file) for file in tables} - {Format.json}
    if tables:
        return [str(file) for file in tables if len(forms) != 1 or format_of(file) in forms]
    allowed = "files of a format we read, or a folder of texts for each class"
    hint = f"Name a file: {where}=FILE."
    if where == "FILE":
        allowed = "files of a format we read"
        hint = "A folder of texts for each class is answered into one file."
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
        key = "--read " if where == "FILE" else "data.read."
        hint = f"Name the format: {key}format=csv."
        if file.suffix.lower() == ".txt":
            hint += f" With a word and its tag on each line it is {key}format=conll."
        raise UserError(
            where,
            f"{file} is no format we read",
            allowed=f"{', '.join(ENDINGS)}; any of them also .gz",
            hint="Give it the ending of its format." if where == "encode" else hint,
        )
    return _TABLES[form][0](file, where, reading)


def format_of(file: Path) -> Format | None:
    """The format that a file's name promises."""
    return ENDINGS.get(Path(file.name.lower().removesuffix(".gz")).suffix)


def _path_of(name: str | Path, where: str) -> Path:
    """The path that is named; for an address, the path of its copy in the cache."""
    require(bool(str(name)), where, "is empty", hint="Name a file, or leave it out.")
    return home_expanded(fetch(str(name), where) if is_address(name) else name)


def _join_files(sources: list[Any], where: str, reading: ReadingConfig) -> Table:
    """The table of several files, one after the other."""
    require(bool(sources), where, "an empty list", allowed="one file or more")
    first = sources[0]
    are_rows = isinstance(first, Mapping) and any(
        isinstance(value, str | int | float) for value in first.values()
    )
    require(
        not are_rows,
        where,
        "is a list of rows",
        allowed="one file or more, or a table",
        hint="Pass one table: pandas.DataFrame(rows), or pyarrow.Table.from_pylist(rows).",
    )
    if twice := [name for name, count in Counter(map(str, sources)).items() if count > 1]:
        raise UserError(where, f"{twice[0]} is named twice", hint="Name each file once.")
    tables = [open_source(source, where=where, reading=reading) for source in sources]
    if len(tables) == 1:
        return tables[0]
    joined = ManyFiles(tables, f"{tables[0].name} and {len(tables) - 1} more")
    require(
        bool(joined.columns),
        where,
        f"{tables[0].name} and {tables[-1].name} have no column in common",
        hint="Name files of one kind.",
    )
    return joined


def training_files(source: object, where: str) -> list[str]:
    """The files behind a setting that names training rows.

    Lists, patterns and folders are unfolded: `data` → `data/train-0.csv`, `data/train-1.csv`, and
    not the `data/test.csv` beside them.
    """
    if isinstance(source, list):
        return [file for part in source for file in training_files(part, where)]
    # nobody is asked for what lies at an address
    if not isinstance(source, str) or is_address(source):
        return []
    folder = home_expanded(source)
    if _is_folder(folder) and (splits := _splits_in(folder)):
        return training_files(splits["train"], where)
    return files_in(source, where)


def _splits_of(source: object, where: str, reading: ReadingConfig) -> dict[str, Table]:
    """The tables of `data.source` by split; all rows are training rows if no splits are named."""
    if isinstance(source, Mapping) and source and all(map(is_rows, source.values())):
        named: dict[str | None, Any] = {}
        has_train = "train" in map(_split_of, source)
        for name, rows in source.items():
            split = _split_of(str(name))
            # Parts of other names are left out beside training rows, however many they are.
            if split in named and (split is not None or not has_train):
                raise UserError(
                    where,
                    f"several parts hold {split or 'training'} rows",
                    allowed=f"parts: {', '.join(map(str, source))}",
                )
            named[split] = rows
        return _by_split(named, where, partial(table_of, where=where))
    if not isinstance(source, str | Path):
        return {"train": open_source(source, where=where, reading=reading)}
    path = _path_of(source, where)
    source = str(path) if is_address(source) else source  # what was fetched is not asked for again
    is_there = os.path.lexists(path)  # a link that leads nowhere names no data set
    names_no_file = not is_there and not _is_pattern(path) and format_of(path) is None
    if names_no_file and may_be_hub_name(str(source)):
        return _splits_of(from_hub(str(source), where), where, reading)
    if _is_folder(path):
        if is_saved_dataset(path):
            return _splits_of(from_disk(path, where), where, reading)
        if splits := _splits_in(path):
            open_part = partial(open_source, where=where, reading=reading)
            return _by_split(splits, where, open_part)
    return {"train": open_source(source, where=where, reading=reading)}


def _by_split(
    named: Mapping[str | None, Any], where: str, open_part: Callable[[Any], Table]
) -> dict[str, Table]:
    """Open each part that names a split. One part alone has the training rows."""
    if len(named) == 1:
        return {"train": open_part(next(iter(named.values())))}
    require(
        "train" in named,
        where,
        f"no training rows among {', '.join(filter(None, named)) or 'its parts'}",
        allowed="train, and validation and test if there are any",
    )
    return {split: open_part(part) for split, part in named.items() if split is not None}


def is_rows(value: object) -> bool:
    """Whether this is a whole table rather than a column."""
    is_pandas = hasattr(value, "iloc") and hasattr(value, "columns")
    return is_pandas or is_dataset(value) or isinstance(value, Mapping | pa.Table)


def _splits_in(folder: Path) -> dict[str | None, Any]:
    """What a folder holds under the names of splits: files, files in pieces, or folders.

    Empty without training rows. `data` in the folder is looked into, too, as in copies of the Hub.
    """
    paths_of: dict[str, list[str]] = {}
    folders = [folder, folder / "data"] if (folder / "data").is_dir() else [folder]
    for place in folders:
        for path in sorted(place.iterdir(), key=lambda path: _by_number(path.name)):
            split = _split_of(path.name)
            is_table = path.is_file() and format_of(path) is not None
            if split and not path.name.startswith(".") and (is_table or _is_folder(path)):
                paths_of.setdefault(split, []).append(str(path))
    if "train" not in paths_of:
        return {}
    # `open_source` takes one path or a list; a list of one would not be read as a folder of texts.
    splits: dict[str | None, Any] = {}
    for split, paths in paths_of.items():
        splits[split] = paths if len(paths) > 1 else paths[0]
    return splits


def _split_of(name: str) -> str | None:
    """The split of a file or a part by its first word: train-00000.parquet → train."""
    first = re.split(r"[-_. ]", name.lower())[0]
    return next((split for split, names in _SPLIT_NAMES.items() if first in names), None)


def _is_pattern(path: Path) -> bool:
    if not any(sign in str(path) for sign in "*?["):
        return False
    try:
        return not path.exists()
    except OSError:  # no disk takes such a name, so it is no file's
        return True


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _by_number(name: str) -> list[tuple[int, str]]:
    """Names in counting order: part-2 before part-10."""
    # "part-10" → [(-1, "part-"), (10, ""), (-1, "")]
    keys = []
    for word in re.split(r"(\d+)", name):
        keys.append((int(word), "") if word.isdecimal() else (-1, word))
    return keys

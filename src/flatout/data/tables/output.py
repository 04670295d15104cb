"""Blocks of rows written as csv, jsonl, parquet or CoNLL: to standard output, or to a file that
appears when it is whole.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from flatout.data.tables.table import are_bytes, is_list, is_text
from flatout.errors import UserError, require

FORMATS = (".csv", ".jsonl", ".parquet")
CONLL = ".conll"  # a word and its tag on each line
CONLL_U = ".conllu"  # ten columns, of which the number, the word and its part of speech are written


@contextmanager
def block_writer(
    out: str | None, *, reads: str | None = None, formats: Sequence[str] = FORMATS
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Write blocks to standard output, or to a file that appears once it is complete.

    `reads`: the file that the blocks come from, which is never written over. `formats`: endings
    that may be written. Blocks of CoNLL have two columns, lists of words and of their tags.
    """
    if out is None:
        write, close = _format_writer(sys.stdout.buffer, ".csv")
        yield explain_disk_errors(Path("/dev/stdout"))(write)
        with explain_disk_errors(Path("/dev/stdout")):
            close()
            sys.stdout.buffer.flush()
        return
    path = Path(out)
    require(
        path.suffix in formats,
        "--out",
        f"cannot write {path.suffix or path.name}",
        allowed=", ".join(formats),
    )
    require(
        path.parent.is_dir(),
        "--out",
        f"no such folder: {path.parent}",
        hint="Make it first, or name another folder.",
    )
    if reads is not None and path.exists() and _is_among(path, Path(reads)):
        raise UserError("--out", f"{path} is a file that is read", hint="Name another file.")
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    is_there = path.exists()
    try:
        with explain_disk_errors(path):
            file = beside.open("wb")
        with file:
            write, close = _format_writer(file, path.suffix)
            try:
                yield explain_disk_errors(path)(write)
            except BaseException:
                # pyarrow ends a file that is open; the first error is the one to show
                with suppress(Exception):
                    close(is_whole=False)
                raise
            with explain_disk_errors(path):
                close()
                file.flush()
                beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    if is_there:
        print(f"{path} was there, and is replaced", file=sys.stderr)


def _is_among(path: Path, source: Path) -> bool:
    """Whether a file is what a name, a folder or a pattern leads to."""
    if source.exists():
        return path.samefile(source) or source.resolve() in path.resolve().parents
    return path.absolute().match(str(source.absolute()))


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Inside it an error of the disk becomes a UserError that names the path."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            "--out",
            f"cannot write {path}: {error.strerror or error}",
            hint="Name a file where there is room, and which you may write.",
        ) from None


def _format_writer(
    file: BinaryIO, suffix: str
) -> tuple[Callable[[pa.RecordBatch], None], Callable[..., None]]:
    opened: list[Any] = []
    formulas = [0]

    def write_csv(block: pa.RecordBatch) -> None:
        options = pa_csv.WriteOptions(include_header=not opened)
        opened.append(True)
        columns, found = zip(
            *(_without_formulas(_flat(column)) for column in block.columns), strict=True
        )
        formulas[0] += sum(found)
        # A spreadsheet would run a column's name, too.
        names = ["'" * name.startswith("=") + name for name in block.schema.names]
        pa_csv.write_csv(pa.RecordBatch.from_arrays(list(columns), names=names), file, options)

    def write_jsonl(block: pa.RecordBatch) -> None:
        file.writelines(
            json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
            for row in block.to_pylist()
        )

    def write_parquet(block: pa.RecordBatch) -> None:
        if not opened:
            opened.append(pq.ParquetWriter(file, block.schema))
        opened[0].write_batch(block)

    def write_sentences(block: pa.RecordBatch) -> None:
        words, tags = (column.to_pylist() for column in block.columns)
        for sentence in zip(words, tags, strict=True):
            lines = []
            for number, word_and_tag in enumerate(zip(*sentence, strict=True), 1):
                # A tab or a line end inside a word would be read as the end of its column. A word
                # without a tag has `_`, as in CoNLL-U.
                word, tag = (" ".join((text or "_").split()) for text in word_and_tag)
                fields = [word, tag]
                if suffix == CONLL_U:
                    fields = [str(number), word, "_", tag, *["_"] * 6]
                lines.append("\t".join(fields))
            file.write("\n".join([*lines, "", ""]).encode())

    def close(*, is_whole: bool = True) -> None:
        if suffix == ".parquet" and opened:
            opened[0].close()
        if formulas[0] and is_whole:
            words = (
                f"{formulas[0]:,} cells that begin with '=' got a ' before it: a spreadsheet would"
                " run them."
            )
            print(f"{words} jsonl and parquet keep them as they are.", file=sys.stderr)

    writers = {
        ".csv": write_csv,
        ".jsonl": write_jsonl,
        ".parquet": write_parquet,
        CONLL: write_sentences,
        CONLL_U: write_sentences,
    }
    return writers[suffix], close


def _without_formulas(column: pa.Array) -> tuple[pa.Array, int]:
    """Texts that a spreadsheet would run, as texts; how many there were."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())  # pyarrow searches no views
    if not is_text(column.type):
        return column, 0
    are_formulas = pc.fill_null(pc.starts_with(column, "="), False)
    if not (count := pc.sum(are_formulas).as_py() or 0):
        return column, 0
    return pc.replace_substring_regex(column, pattern="^=", replacement="'="), count


def _join_words(words: list[str | None] | None) -> str | None:
    if words is None:
        return None
    return "|".join(word or "" for word in words)


def _flat(column: pa.Array) -> pa.Array:
    """What a csv cannot hold as texts: lists separated by `|`, bytes in hexadecimal, the rest as
    JSON.
    """
    if are_bytes(column.type):
        return pa.array([each and each.hex() for each in column.to_pylist()], pa.string())
    if is_list(column.type) and not pa.types.is_nested(column.type.value_type):
        # one with a null in it, too, which `binary_join` drops
        lists = column.cast(pa.list_(pa.string())).to_pylist()
        return pa.array([_join_words(words) for words in lists])
    if pa.types.is_nested(column.type):
        return pa.array(
            [json.dumps(each, ensure_ascii=False, default=str) for each in column.to_pylist()],
            pa.string(),
        )
    return column

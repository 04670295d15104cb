"""`python -m flatout encode FILE`: write the records of a table with their encoding.

A run with `data=bits` reads the table that comes out. `--sample N` encodes built-in people, so that
you can try all of it without a file. Records are encoded by the block, so memory stays flat.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter

from flatout.bits.columns import COLUMN, UIDS, Form, encode_table, is_index, uid_of
from flatout.bits.encodings import EncodingConfig, EncodingKind, Hashing
from flatout.bits.people import PeopleConfig, PeopleTable
from flatout.bits.recognise import find_encodings
from flatout.data.checks.findings import counted
from flatout.data.store.progress import Progress
from flatout.data.tables.output import FORMATS, block_writer
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table, join_names, require_columns
from flatout.errors import as_choice, did_you_mean, require
from flatout.run_log import print_note

_SECRET = "FLATOUT_SECRET"
_FORMS = (Form.binary, Form.hex, Form.base64, Form.packed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    usual = EncodingConfig()
    add("file", metavar="FILE", nargs="?", help="csv, tsv, json, jsonl or parquet with the records")
    add("--sample", metavar="N", type=int, help="encode N built-in people instead of a file")
    add(
        "--typos",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of them with a typing error",
    )
    kinds = ", ".join(EncodingKind)
    add(
        "--encoding",
        metavar="KIND",
        default=usual.kind.value,
        help=f"{kinds} (default: {usual.kind})",
    )
    add("--columns", metavar="A,B", help="columns to encode, in order (default: all but the uid)")
    add("--uid", metavar="COLUMN", help="column that names each record (default: uid or id)")
    add(
        "--size",
        type=int,
        default=usual.size,
        help=f"bits, functions or columns (default {usual.size})",
    )
    add(
        "--hashes",
        type=int,
        default=usual.hashes,
        help=f"bits a 2-gram sets (default {usual.hashes})",
    )
    add(
        "--hashing",
        default=usual.hashing.value,
        help=f"{', '.join(Hashing)} (default {usual.hashing})",
    )
    add("--fold", type=int, default=0, help="times a Bloom filter is halved by XOR (default: 0)")
    add(
        "--diffusion",
        type=int,
        default=0,
        help="bits XORed into each bit of a Bloom filter (default 0)",
    )
    add("--no-padding", action="store_true", help="do not hash the ends of a text with a blank")
    add(
        "--secret",
        metavar="TEXT",
        help=f"what the hash functions follow from (default: ${_SECRET})",
    )
    add(
        "--form",
        default=Form.binary.value,
        help=f"how bits are written: {', '.join(_FORMS)} (default: binary)",
    )
    add("--drop-text", action="store_true", help="write the uid and the encoding alone")
    add("--out", metavar="FILE", help=f"{', '.join(FORMATS)} (default: csv on standard output)")


def run(arguments: argparse.Namespace) -> None:
    table = _open_records(arguments)
    if arguments.uid is not None:
        require_columns(table, {"--uid": arguments.uid})
    uid = uid_of(table.columns, arguments.uid or UIDS[0])
    columns = _choose_columns(arguments, table, uid)
    config = _read_encoding(arguments)
    form = _read_form(arguments, config)
    named = f"{uid} names each record" if uid else "no column names them: --uid COLUMN"
    index = [name for name in table.columns if is_index(name) and name not in columns]
    left_out = f"; {join_names(index)}, an index, is not" if index else ""
    print_note(f"encoded: {join_names(columns)}{left_out}; {named}")
    started = time.perf_counter()
    rows = 0
    empty_fields: Counter[str] = Counter()
    with block_writer(arguments.out, reads=arguments.file) as write, Progress() as progress:
        advance = progress.task("encoding")
        kept = [uid] if arguments.drop_text else None
        for block in encode_table(table, columns, config, form, kept):
            write(block.records)
            rows += block.records.num_rows
            advance(block.records.num_rows)
            empty_fields += block.empty_fields
    seconds = time.perf_counter() - started
    print_note(f"{config.line()}: {counted(rows, 'record')} in {seconds:.1f} s")
    if empty_fields:
        counts = ", ".join(
            f"{column} in {counted(count, 'record')}" for column, count in empty_fields.items()
        )
        print_note(f"warning empty fields, which are encoded as no text: {counts}")


def _read_form(arguments: argparse.Namespace, config: EncodingConfig) -> Form:
    """How the bits are written, where this encoding and this file can hold it."""
    require(
        arguments.form in _FORMS,
        "--form",
        arguments.form,
        allowed=", ".join(_FORMS),
        hint=did_you_mean(arguments.form, _FORMS),
    )
    form = Form(arguments.form)
    require(
        config.kind is not EncodingKind.twostep or form is Form.binary,
        "--form",
        f"{form} does not apply to twostep: it makes sets of numbers",
        hint="Leave it out.",
    )
    # Text formats would write bytes that no reader takes for text.
    require(
        form is not Form.packed or (arguments.out or "").endswith(".parquet"),
        "--form",
        "packed bits are bytes",
        hint="Write them to a .parquet file with --out.",
    )
    return form


def _open_records(arguments: argparse.Namespace) -> Table:
    is_one = (arguments.file is None) != (arguments.sample is None)
    require(is_one, "FILE", "name a file, or ask for built-in people with --sample N")
    if arguments.sample is not None:
        return PeopleTable(PeopleConfig(rows=arguments.sample, typos=arguments.typos))
    require(not arguments.typos, "--typos", "is for --sample", hint="Leave it out.")
    return open_table(arguments.file, where="encode")


def _choose_columns(arguments: argparse.Namespace, table: Table, uid: str | None) -> list[str]:
    """The columns that are typed, else all but the one that names the records."""
    if arguments.columns is not None:
        columns = [name.strip() for name in arguments.columns.split(",")]
        require_columns(
            table, {f"--columns[{number}]": name for number, name in enumerate(columns)}
        )
        return columns
    known = {uid, *COLUMN.values()}
    columns = [name for name in table.columns if name not in known and not is_index(name)]
    require(
        bool(columns),
        "FILE",
        f"no column of {table.name} is left to encode",
        hint="Name some: --columns A,B.",
    )
    # An encoding of an encoding is a mistake that no later step would find.
    encodings = find_encodings(table, columns) if arguments.file is not None else []
    require(
        not encodings,
        "FILE",
        f"{table.name} has columns that look like encodings or digests, not like plain text",
        allowed=", ".join(encoding.line() for encoding in encodings),
        hint="Name the columns of plain text: --columns A,B.",
    )
    return columns


def _read_encoding(arguments: argparse.Namespace) -> EncodingConfig:
    secret = arguments.secret or os.environ.get(_SECRET)
    config = EncodingConfig(
        kind=as_choice(EncodingKind, arguments.encoding, "--encoding"),
        hashing=as_choice(Hashing, arguments.hashing, "--hashing"),
        padding=not arguments.no_padding,
        secret=EncodingConfig().secret if secret is None else secret,
        size=arguments.size,
        hashes=arguments.hashes,
        fold=arguments.fold,
        diffusion=arguments.diffusion,
    )
    if secret is None and arguments.file is not None:
        print_note(
            f"encoded with the usual secret, which everybody knows: set --secret or ${_SECRET}"
        )
    return config

"""`python -m flatout encode FILE`: records of a table with their encoding, as a table
of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from flatout.bits.columns import COLUMN, UIDS, Form, encode_table, uid_of
from flatout.bits.encodings import EncodingConfig, EncodingKind, Hashing
from flatout.bits.people import PeopleConfig, PeopleTable
from flatout.bits.recognise import find_encodings
from flatout.data.checks.findings import counted
from flatout.data.store.progress import Progress
from flatout.data.tables.output import FORMATS, block_writer
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table, require_columns
from flatout.errors import as_choice, did_you_mean, require

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
    table = _table(arguments)
    if arguments.uid is not None:
        require_columns(table, {"--uid": arguments.uid})
    uid = uid_of(table.columns, arguments.uid or UIDS[0])
    columns = _columns(arguments, table, uid)
    config = _config(arguments)
    hint = did_you_mean(arguments.form, _FORMS)
    require(
        arguments.form in _FORMS, "--form", arguments.form, allowed=", ".join(_FORMS), hint=hint
    )
    form = Form(arguments.form)
    are_bits = config.kind is not EncodingKind.twostep or form is Form.binary
    require(
        are_bits,
        "--form",
        f"{form} does not apply to twostep: it makes sets of numbers",
        hint="Leave it out.",
    )
    is_file = form is not Form.packed or (arguments.out or "").endswith(".parquet")
    require(
        is_file, "--form", "packed bits are bytes", hint="Write them to a .parquet file with --out."
    )
    named = f"{uid} names each record" if uid else "no column names them: --uid COLUMN"
    print(f"encoded: {', '.join(columns)}; {named}", file=sys.stderr)
    started = time.perf_counter()
    rows = 0
    empty_fields: Counter[str] = Counter()
    with block_writer(arguments.out, reads=arguments.file) as write, Progress() as progress:
        advance = progress.task("encoding")
        blocks = encode_table(
            table,
            columns,
            config,
            form,
            uid=uid,
            drops_text=arguments.drop_text,
            empty_fields=empty_fields,
        )
        for block in blocks:
            write(block)
            rows += block.num_rows
            advance(block.num_rows)
    print(
        f"{config.line()}: {rows:,} records in {time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )
    if empty_fields:
        counts = ", ".join(
            f"{column} in {counted(count, 'record')}" for column, count in empty_fields.items()
        )
        print(f"warning empty fields, which are encoded as no text: {counts}", file=sys.stderr)


def _table(arguments: argparse.Namespace) -> Table:
    is_one = (arguments.file is None) != (arguments.sample is None)
    require(is_one, "FILE", "name a file, or ask for built-in people with --sample N")
    if arguments.sample is not None:
        return PeopleTable(PeopleConfig(rows=arguments.sample, typos=arguments.typos))
    require(not arguments.typos, "--typos", "is for --sample", hint="Leave it out.")
    return open_table(arguments.file, where="FILE")


def _columns(arguments: argparse.Namespace, table: Table, uid: str | None) -> list[str]:
    if arguments.columns is None:
        found = [name for name in table.columns if name != uid and name not in COLUMN.values()]
        require(
            bool(found),
            "FILE",
            f"no column of {table.name} is left to encode",
            hint="Name some: --columns A,B.",
        )
        encodings = find_encodings(table, found) if arguments.file is not None else []
        lines = ", ".join(encoding.line() for encoding in encodings)
        require(
            not encodings,
            "FILE",
            f"{table.name} has columns that look like encodings or digests, not like plain text",
            allowed=lines,
            hint="Name the columns of plain text: --columns A,B.",
        )
        return found
    columns = [name.strip() for name in arguments.columns.split(",")]
    require_columns(table, {f"--columns[{number}]": name for number, name in enumerate(columns)})
    return columns


def _config(arguments: argparse.Namespace) -> EncodingConfig:
    secret = arguments.secret or os.environ.get(_SECRET)
    found = EncodingConfig(
        kind=as_choice(EncodingKind, arguments.encoding, "--encoding"),
        hashing=as_choice(Hashing, arguments.hashing, "--hashing"),
        padding=not arguments.no_padding,
        secret=EncodingConfig().secret if secret is None else secret,
        **{name: getattr(arguments, name) for name in ("size", "hashes", "fold", "diffusion")},
    )
    if secret is None and arguments.file is not None:
        print(
            f"encoded with the usual secret, which everybody knows: set --secret or ${_SECRET}",
            file=sys.stderr,
        )
    return found

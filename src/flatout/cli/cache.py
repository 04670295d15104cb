"""`python -m flatout cache`: list what lies in the cache, check that it is undamaged, remove it."""

from __future__ import annotations

import argparse
import sys

from flatout.data.checks.findings import counted
from flatout.data.store.cache import Cache
from flatout.run_log import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", metavar="FOLDER", help="the cache folder (default: $FLATOUT_CACHE or the user's)"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="every store, newest first")
    actions.add_parser("size", help="bytes on disk")
    actions.add_parser(
        "verify", help="compare every store with its checksums; exit code 1 when one is damaged"
    )
    clear = actions.add_parser("clear", help="remove one store, or all")
    clear.add_argument("key", nargs="?", help="the store to remove (default: all)")


def run(arguments: argparse.Namespace) -> None:
    cache = Cache(arguments.cache)
    if arguments.action == "clear":
        count = cache.clear(arguments.key)
        print(f"{count} {'store' if count == 1 else 'stores'} removed from {cache.folder}")
    elif arguments.action == "verify":
        verify(cache)
    else:
        show(cache, whole=arguments.action == "list")


def show(cache: Cache, *, whole: bool) -> None:
    """Print every store on a line, or with `whole=False` only how many bytes they take."""
    entries = cache.entries()
    if not whole:
        files = (file for entry in entries for file in entry.manifest["files"].items())
        # A file name with `..` leads out of the store, into a unit that several stores share. Its
        # bytes are counted once, with the units below.
        own = sum(file["bytes"] for name, file in files if not name.startswith(".."))
        print(f"{own / 1e6:,.1f} MB in {len(entries)} stores in {cache.folder}")
        for part, unit, of in (
            (cache.of_units(), "unit", "large stores, and of builds that are not finished"),
            (cache.of_surveys(), "survey", "files"),
        ):
            if found := part.entries():
                num_bytes = sum(entry.num_bytes for entry in found)
                print(f"{num_bytes / 1e6:,.1f} MB in {counted(len(found), unit)} of {of}")
        return
    for entry in entries:
        rows = " + ".join(f"{count:,}" for count in entry.rows.values())
        print_line(
            f"{entry.key}  {entry.built}  {entry.num_bytes / 1e6:9,.1f} MB  {rows or 0} rows "
            f" {entry.name}"
        )
    if not entries:
        print(f"no stores in {cache.folder}")


def verify(cache: Cache) -> None:
    damaged_files = cache.verify()
    for key, damaged in damaged_files.items():
        print(f"{key}: {'damaged: ' + ', '.join(damaged) if damaged else 'whole'}")
    if any(damaged_files.values()):
        print("Damaged stores are built again when they are next used.")
        sys.exit(1)
    if not damaged_files:
        print(f"no stores in {cache.folder}")

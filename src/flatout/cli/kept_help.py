"""The text of `python -m train --help`, kept in a file: making it imports torch and much more.

The first line of the file is the checksum of `conf/` as it was. With other settings files, and with
any word beside `--help`, the text is made again. `python -m tests.cli.renew_help` writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

FILE = Path(__file__).with_name("train_help.txt")


def read_help(words: Sequence[str], conf: Path) -> str | None:
    """The kept text where it holds; None where it must be made."""
    if list(words) not in (["--help"], ["-h"]):
        return None
    checksum, _, text = FILE.read_text(encoding="utf-8").partition("\n")
    return text if checksum == checksum_of(conf) else None


def write_help(text: str, conf: Path) -> None:
    FILE.write_text(f"{checksum_of(conf)}\n{text}", encoding="utf-8")


def checksum_of(conf: Path) -> str:
    """A checksum of all settings files: names and bytes."""
    checksum = xxhash.xxh3_64()
    for path in sorted(conf.rglob("*.yaml")):
        if not path.is_file():  # a pipe would never end
            continue
        checksum.update(path.relative_to(conf).as_posix().encode())
        checksum.update(path.read_bytes())
    return checksum.hexdigest()

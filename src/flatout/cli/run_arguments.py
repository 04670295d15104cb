"""Arguments of the commands that ask a finished run (predict, evaluate, verify, export).

They name a file of rows, how it is written, and the devices that answer. Here they become a path
(`input_file`), a `ReadingConfig` (`choose_reading`) and a predictor a device (`load_predictors`).
"""

from __future__ import annotations

import argparse
import codecs
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

import torch
import yaml

from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import training_files
from flatout.data.tables.table import Table
from flatout.distributed.ranks import why_no_gpu
from flatout.engine.precision import Precision
from flatout.errors import (
    UserError,
    as_choice,
    example_columns,
    explain_full_tmpdir,
    printable,
    require,
    settings_of,
)
from flatout.files import home_expanded, load_yaml, values_of
from flatout.inference.model_folder import ModelFolder
from flatout.inference.run_predictor import FileOptions, RunPredictor
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import read_summary
from flatout.run.claimed_folders import SETTINGS
from flatout.run.kinds import load_predictor

FILES = "csv, tsv, json, jsonl, conll, parquet, arrow, npy or hdf5"


@contextmanager
def input_file(arguments: argparse.Namespace, verb: str, file: str | None = None) -> Iterator[str]:
    """The path of a command's file; for `-` a temporary file with all of standard input.

    Mistakes in the file are raised again in the words of this command: `data.read.encoding` is
    typed `--read encoding` here.
    """
    file = file or arguments.file
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield file if file != "-" else _store_standard_input(folder, verb)
        except UserError as mistake:
            where, message, allowed, hint = (
                _in_words_of_command(part, arguments, folder) for part in mistake.parts.values()
            )
            raise type(mistake)(where, message, allowed=allowed, hint=hint) from None


def _in_words_of_command(part: str, arguments: argparse.Namespace, folder: str) -> str:
    advice = part.replace("data.read.", "--read ")
    # You typed `-`, so the folder of the temporary file would puzzle you.
    return _name_columns_of_run(arguments, advice).replace(f"{folder}/", "")


def _name_columns_of_run(arguments: argparse.Namespace, advice: str) -> str:
    """Advice with the columns that the run reads, instead of made-up ones.

    `--read columns=[text,label]` → `--read columns=[title,topic]` for a run that reads these.
    """
    example = re.search(r"--read columns=\[([\w,]+)\]", advice)
    if example is None:
        return advice
    try:
        data = ModelFolder.find(arguments.run).settings().get("data") or {}
    except UserError:  # a folder of transformers, which names no columns
        return advice
    trained = data.get("columns")
    if not isinstance(trained, dict) or "texts" not in trained:
        return advice
    options = file_options(arguments)
    texts = [options.text] if options.text else trained["texts"]
    label = options.label or trained["label"]
    known = [*texts, *([label] if label else [])]
    count = example[1].count(",") + 1
    return advice.replace(example[0], f"--read columns={example_columns(count, known)}")


def _store_standard_input(folder: str, verb: str) -> str:
    """The path of a new file with all of standard input.

    A file, because formats are found by names, and tables read their file more than once. Its
    ending follows from the first bytes: `{` → jsonl, `[` → json, `PAR1` → parquet, else csv.
    """
    head = sys.stdin.buffer.read(4096)
    require(
        bool(head.strip()),
        "FILE",
        "nothing came over standard input",
        hint=f"Write: command | flatout {verb} RUN -",
    )
    plain = head
    packed = ".gz" if head.startswith(b"\x1f\x8b") else ""
    if packed:
        with suppress(zlib.error):  # its reader says what is wrong with it
            plain = zlib.decompressobj(wbits=31).decompress(head)
    first_character = plain.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    ending = {b"{": "jsonl", b"[": "json"}.get(first_character, "csv")
    if plain.startswith(b"PAR1"):
        ending = "parquet"
    path = Path(folder, f"standard input.{ending}{packed}")
    use = "it holds what comes over standard input"
    with explain_full_tmpdir(use), path.open("wb") as file:
        file.write(head)
        shutil.copyfileobj(sys.stdin.buffer, file)
    return str(path)


def add_reading(parser: argparse.ArgumentParser) -> None:
    text = (
        "how the file is written, as data.read.KEY of a run (default: as the run's own):"
        " encoding=cp1252"
    )
    parser.add_argument("--read", metavar="KEY=VALUE", action="append", default=[], help=text)


def choose_reading(arguments: argparse.Namespace) -> ReadingConfig:
    """How the file is read: as the run's own files, with the changes that `--read` names."""
    file = ModelFolder.find(arguments.run).path.parent / SETTINGS
    names = [field.name for field in fields(ReadingConfig)]
    usual = asdict(ReadingConfig())
    # The format is found again: a run on parquet may be asked about a csv file.
    of_run = _reading_of_run(file) if file.is_file() else {}
    values = {name: value for name, value in of_run.items() if name in names and name != "format"}
    if named := [f"{name}={value}" for name, value in values.items() if value != usual[name]]:
        line = f"read as in training: {', '.join(named)} (--read KEY=VALUE changes it)"
        print(printable(line), file=sys.stderr)
    for word in arguments.read:
        name, _, value = word.partition("=")
        require(name in names, "--read", f"no setting {name!r}", allowed=", ".join(names))
        try:
            # A single character is taken as it stands: `delimiter=-` is an empty list in YAML. The
            # form of dates is taken so, too: YAML has no value that begins with `%`.
            is_plain = len(value) <= 1 or value.startswith("%")
            values[name] = value if is_plain else yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(
                "--read", f"cannot read {word!r}", hint="Put quotes around the value."
            ) from None
    return settings_of(ReadingConfig, values)


def is_trained_on(run: str, file: str) -> bool:
    """Whether a run has learned from this very file, or folder, by its settings."""
    settings = ModelFolder.find(run).path.parent / SETTINGS
    if not settings.is_file() or not Path(file).exists():
        return False
    with values_of(settings):
        data = (load_yaml(settings) or {}).get("data") or {}
        named = [data.get("source"), data.get("train")]
    files: list[object] = [*named]
    for name in named:
        # a name may be of the Hub, or of files that are gone
        with suppress(UserError, OSError, ValueError):
            files += training_files(name, "data.source")
    for name in files:
        with suppress(OSError, ValueError):
            if isinstance(name, str) and home_expanded(name).samefile(file):
                return True
    return False


def has_training_bytes(run: str, table: Table) -> bool:
    """Whether a table holds the bytes that a run has learned from, under any name."""
    folder = ModelFolder.find(run).path.parent
    if not all((folder / name).is_file() for name in (SUMMARY, SETTINGS)):  # no run's folder
        return False
    prints = read_summary(folder)["data"].get("fingerprints")
    trained = prints.get("train") if isinstance(prints, dict) else None
    # Behind the hash of its bytes may stand how a file was read, and what was left out of it.
    return isinstance(trained, str) and trained.split()[:1] == table.fingerprint().split()[:1]


def _reading_of_run(file: Path) -> dict[str, object]:
    """The settings `data.read` in a run's config.yaml, checked: the file may come from others."""
    hint = "Name another run, or remove the file: then --read names all that is unusual."
    try:
        settings = load_yaml(file) or {}
    except UserError as error:
        raise UserError(
            str(file), f"holds no settings of a run, it {error.what}", hint=hint
        ) from None
    try:
        of_run = (settings.get("data") or {}).get("read") or {}
        values = {
            part.name: of_run[part.name] for part in fields(ReadingConfig) if part.name in of_run
        }
        return asdict(settings_of(ReadingConfig, values))
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        raise UserError(str(file), "holds no settings of a run", hint=hint) from None


def add_computing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--device",
        metavar="NAME",
        default="auto",
        help="cpu, cuda:0, or several with commas (default: all GPUs)",
    )
    text = "auto (sixteen bits on a GPU, else fp32), fp32, bf16 or fp16 (default: auto)"
    add("--precision", metavar="NAME", default="auto", help=text)
    add_part(parser)
    add(
        "--exact",
        action="store_true",
        help="the same bits for a row beside any rows, in any order, on this device",
    )


def add_part(parser: argparse.ArgumentParser) -> None:
    text = "rival or network: that part of the run answers alone"
    parser.add_argument("--with", dest="answer_with", metavar="PART", help=text)


def file_options(arguments: argparse.Namespace) -> FileOptions:
    """The options that this command has of those that a predictor may understand."""
    names = [field.name for field in fields(FileOptions) if field.name in arguments]
    return FileOptions(**{name: getattr(arguments, name) for name in names})


def load_predictors(arguments: argparse.Namespace) -> list[RunPredictor]:
    """The run's best model, once for every device."""
    precision = as_choice(Precision, arguments.precision, "--precision")
    devices = answering_devices(arguments.device)
    return [
        load_predictor(
            arguments.run,
            device,
            precision,
            exact=arguments.exact,
            answer_with=arguments.answer_with,
        )
        for device in devices
    ]


def answering_devices(names: str = "auto") -> list[torch.device]:
    """Devices by their names, with commas between them; auto: all GPUs, where there are any."""
    count = torch.cuda.device_count()
    numbered = [f"cuda:{number}" for number in range(count)]
    if names == "auto":
        return [torch.device(name) for name in numbered or ["cpu"]]
    devices = ["cpu", *(["cuda"] if count else []), *numbered]
    for name in names.split(","):
        if name not in devices:
            why, hint = ("", "") if count or not name.startswith("cuda") else why_no_gpu()
            raise UserError(
                "--device",
                f"no device {name!r} here{why and f', as {why}'}",
                allowed=", ".join(["auto", *devices]),
                hint=hint,
            )
    return [torch.device(name) for name in names.split(",")]

"""What commands that ask a run share: the file that is given, the devices, and the run on each."""

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
from flatout.distributed.ranks import why_no_gpu
from flatout.engine.precision import Precision
from flatout.errors import UserError, as_choice, example_columns, require, settings_of
from flatout.inference.run_predictor import FileOptions, ModelFolder, RunPredictor
from flatout.run.kinds import load_predictor
from flatout.run.run_folder import SETTINGS

FILES = "csv, tsv, json, jsonl, parquet, arrow, npy or hdf5"


@contextmanager
def readable(arguments: argparse.Namespace, verb: str, file: str | None = None) -> Iterator[str]:
    """A file by its name, or standard input laid down; a mistake that is found in it names the
    option of the verb, and columns as the run has them.
    """
    file = file or arguments.file
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield file if file != "-" else _laid_down(folder, verb)
        except UserError as mistake:
            told = [
                _with_columns_of(arguments, part.replace("data.read.", "--read ")).replace(
                    f"{folder}/", ""
                )
                for part in mistake.parts.values()
            ]
            raise type(mistake)(told[0], told[1], allowed=told[2], hint=told[3]) from None


def _with_columns_of(arguments: argparse.Namespace, advice: str) -> str:
    """Advice that names columns of a file, with the columns that the run reads."""
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
    named = file_options(arguments)
    texts = [named.text] if named.text else trained["texts"]
    label = named.label or trained["label"]
    known = [*texts, *([label] if label else [])]
    count = example[1].count(",") + 1
    return advice.replace(example[0], f"--read columns={example_columns(count, known)}")


def _laid_down(folder: str, verb: str) -> str:
    """Standard input in a file of this folder, so that its format can be found."""
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
    begins = plain.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    kind = (
        "parquet" if plain.startswith(b"PAR1") else {b"{": "jsonl", b"[": "json"}.get(begins, "csv")
    )
    path = Path(folder, f"standard input.{kind}{packed}")
    with path.open("wb") as laid_down:
        laid_down.write(head)
        shutil.copyfileobj(sys.stdin.buffer, laid_down)
    return str(path)


def add_reading(parser: argparse.ArgumentParser) -> None:
    text = (
        "how the file is written, as data.read.KEY of a run (default: as the run's own):"
        " encoding=cp1252"
    )
    parser.add_argument("--read", metavar="KEY=VALUE", action="append", default=[], help=text)


def reading_of(arguments: argparse.Namespace) -> ReadingConfig:
    """How the files of the run were written, and what `--read` says of this one."""
    file = ModelFolder.find(arguments.run).path.parent / SETTINGS
    settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known = [each.name for each in fields(ReadingConfig)]
    own = (settings.get("data") or {}).get("read") or {}
    usual = asdict(ReadingConfig())
    values = {name: value for name, value in own.items() if name in known and name != "format"}
    if named := [f"{name}={value}" for name, value in values.items() if value != usual[name]]:
        print(
            f"read as in training: {', '.join(named)} (--read KEY=VALUE changes it)",
            file=sys.stderr,
        )
    for word in arguments.read:
        name, _, value = word.partition("=")
        require(name in known, "--read", f"no setting {name!r}", allowed=", ".join(known))
        try:
            # one sign may be of YAML's own
            values[name] = yaml.safe_load(value) if len(value) > 1 else value
        except yaml.YAMLError:
            raise UserError(
                "--read", f"cannot read {word!r}", hint="Put quotes around the value."
            ) from None
    return settings_of(ReadingConfig, values)


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
    add(
        "--exact",
        action="store_true",
        help="the same bits for a row beside any rows, in any order, on this device",
    )


def file_options(arguments: argparse.Namespace) -> FileOptions:
    names = {each.name for each in fields(FileOptions)}
    return FileOptions(**{name: value for name, value in vars(arguments).items() if name in names})


def load_predictors(arguments: argparse.Namespace) -> list[RunPredictor]:
    """The run, once for every device."""
    precision = as_choice(Precision, arguments.precision, "--precision")
    devices = answering_devices(arguments.device)
    return [
        load_predictor(arguments.run, device, precision, exact=arguments.exact)
        for device in devices
    ]


def answering_devices(names: str = "auto") -> list[torch.device]:
    """Devices by their names, with commas between them; auto: all GPUs, where there are any."""
    count = torch.cuda.device_count()
    numbered = [f"cuda:{number}" for number in range(count)]
    if names == "auto":
        return [torch.device(name) for name in numbered or ["cpu"]]
    known = ["cpu", *(["cuda"] if count else []), *numbered]
    for name in names.split(","):
        if name not in known:
            why, hint = ("", "") if count or not name.startswith("cuda") else why_no_gpu()
            raise UserError(
                "--device",
                f"no device {name!r} here{why and f', as {why}'}",
                allowed=", ".join(["auto", *known]),
                hint=hint,
            )
    return [torch.device(name) for name in names.split(",")]

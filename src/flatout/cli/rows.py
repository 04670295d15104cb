"""What `predict` and `evaluate` have in common: the file they are given, the devices, and the run on each of them."""

from __future__ import annotations

import argparse
import codecs
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from flatout.distributed.ranks import why_no_gpu
from flatout.engine.precision import Precision
from flatout.errors import UserError, as_choice
from flatout.inference.run_predictor import FileOptions, RunPredictor
from flatout.run.kinds import load_predictor

FILES = "csv, tsv, json, jsonl, parquet, arrow, npy or hdf5"


@contextmanager
def readable(file: str, verb: str) -> Iterator[str]:
    """A file by its name; standard input goes into a temporary file first, so that its format can be found."""
    if file != "-":
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        head = sys.stdin.buffer.read(4096)
        if not head.strip():
            raise UserError("FILE", "nothing came over standard input", hint=f"Write: command | flatout {verb} RUN -")
        path = Path(folder, f"standard input.{_kind_of(head)}")
        with path.open("wb") as laid_down:
            laid_down.write(head)
            shutil.copyfileobj(sys.stdin.buffer, laid_down)
        yield str(path)


def _kind_of(head: bytes) -> str:
    """How rows are written, by what they begin with."""
    if head.startswith(b"PAR1"):
        return "parquet"
    opening = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return {b"{": "jsonl", b"[": "json"}.get(opening, "csv")


def add_computing(parser: argparse.ArgumentParser) -> None:
    """What answers are computed on, and how exactly."""
    parser.add_argument(
        "--device", metavar="NAME", default="auto", help="cpu, cuda:0, or several with commas (default: all GPUs)"
    )
    parser.add_argument(
        "--precision",
        metavar="NAME",
        default="auto",
        help="auto (sixteen bits on a GPU, else fp32), fp32, bf16 or fp16 (default: auto)",
    )


def file_options(arguments: argparse.Namespace) -> FileOptions:
    """What was said about the file."""
    names = {each.name for each in fields(FileOptions)}
    return FileOptions(**{name: value for name, value in vars(arguments).items() if name in names})


def load_predictors(arguments: argparse.Namespace) -> list[RunPredictor]:
    """The run, once for every device."""
    precision = as_choice(Precision, arguments.precision, "--precision")
    return [load_predictor(arguments.run, device, precision) for device in answering_devices(arguments.device)]


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
            what = f"no device {name!r} here{why and f', as {why}'}"
            raise UserError("--device", what, allowed=", ".join(["auto", *known]), hint=hint)
    return [torch.device(name) for name in names.split(",")]

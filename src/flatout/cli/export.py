"""`python -m flatout export RUN`: a finished run as files that other programs open: transformers, or ONNX.

The files are checked before their folder gets its name: their answers must equal the run's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from flatout.errors import UserError, require
from flatout.inference.export import ONNX
from flatout.inference.run_predictor import ModelFolder
from flatout.run.kinds import kind_of_run

_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="folder of a finished run of model=transformer, or on recordings"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder that is made (default: RUN/export)")
    parser.add_argument("--onnx", action="store_true", help=f"also write {ONNX}; needs flatout[onnx]")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.run / "export" if arguments.out is None else arguments.out
    settings = ModelFolder.find(arguments.run).settings()
    predictor = kind_of_run(settings).predictor
    predictor.require_exportable(str(arguments.run), settings["model"]["kind"], onnx=arguments.onnx)
    if arguments.onnx:
        _require_onnx()
    with _made_whole(folder) as beside:
        lines = predictor.export_run(arguments.run, beside, folder, onnx=arguments.onnx)
    print("\n".join([f"written to {folder}", *lines]))


def _require_onnx() -> None:
    missing = [name for name in _ONNX_PACKAGES if find_spec(name) is None]
    if missing:
        hint = "Install it with pip install 'flatout[onnx]'."
        raise UserError("--onnx", f"needs the package {', '.join(missing)}", hint=hint)


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside, which gets the name at the end; it is gone where something went wrong."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, "--out", f"{folder} exists", hint="Name another folder with --out, or remove this one.")
    target = folder.resolve()
    beside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            "--out", f"cannot write {folder}: {error.strerror}", hint="Name a folder that you may write to."
        ) from None
    try:
        yield beside
        if target.exists():
            target.rmdir()
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)

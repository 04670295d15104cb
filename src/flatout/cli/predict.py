"""`python -m flatout predict RUN FILE`: every row of a file with what the run answers, in the
file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A
run on texts answers classes, one on recordings their samples, one on bit strings 2-grams and, on
request, texts they may have come from.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import xxhash
import yaml

from flatout.data.checks.findings import counted
from flatout.data.store.progress import Progress
from flatout.data.tables.formats.file import require_file
from flatout.data.tables.output import FORMATS, block_writer, told
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import files_in
from flatout.distributed import engine
from flatout.distributed.ranks import why_no_gpu
from flatout.engine.precision import Precision
from flatout.errors import UserError, as_choice, example_columns, require, settings_of
from flatout.files import stamp_of, write_atomically
from flatout.inference.run_predictor import WEIGHTS, FileOptions, ModelFolder, RunPredictor
from flatout.run.kinds import load_predictor
from flatout.run.run_folder import SETTINGS

# in which disks keep times
MANIFEST = "answers.json"
_UNITS_NS = (1, 100, 1_000, 1_000_000, 10**9, 2 * 10**9)
FILES = "csv, tsv, json, jsonl, parquet, arrow, npy or hdf5"
_MANY = "Write --out FOLDER/ for a folder of answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a finished run's folder")
    add(
        "file",
        metavar="FILE",
        help=f"{FILES} with the rows, or a folder of recordings; -: standard input",
    )
    add("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    add("--top-k", metavar="N", type=int, default=0, help="also the N likeliest labels of each row")
    add("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add("--rebuild", action="store_true", help="also rebuild texts from the 2-grams of encodings")
    add_reading(parser)
    add_computing(parser)
    text = (
        f"{', '.join(FORMATS)} (default: csv on standard output); FOLDER/: a file of answers for"
        " each file"
    )
    add("--out", metavar="FILE", help=text)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    if (parts := engine.parts_of(arguments, may_be_here=False)) is None:
        rows = _answered(arguments, *engine.part_of(arguments.part or "1/1"))
    else:
        require(_is_folder(arguments.out), "--on", "is for many files", hint=_MANY)
        rows = sum(
            engine.on_ray(partial(_answered, arguments), parts, Path(arguments.out), uses_gpu=True)
        )
    if arguments.out is not None:
        print(f"written to {arguments.out}: {rows:,} rows")


def _answered(arguments: argparse.Namespace, number: int, count: int) -> int:
    predictors = load_predictors(arguments)
    options = file_options(arguments)
    require(options.top_k >= 0, "--top-k", f"{options.top_k}", allowed="1 or more")
    for name in (
        name for name in ("text", "top_k", "bits", "rebuild") if name not in predictors[0].options
    ):
        require(
            not getattr(options, name),
            f"--{name.replace('_', '-')}",
            f"this run answers {predictors[0].answers_to}",
            hint="Leave it out.",
        )
    reading = reading_of(arguments)
    if _is_folder(arguments.out):
        answer_one = partial(answer, predictors=predictors, options=options, way=reading)
        files = files_in(arguments.file, "FILE")
        own = slice(number - 1, None, count)
        if folders := [
            each.name for each in Path(arguments.file).expanduser().glob("[!.]*/") if each.is_dir()
        ]:
            print(
                f"{arguments.file}: folders in it are not read: {', '.join(folders[:3])}",
                file=sys.stderr,
            )
        weights = pa.memory_map(str(ModelFolder.find(arguments.run).path / WEIGHTS)).read_buffer()
        asked = {
            "run": Path(arguments.run).resolve().name,
            "weights": xxhash.xxh3_64_hexdigest(weights),
        }
        asked |= {"exact": arguments.exact, "precision": arguments.precision}
        asked |= {name: value for name, value in asdict(options).items() if value} | {
            "read": arguments.read
        }
        with readable(arguments, "predict"):
            rows = answer_files(files, Path(arguments.out), answer_one, own, asked)
    else:
        require(arguments.part is None, "--part", "is of many files", hint=_MANY)
        with readable(arguments, "predict") as file:
            rows = answer(file, arguments.out, predictors, options, reading)
    for line in predictors[0].notes():
        print(line, file=sys.stderr)
    return rows


def _is_folder(out: str | None) -> bool:
    return out is not None and (out.endswith("/") or Path(out).is_dir())


def answer(
    file: str,
    out: str | None,
    predictors: list[RunPredictor],
    options: FileOptions,
    way: ReadingConfig,
) -> int:
    """Answer a file; the number of its rows."""
    table = predictors[0].open(file, "predict", way)
    with block_writer(out, reads=file) as write, Progress() as progress:
        advance = progress.task("predicting")
        rows = 0
        replaced = list[str]()
        for found in predictors[0].answer_table(table, options, predictors):
            write(found.block)
            advance(found.done)
            rows += found.block.num_rows
            replaced = found.replaced
        # Raised while the answers are being written, so that an older file of that name stays.
        require(
            rows > 0, "FILE", f"{table.name}: no row to answer", hint="Name a file that holds some."
        )
    if replaced:
        print(
            f"{table.name}: {', '.join(replaced)} left out: the answers have columns of that name",
            file=sys.stderr,
        )
    return rows


# Many files, into a folder: each is answered once, whichever process began it.


def answer_files(
    files: list[str],
    folder: Path,
    answer_one: Callable[[str, str], int],
    part: slice,
    asked: dict[str, Any],
) -> int:
    """Answer each file of a part that has no answers as it is now into a file of its name; the
    number of rows.
    """
    # `asked`: what all answers in a folder have in common. With the last of them the folder's
    # manifest names them all. Answers bear the time of what they answer, so that a file that was
    # changed is answered again. A file that was changed and got its time back (rsync -t, tar) shows
    # it by its ctime, which nobody can set.

    def is_answered(out: Path) -> bool:
        if out in done:  # whatever the clocks of two disks say
            return True
        if not out.exists():
            return False
        asked = Path(named[out]).stat()
        answered = out.stat()
        has_its_time = any(
            answered.st_mtime_ns == asked.st_mtime_ns // unit * unit for unit in _UNITS_NS
        )
        return has_its_time and asked.st_ctime_ns < answered.st_ctime_ns

    done = set[Path]()
    named = dict[Path, str]()
    what = f"{folder} holds the files that are read"
    for file in map(Path, files):
        require_file(file, "FILE")
        require(
            folder.resolve() != file.parent.resolve(), "--out", what, hint="Name another folder."
        )
        out = folder / (file.name if file.suffix in FORMATS else f"{file.name}.csv")
        require(
            out not in named,
            "--out",
            f"two files are called {file.name}",
            hint="Answer each folder by itself.",
        )
        named[out] = str(file)
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _hold_to(asked, folder, named)
    own = list(named.items())[part]
    waiting = [(file, out) for out, file in own if not is_answered(out)]
    rows = 0
    if len(waiting) < len(own):
        print(
            f"{counted(len(own) - len(waiting), 'file')} of {len(own)} answered before",
            file=sys.stderr,
        )
    if waiting:  # a list of all files comes with the last one
        write_atomically(folder / MANIFEST, json.dumps({"asked": asked}, indent=1))
    for given, out in waiting:
        times = Path(given).stat()
        stamp = stamp_of(Path(given))
        rows += answer_one(given, str(out))
        # else it was changed meanwhile, and its answers bear no time of it
        if stamp_of(Path(given)) == stamp:
            os.utime(out, ns=(times.st_atime_ns, times.st_mtime_ns))
            done.add(out)
    if missing := [out for out in named if not is_answered(out)]:
        print(
            f"{counted(len(missing), 'file')} of {len(named)} not answered yet, by other parts",
            file=sys.stderr,
        )
    else:
        sizes = {out.name: out.stat().st_size for out in named}
        write_atomically(folder / MANIFEST, json.dumps({"asked": asked, "bytes": sizes}, indent=1))
    return rows


def _hold_to(asked: dict[str, Any], folder: Path, answers: Iterable[Path]) -> None:
    """Refuse a folder that holds something else than answers to what is asked; note this in one
    that holds none.
    """
    manifest = folder / MANIFEST
    is_taken = any(out.exists() for out in answers)
    if not manifest.exists():  # asked second: another part has answers after it wrote the manifest
        require(
            not is_taken,
            "--out",
            f"{folder} holds files that are called as the answers, and no {MANIFEST} of theirs",
            hint="Name another folder.",
        )
        write_atomically(manifest, json.dumps({"asked": asked}, indent=1))
    try:
        found = dict(json.loads(manifest.read_text(encoding="utf-8"))["asked"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            "--out", f"{manifest} is not of answers", hint="Name another folder."
        ) from None
    others = [
        f"{name}={found.get(name)}" for name in asked | found if found.get(name) != asked.get(name)
    ]
    require(
        not others,
        "--out",
        f"the answers in {folder} have {', '.join(others)}",
        hint="Name another folder, or ask as before.",
    )


# What `evaluate` has in common with it: the file that is given, the devices, and the run on each of
# them.


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

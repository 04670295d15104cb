"""The rows of a file that a finished run answers: read by the block, answered on every device, in the file's order.

Memory stays flat however long the file is: a block a device is under way, and one more waits.
"""

from __future__ import annotations

import argparse
import codecs
import queue
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch

from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, require_columns
from flatout.engine.precision import Precision
from flatout.errors import UserError, as_choice
from flatout.run.kinds import load_predictor

FILES = "csv, tsv, json, jsonl, parquet, arrow, npy or hdf5"
_ROWS_PER_BLOCK = 16_384
Numbered = tuple[int, pa.RecordBatch]
"""A block of rows after the number of the first of them."""
Piece = TypeVar("Piece")
Found = TypeVar("Found")


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


def numbered_blocks(table: Table, columns: Sequence[str]) -> Iterator[Numbered]:
    """Some columns of a table, block by block."""
    first_row = 0
    for block in table.blocks(columns, rows_per_block=_ROWS_PER_BLOCK):
        yield first_row, block
        first_row += block.num_rows


def in_order(answer: Callable[[Any, Piece], Found], predictors: list[Any], pieces: Iterable[Piece]) -> Iterator[Found]:
    """What is answered to each piece, in their order; each device answers one while others answer the next ones.

    The calling thread makes the pieces, one after the other; only `answer` runs in several threads.
    """
    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for predictor in predictors:
        free.put(predictor)

    def answered(piece: Piece) -> Found:
        predictor = free.get()
        try:
            return answer(predictor, piece)
        finally:
            free.put(predictor)

    waiting: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(len(predictors), thread_name_prefix="answer") as pool:
        for piece in pieces:
            waiting.append(pool.submit(answered, piece))
            if len(waiting) > len(predictors):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def require_text_columns(table: Table, roles: Roles, **others: str) -> None:
    """Check that the columns of the texts are there, and `others` by the options that name them."""
    texts = {"--text" if number == 0 else f"--text[{number}]": name for number, name in enumerate(roles.texts)}
    require_columns(table, {**texts, **{f"--{option}": name for option, name in others.items()}})


def tell_of_lost_words(lost: int, predictor: Any) -> None:
    """Say how many words a tagger did not see, where there are any."""
    if lost:
        longest = f"data.max_length={predictor.max_length} of this run"
        print(f"words beyond {longest}: {lost:,}; each is answered O, entities among them are missed", file=sys.stderr)


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


def load_predictors(arguments: argparse.Namespace) -> list[Any]:
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
            raise UserError("--device", f"no device {name!r} here", allowed=", ".join(["auto", *known]))
    return [torch.device(name) for name in names.split(",")]

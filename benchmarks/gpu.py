"""What only a card can show, in one table: kernels, steps that never wait, whole runs, speed, and
ranks on two cards.

Each part is measured in a process of its own, as an error of a card may leave a process useless,
and ends after its time. What is not there to measure a row with stands in the row: a card, two
cards, a package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.card.graphs import GRAPH_ROWS, graph_claims
from benchmarks.card.kernels import KERNEL_ROWS, kernel_claims
from benchmarks.card.launches import LAUNCH_ROWS, TRAINER_ROWS, launch_claims, trainer_claims
from benchmarks.card.place import ROOT, RUNS_AT_ONCE, Place
from benchmarks.card.ranks import RANK_ROWS, rank_claims
from benchmarks.card.rates import RATE_ROWS, rate_claims
from benchmarks.card.runs import (
    COMMAND_ROWS,
    MEMORY_ROWS,
    RESUME_ROWS,
    START_ROWS,
    command_claims,
    curve_rows,
    curves_of,
    memory_claims,
    resume_claims,
    start_claims,
)
from benchmarks.card.speed import ENCODER_ROWS, LSTM_ROWS, encoder_claims, lstm_claims
from benchmarks.card.steps import STEP_ROWS, step_claims
from benchmarks.claim import Claim, Options, not_here


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows that are measured together."""

    rows: tuple[str, ...]
    """What their claims begin with, in order."""
    measure: Callable[[Place], Iterator[Claim]]
    limit_s: int = 120
    cards: int = 1
    needs: str | None = None
    """A package."""
    is_check: bool = True
    """Whether it finds right or wrong, and not how fast; such parts are tests, too."""


_TEXTS = ("headlines_bilstm", "headlines_cnn", "bert_tiny")
_OTHERS = ("battery_soc", "bloom_bigrams")
PARTS = {
    "start": Part(START_ROWS, start_claims),
    "kernels": Part(KERNEL_ROWS, kernel_claims),
    "steps": Part(STEP_ROWS, step_claims),
    "graphs": Part(GRAPH_ROWS, graph_claims, 240),
    "curves": Part(curve_rows(*_TEXTS), curves_of(*_TEXTS), 180),
    "recordings and bits": Part(curve_rows(*_OTHERS), curves_of(*_OTHERS), 180),
    "resume": Part(RESUME_ROWS, resume_claims, 180),
    "memory": Part(MEMORY_ROWS, memory_claims),
    "commands": Part(COMMAND_ROWS, command_claims, 240),
    "encoder": Part(ENCODER_ROWS, encoder_claims, 300, needs="accelerate", is_check=False),
    "lstm": Part(LSTM_ROWS, lstm_claims, is_check=False),
    "launches": Part(LAUNCH_ROWS, launch_claims, 300, is_check=False),
    "trainer": Part(TRAINER_ROWS, trainer_claims, 240, needs="accelerate", is_check=False),
    "rates": Part(RATE_ROWS, rate_claims, 240, is_check=False),
    "two cards": Part(RANK_ROWS, rank_claims, 180, cards=2),
}
_ALL_S = 600
"""Parts that have not begun by then are left out; without `--quick` all times are four times as
long."""
_FULL = 4


def claims(options: Options) -> Iterator[Claim]:
    """All parts, one after the other."""
    until = time.monotonic() + _ALL_S * options.choose(_FULL, 1, 1)
    for name in PARTS:
        yield from part_claims(name, options, until - time.monotonic())


def part_claims(
    name: str, options: Options, left_s: float = _FULL * _ALL_S, run: list[str] | None = None
) -> Iterator[Claim]:
    """One part in a process of its own; `run`: what starts it."""
    part = PARTS[name]
    missing = what_is_missing(part) or ("" if left_s > 0 else "its time was over")
    if missing:
        yield from (not_here(row, missing) for row in part.rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        found, why = measured_apart(
            name,
            options,
            Path(folder),
            min(part.limit_s * options.choose(_FULL, 1, 1), left_s),
            run,
        )
    yield from found
    for row in part.rows[len(found) :]:
        yield Claim(row, float("nan"), None, "", None, "", False, why or "no figure")


def what_is_missing(part: Part) -> str:
    """Why a part cannot be measured here; empty where it can."""
    count = torch.cuda.device_count()
    if count < part.cards:
        return "no card" if not count else f"{count} card{'s'[: count != 1]}"
    return "" if part.needs is None or find_spec(part.needs) else f"no package {part.needs}"


_START = [sys.executable, "-c", "from benchmarks.gpu import measure_part; measure_part()"]


def measured_apart(
    name: str, options: Options, folder: Path, limit_s: float, run: list[str] | None = None
) -> tuple[list[Claim], str]:
    """The rows that a part's process found, and why there are no more of them."""
    settings = {
        "part": name,
        "device": "cuda:0" if torch.cuda.is_available() else "cpu",
        "folder": str(folder),
    }
    given = {each: value for each, value in asdict(options).items() if not isinstance(value, Path)}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "FLATOUT_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    # Runs go side by side, and threads of several that all take every core wait for each other.
    environment.setdefault(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // RUNS_AT_ONCE))
    )
    with (folder / "said.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            run or _START,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps({**settings, "options": given}), timeout=limit_s)
            why = ""
        except subprocess.TimeoutExpired:
            why = f"not ended after {limit_s:.0f} s"
        finally:
            _end_all(process)
    lines = (folder / "said.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if process.returncode and not why:
        why = f"ended with {process.returncode}: {lines[-1] if lines else ''}"
        print("\n".join(lines[-30:]), file=sys.stderr)
    written = folder / "rows.jsonl"
    rows = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    return [Claim(**json.loads(row)) for row in rows], why


def _end_all(process: subprocess.Popen[str]) -> None:
    """Nothing that a part has started outlives it; commands lead groups of their own."""
    begun = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in [*begun, process]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(begun, timeout=10)


def measure_part() -> None:
    """The child's side: settings on standard input, a line a row in the folder's rows.jsonl."""
    settings: dict[str, Any] = json.loads(sys.stdin.read())
    folder = Path(settings["folder"])
    known = {each.name for each in fields(Options)}
    options = Options(
        **{name: value for name, value in settings["options"].items() if name in known}
    )
    place = Place(torch.device(settings["device"]), folder, options)
    write_rows(PARTS[settings["part"]], place, folder / "rows.jsonl")


def write_rows(part: Part, place: Place, path: Path) -> None:
    """Each row as soon as it is found, so that those before an error are kept."""
    with path.open("a", encoding="utf-8") as file:
        for claim in part.measure(place):
            print(json.dumps(claim.as_dict()), file=file, flush=True)

"""Make the pictures of README and the site from real runs. `python -m docs.pictures.make [FOLDER]
[--only run]`.

A default run, a small sweep, a short ladder and a table of prices are made in FOLDER, or in a
temporary one: some seven minutes on two cores. The terminal becomes an SVG by rich, pages become
PNGs by a headless chromium. A picture has at most 300 KB.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from docs.pictures.drawings import main as draw_all
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FOLDER = Path(__file__).parent
MOST_BYTES = 300_000
COLUMNS = 104
RUN = ["-m", "train"]
SWEEP = [
    "-m",
    "flatout",
    "sweep",
    "+sweep=headlines",
    "data.sample.rows=4000",
    "trainer.max_epochs=4",
    "trials=12",
]
LADDER = ["-m", "flatout", "ladder", "+ladder=bloom", "for=100s"]
PRICE = [
    "-m",
    "flatout",
    "price",
    "model=bilstm,textcnn",
    "data.batch_size=64,128",
    "price.watts=60",
    "price.per_hour=0.4",
]
# a run and its page, with the same prices
PRICED_RUN = ["-m", "train", "model=textcnn", "price.watts=60", "price.per_hour=0.4"]
STARTUP_S = 60
"""How long TensorBoard may take before it answers."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures.make", description=__doc__)
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="where the runs are trained; a temporary one if left out",
    )
    parser.add_argument("--only", choices=list(MADE), help="what to picture; all if left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(given.folder or temporary).absolute()
        work.mkdir(parents=True, exist_ok=True)
        for name in [given.only] if given.only else MADE:
            MADE[name](work / name)


def picture_run(folder: Path) -> None:
    """A default run: its end in the terminal, its report, its curves."""
    printed = train(folder, RUN)
    draw_terminal(end_of_run(printed), "python -m train", FOLDER / "run.svg")
    (report,) = folder.rglob("report.html")
    take_picture(report.resolve().as_uri(), FOLDER / "report.png", height=1500)
    with tensorboard(folder, "outputs") as address:
        take_picture(
            f"{address}/#custom_scalars",
            FOLDER / "tensorboard.png",
            height=1000,
            width=1400,
            wait_s=20,
        )


def picture_sweep(folder: Path) -> None:
    train(folder, SWEEP)
    (page,) = folder.rglob("sweep.html")
    take_picture(page.resolve().as_uri(), FOLDER / "sweep.png", height=1300)


def picture_ladder(folder: Path) -> None:
    train(folder, LADDER)
    (page,) = folder.rglob("ladder.html")
    take_picture(page.resolve().as_uri(), FOLDER / "ladder.png", height=1300)


def picture_price(folder: Path) -> None:
    """A table of prices in the terminal, and the page of a run that says what it took."""
    printed = train(folder / "table", PRICE)
    lines = [line for line in printed.splitlines() if not line.startswith("cache:")]
    command = " ".join(["$ python", *PRICE])
    draw_terminal("\n".join([command, *lines]), "python -m flatout price", FOLDER / "price.svg")
    train(folder / "run", PRICED_RUN)
    (report,) = folder.rglob("report.html")
    take_picture(report.resolve().as_uri(), FOLDER / "price.png", height=620)


def draw(folder: Path) -> None:
    """The drawings, which need no run."""
    draw_all()


MADE: dict[str, Callable[[Path], None]] = {
    "run": picture_run,
    "sweep": picture_sweep,
    "ladder": picture_ladder,
    "price": picture_price,
    "drawings": draw,
}


def train(folder: Path, words: list[str]) -> str:
    """What a command prints; it runs in a folder, and leaves its runs in `outputs/` there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FLATOUT_CACHE": "../cache"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.replace(f"{folder}/", "")


def end_of_run(printed: str) -> str:
    """The last two validations and the closing table without its classes, the command
    before them.
    """
    lines = printed.splitlines()
    epochs = [number for number, line in enumerate(lines) if line.startswith("epoch")]
    closing = next(number for number, line in enumerate(lines) if line.startswith("BiLSTM"))
    return "\n".join(
        ["$ python -m train", "…", *lines[epochs[-2] : epochs[-1] + 1], "…", *lines[closing:]]
    )


def draw_terminal(text: str, title: str, path: Path) -> None:
    """A terminal as SVG, in the reader's own fixed-width font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    marked = Text(text)
    marked.highlight_regex(r"(?m)^(verdict|speed|each batch|test/\w+|\$ .*)", "bold cyan")
    marked.highlight_regex(r"(?m)^BiLSTM.*", "bold")
    console.print(marked, end="\n\n")  # rich cuts the lower edge of the last line
    svg = console.export_svg(title=title, theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # rich names fonts of a server
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    keep(path, svg.replace("Fira Code, monospace", "ui-monospace, monospace").encode())


@contextmanager
def tensorboard(folder: Path, name: str) -> Iterator[str]:
    """The address of a TensorBoard on the curves below `name` in a folder; it ends with
    the block.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", name, "--port", str(port)]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_for_curves(f"{address}/data/plugin/scalars/tags")
            yield address
        finally:
            server.terminate()


def wait_for_curves(address: str) -> None:
    """Return when a TensorBoard lists curves."""
    end = time.monotonic() + STARTUP_S
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(address) as answer:  # noqa: S310, our own server
            if any(json.load(answer).values()):
                return
        time.sleep(0.5)
    raise SystemExit(f"pictures: TensorBoard shows no curves after {STARTUP_S} s.")


def take_picture(
    address: str, path: Path, *, height: int, width: int = 1100, wait_s: int = 0
) -> None:
    """The top of a page as PNG; `wait_s` is the time that its scripts get to draw."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        raise SystemExit("pictures: no chromium. Install it, or leave the pictures as they are.")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        size = [
            f"--window-size={width},{height}",
            f"--screenshot={shot}",
            f"--user-data-dir={folder}/profile",
        ]
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        waiting = [f"--virtual-time-budget={1000 * wait_s}"] if wait_s else []
        subprocess.run(
            [chromium, *quiet, *size, *waiting, address], check=True, capture_output=True
        )
        keep(path, shot.read_bytes())


def keep(path: Path, content: bytes) -> None:
    if len(content) > MOST_BYTES:
        raise SystemExit(
            f"{path.name}: {len(content):,} bytes, at most {MOST_BYTES:,}. Take a smaller window."
        )
    path.write_bytes(content)
    print(path, f"{len(content):,} bytes")


if __name__ == "__main__":
    main()

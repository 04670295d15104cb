"""Make the pictures of README and the site from real runs. `python -m docs.pictures.make [FOLDER]`.

A default run and a small sweep are trained into FOLDER, or into a temporary one: some three minutes on two cores. The
terminal becomes an SVG by rich, pages become PNGs by a headless chromium. Each picture is at most 300 KB.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.pictures.drawings import main as draw_all
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FOLDER = Path(__file__).parent
MOST_BYTES = 300_000
COLUMNS = 104
RUN = ["-m", "train"]
SWEEP = ["-m", "flatout", "sweep", "+sweep=headlines", "data.sample.rows=4000", "trainer.max_epochs=4", "trials=12"]


def main() -> None:
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        work = (Path(given[0]) if given else Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        said = train(work / "run", RUN)
        draw_terminal(end_of_run(said), "python -m train", FOLDER / "run.svg")
        (report,) = (work / "run").rglob("report.html")
        take_picture(report, FOLDER / "report.png", height=1500)
        train(work / "sweep", SWEEP)
        (page,) = (work / "sweep").rglob("sweep.html")
        take_picture(page, FOLDER / "sweep.png", height=1300)
    draw_all()


def train(folder: Path, words: list[str]) -> str:
    """What a command prints; it runs in a folder, and leaves its runs in `outputs/` there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FLATOUT_CACHE": str(folder.parent / "cache")}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.replace(f"{folder}/", "")


def end_of_run(said: str) -> str:
    """The last two validations and the closing table without its classes, the command before them."""
    lines = said.splitlines()
    epochs = [number for number, line in enumerate(lines) if line.startswith("epoch")]
    closing = next(number for number, line in enumerate(lines) if line.startswith("BiLSTM"))
    return "\n".join(["$ python -m train", "…", *lines[epochs[-2] : epochs[-1] + 1], "…", *lines[closing:]])


def draw_terminal(text: str, title: str, path: Path) -> None:
    """A terminal as SVG, in the reader's own fixed-width font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    marked = Text(text)
    marked.highlight_regex(r"(?m)^(verdict|speed|each step|test/\w+|\$ .*)", "bold cyan")
    marked.highlight_regex(r"(?m)^BiLSTM.*", "bold")
    console.print(marked)
    svg = console.export_svg(title=title, theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # rich names fonts of a server
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    keep(path, svg.replace("Fira Code, monospace", "ui-monospace, monospace").encode())


def take_picture(page: Path, path: Path, *, height: int, width: int = 1100) -> None:
    """The top of a page as PNG."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures: no chromium. Install it, or leave the pictures as they are.")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        size = [f"--window-size={width},{height}", f"--screenshot={shot}", f"--user-data-dir={folder}/profile"]
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        subprocess.run([chromium, *quiet, *size, page.resolve().as_uri()], check=True, capture_output=True)
        keep(path, shot.read_bytes())


def keep(path: Path, content: bytes) -> None:
    if len(content) > MOST_BYTES:
        raise SystemExit(f"{path.name}: {len(content):,} bytes, at most {MOST_BYTES:,}. Take a smaller window.")
    path.write_bytes(content)
    print(path, f"{len(content):,} bytes")


if __name__ == "__main__":
    main()

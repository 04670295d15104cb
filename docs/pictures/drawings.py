"""Drawings: the way of the data, the house, and measured ratios. `python -m docs.pictures.drawings`
writes them.

Each drawing is a list of boxes, arrows and texts on a white page. No font and no picture is
fetched.
"""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results.json"
INK = "#1f2937"
SOFT = "#4b5563"
EDGE = "#9ca3af"
WIN = "#93c5fd"
LOSS = "#fca5a5"
BLUE = "#dbeafe"
GREEN = "#dcfce7"
SAND = "#fef3c7"
ROSE = "#ffe4e6"
LILAC = "#ede9fe"


@dataclass
class Drawing:
    """An SVG in the making."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: int, y: int, width: int, height: int, title: str, lines: list[str], fill: str
    ) -> None:
        """A rounded box with a title and small lines below it."""
        shape = (
            f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}"'
            f' stroke="{EDGE}"'
        )
        self.parts.append(f"<rect {shape}/>")
        self.text(x + width / 2, y + 24, title, size=15, weight=600)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 44 + 16 * number, line, size=12, colour=SOFT)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int,
        weight: int = 400,
        colour: str = INK,
        anchor: str = "middle",
    ) -> None:
        style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        line = (
            f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{SOFT}" stroke-width="1.5"'
            ' marker-end="url(#head)"'
        )
        self.parts.append(f"<line {line}/>")

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"'
        self.parts.append(f"<rect {shape}/>")

    def svg(self, title: str) -> str:
        """The whole picture."""
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui,'
            f' sans-serif">\n<title>{html.escape(title)}</title>\n<defs><marker id="head"'
            ' viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0 10 5 0 10z" fill="{SOFT}"/></marker></defs>\n<rect'
            f' width="{self.width}" height="{self.height}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def data_way() -> str:
    """From a table to an optimizer step."""
    drawing = Drawing(980, 300)
    steps = [
        ("Source", ["csv, parquet, Hub,", "a table in memory"], SAND),
        ("Checks", ["each row counted:", "kept, repaired, dropped"], SAND),
        ("Store", ["encoded once,", "on disk, memory-mapped"], GREEN),
        ("Plan", ["which rows when:", "a pure function"], GREEN),
        ("Feed", ["resident, threaded", "or worker processes"], BLUE),
    ]
    for number, (title, lines, fill) in enumerate(steps):
        x = 20 + number * 192
        drawing.box(x, 40, 168, 84, title, lines, fill)
        if number:
            drawing.arrow(x - 24, 82, x - 2, 82)
    drawing.text(20, 24, "on the host, once", size=12, colour=SOFT, anchor="start")
    drawing.text(788, 24, "for each step", size=12, colour=SOFT, anchor="start")
    drawing.arrow(872, 124, 872, 168)
    drawing.box(
        692,
        170,
        268,
        104,
        "Flat batch",
        ["", "tokens of all rows, end to end;", "offsets, targets, row numbers"],
        BLUE,
    )
    for number, length in enumerate((52, 30, 74, 40)):
        x = 716 + sum((52, 30, 74, 40)[:number])
        drawing.bar(x, 206, length - 3, 10, ("#60a5fa", "#34d399", "#fbbf24", "#f472b6")[number])
    drawing.arrow(692, 222, 644, 222)
    drawing.box(
        452,
        170,
        190,
        104,
        "Network",
        ["a plain nn.Module", "flat, or rectangles of", "rows of like length"],
        LILAC,
    )
    drawing.arrow(452, 222, 404, 222)
    drawing.box(
        212, 170, 190, 104, "Task", ["loss over the rows of", "the whole step, metrics"], LILAC
    )
    drawing.arrow(212, 222, 164, 222)
    drawing.box(
        20, 170, 142, 104, "Fast loop", ["one optimizer step;", "no sync with", "the device"], ROSE
    )
    return drawing.svg("The way of the data")


LAYERS = [
    ("cli", "commands, the edge to Hydra", ROSE),
    ("sweep · ladder", "many runs: trials, searches, measured rungs", ROSE),
    ("run", "one run: build, trainer, run folder, resume", ROSE),
    ("perf · checkpoints · report · inference", "measure, save, show, answer", LILAC),
    ("callbacks", "curves, times, hardware: each alone in a plain Trainer", LILAC),
    ("tasks · bits", "LightningModules: loss, metrics, optimizer", BLUE),
    ("engine · distributed", "the fast loop, precision, ranks", BLUE),
    ("models", "plain nn.Modules, each beside its settings", GREEN),
    ("data", "DataModules over store, plan, feed", GREEN),
    ("files · errors · run_log", "loose modules that all may use", SAND),
]
"""The floors of the source, from the top down, and what each is for."""


def house() -> str:
    """The floors of the source, and which way imports point."""
    height = 44
    drawing = Drawing(820, 40 + len(LAYERS) * (height + 6))
    for number, (name, about, fill) in enumerate(LAYERS):
        y = 20 + number * (height + 6)
        drawing.bar(70, y, 730, height, fill)
        drawing.text(90, y + 27, name, size=15, weight=600, anchor="start")
        drawing.text(430, y + 27, about, size=13, colour=SOFT, anchor="start")
    drawing.arrow(40, 24, 40, drawing.height - 24)
    drawing.parts.append(
        f'<text x="26" y="{drawing.height / 2:g}" font-size="12" fill="{SOFT}" text-anchor="middle"'
        f' transform="rotate(-90 26 {drawing.height / 2:g})">imports point down</text>'
    )
    return drawing.svg("The layers of the source")


def ratios() -> str:
    """The published ratios of speed, losses in red, on a scale of factors of ten."""
    rows = published_rows()
    drawing = Drawing(900, 50 + 30 * len(rows))
    drawing.text(
        450,
        24,
        "times as fast as the other way (1×: equal), measured side by side",
        size=13,
        colour=SOFT,
    )
    one = 440  # where a ratio of 1 stands
    for number, row in enumerate(rows):
        y, reach = 40 + 30 * number, 190 * math.log10(row["ratio"])
        claim = row["claim"].replace("*", "").replace("`", "")
        drawing.text(360, y + 15, claim, size=12, anchor="end")
        drawing.bar(min(one, one + reach), y, max(abs(reach), 2), 20, WIN if reach >= 0 else LOSS)
        drawing.text(
            max(one, one + reach) + 8,
            y + 15,
            f"{row['ratio']:g}×",
            size=12,
            weight=600,
            anchor="start",
        )
    drawing.bar(one - 0.5, 36, 1, 30 * len(rows) - 2, SOFT)
    return drawing.svg("Measured ratios")


def published_rows() -> list[dict[str, Any]]:
    """The rows of README's table of measurements."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return rows


DRAWINGS = {"data_way.svg": data_way, "house.svg": house, "ratios.svg": ratios}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()

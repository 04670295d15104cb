"""Write `exposure.html`, one page about what an encoding reveals, and `exposure.json`.

Both have the same numbers: people read the page, `flatout compare` reads the other file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_text, tile
from flatout.report.summary import json_safe, read_json

PAGE = "exposure.html"
NUMBERS = "exposure.json"


def write_exposure(folder: Path, exposure: Mapping[str, Any]) -> None:
    """Write both files into a run folder."""
    (folder / NUMBERS).write_text(
        json.dumps(json_safe(exposure), indent=1, ensure_ascii=False), encoding="utf-8"
    )
    (folder / PAGE).write_text(page(exposure), encoding="utf-8")


def read_exposure(folder: Path) -> dict[str, Any]:
    """The numbers of a run's exposure report."""
    if_missing = (
        "Name a finished run on bit strings, below outputs/; task.exposure=true writes the file."
    )
    return read_json(
        folder, NUMBERS, if_missing, "Write it again by python -m train with task.exposure=true."
    )


def page(exposure: Mapping[str, Any]) -> str:
    """The page as HTML, without network or script."""
    common = [Curve("model", [(row["from"], row["dice"]) for row in exposure["frequency"]])]
    learning = []
    for name in ("model", "ridge"):
        if points := [
            (point["records"], point[name]) for point in exposure["learning"] if name in point
        ]:
            learning.append(Curve(name, points))
    charts = [
        line_chart("Dice over known records", learning, x_label="known records", doublings=True),
        line_chart(
            "Dice over how common a 2-gram is",
            common,
            x_label="training records that hold it",
            doublings=True,
        ),
    ]
    scores = exposure["scores"]
    rebuilt = exposure["reconstruction"]["alone"]
    tiles = [
        tile(f"{scores['dice']:.3f}", "Dice of the 2-grams"),
        tile(f"{scores['exact']:.1%}", "sets of 2-grams exactly right"),
        tile(f"{rebuilt['at_1']:.1%}", "texts rebuilt at the first try"),
    ]
    columns = ("at_1", "at_5", "at_10", "wrong", "without")
    shares = [
        "from the encoding and the order of letters",
        *(f"{rebuilt[key]:.1%}" for key in columns),
    ]
    return render_text(
        "exposure.html",
        encoding=exposure["encoding"],
        source=exposure["source"],
        known=f"{exposure['records']['train']:,}",
        tested=f"{exposure['records']['judged']:,}",
        conclusion=exposure["conclusion"],
        figures=tiles,
        curves=[chart for chart in charts if chart],
        methods=[[name, f"{value:.4f}"] for name, value in exposure["methods"].items()],
        rates=[shares],
        most=exposure["most"],
        least=exposure["least"],
    )

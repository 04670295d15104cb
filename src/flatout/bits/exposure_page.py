"""`exposure.html`: how much an encoding gives away, on one page, and `exposure.json` with the same numbers."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import UserError
from flatout.report.curves import Curve, line_chart
from flatout.report.page import STYLE, section, table
from flatout.report.summary import json_safe

PAGE, NUMBERS = "exposure.html", "exposure.json"


def write_exposure(folder: Path, exposure: Mapping[str, Any]) -> None:
    """Write both files into a run's folder."""
    (folder / NUMBERS).write_text(json.dumps(json_safe(exposure), indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / PAGE).write_text(page(exposure), encoding="utf-8")


def read_exposure(folder: Path) -> dict[str, Any]:
    """The numbers of a run's exposure report."""
    path = folder / NUMBERS
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        mend = "Name the folder of a finished run on bit strings, below outputs/."
        raise UserError(str(folder), f"no {NUMBERS} there", mend=mend) from None
    except ValueError as error:
        raise UserError(str(path), f"not valid JSON: {error}") from None


def page(exposure: Mapping[str, Any]) -> str:
    """The page as HTML, without network or script."""
    sections = [
        f"<h1>What this encoding gives away</h1><p class='muted'>{html.escape(exposure['encoding'])}<br>"
        f"{html.escape(exposure['source'])}, {exposure['records']['train']:,} known records, judged on"
        f" {exposure['records']['judged']:,} others</p>",
        section("In plain words", "".join(f"<p>{html.escape(line)}</p>" for line in exposure["conclusion"])),
        _figures(exposure),
        f'<div class="charts">{_learning_chart(exposure)}{_frequency_chart(exposure)}</div>',
        '<p class="muted">Left: ridge regression and the detectors are solved again from so many pairs of text and'
        " encoding; the rest of the model, which needs texts alone, is kept.</p>",
        section("Against what is simple", _methods(exposure)),
        section("Known by name", _rates(exposure)),
        section("2-grams that leak most", _grams(exposure["most"])),
        section("2-grams that leak least", _grams(exposure["least"])),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>exposure</title><style>{STYLE}</style><body>{''.join(sections)}</body></html>"
    )


def _figures(exposure: Mapping[str, Any]) -> str:
    rates = exposure["reconstruction"]
    tiles = [
        (f"{exposure['scores']['dice']:.3f}", "Dice of the 2-grams"),
        (f"{exposure['scores']['exact']:.1%}", "sets of 2-grams exactly right"),
        (f"{rates['alone']['at_1']:.1%}", "texts rebuilt at the first try"),
    ]
    if rates["with_names"]:
        tiles.append((f"{rates['with_names']['at_1']:.1%}", "the same with a list of names"))
    made = (f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for value, name in tiles)
    return f'<div class="figures">{"".join(made)}</div>'


def _learning_chart(exposure: Mapping[str, Any]) -> str:
    curves = []
    for name in ("model", "ridge"):
        points = [(point["records"], point[name]) for point in exposure["learning"] if name in point]
        if points:
            curves.append(Curve(name, points))
    return line_chart("Dice over known records", curves, x_label="known records", doublings=True)


def _frequency_chart(exposure: Mapping[str, Any]) -> str:
    points = [(row["from"], row["dice"]) for row in exposure["frequency"]]
    title = "Dice over how common a 2-gram is"
    return line_chart(title, [Curve("model", points)], x_label="training records that hold it", doublings=True)


def _methods(exposure: Mapping[str, Any]) -> str:
    rows = [[name, f"{value:.4f}"] for name, value in exposure["methods"].items()]
    return table(["method", "Dice"], rows, first_number=1)


def _rates(exposure: Mapping[str, Any]) -> str:
    names = {"alone": "from the encoding and the order of letters", "with_names": "with a list of names"}
    rows = [
        [about, *(f"{rates[key]:.1%}" for key in ("at_1", "at_5", "at_10", "wrong", "without"))]
        for key_of, about in names.items()
        if (rates := exposure["reconstruction"][key_of])
    ]
    return table(["rebuilt", "first try", "within 5", "within 10", "wrong first try", "nothing found"], rows, 1)


def _grams(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = (
        f"<span title='{row['records']} records'><code>{html.escape(row['gram'])}</code> {row['dice']:.2f}</span>"
        for row in rows
    )
    return f'<p class="legend">{" ".join(cells)}</p>' if rows else ""

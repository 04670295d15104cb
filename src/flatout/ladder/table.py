"""The table of a ladder in the terminal; a rung that does not pay is red."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from flatout.errors import printable
from flatout.ladder.results import COSTS, UNSURE, written

_COLOURS = {COSTS: "red", UNSURE: "yellow"}


def figures(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns of figures, and the figures of each rung."""
    has = {
        "has_tokens": any(rung.get("tokens_per_s") for rung in found["rungs"]),
        "has_gpu": any(rung.get("device_share") is not None for rung in found["rungs"]),
    }
    return heads(**has), [row_cells(rung, **has) for rung in found["rungs"]]


def ladder_table(found: dict[str, Any]) -> Table:
    """A row for each rung."""
    names, rows = figures(found)
    table = Table(box=None, padding=(0, 2, 0, 0), title=Text(found["title"]), title_justify="left")
    table.add_column("rung")
    table.add_column("promised")
    for head in (*names, ""):
        table.add_column(head, justify="right" if head else "left")
    for rung, cells in zip(found["rungs"], rows, strict=True):
        word = rung["skipped"] or ("" if rung["verdict"] in (None, "pays") else rung["verdict"])
        style = "bright_black" if rung["skipped"] else _COLOURS.get(rung["verdict"] or "", "")
        texts = [printable(rung["name"]), printable(rung["promised"]), *cells, printable(word)]
        table.add_row(*(Text(text, style=style) for text in texts))
    return table


def heads(*, has_tokens: bool, has_gpu: bool) -> list[str]:
    """Names of the columns of figures."""
    tokens, gpu = ["tokens/s"] if has_tokens else [], ["GPU"] if has_gpu else []
    return ["measured", "in all", "rows/s", *tokens, "±", "wait", "padding", "memory", "startup", *gpu]


def row_cells(rung: dict[str, Any], *, has_tokens: bool, has_gpu: bool) -> list[str]:
    """The figures of a rung as texts."""
    if rung["cumulative"] is None:
        return [""] * len(heads(has_tokens=has_tokens, has_gpu=has_gpu))
    of = "startup " if rung["measures"] == "startup" and rung["measured"] else ""
    cells = [of + written(rung["measured"]), written({**rung["cumulative"], "low": None}), _number(rung["rows_per_s"])]
    cells += [_number(rung["tokens_per_s"])] if has_tokens else []
    cells += [_share(rung[name]) for name in ("spread", "wait_share", "padding_share")]
    cells += ["" if rung["memory_gb"] is None else f"{rung['memory_gb']:.2f} GB", f"{rung['startup_s']:.1f} s"]
    return cells + ([_share(rung["device_share"])] if has_gpu else [])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"

"""`report.html`: one run on one page, without network or script, fit to be printed."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.report.closing import gpu_text, verdict_text
from flatout.report.curves import Curve, line_chart, stacked_bar

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f23;max-width:980px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem;border-bottom:1px solid #d8dee4}
.muted,small,.tick{color:#57606a;fill:#57606a}.tick{font-size:11px}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:#e6eaee}.figures{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}
.figures div{border:1px solid #d8dee4;border-radius:6px;padding:.5rem .9rem}.figures b{display:block;font-size:1.25rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:1rem;margin-top:1.5rem}figure{margin:0}
.one{max-width:620px;margin-top:1.5rem}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}th{font-weight:600;border-bottom:1px solid #d8dee4}
pre{background:#f6f8fa;padding:.8rem;border-radius:6px;overflow:auto;font-size:12.5px}.bar{width:100%;height:26px}
.legend span{margin-right:1.2rem;white-space:nowrap}svg{overflow:visible}code{overflow-wrap:anywhere}
.status{font-size:.8rem;font-weight:600;border:1px solid;border-radius:1rem;padding:.1rem .6rem;vertical-align:.25rem}
.finished{color:#1a7f37}.failed{color:#b3261e}.interrupted{color:#8a6100}.running{color:#1f6f8b}
@media print{body{margin:0;max-width:none}figure,tr,.figures div{break-inside:avoid}h2{break-after:avoid}
pre{white-space:pre-wrap}}
"""
_CHARTS = {
    "loss": ("train/loss", "val/loss"),
    "quality on validation": ("val/accuracy", "val/macro_f1", "val/subset_accuracy", "val/auroc"),
    "2-grams on validation": ("val/dice", "val/precision", "val/recall", "val/exact"),
    "rows a second": ("speed/rows_per_s",),
    "the card's use": ("speed/mfu", "gpu/utilisation"),
    "error on validation": ("val/rmse", "val/mae"),
}


def write_page(
    folder: Path,
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, str]],
    per_class: Sequence[Mapping[str, Any]],
) -> Path:
    """Write `report.html` into a run's folder."""
    config = folder / "config.yaml"
    sections = [
        _heading(summary),
        _figures(summary),
        section("What limited the run", html.escape(verdict_text(summary["verdict"]))),
        f'<div class="charts">{_charts(curves)}</div>',
        section("Where each step's time went", stacked_bar(_known(summary["speed"]["step_ms"]), "ms")),
        section("The card", html.escape(gpu_text(summary["speed"]["gpu"]))),
        section("What was chosen, and why", _choices(summary["choices"])),
        section("Classes", _classes(per_class)),
        section("Settings", f"<pre>{html.escape(config.read_text('utf-8'))}</pre>" if config.is_file() else ""),
    ]
    title = html.escape(str(summary["experiment"] or "a run"))
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><body>{''.join(sections)}</body></html>"
    )
    path = folder / "report.html"
    beside = folder / ".report.html-new"
    beside.write_text(page, encoding="utf-8")
    return beside.replace(path)


def read_curves(folder: Path) -> list[dict[str, str]]:
    """Rows of a run's metrics.csv, the last one only when it is whole; none where there is no such file."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def _heading(summary: Mapping[str, Any]) -> str:
    model, data = summary["model"], summary["data"]
    parameters = f", {model['parameters']:,} parameters" if model["parameters"] else ""
    words = f"{model['name'] or 'no model yet'}{parameters} on {data['source'] or 'no data yet'}"
    status = html.escape(str(summary["status"]))
    return (
        f'<h1>{html.escape(str(summary["experiment"] or "a run"))} <span class="status {status}">{status}</span></h1>'
        f'<p class="muted">{html.escape(words)}<br><code>{html.escape(summary["command"] or "")}</code></p>'
    )


def _figures(summary: Mapping[str, Any]) -> str:
    baseline = summary["baseline"] or {}
    known = baseline.get("metrics") or {}
    tiles = []
    for name, value in summary["metrics"].items():
        if name.startswith("test/") and value is not None and name != "test/loss":
            beside = f"{value / known[name]:.1%} of the {baseline['name']}" if known.get(name) else ""
            tiles.append((f"{value:.4f}", name, beside))
    speed, training = summary["speed"], summary["training"]
    if speed["rows_per_s"]:
        tiles.append((f"{speed['rows_per_s']:,.0f}", "rows/s", _said("padding {:.1%}", speed["padding_share"])))
    if speed["tokens_per_s"]:
        tiles.append((f"{speed['tokens_per_s']:,.0f}", "tokens/s", ""))
    if speed["mfu"] is not None:
        tiles.append((f"{speed['mfu']:.1%}", "MFU", _said("of {:,.3g} TFLOP/s", summary["hardware"]["peak_tflops"])))
    if training["seconds"]:
        tiles.append((f"{training['seconds']:.0f} s", "in all", _said("{:,} steps", training["steps"])))
    made = (
        f"<div><b>{html.escape(value)}</b>{html.escape(name)} <small>{html.escape(beside)}</small></div>"
        for value, name, beside in tiles
    )
    return f'<div class="figures">{"".join(made)}</div>'


def _charts(curves: Sequence[Mapping[str, str]]) -> str:
    charts = []
    for title, names in _CHARTS.items():
        lines = [Curve(name, _points(curves, name)) for name in names]
        charts.append(line_chart(title, [line for line in lines if line.points]))
    return "".join(charts)


def _points(curves: Sequence[Mapping[str, str]], name: str) -> list[tuple[float, float]]:
    """A column over the steps; the last row of a run that was killed may be half a row."""
    points = []
    for row in curves:
        with suppress(KeyError, TypeError, ValueError):
            points.append((float(row["step"]), float(row[name])))
    return [point for point in points if all(map(math.isfinite, point))]


def _choices(choices: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ["choice", "value", "why", "evidence"],
        [[choice["name"], str(choice["value"]), choice["why"], choice["evidence"]] for choice in choices],
    )


def _classes(per_class: Sequence[Mapping[str, Any]]) -> str:
    scores = ("precision", "recall", "f1")
    rows = [[row["class"], *(f"{row[name]:.3f}" for name in scores), f"{row['support']:,}"] for row in per_class]
    return table(["class", *scores, "rows"], rows, first_number=1)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], first_number: int = 99) -> str:
    """Rows as an HTML table; columns from `first_number` on hold numbers."""
    if not rows:
        return ""
    kinds = ["" if i < first_number else ' class="n"' for i in range(len(heads))]
    head = "".join(f"<th{kind}>{html.escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{html.escape(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def section(title: str, body: str) -> str:
    """A part of a page under its heading; nothing without a body."""
    return f"<h2>{html.escape(title)}</h2>{body}" if body else ""


def _said(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}

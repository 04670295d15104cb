"""`report.html`: one run on one page, fit to be printed; and how every page is rendered.

A page is one file: its style and its charts stand inside, so it opens without network and runs no
script. Every value is escaped, except a chart's own SVG. A run on recordings also shows its answers
to the test or the validation.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.files import write_atomically, write_table
from flatout.masking import mask_settings
from flatout.report import closing
from flatout.report.figures import COLOURS, Chart, Curve, line_chart

if TYPE_CHECKING:
    from jinja2 import Environment

    from flatout.data.batches.feed import Feeds

_CHARTS = {
    "loss": ("train/loss", "val/loss"),
    "quality on validation": tuple(
        f"val/{name}"
        for name in (
            "accuracy macro_f1 subset_accuracy auroc f1 dice precision recall exact masked_accuracy"
        ).split()
    ),
    "rows a second": ("speed/rows_per_s",),
    "the card's use": ("speed/mfu", "gpu/utilisation"),
    "error on validation": ("val/rmse", "val/mae"),
}
RECORDINGS = "recordings.csv"
TARGETS = "targets.csv"
_MOST_POINTS = 600  # of a longer recording so many samples about its middle are drawn
_SCORES = ("precision", "recall", "f1")


def write_page(
    folder: Path,
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, str]],
    per_class: Sequence[Mapping[str, Any]],
    answers: Sequence[Chart] = (),
) -> Path:
    summary = mask_settings(summary)
    path = folder / "report.html"
    config = folder / "config.yaml"
    model = summary["model"]
    parameters = f", {model['parameters']:,} parameters" if model["parameters"] else ""
    parts = closing.parts_of_step(summary["speed"]["step_ms"])
    page = render_text(
        "report.html",
        summary=summary,
        about=(
            f"{model['name'] or 'no model yet'}{parameters} on"
            f" {summary['data']['source'] or 'no data yet'}"
        ),
        figures=[*_metric_tiles(summary), *_speed_tiles(summary)],
        early_end=closing.early_end(summary),
        rival=closing.rival_text(summary),
        truncation=closing.truncation_text(summary),
        verdict=closing.verdict_text(summary["verdict"]),
        curves=_charts(curves, summary["metric"]),
        answers=answers,
        times=[
            {"share": share, "colour": colour, "text": f"{name} {ms:.2f} ms ({share:.0%})"}
            for (name, ms, share), colour in zip(parts, COLOURS, strict=False)
        ],
        card=closing.gpu_text(summary["speed"]["gpu"]),
        choices=[
            [choice[name] for name in ("name", "value", "why", "evidence")]
            for choice in summary["choices"]
        ],
        classes=[
            [row["class"], *(f"{row[name]:.3f}" for name in _SCORES), f"{row['support']:,}"]
            for row in per_class
        ],
        settings=config.read_text("utf-8") if config.is_file() else "",
    )
    write_atomically(path, page)
    return path


def read_curves(folder: Path) -> list[dict[str, str]]:
    """Rows of a run's `metrics.csv` without an unfinished last one; an empty list
    without the file.
    """
    if not (path := folder / "metrics.csv").is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def tile(value: str, name: str, note: str = "") -> dict[str, str]:
    """A large figure on a page, what it is, and a short note."""
    return {"value": value, "name": name, "note": note}


def _metric_tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    baseline = summary["baseline"] or {}
    known = baseline.get("metrics") or {}
    intervals = summary.get("intervals") or {}
    tiles = []
    for name, value in summary["metrics"].items():
        if name.startswith("test/") and value is not None and name != "test/loss":
            beside = (
                f"{value / known[name]:.1%} of the {baseline['name']}" if known.get(name) else ""
            )
            notes = [closing.interval_text(intervals.get(name)).strip(), beside]
            tiles.append(tile(f"{value:.4f}", name, " ".join(filter(None, notes))))
    return tiles


def _speed_tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    speed = summary["speed"]
    training = summary["training"]
    tiles = []
    if speed["rows_per_s"]:
        tiles.append(
            tile(
                f"{speed['rows_per_s']:,.0f}",
                "rows/s",
                filled("padding {:.1%}", speed["padding_share"]),
            )
        )
    if speed["tokens_per_s"]:
        tiles.append(tile(f"{speed['tokens_per_s']:,.0f}", "tokens/s"))
    if speed["mfu"] is not None:
        peak = filled("of {:,.3g} TFLOP/s", summary["hardware"]["peak_tflops"])
        tiles.append(tile(f"{speed['mfu']:.1%}", "MFU", peak))
    if training["seconds"]:
        tiles.append(
            tile(f"{training['seconds']:.0f} s", "in all", filled("{:,} steps", training["steps"]))
        )
    return tiles


def _charts(curves: Sequence[Mapping[str, str]], metric: str | None) -> list[Chart]:
    deciding = f"val/{metric}"
    charts = []
    is_shown = any(deciding in names for names in _CHARTS.values())
    for title, names in (
        _CHARTS if is_shown else {**_CHARTS, f"{metric} on validation": (deciding,)}
    ).items():
        lines = [Curve(name, _points(curves, name)) for name in names]
        charts.append(line_chart(title, [line for line in lines if line.points]))
    return [chart for chart in charts if chart]


def _points(curves: Sequence[Mapping[str, str]], name: str) -> list[tuple[float, float]]:
    """A column over the steps; the last row of a killed run may be incomplete."""
    points = []
    for row in curves:
        with suppress(KeyError, TypeError, ValueError):
            points.append((float(row["step"]), float(row[name])))
    return [point for point in points if all(map(math.isfinite, point))]


def filled(form: str, value: Any) -> str:
    """A figure in words; empty where there is none."""
    return "" if value is None else form.format(value)


def render_text(template: str, **values: Any) -> str:
    """The text of a file; `template` is a name in `templates/` without its `.jinja`.

    Of a page, values are escaped.
    """
    return _environment().get_template(f"{template}.jinja").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=PackageLoader("flatout.report"),
        autoescape=select_autoescape(disabled_extensions=("md.jinja", "py.jinja"), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def draw_answers(task: Any, feeds: Feeds, folder: Path) -> list[Chart]:
    """The charts of a task on recordings, and files of its errors.

    Every rank answers, the first one draws.
    """
    from flatout.tasks.kept_answers import keep_answers

    kept = keep_answers(
        task, feeds.test or feeds.validation, "validation" if feeds.test is None else "test"
    )
    if task.global_rank != 0:
        return []
    write_rows(folder / RECORDINGS, kept.errors)  # the largest error first
    write_rows(folder / TARGETS, kept.of_targets)  # errors over all recordings
    # A chart for each recording that was kept, of what was measured and answered there; then the
    # errors.
    ranks = ["recording"]
    if len(kept.series) > 1:
        ranks = [
            "median recording",
            *(f"worst recording {number}" for number in range(1, len(kept.series))),
        ]
    charts = []
    for rank, each in zip(ranks, kept.series, strict=False):
        first = max(0, (len(each.places) - _MOST_POINTS) // 2)
        shown = slice(first, first + _MOST_POINTS)
        curves = [
            Curve(name, list(zip(each.places[shown].tolist(), values[shown].tolist(), strict=True)))
            for name, values in (("measured", each.truths), ("answered", each.answers))
        ]
        title = f"{rank}, {kept.target} RMSE {each.rmse:.3g}: {each.name.rpartition('/')[2]}"
        charts.append(line_chart(title, curves, x_label="sample"))
    charts.append(
        line_chart(
            f"error over {kept.target}", [Curve("RMSE", list(kept.by_value))], x_label=kept.target
        )
    )
    charts.append(
        line_chart("error over time", [Curve("RMSE", list(kept.by_time))], x_label=kept.time_name)
    )
    return [chart for chart in charts if chart is not None]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of errors as CSV; an empty file without any."""
    cells = [
        [f"{value:.6g}" if isinstance(value, float) else value for value in row.values()]
        for row in rows
    ]
    write_table(path, [list(rows[0]) if rows else [], *cells])

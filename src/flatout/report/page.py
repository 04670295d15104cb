"""`report.html`: one run on one page that can be printed; and how every page is rendered.

A page is one file: its style and its charts stand inside, so it opens without network and runs no
script. Its text is a template in `templates/`; every value is escaped, except a chart's own SVG. A
run on recordings also shows its predictions for the test split or, without one, for validation.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import without_codes
from flatout.files import read_modest, write_atomically, write_table
from flatout.masking import mask_settings
from flatout.report.figures import COLOURS, Chart, Curve, line_chart
from flatout.report.run_report import RunReport, class_cells, parts_of_step

if TYPE_CHECKING:
    from jinja2 import Environment

    from flatout.data.batches.feed import Feeds
    from flatout.tasks.sequences import SequenceRegressor

_MOST_BYTES_OF_CURVES = 1 << 30  # of weeks of training
_MOST_CONFUSED = 20  # classes in the table of answers
# title of a chart → the columns of `metrics.csv` in it; a chart without points is left out
_CHARTS = {
    "loss": ("train/loss", "val/loss"),
    "quality on validation": (
        "val/accuracy",
        "val/macro_f1",
        "val/subset_accuracy",
        "val/auroc",
        "val/f1",
        "val/dice",
        "val/precision",
        "val/recall",
        "val/exact",
        "val/masked_accuracy",
    ),
    "rows a second": ("speed/rows_per_s",),
    "the card's use": ("speed/mfu", "gpu/utilisation"),
    "error on validation": ("val/rmse", "val/mae"),
}
RECORDINGS = "recordings.csv"
TARGETS = "targets.csv"
_MOST_POINTS = 600  # samples drawn of a recording; of a longer one, those in its middle


def write_page(
    folder: Path,
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, str]],
    per_class: Sequence[Mapping[str, Any]],
    answers: Sequence[Chart] = (),
) -> Path:
    """Write `report.html` into a run folder; `curves` are the rows of its `metrics.csv`."""
    report = RunReport(mask_settings(summary), per_class)
    path = folder / "report.html"
    config = folder / "config.yaml"
    page = render_text(
        "report.html",
        report=report,
        summary=report.summary,
        figures=[*_score_tiles(report), *_speed_tiles(report)],
        curves=_charts(curves, report.summary),
        answers=answers,
        times=time_bar(parts_of_step(report.summary["speed"]["step_ms"])),
        classes=list(map(class_cells, per_class)),
        confusion=_confusion(per_class),
        settings=config.read_text("utf-8") if config.is_file() else "",
    )
    write_atomically(path, page)
    return path


def time_bar(parts: Iterable[tuple[str, float, float]]) -> list[dict[str, object]]:
    """Parts of a batch's time as a bar of a page shows them: name, milliseconds and share each."""
    return [
        {"share": share, "colour": colour, "text": f"{name} {ms:.2f} ms ({share:.0%})"}
        for (name, ms, share), colour in zip(parts, COLOURS, strict=False)
    ]


def _confusion(per_class: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A table of the commonest classes: labels down, answers across; empty where it is unknown."""
    shown = [row for row in per_class if "answered" in row][:_MOST_CONFUSED]
    names = [row["class"] for row in shown]
    table = [["labelled as", *names]] if shown else []
    for row in shown:
        table.append([row["class"], *(f"{row['answered'].get(name, 0):,}" for name in names)])
    return table


def read_curves(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's `metrics.csv`; none if there is no file.

    A killed run may have left half a last row: everything after the last line break is dropped.
    """
    if not (path := folder / "metrics.csv").is_file():
        return []
    text = read_modest(path, _MOST_BYTES_OF_CURVES)
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def tile(value: str, name: str, note: str = "") -> dict[str, str]:
    """A large figure on a page, its name below it, and a short note."""
    return {"value": value, "name": name, "note": note}


def _score_tiles(report: RunReport) -> list[dict[str, str]]:
    tiles = []
    for score in report.scores:
        if score.name.startswith("test/") and score.name != "test/loss":
            note = score.interval
            if score.of_baseline:
                share = score.share_of_baseline
                beside = f" {share} of the " if share else f" {score.of_baseline:.4f} by the "
                note += f"{beside}{report.baseline}"
            note += score.of_commonest
            tiles.append(tile(f"{score.value:.4f}", score.name, note.strip()))
    return tiles


def _speed_tiles(report: RunReport) -> list[dict[str, str]]:
    speed = report.summary["speed"]
    seconds = report.summary["training"]["seconds"]
    tiles = []
    if speed["rows_per_s"]:
        padding = filled("padding {:.1%}", speed["padding_share"])
        tiles.append(tile(f"{speed['rows_per_s']:,.0f}", "rows/s", padding))
    if speed["tokens_per_s"]:
        tiles.append(tile(f"{speed['tokens_per_s']:,.0f}", "tokens/s"))
    if speed["mfu"] is not None:
        peak = filled("of {:,.3g} TFLOP/s", report.summary["hardware"]["peak_tflops"])
        tiles.append(tile(f"{speed['mfu']:.1%}", "MFU", peak))
    if seconds:
        tiles.append(tile(f"{seconds:.0f} s", "in all", report.steps))
    if report.cost:
        tiles.append(tile(report.cost, "energy and money", report.time))
    return tiles


def _charts(curves: Sequence[Mapping[str, str]], summary: Mapping[str, Any]) -> list[Chart]:
    """The charts of a run; the metric that chooses its weights is always among them."""
    metric = summary["metric"]
    deciding = f"val/{metric}"
    columns = dict(_CHARTS)
    if not any(deciding in names for names in columns.values()):
        columns[f"{metric} on validation"] = (deciding,)
    charts = []
    for title, names in columns.items():
        lines = [Curve(name, _points(curves, name)) for name in names]
        charts.append(line_chart(title, [line for line in lines if line.points]))
    lines = []
    for name in ("error", "at_most"):
        shares = [(cut["share"], cut[name]) for cut in summary.get("abstention") or []]
        lines.append(Curve(name.replace("_", " "), shares))
    charts.append(line_chart("error of the surest answers", lines, x_label="share answered"))
    return [chart for chart in charts if chart]


def _points(curves: Sequence[Mapping[str, str]], name: str) -> list[tuple[float, float]]:
    """A column over the steps, without cells that are empty or not finite."""
    points = []
    for row in curves:
        # a row holds the columns of its step only; a killed run's last one may be half written
        with suppress(KeyError, TypeError, ValueError):
            points.append((float(row["step"]), float(row[name])))
    return [point for point in points if all(map(math.isfinite, point))]


def filled(form: str, value: object) -> str:
    """A number in its form, `filled("{:,} steps", 1200)`; empty for None."""
    return "" if value is None else form.format(value)


def render_text(template: str, **values: Any) -> str:
    """Fill in a template, named without its `.jinja`; in HTML all values are escaped."""
    return _environment().get_template(f"{template}.jinja").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("flatout.report"),
        autoescape=select_autoescape(disabled_extensions=("md.jinja", "py.jinja"), default=True),
        undefined=StrictUndefined,
        finalize=_without_codes,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["as_markdown"] = as_markdown
    return environment


def _without_codes(value: object) -> object:
    """A text with codes and marks of direction written out; anything else stays as it is."""
    # a chart's own SVG is of another class
    return without_codes(value) if type(value) is str else value


def as_markdown(text: object) -> str:
    """A text on one line that Markdown shows unchanged: names of classes come with the data."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~&$])", r"\\\1", " ".join(str(text).split()))


def draw_answers(task: SequenceRegressor, feeds: Feeds, folder: Path) -> list[Chart]:
    """Draw what a task on recordings predicts, and write its errors as CSV into the folder.

    Every rank predicts its part; only the first one writes and returns charts.
    """
    from flatout.tasks.kept_answers import keep_answers

    answers = keep_answers(
        task, feeds.test or feeds.validation, "validation" if feeds.test is None else "test"
    )
    if task.global_rank != 0:
        return []
    write_rows(folder / RECORDINGS, answers.errors)  # the largest error first
    write_rows(folder / TARGETS, answers.of_targets)  # errors over all recordings
    charts = []
    # `keep_answers` puts the recording of median error first, then the worst ones
    for rank, series in enumerate(answers.series):
        name = f"worst recording {rank}" if rank else "median recording"
        if len(answers.series) == 1:
            name = "recording"
        first = max(0, (len(series.places) - _MOST_POINTS) // 2)
        shown = slice(first, first + _MOST_POINTS)
        samples = series.places[shown].tolist()
        curves = [
            Curve("measured", list(zip(samples, series.truths[shown].tolist(), strict=True))),
            Curve("answered", list(zip(samples, series.answers[shown].tolist(), strict=True))),
        ]
        file_name = series.name.rpartition("/")[2]
        title = f"{name}, {answers.target} RMSE {series.rmse:.3g}: {file_name}"
        charts.append(line_chart(title, curves, x_label="sample"))
    by_value = [Curve("RMSE", list(answers.by_value))]
    charts.append(line_chart(f"error over {answers.target}", by_value, x_label=answers.target))
    by_time = [Curve("RMSE", list(answers.by_time))]
    charts.append(line_chart("error over time", by_time, x_label=answers.time_name))
    return [chart for chart in charts if chart is not None]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of errors as CSV, numbers with six digits; without rows the file is empty."""
    table = [list(rows[0]) if rows else []]
    for row in rows:
        shortened = {
            name: f"{value:.6g}" for name, value in row.items() if isinstance(value, float)
        }
        table.append(list((row | shortened).values()))
    write_table(path, table)

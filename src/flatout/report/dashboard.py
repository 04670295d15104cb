"""What a run shows in TensorBoard beside its curves: chart layout, closing text and figures.

The layout is written with the first curves. The closing text, the figures and the precision-recall
curves follow at the end, in a separate event file, which a resumed run replaces. Settings and final
metrics (the HPARAMS page) have a third file, so a resumed run is listed once. A sweep lists the
settings that it searched instead of all settings of a trial. TensorBoard shows figures as pixels.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatout.errors import printable
from flatout.report.closing import closing_markdown
from flatout.report.figures import (
    COLOURS,
    GRID,
    INK,
    LETTER,
    MUTED,
    PAPER,
    add_axes,
    drawing,
    ignoring_missing_glyphs,
)
from flatout.report.run_report import parts_of_step
from flatout.report.summary import flattened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flatout.tasks.metrics import Counted

_LONGEST = 22  # letters of a class name in a figure
# 1.5 times the pixels of a page (72): TensorBoard enlarges a picture that is clicked
_DPI = 108
# Settings by which runs are compared on the HPARAMS page, beside all of model, optim and task.
_COMPARED = (
    "data.batch_size",
    "data.accumulate",
    "data.effective_batch",
    "data.tokens_per_batch",
    "data.max_length",
    "precision",
    "seed",
    "trainer.max_epochs",
)
# heading → title of a chart → its kind and the curves in it
Layout = dict[str, dict[str, list[Any]]]


def layout(metrics: Sequence[str], *, has_card: bool) -> Layout:
    """The charts under each heading; `metrics` are names without their `val/`.

    A run without a GPU gets no charts of one.
    """
    from flatout.callbacks.clock import PARTS

    charts = [
        ("speed", "rows a second", ["speed/rows_per_s"]),
        ("speed", "tokens a second", ["speed/tokens_per_s"]),
        ("speed", "padding, fraction", ["speed/padding_share"]),
        ("speed", "fraction of the card's peak (MFU)", ["speed/mfu"]),
        ("time", "parts of a batch's time, ms", [f"time/{part}_ms" for part in PARTS]),
        ("time", "time of a step, 50th and 99th percentile, ms", ["time/p50_ms", "time/p99_ms"]),
        (
            "memory",
            "memory, GB",
            ["host/process_memory_gb", "host/available_memory_gb", "gpu/memory_gb"],
        ),
        ("loss", "training and validation loss", ["train/loss", "val/loss"]),
        ("loss", "learning rate", ["train/lr"]),
        ("quality", "validation metrics", [f"val/{name}" for name in metrics]),
        ("gpu", "in use", ["gpu/utilisation", "gpu/throttled_share"]),
        ("gpu", "power, W", ["gpu/power_w"]),
        ("gpu", "temperature, °C", ["gpu/temperature_c"]),
        ("gpu", "clocks, MHz", ["gpu/sm_clock_mhz", "gpu/memory_clock_mhz"]),
    ]
    headings: Layout = {}
    for heading, title, tags in charts:
        if not has_card:
            tags = [tag for tag in tags if not tag.startswith(("gpu/", "speed/mfu"))]
        if tags:
            # TensorBoard takes each as a regular expression: `$` keeps `loss` from `loss_ema`
            curves = [f"{tag}$" for tag in tags]
            headings.setdefault(heading, {})[title] = ["Multiline", curves]
    return headings


def write_dashboard(
    folder: Path, summary: dict[str, Any], settings: dict[str, Any], counted: Counted | None
) -> None:
    """Write everything that follows a run's curves, at its last step.

    `counted`, what validation counted for each class, gives the confusion figure and the
    precision-recall curves; `settings` are those of the HPARAMS page.
    """
    step = summary["training"]["steps"] or 0
    with event_file(folder, ".closing") as writer, ignoring_missing_glyphs():
        writer.add_text("verdict", closing_markdown(summary), step)
        if (figure := time_figure(summary["speed"]["step_ms"])) is not None:
            # close=False: pyplot, which would close it, does not know the figure
            writer.add_figure("time/each_step", figure, step, close=False)
        if counted is not None:
            if counted.confusion is not None:
                figure = confusion_figure(counted.classes, counted.confusion)
                writer.add_figure("validation/confusion", figure, step, close=False)
            for name, points in precision_over_recall(counted).items():
                writer.add_pr_curve_raw(
                    f"validation/{name}", *points, step, num_thresholds=points.shape[1]
                )
    speed = {name: summary["speed"][name] for name in ("rows_per_s", "tokens_per_s")}
    write_hyperparameters(folder, settings, {**summary["metrics"], **speed}, step)


def precision_over_recall(counted: Counted) -> dict[str, NDArray[np.float64]]:
    """Precision-recall curves of the commonest classes, as TensorBoard takes them."""
    # Each is [6, points]: true and false positives, true and false negatives, precision, recall.
    # The points are evenly spaced logits, so that a confident model has a curve too. TensorBoard's
    # thresholds are not theirs.
    if counted.binned is None:
        return {}
    count = min(127, len(counted.binned))  # TensorBoard keeps no more points
    thinned = np.linspace(0, len(counted.binned) - 1, count).round().astype(int)
    binned = counted.binned[thinned].astype(np.float64)  # [points, classes, target, answer]
    right = binned[..., 1, 1]
    wrong = binned[..., 0, 1]
    missed = binned[..., 1, 0]
    left = binned[..., 0, 0]
    answered = right + wrong
    labelled = right + missed
    precision = np.where(answered > 0, right / np.maximum(answered, 1), 1.0)
    recall = right / np.maximum(labelled, 1)
    curves = np.stack([right, wrong, left, missed, precision, recall])
    most = len(counted.classes) if counted.confusion is None else 20
    commonest = np.argsort(-labelled[0], kind="stable")[:most]
    # a class without a row has no recall
    return {counted.classes[k]: curves[:, :, k] for k in commonest if labelled[0, k]}


def write_hyperparameters(
    folder: Path, settings: dict[str, Any], metrics: dict[str, float | None], step: int
) -> None:
    """List a run on TensorBoard's HPARAMS page; each metric is one point, named `final/…`."""
    from torch.utils.tensorboard.summary import hparams

    known = {name: value for name, value in metrics.items() if value is not None}
    finals = {f"final/{name.replace('/', '_')}": value for name, value in known.items()}
    # the page sorts numbers, texts and booleans, and refuses everything else
    plain = dict(settings)
    for key, value in settings.items():
        if not isinstance(value, bool | int | float | str):
            plain[key] = str(value)
    with event_file(folder, ".hparams") as writer:
        for summary in hparams(plain, finals):
            writer._get_file_writer().add_summary(summary)
        for name, value in finals.items():
            writer.add_scalar(name, value, step)


@contextmanager
def event_file(folder: Path, suffix: str) -> Iterator[Any]:
    """A writer of an event file that replaces those with the same suffix when it is complete."""
    # TensorBoard reads a folder's files in the order of their names: the second they were begun in,
    # then a number as text, where 10 comes before 9. A resumed run's curves begin with a note that
    # drops all points read before it from its first step on. So the file is written apart and gets
    # a second after all others: the note never drops its points.
    from torch.utils.tensorboard import SummaryWriter

    before = list(folder.glob(f"events.*{suffix}"))
    # in this folder: the disk of temporary files may be full, and the run has ended well
    with tempfile.TemporaryDirectory(prefix=".events-", dir=folder) as apart:
        with closing(SummaryWriter(apart, filename_suffix=suffix)) as writer:
            yield writer
        written = next(Path(apart).iterdir())
        head, second, rest = re.split(r"(?<=tfevents\.)(\d+)", written.name, maxsplit=1)
        names = " ".join(path.name for path in folder.glob("events.*"))
        latest = max(map(int, re.findall(r"tfevents\.(\d+)\.", names)), default=0)
        shutil.move(written, folder / f"{head}{max(int(second), latest + 1)}{rest}")
    for path in before:
        path.unlink(missing_ok=True)


def compared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which runs are compared, by their dotted keys; unset ones are left out."""
    return {
        key: value
        for key, value in flattened(settings).items()
        if value not in (None, {})
        and (key in _COMPARED or key.startswith(("model.", "optim.", "task.")))
    }


def confusion_figure(classes: Sequence[str], counts: NDArray[np.integer]) -> Figure:
    """Confusion of the 40 commonest classes: true ones down, predicted ones across.

    `counts` are [true class, predicted class]; a cell is coloured by its fraction of the true
    class's rows.
    """
    from matplotlib.colors import LinearSegmentedColormap

    order = np.argsort(-counts.sum(1), kind="stable")[:40]
    shown = counts[np.ix_(order, order)]
    names = [printable(classes[index]) for index in order]
    for index, name in enumerate(names):
        if len(name) > _LONGEST:
            names[index] = f"{name[: _LONGEST - 1]}…"
    shares = shown / np.maximum(counts[order].sum(1, keepdims=True), 1)
    # All sizes are pixels. A cell is as large as its picture allows, the margins hold the names.
    size = int(np.clip(640 // len(names), 16, 72))
    margin = 24 + LETTER * 1.1 * max(map(len, names))
    edge = size * len(names)
    head = 30
    of_all = f" (the {len(names)} commonest of {len(classes)})" if len(names) < len(classes) else ""
    with drawing(max(margin + edge + 16, 400), head + margin + edge + 16, dpi=_DPI) as figure:
        width = figure.get_size_inches()[0] * 72
        axes = add_axes(
            figure, left=margin, right=width - margin - edge, top=head + margin, bottom=16
        )
        axes.imshow(
            shares, cmap=LinearSegmentedColormap.from_list("", [PAPER, COLOURS[0]]), vmin=0, vmax=1
        )
        axes.set(xticks=range(len(names)), yticks=range(len(names)), yticklabels=names)
        axes.set_xticklabels(names, rotation=90)
        axes.tick_params(
            labelcolor=INK, labeltop=True, labelbottom=False, labelsize=11 if size < 30 else 12
        )
        axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.grid(visible=False)
        axes.grid(which="minor", color=GRID)
        _write_counts(axes, shown, shares, size)
        figure.text(
            12 / width,
            0.985,
            f"true class down, predicted class across{of_all}",
            va="top",
            fontsize=13,
        )
    return figure


def _write_counts(
    axes: Axes, counts: NDArray[np.integer], shares: NDArray[np.floating], size: int
) -> None:
    """Write each count into its cell of `size` pixels, if it has room there."""
    for down, across in zip(*np.nonzero(counts), strict=True):
        if len(text := str(counts[down, across])) * LETTER * 1.1 < size - 2:
            axes.text(
                across,
                down,
                text,
                color=PAPER if shares[down, across] > 0.55 else INK,  # on a dark cell
                fontsize=9 if size < 30 else 11,
                ha="center",
                va="center",
            )


def time_figure(step_ms: Mapping[str, float | None]) -> Figure | None:
    """One bar of the parts of a batch's time, and a line for each with its time and fraction.

    None if fewer than two parts are known: a single part says nothing.
    """
    if len(parts := parts_of_step(step_ms)) < 2:
        return None
    with drawing(484, 120 + 26 * len(parts), dpi=_DPI) as figure:
        axes = add_axes(figure, left=12, right=12, top=44, bottom=12)
        axes.set(xlim=(0, 1), ylim=(2.4 + 0.65 * len(parts), 0))
        axes.set_axis_off()
        axes.set_title(
            f"each batch: {sum(ms for _, ms, _ in parts):.2f} ms", loc="left", fontsize=15
        )
        before = 0.0
        for row, ((name, value, share), colour) in enumerate(zip(parts, COLOURS, strict=False)):
            y = 2.4 + 0.65 * row
            axes.barh(0.8, share, left=before, height=1.2, color=colour)
            axes.barh(y, 0.03, height=0.4, color=colour)
            before += share
            axes.text(0.05, y, name, color=INK, fontsize=14, ha="left", va="center")
            axes.text(0.5, y, f"{value:.3f} ms", color=INK, fontsize=14, ha="right", va="center")
            axes.text(0.65, y, f"{share:.1%}", color=MUTED, fontsize=14, ha="right", va="center")
    return figure

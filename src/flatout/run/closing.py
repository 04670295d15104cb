"""The end of a run: its model, its summary and its reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from flatout.callbacks.profile_steps import TABLE, TRACE
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.data.batches.feed import Feeds
from flatout.distributed.ranks import Ranks
from flatout.engine.peaks import measured_peak
from flatout.inference.folder import Answers
from flatout.report.closing import print_closing
from flatout.report.dashboard import write_dashboard
from flatout.report.figures import Chart
from flatout.report.page import read_curves, write_page
from flatout.run.run_folder import RunFolder
from flatout.run.trainer import Training
from flatout.tasks.task import Task


def find_peak(training: Training, feeds: Feeds, ranks: Ranks) -> None:
    """Where no table tells what the device could do, try it: now, so that no first step waits for it.

    The run's threads and its way of making fp32 products are still set. So a CPU has no curve of its MFU: measured
    before the first step it would delay every run, for a curve with the shape of that of rows a second.
    """
    throughput = training.curves.throughput
    if ranks.is_first and throughput.peak is None and throughput.total.flops:
        throughput.peak = measured_peak(feeds.train.device, str(training.trainer.precision))


def save_model(predictor: Answers, network: Any, folder: RunFolder) -> None:
    """Write the `model/` folder."""
    if isinstance(network, nn.Module):
        folder.say("model/ is not written: the settings of your own model are not known")
    else:
        predictor.save(folder.path / "model", network)


def summarise(folder: RunFolder, task: Task, feeds: Feeds, training: Training, seconds: float) -> None:
    """Fill the summary with what was trained, on what, and how fast."""
    rows_per_step = feeds.train.plan.rows_per_batch * feeds.train.plan.parts
    summarise_speed(
        folder, task.model, training, seconds, rows_per_step=rows_per_step, counts_tokens=task.counts_tokens
    )


def summarise_speed(
    folder: RunFolder,
    model: nn.Module,
    training: Training,
    seconds: float,
    *,
    rows_per_step: int,
    counts_tokens: bool = False,
) -> None:
    """Fill the summary for any model."""
    summary, curves = folder.summary, training.curves
    throughput, timer = curves.throughput, curves.timer
    rates = throughput.total.values()
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    summary.update("model", {"name": type(model).__name__, "parameters": count, "trainable": trained})
    if (peak := throughput.peak) is not None:
        summary.update("hardware", {"peak_tflops": peak.tflops, "peak_source": peak.source})
    summary.update(
        "training",
        {
            "epochs": curves.epochs,
            "steps": curves.steps,
            "rows_per_step": rows_per_step,
            "seconds": round(seconds, 2),
            "seconds_to_first_step": timer.seconds_to_first_step,
            "skipped_steps": len(training.loop.skipped),
            "out_of_memory": training.loop.passes.times_out,
        },
    )
    for name in ("rows_per_s", *(("tokens_per_s", "padding_share") if counts_tokens else ())):
        summary.set(f"speed.{name}", rates.get(f"speed/{name}", 0.0))
    for name, value in timer.total.values().items():
        summary.set(f"speed.step_ms.{name.removeprefix('time/').removesuffix('_ms')}", value or None)
    times = timer.step_times
    summary.update("speed.step_percentiles_ms", {f"p{share}": _ms(times.percentile(share / 100)) for share in _SHARES})
    summary.set("speed.first_steps_ms", [_ms(seconds) for seconds in times.first])
    summary.set("speed.mfu", throughput.mfu(throughput.total))
    for group, found in curves.monitor.summary().items():
        summary.update(f"speed.{group}", found)


_SHARES = (50, 90, 99)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def write_reports(
    folder: RunFolder,
    task: Task,
    per_class: list[dict[str, Any]],
    *,
    settings: dict[str, Any],
    has_tensorboard: bool,
    charts: Sequence[Chart] = (),
) -> None:
    """Write the page, print the closing table, and complete what TensorBoard shows of these settings."""
    values = {**folder.summary.values, "status": "finished"}
    write_page(folder.path, values, read_curves(folder.path), per_class, charts)
    artifacts = {"model": "model", "checkpoints": CHECKPOINTS, "page": "report.html", "curves": "metrics.csv"}
    artifacts |= {"trace": TRACE, "operators": TABLE}
    written = {name: path for name, path in artifacts.items() if (folder.path / path).exists()}
    folder.summary.update("artifacts", written)
    print_closing(values, folder.path, per_class)
    if has_tensorboard:
        write_dashboard(folder.path, values, settings, task.counted)

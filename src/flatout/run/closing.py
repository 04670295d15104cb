"""The end of a run: what it leaves behind, its model, its summary, its verdict and its reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from flatout.callbacks.profile_steps import TABLE, TRACE
from flatout.callbacks.throughput import FetchTimes
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.distributed.collectives import of_all_ranks
from flatout.distributed.ranks import Ranks, others_watched
from flatout.engine.compile import is_compiled
from flatout.engine.lightning_internals import callbacks_of
from flatout.engine.passes import TRAINING
from flatout.engine.peaks import measured_peak
from flatout.engine.precision import LIGHTNING_NAMES, Precision, choose_precision
from flatout.inference.run_predictor import RunPredictor
from flatout.models.encoder.transformer import Transformer
from flatout.perf.notes import measured_before
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence
from flatout.perf.verdict.experiments import MOST_S, SHARE, alone_ms, try_out, try_safely
from flatout.perf.verdict.gathering import evidence_of, evidence_of_own
from flatout.perf.verdict.own_tries import try_own
from flatout.perf.verdict.rules import verdict
from flatout.report.closing import print_closing
from flatout.report.dashboard import write_dashboard
from flatout.report.figures import Chart
from flatout.report.page import read_curves, write_page
from flatout.report.summary import read_summary
from flatout.run.kinds import kind_of, load_predictor
from flatout.run.own_parts import NoAnswers
from flatout.run.resolve import Settings
from flatout.run.rival import find_rival
from flatout.run.run_folder import RunFolder
from flatout.run.trainer import Training, settings_to_compare
from flatout.tasks.task import Task

Answers = RunPredictor | NoAnswers  # what answers for new rows after training


@dataclass(slots=True)
class Result:
    """What a finished run leaves behind."""

    folder: Path
    metrics: dict[str, float]  # `val/…` of the best checkpoint and `test/…`
    per_class: list[dict[str, Any]]
    predictor: Answers
    summary: dict[str, Any]
    metric: str  # name of the validation metric that decided which checkpoint is best

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What limited the run; None where it was too short to tell."""
        return self.summary["verdict"]

    @property
    def objective(self) -> float:
        """The validation metric of the best checkpoint: what a sweep compares; NaN where a module
        logs none.
        """
        return self.metrics.get(f"val/{self.metric}", math.nan)

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        """Answers for new texts, or for new encodings."""
        return self.predictor.predict(rows)


def answers_of(config: RunConfig, folder: Path) -> Answers:
    return NoAnswers(type(config.task).__name__) if config.has_own_parts else load_predictor(folder)


def finished_result(folder: Path, answers: Answers) -> Result:
    """What a run has left that has finished before."""
    summary = read_summary(folder)
    metrics = {
        name: float(value) for name, value in summary["metrics"].items() if value is not None
    }
    return Result(folder, metrics, [], answers, summary, summary["metric"] or "loss")


def keep_answers(
    config: RunConfig,
    module: Any,
    feeds: Feeds | None,
    training: Training,
    ranks: Ranks,
    folder: RunFolder,
) -> tuple[Answers, list[dict[str, Any]], list[Chart]]:
    """What the trained network answers with, which is saved; its scores by class, and charts of its
    answers.
    """
    if feeds is None:
        return NoAnswers(type(module).__name__), [], []
    kind = kind_of(config.data)
    strategy = cast(Any, training.trainer.strategy)
    # ranks hold slices: all of them on each rank's host, to answer and to be saved with
    if module.is_sharded:
        with others_watched():
            module.model = strategy.gathered(module.model)
        module.is_sharded = False
    per_class = module.per_class()
    predictor = kind.predictor.of(module)
    charts = [] if kind.draw is None else kind.draw(module, feeds, folder.path)
    if ranks.is_first and isinstance(config.model, nn.Module):
        folder.say("model/ is not written: the settings of your own model are not known")
    elif ranks.is_first:
        predictor.save(folder.path / "model", config.model)
    # Where no table tells what the device could do it is tried now, so that no first step waits for
    # it: the run's threads and its way of making fp32 products are still set. So a CPU has no curve
    # of its MFU.
    throughput = training.curves.throughput
    if ranks.is_first and throughput.peak is None and throughput.volume.total.flops:
        throughput.peak = measured_peak(feeds.train.device, str(training.trainer.precision))
    return predictor, per_class, charts


def summarise(
    module: Any, feeds: Feeds | None, training: Training, seconds: float, folder: RunFolder
) -> None:
    """Fill the summary with what was trained, on what, and how fast."""
    put = folder.summary.set
    curves = training.curves
    loop = training.loop
    trainer = training.trainer
    throughput = curves.throughput
    total = curves.throughput.volume.total
    timer = curves.timer
    rates = total.values()
    model = module if feeds is None else module.model
    if feeds is None:
        rows_per_step = round(total.rows / max(1, total.steps))
    else:
        rows_per_step = feeds.train.plan.rows_per_batch * feeds.train.plan.parts
    count = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    put("model", {"name": type(model).__name__, "parameters": count, "trainable": trained})
    if (peak := throughput.peak) is not None:
        put("hardware", {"peak_tflops": peak.tflops, "peak_source": peak.source})
    put(
        "training",
        {
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "rows_per_step": rows_per_step,
        },
    )
    put(
        "training",
        {"seconds": round(seconds, 2), "seconds_to_first_step": timer.seconds_to_first_step},
    )
    num_out_of_memory = loop.passes.num_out_of_memory
    put("training", {"skipped_steps": len(loop.skipped), "out_of_memory": num_out_of_memory})
    counts_tokens = feeds is not None and module.counts_tokens
    for name in ("rows_per_s", *(("tokens_per_s", "padding_share") if counts_tokens else ())):
        put(f"speed.{name}", rates.get(f"speed/{name}", 0.0))
    for name, value in timer.times.total.values().items():
        put(f"speed.step_ms.{name.removeprefix('time/').removesuffix('_ms')}", value or None)
    percentiles = {f"p{share}": timer.step_times.percentile(share / 100) for share in (50, 90, 99)}
    put(
        "speed.step_percentiles_ms",
        {name: each and round(1000 * each, 3) for name, each in percentiles.items()},
    )
    put("speed.first_steps_ms", [round(1000 * seconds, 3) for seconds in timer.step_times.first])
    put("speed.mfu", throughput.mfu(total))
    for group, found in curves.monitor.summary().items():
        put(f"speed.{group}", found)


def write_verdict(
    settings: Settings, module: Any, feeds: Feeds | None, training: Training, folder: RunFolder
) -> None:
    """Judge what held the run back, and write evidence and verdict into the summary."""
    if feeds is None:
        evidence = _judge_own(settings.asked, module, training, folder)
    else:
        evidence = judge(module, feeds, settings, training, folder)
    if evidence is None:
        folder.say(f"verdict: none, a verdict needs {LEAST_STEPS} steps")
    elif folder.is_first:
        folder.summary.set("evidence", asdict(evidence))
        found = verdict(evidence)
        folder.summary.set("verdict", {**found, "ladder": measured_before(found["override"])})


def judge(
    task: Task, feeds: Feeds, settings: Settings, training: Training, folder: RunFolder
) -> Evidence | None:
    """At the end, on all ranks: try what could be faster; the evidence, None after too
    few steps.
    """
    asked = settings.asked
    curves = training.curves
    precision = str(training.trainer.precision)
    batches = curves.throughput.volume.total.batches
    evidence = evidence_of(curves, feeds.train, precision, batches / (settings.batches or 1))
    may_try = asked.monitor.verdict and not asked.is_sharded
    ranks = _of_all_ranks(task, feeds, training, evidence if may_try else None)
    if evidence is None:
        return None
    evidence.effective_batch = asked.data.effective_batch
    evidence.tuned_layers = _tuned_layers(task)
    evidence.pieces = training.loop.passes.pieces[TRAINING]
    is_measured = "precision" in (folder.summary.values["tune"] or {}).get("values", {})
    usual = choose_precision(Precision.auto, task.device).value
    if (
        asked.precision in (Precision.fp32, Precision.bf16)
        and not is_measured
        and LIGHTNING_NAMES[usual] != precision
    ):
        evidence.native = usual.value
    if ranks:
        evidence.ranks = ranks
        evidence.not_tried = "on several ranks nothing else is tried"
    elif may_try:
        compiles = bool(asked.compile) or is_compiled(task.model)
        try_safely(evidence, partial(try_out, task, feeds, evidence, is_compiled=compiles))
    return evidence


def _tuned_layers(task: Task) -> int:
    """Layers of a pretrained encoder of which all are trained."""
    network = task.model
    is_pretrained = getattr(task.model_config, "pretrained", None) is not None
    if (
        not is_pretrained
        or not isinstance(network, Transformer)
        or not network.is_flat
        or network.predicts_words
    ):
        return 0
    return (
        len(network.in_order())
        if all(weight.requires_grad for weight in network.parameters())
        else 0
    )


def _of_all_ranks(
    task: Task, feeds: Feeds, training: Training, evidence: Evidence | None
) -> list[dict[str, float]]:
    """Of several ranks each one's parts of a batch, and what it takes alone where something may be
    tried.
    """
    if feeds.train.plan.world == 1:
        return []
    counted = training.curves.timer.times.counted()
    own = {name: 1000 * spent / max(1, counted.batches) for name, spent in counted.split().items()}
    if evidence is not None and training.loop.passes.pieces[TRAINING] == 1:
        # your own model may raise anything, and the other ranks wait for this one
        with suppress(Exception):
            own["alone"] = alone_ms(
                task, feeds, min(SHARE * evidence.total_ms * evidence.batches / 1000, 5.0)
            )
    return of_all_ranks(own)


def _judge_own(
    config: RunConfig, module: Any, training: Training, folder: RunFolder
) -> Evidence | None:
    trainer, curves = training.trainer, training.curves
    fetches = next(each for each in callbacks_of(trainer) if isinstance(each, FetchTimes))
    evidence = evidence_of_own(curves, trainer, fetches.ms)
    if evidence is not None and config.monitor.verdict:
        trained_s = evidence.total_ms * evidence.batches / 1000
        try_own(trainer, module, fetches.loader, evidence, seconds=MOST_S, trained_s=trained_s)
        for note in evidence.notes:
            folder.say(f"verdict: {note}")
    return evidence


def report_kind(
    config: RunConfig, data: Any, task: Task, predictor: Any, seconds: float, folder: RunFolder
) -> None:
    """Add what the kind of the data has beside each result: the scores of a simple model, and a
    study of its own.
    """
    kind = kind_of(config.data)
    values = folder.summary.values
    if kind.rival is not None and config.monitor.rival:
        folder.summary.set("rival", find_rival(*kind.rival, data, values, seconds, folder))
    if kind.report is not None:
        kind.report(task, predictor, data.feeds, values, folder.path, folder)


def write_reports(
    settings: Settings, module: Any, scores: list[Any], charts: list[Chart], folder: RunFolder
) -> None:
    """Write the page, print the closing table, and complete what TensorBoard shows of these
    settings.
    """
    values = {**folder.summary.values, "status": "finished"}
    write_page(folder.path, values, read_curves(folder.path), scores, charts)
    artifacts = {
        "model": "model",
        "checkpoints": CHECKPOINTS,
        "page": "report.html",
        "curves": "metrics.csv",
    }
    artifacts |= {"trace": TRACE, "operators": TABLE}
    folder.summary.set(
        "artifacts",
        {name: path for name, path in artifacts.items() if (folder.path / path).exists()},
    )
    print_closing(values, folder.path, scores)
    if "tensorboard" in settings.asked.logger and not settings.asked.has_own_parts:
        write_dashboard(folder.path, values, settings_to_compare(settings), module.counted)

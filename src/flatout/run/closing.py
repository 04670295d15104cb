"""The end of a run: keep its model, fill its summary, judge what limited it, write its reports.

`run/run.py` calls the stages in this order: answers are kept (`keep_task`), then `write_verdict`,
`summarise`, `report_kind`, `write_reports`. Ranks compute the first two together; the others are
for the first rank alone. `Result` is what Python users get back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.profile_steps import TABLE, TRACE
from flatout.callbacks.step_timer import StepTimer
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.config import ALWAYS, RunConfig
from flatout.distributed.collectives import of_all_ranks
from flatout.distributed.ranks import others_watched
from flatout.engine.compile import is_compiled
from flatout.engine.lightning_internals import overrides
from flatout.engine.pieces import TRAINING
from flatout.engine.precision import LIGHTNING_NAMES, Precision, choose_precision
from flatout.engine.run_length import EPOCHS
from flatout.files import values_of
from flatout.inference.fingerprint import Fingerprint
from flatout.inference.model_folder import ModelFolder
from flatout.models.contract import is_pretrained
from flatout.models.encoder.transformer import Transformer
from flatout.perf.notes import measured_before
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence
from flatout.perf.verdict.experiments import MOST_S, SHARE, alone_ms, try_out, try_safely
from flatout.perf.verdict.gathering import evidence_of
from flatout.perf.verdict.rules import verdict
from flatout.price.costs import TRIES_SHARE_IN_BUDGET
from flatout.report.closing import print_closing
from flatout.report.page import read_curves, write_page
from flatout.report.run_report import RunReport
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import read_summary
from flatout.run.context import Answers, OurParts, Run, RunAnswers, Settings, Training
from flatout.run.kinds import kind_of
from flatout.run.result_findings import find_in_result
from flatout.run.rival import (
    LINEAR,
    compare_with_rival,
    find_rival,
    keep_rival,
    rival_limit_s,
    score_beside,
    wins_clearly,
)
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task

_MOST_ALONE_S = 5.0  # that a rank trains alone, to time it


@dataclass(slots=True, repr=False)
class Result:
    """What a finished run leaves behind. Printed, it names its folder and its scores."""

    folder: Path
    metrics: dict[str, float]  # `val/…` of the best checkpoint and `test/…`
    per_class: list[dict[str, Any]]
    predictor: Answers
    summary: dict[str, Any]
    metric: str  # name of the validation metric that decided which checkpoint is best

    def __repr__(self) -> str:
        is_tested = any(name.startswith("test/") for name in self.metrics)
        split = "test/" if is_tested else "val/"
        lines = [f"Result of the run in {self.folder}"]
        for name, value in self.metrics.items():
            if name.startswith(split):
                lines.append(f"{name:<18} {value:.4f}")
        return "\n".join(lines)

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

    @property
    def spent(self) -> dict[str, float]:
        """`kwh` and `money` of the run, as far as they are known."""
        return RunReport(self.summary).spent

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        """Answers for new texts, or for new encodings."""
        return self.predictor.predict(rows)


def finished_result(folder: Path, answers: Answers) -> Result:
    """The result of a run that has finished before, from its folder."""
    summary = read_summary(folder)
    with values_of(folder / SUMMARY):
        metrics = {name: float(value) for name, value in RunReport(summary).metrics.items()}
    return Result(folder, metrics, [], answers, summary, summary["metric"] or "loss")


def keep_task(run: Run, ours: OurParts, training: Training) -> RunAnswers:
    """Save the trained network in `model/`, and collect what is shown of its answers.

    Every rank takes part.
    """
    config = run.settings.asked
    folder = run.folder
    task = ours.task
    kind = kind_of(config.data)
    if task.is_sharded:
        # Each rank gathers all slices on its host, to answer and to save them.
        strategy = cast(Any, training.trainer.strategy)
        with others_watched():
            task.take_whole(strategy.gathered(task.model))
    per_class = task.per_class()
    predictor = kind.predictor.of(task)
    predictor.held_out = task.held_out
    predictor.held_out_errors = task.held_out_errors
    if kind.keeps_rows:
        splits = (ours.feeds.train.split, ours.feeds.validation.split)
        predictor.fingerprint = Fingerprint.of(*splits, task.info.vocabulary.unknown)
    charts = [] if kind.draw is None else kind.draw(task, ours.feeds, folder.path)
    if run.ranks.is_first:
        if isinstance(config.model, nn.Module):
            folder.say("model/ is not written: the settings of your own model are not known")
        elif overrides(task, "build_model", kind.task):
            folder.say(f"model/ is not written: {type(task).__name__} builds a network of its own")
        else:
            predictor.save(folder.path / "model", config.model)
            arrays = (predictor.held_out, predictor.held_out_errors, predictor.fingerprint)
            for kept in filter(None, arrays):
                kept.write(folder.path / "model")
        # A CPU has its MFU in the summary, and no curve of it: no first step waited to time it.
        # Threads and precision are still the run's.
        training.curves.throughput.measure_missing_peak(
            ours.feeds.train.device, str(training.trainer.precision)
        )
    return RunAnswers(predictor, per_class, charts)


def summarise(run: Run, training: Training, seconds: float) -> None:
    """Fill the summary with what was trained, and how fast; `seconds`: of the whole run."""
    put = run.folder.summary.set
    trainer = training.trainer
    loop = training.loop
    timer = training.curves.timer
    throughput = training.curves.throughput
    total = throughput.volume.total
    put("model", _summarise_model(run.parts.network))
    peak = throughput.peak
    if peak is not None:
        put("hardware", {"peak_tflops": peak.tflops, "peak_source": peak.source})
    put(
        "training",
        {
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "rows_per_step": run.parts.rows_per_step(training),
            "seconds": round(seconds, 2),
            "best_epoch": training.checkpoints.best_so_far.epoch,
            "seconds_to_first_step": timer.seconds_to_first_step,
            "skipped_steps": len(loop.skipped),
            "out_of_memory": loop.pieces.num_out_of_memory,
        },
    )
    if loop.graph_facts:
        put("step_graph", loop.graph_facts)
    rates = total.values()
    for name in run.parts.rate_names():
        put(f"speed.{name}", rates.get(f"speed/{name}", 0.0))
    for name, value in timer.times.total.values().items():
        put(f"speed.step_ms.{name.removeprefix('time/').removesuffix('_ms')}", value or None)
    put("speed.step_percentiles_ms", _percentiles_ms(timer))
    first_steps_ms = [round(1000 * seconds, 3) for seconds in timer.step_times.first]
    put("speed.first_steps_ms", first_steps_ms)
    put("speed.mfu", throughput.mfu(total))
    for group, values in training.curves.monitor.summary().items():
        put(f"speed.{group}", values)


def _summarise_model(network: nn.Module) -> dict[str, Any]:
    """The section `model` of `summary.json`."""
    weights = list(network.parameters())
    return {
        "name": type(network).__name__,
        "parameters": sum(weight.numel() for weight in weights),
        "trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
    }


def _percentiles_ms(timer: StepTimer) -> dict[str, float | None]:
    """`{"p50": 1.2, …}`: times of a step; None where no step was timed."""
    percentiles: dict[str, float | None] = {}
    for share in (50, 90, 99):
        seconds = timer.step_times.percentile(share / 100)
        percentiles[f"p{share}"] = seconds and round(1000 * seconds, 3)
    return percentiles


def write_verdict(run: Run, training: Training) -> None:
    """Judge what limited the run, and write evidence and verdict into the summary."""
    folder = run.folder
    evidence = run.parts.find_evidence(run, training)
    if evidence is None:
        if run.settings.asked.monitor.verdict:
            folder.say(
                f"verdict: none; what limits the speed is judged from"
                f" {LEAST_STEPS} steps after the first {FIRST_STEPS} on"
            )
    elif folder.is_first:
        folder.summary.set("evidence", asdict(evidence))
        judgement = verdict(evidence)
        ladder = measured_before(judgement["override"])
        folder.summary.set("verdict", {**judgement, "ladder": ladder})


def judge(
    ours: OurParts, settings: Settings, training: Training, folder: RunFolder
) -> Evidence | None:
    """The evidence of a run at its end, with trials of what could be faster; every rank takes part.

    None after too few steps.
    """
    task = ours.task
    feeds = ours.feeds
    asked = settings.asked
    curves = training.curves
    precision = str(training.trainer.precision)
    epochs = curves.throughput.volume.total.batches / (settings.batches or 1)
    evidence = evidence_of(curves, feeds.train, precision, epochs)
    may_try = asked.monitor.verdict and not asked.is_sharded
    ranks = _times_of_ranks(ours, training, evidence if may_try else None)
    if evidence is None:
        return None
    evidence.effective_batch = asked.data.effective_batch
    evidence.tuned_layers = _count_tuned_layers(task)
    evidence.pieces = training.loop.pieces.counts[TRAINING]
    is_measured = "precision" in (folder.summary.values["tune"] or {}).get("values", {})
    if not is_measured:
        evidence.native = _find_native_precision(asked, task, precision)
    if ranks:
        evidence.ranks = ranks
        evidence.not_tried = "on several ranks nothing else is tried"
    elif may_try:
        is_compiled_run = bool(asked.compile) or is_compiled(task.model)
        trained_s = evidence.total_ms * evidence.batches / 1000
        most_s = MOST_S if asked.budget is None else TRIES_SHARE_IN_BUDGET * trained_s
        race = partial(try_out, task, feeds, evidence, is_compiled=is_compiled_run, most_s=most_s)
        try_safely(evidence, race)
    return evidence


def _find_native_precision(asked: RunConfig, task: Task, precision: str) -> str:
    """The precision that flatout would choose here, if another one was set; else empty.

    `precision`: the one that the run had, by Lightning's name.
    """
    if asked.precision not in (Precision.fp32, Precision.bf16):
        return ""
    usual = choose_precision(Precision.auto, task.device).value
    return "" if LIGHTNING_NAMES[usual] == precision else usual.value


def _count_tuned_layers(task: Task) -> int:
    """Layers of a flat pretrained encoder if all its weights are trained; else 0."""
    network = task.model
    if not is_pretrained(task.model_config) or not isinstance(network, Transformer):
        return 0
    if not network.is_flat or network.predicts_words:
        return 0
    are_all_trained = all(weight.requires_grad for weight in network.parameters())
    return len(network.in_order()) if are_all_trained else 0


def _times_of_ranks(
    ours: OurParts, training: Training, evidence: Evidence | None
) -> list[dict[str, float]]:
    """For each of several ranks, the milliseconds that each part of a batch takes; empty for one.

    With `evidence` something may be tried: then `alone` is what a batch takes a rank that does not
    wait for the others.
    """
    feeds = ours.feeds
    if feeds.train.plan.world == 1:
        return []
    counted = training.curves.timer.times.counted()
    times_ms = {}
    for name, seconds in counted.split().items():
        times_ms[name] = 1000 * seconds / max(1, counted.batches)
    if evidence is not None and training.loop.pieces.counts[TRAINING] == 1:
        trained_s = evidence.total_ms * evidence.batches / 1000
        # your own model may raise anything, and the other ranks wait for this one
        with suppress(Exception):
            times_ms["alone"] = alone_ms(ours.task, feeds, min(SHARE * trained_s, _MOST_ALONE_S))
    return of_all_ranks(times_ms)


def report_kind(run: Run, ours: OurParts, predictor: Answers, seconds: float) -> None:
    """Add what this kind of data has beside each result.

    That are the scores of a simple model, and a study of its own; `seconds`: of the whole run.
    """
    config = run.settings.asked
    folder = run.folder
    kind = kind_of(config.data)
    values = folder.summary.values
    if kind.rival is not None and config.monitor.rival:
        scores = score_beside(ours.task, ours.data)
        may_take_s = math.inf if config.monitor.rival == ALWAYS else seconds
        if scores:
            section = compare_with_rival(kind.rival, scores, values)
        else:
            section = find_rival(kind.rival, ours.data, values, may_take_s, folder)
        if section is not None and wins_clearly(section, values):
            # a network of the user's own has no `model/` folder, and only texts' rival is a model
            may_keep = kind.rival == LINEAR and (folder.path / "model").is_dir()
            model_folder = ModelFolder(folder.path / "model")
            limit_s = rival_limit_s(may_take_s)
            section["kept"] = may_keep and keep_rival(
                ours.task, cast(Any, ours.data), model_folder, limit_s, folder
            )
        folder.summary.set("rival", section)
    if kind.report is not None:
        kind.report(ours.task, predictor, ours.feeds, values, folder.path, folder)


def write_reports(run: Run, answers: RunAnswers) -> None:
    """Write the page, print the closing table, and complete what TensorBoard shows."""
    settings = run.settings
    folder = run.folder
    max_epochs = int(settings.trainer.get("max_epochs") or EPOCHS)
    findings = find_in_result(
        folder.summary.values,
        answers.per_class,
        max_epochs,
        batch_size_sets_steps=run.parts.batch_size_sets_steps(settings),
    )
    folder.summary.set("findings", findings)
    values = {**folder.summary.values, "status": "finished"}
    curves = read_curves(folder.path)
    write_page(folder.path, values, curves, answers.per_class, answers.charts)
    files = {
        "model": "model",
        "checkpoints": CHECKPOINTS,
        "page": "report.html",
        "curves": "metrics.csv",
        "trace": TRACE,
        "operators": TABLE,
    }
    artifacts = {name: path for name, path in files.items() if (folder.path / path).exists()}
    folder.summary.set("artifacts", artifacts)
    # the page and the summary have the verdict in any case, for whoever looks
    verdict_shown = values["verdict"] if settings.asked.monitor.verdict else None
    print_closing({**values, "verdict": verdict_shown}, folder.path, answers.per_class)
    run.parts.write_dashboard(run, values)

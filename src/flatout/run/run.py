"""The story of one run, top to bottom: data, model, task, training, test, report.

Each stage is a function that takes what it needs and returns what the next one needs; what a stage chose by itself is
printed with its reason. On several devices every rank goes through the same story with its share of the rows, and the
first one tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning as L

from flatout.checkpoints.kept import Start
from flatout.checkpoints.same_run import facts_of_run, plan_facts
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, end_group, others_watched
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.limits import limits
from flatout.engine.passes import TRAINING
from flatout.engine.precision import PrecisionChoice, fast_fp32_products, product_type
from flatout.engine.run_length import batches_in_epoch
from flatout.errors import UserError
from flatout.perf.ladder_notes import measured_before
from flatout.perf.verdict.judge import judge, report_early
from flatout.perf.verdict.rules import verdict
from flatout.report.summary import choice_of, hardware
from flatout.run.build import RunBuilder
from flatout.run.closing import find_peak, save_model, summarise, write_reports
from flatout.run.learning_rate import set_rate
from flatout.run.micro_batches import mind_memory
from flatout.run.resume import length_of
from flatout.run.run_folder import RunFolder, folder_of_one, open_run_folder
from flatout.run.split_rows import SPLIT_ROWS, save_split_rows
from flatout.run.stages import (
    Result,
    fit_to_end,
    load_best,
    restore_threads,
    share_processor,
    where_to_start,
    without_loader_advice,
)
from flatout.run.trainer import Training
from flatout.tasks.networks import report_attention
from flatout.tasks.task import Task


def run(build: RunBuilder, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that number."""
    started = time.perf_counter()
    ranks = Ranks.here()
    title = build.title(overrides)
    before = {name: choice_of(path, name) if build.is_resumed else None for name in ("compile", "precision")}
    with (
        Signals() as signals,
        folder_of_one(path) if ranks.is_first else nullcontext(),
        open_run_folder(path, title, is_first=ranks.is_first, is_again=build.is_resumed) as folder,
        restore_threads(),
    ):
        build.draw_from_seed()
        device = ranks.device(build.accelerator, number)
        share_processor(build, ranks, device, folder)
        data = prepare_data(build, ranks, folder)
        build.require_memory_for_model(data, ranks, device)
        build = build.tune(data, ranks, device, overrides, folder)
        task = build.build_task(data, folder)
        feeds = build.place_feeds(data, task, device, ranks)
        build = build.with_whole_steps(feeds, folder)
        set_rate(task, data, build.trainer, folder)
        precision = build.choose_precision(device, ranks, folder, before["precision"])
        loop = build.build_loop(rows_of_steps(build.trainer, feeds.train))
        training, start = set_up(build, data, task, loop, precision, ranks, folder, signals)
        ranks.join(device)
        with training.loggers, fast_fp32_products(precision.precision, device) as found:
            if found is not None:
                folder.choose("fp32 products", found.value, found.why, found.evidence)
            build.compile_network(task, feeds, precision, ranks, folder, before["compile"])
            train(training, task, data, folder, signals, start)
            load_best(training, task)
            task.to(device)  # Lightning has taken it back to the host
            put_facts(task.tune_answers(feeds, folder), folder)
            metrics = evaluate(training.trainer, task, data, folder)
            folder.summary.set("metric", build.choose_metric(task))
            take_whole_weights(training, task)
            per_class, predictor = task.per_class(), build.kind.predictor.of(task)
            charts = build.kind.draw(task, feeds, folder.path)
            if ranks.is_first:
                save_model(predictor, build.network, folder)
            find_peak(training, feeds, ranks)
            training.loggers.log_final(metrics, training.curves.steps)
            write_verdict(build, task, feeds, training, folder)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(folder, task, feeds, training, seconds)
            build.kind.report(task, predictor, feeds, folder.summary.values, folder.path, folder)
            settings: dict[str, Any] = {"settings": build.compared_settings(task), "charts": charts}
            write_reports(folder, task, per_class, **settings, has_tensorboard=build.writes_tensorboard)
        metric = build.choose_metric(task)
        return Result(folder.path, metrics, per_class, predictor, folder.summary.values, metric)


def prepare_data(build: RunBuilder, ranks: Ranks, folder: RunFolder) -> StoreData[Any, Any]:
    """Open the store, which the first rank builds where it is missing; report what is in it."""
    data = build.build_data(folder)

    def prepare() -> str:
        data.prepare_data()
        return str(data.info.key)

    key = ranks.agreed("store", prepare)
    data.setup()
    if data.info.key != key:
        what = f"rank {ranks.rank} sees other data than the first rank"
        raise UserError("data", what, hint="Every machine needs the same files, or one folder that all can read.")
    facts = data.info.summary()
    rows = {_SHORT[split]: count for split, count in facts.pop("rows").items()}
    report = data.info.report
    cache = {"key": report.key, "hit": report.hit, "seconds": round(report.seconds, 4)}
    folder.summary.update("data", {"source": data.info.source, "rows": rows, **facts, "cache": cache})
    return data


_SHORT = {"train": "train", "validation": "val", "test": "test"}


def put_facts(facts: dict[str, Any], folder: RunFolder) -> None:
    """Put what a task found into the summary."""
    for name, value in facts.items():
        folder.summary.set(name, value)


def set_up(
    build: RunBuilder,
    data: StoreData[Any, Any],
    task: Task,
    loop: FastLoop,
    precision: PrecisionChoice,
    ranks: Ranks,
    folder: RunFolder,
    signals: Signals,
) -> tuple[Training, Start | None]:
    """The Trainer, and the checkpoint that it begins with: the same run as before, or refused."""
    feeds = data.feeds
    batches = batches_in_epoch(build.trainer, feeds.train)
    plan, asked = plan_facts(feeds.train, batches), length_of(build.settings)
    about = facts_of_run(build.settings, data.info.key, task.model, plan, precision.lightning_name, asked)
    start = where_to_start(build, about, ranks, folder)
    if not build.shards_weights:  # ranks that wait for each other in every layer cannot cut batches alone
        mind_memory(task, loop, feeds, about, ranks, data.config.cache, folder)
    if folder.is_first and build.kind.keeps_rows:
        save_split_rows(data.store, folder.path / SPLIT_ROWS)
    put_facts(build.prepare_task(task, feeds, folder), folder)
    report_attention(task.model, feeds.train.device, product_type(precision.precision), folder)
    training = build.build_training(
        task, loop, feeds, precision, ranks, folder, about=about, signals=signals, start=start
    )
    trainer, curves = training.trainer, training.curves
    curves.judge_early = lambda: report_early(curves, feeds.train, str(trainer.precision), batches, folder)
    device, world = feeds.train.device, feeds.train.plan.world
    folder.summary.update("hardware", hardware(device, world, str(trainer.precision)) | limits().facts())
    return training, start


def rows_of_steps(trainer: dict[str, Any], feed: Feed) -> Callable[[int], str]:
    """Names the rows of an optimizer step of the run."""
    steps_an_epoch = batches_in_epoch(trainer, feed) // feed.plan.accumulate
    return lambda step: describe_rows(feed, *divmod(step, steps_an_epoch))


def describe_rows(feed: Feed, epoch: int, step: int, most: int = 12) -> str:
    """The rows of the table that an optimizer step trains, in words."""
    numbers = feed.rows_of_step(epoch, step)
    if "rows" in feed.split.columns:
        numbers = feed.split.fixed("rows")[numbers] + 1
    shown = ", ".join(str(number) for number in sorted(numbers.tolist())[:most])
    return f" (rows {shown}{', …' if len(numbers) > most else ''} of the table)"


def train(
    training: Training,
    task: Task,
    data: StoreData[Any, Any],
    folder: RunFolder,
    signals: Signals,
    start: Start | None,
) -> None:
    """Train to the end, or to where nothing gets better."""
    plan = data.feeds.train.plan
    folder.say(
        f"training: {sum(p.numel() for p in task.model.parameters()):,} parameters, {task.total_steps:,} steps of"
        f" {plan.rows_per_batch * plan.parts} rows"
    )
    fit_to_end(training, task, data, folder, signals, start)
    if skipped := training.loop.skipped:
        rows = training.loop.losses.describe_rows(skipped[0])
        folder.say(f"{len(skipped)} steps were skipped, their gradient was not finite: the first{rows}")


def take_whole_weights(training: Training, task: Task) -> None:
    """Where ranks hold slices of the weights: all of them on each rank's host, to answer and to be saved with."""
    strategy = cast(Any, training.trainer.strategy)
    if task.shares_weights:
        with others_watched():
            task.model = strategy.gathered(task.model)
        task.shares_weights = False


def evaluate(trainer: L.Trainer, task: Task, data: StoreData[Any, Any], folder: RunFolder) -> dict[str, float]:
    """Metrics on the validation rows, and on the test rows where there are any."""
    metrics: dict[str, float] = {}
    with without_loader_advice(), others_watched():
        trainer.validate(task, datamodule=data, verbose=False)
        metrics |= {f"val/{name}": value for name, value in task.results.items()}
        task.count_answers()
        if data.feeds.test is not None:
            trainer.test(task, datamodule=data, verbose=False)
            metrics |= {f"test/{name}": value for name, value in task.results.items()}
    task.to(data.feeds.train.device)  # Lightning has taken it to the host; answers are kept and ways tried there
    folder.summary.update("metrics", metrics)
    return metrics


def write_verdict(build: RunBuilder, task: Task, feeds: Feeds, training: Training, folder: RunFolder) -> None:
    """Judge what held the run back, and write evidence and verdict into the summary."""
    is_measured = "precision" in (folder.summary.values["tune"] or {}).get("values", {})
    known = build.judging(task, feeds, training.loop.passes.pieces[TRAINING], is_precision_measured=is_measured)
    evidence = judge(task, feeds, training.curves, known, folder)
    if evidence is not None and folder.is_first:
        folder.summary.update("evidence", evidence.as_dict())
        words = verdict(evidence)
        folder.summary.update("verdict", {**words, "ladder": measured_before(words["override"])})

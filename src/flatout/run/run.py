"""The story of one run, top to bottom: data, module, decisions, training, evaluation, report.

Each stage is a function that takes what it needs and returns what the next one needs; what a stage chose by itself is
printed with its reason, and no stage changes what an earlier one made. The user's own LightningModule takes the same
way; what it cannot have is left out. On several devices every rank goes through the same story with its share of the
rows, and the first one reports it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from flatout.checkpoints.same_run import facts_of_run, plan_facts
from flatout.data.batches.feed import Feeds
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, end_group
from flatout.distributed.signals import Signals
from flatout.engine.precision import product_type
from flatout.perf.verdict.judge import report_early
from flatout.run.closing import Result, keep_answers, summarise, write_reports, write_verdict
from flatout.run.kinds import kind_of
from flatout.run.memory import mind_memory
from flatout.run.own_parts import metric_among, report_own_parts
from flatout.run.parts import build_module, open_data, place_feeds, require_memory_for_model, tune
from flatout.run.resolve import compile_network, exact_products, resolve, restore_threads, share_processor
from flatout.run.resume import where_to_start
from flatout.run.reuse import reuse_frozen_layers
from flatout.run.rival import find_rival
from flatout.run.run_folder import SPLIT_ROWS, RunFolder, folder_of_one, open_run_folder, save_split_rows
from flatout.run.trainer import build_training
from flatout.run.training import evaluate, fit_to_end, load_best
from flatout.tasks.networks import report_attention
from flatout.tasks.task import Task

if TYPE_CHECKING:
    from flatout.config import RunConfig
    from flatout.run.resolve import Settings
    from flatout.run.trainer import Training


def run(config: RunConfig, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that number."""
    started, ranks = time.perf_counter(), Ranks.here()
    with (
        Signals() as signals,
        folder_of_one(path) if ranks.is_first else nullcontext(),
        open_run_folder(path, config, overrides, is_first=ranks.is_first) as folder,
        restore_threads(),
    ):
        L.seed_everything(config.seed, verbose=False)
        device = ranks.device(str(config.trainer.get("accelerator", "auto")), number)
        share_processor(config.threads, ranks, device, folder)
        data = open_data(config, ranks, folder)
        require_memory_for_model(config, data, ranks, device)
        config = tune(config, data, ranks, device, overrides, folder)
        module = build_module(config, data, folder)
        feeds = None if config.has_own_parts else place_feeds(config, data, module, device, ranks)
        settings = resolve(config, module, feeds, device, ranks, folder)
        about = facts_to_compare(settings, data, module, feeds, ranks)
        start = where_to_start(config, settings.trainer, about, ranks, folder)
        with exact_products(settings.precision.precision, feeds, folder):
            reuse_frozen_layers(config, settings, data, module, feeds, ranks, folder)
        training = build_training(config, settings, module, feeds, device, ranks, folder, about, signals, start)
        if feeds is None:
            report_own_parts(module, data, settings.monitor, ranks, folder)
        else:
            if not config.is_sharded:  # ranks that wait for each other in every layer cannot cut batches alone
                mind_memory(module, training.loop, feeds, about, ranks, config.data.cache, folder)
            prepare(config, settings, data, module, feeds, training, folder)
        ranks.join(device)
        with training.loggers, exact_products(settings.precision.precision, feeds, folder):
            compile_network(config, settings, module, feeds, ranks, folder)
            fit_to_end(training, module, data, feeds, folder, start)
            load_best(training, module)
            metrics = evaluate(training, module, data, feeds, device, folder)
            metric = settings.metric or metric_among(metrics)
            folder.summary.set("metric", metric)
            predictor, per_class, charts = keep_answers(config, module, feeds, training, ranks, folder)
            training.loggers.log_final(metrics, training.curves.steps)
            write_verdict(config, settings, module, feeds, training, folder)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(module, feeds, training, seconds, folder)
            if feeds is not None:
                kind = kind_of(config.data)
                if kind.rival is not None and config.monitor.rival:
                    rival = find_rival(*kind.rival, data, folder.summary.values, seconds, folder)
                    folder.summary.set("rival", rival)
                if kind.report is not None:
                    kind.report(module, predictor, feeds, folder.summary.values, folder.path, folder)
            write_reports(config, settings, module, per_class, charts, folder)
        return Result(folder.path, metrics, per_class, predictor, folder.summary.values, metric or "loss")


def facts_to_compare(settings: Settings, data: Any, module: Any, feeds: Feeds | None, ranks: Ranks) -> dict[str, Any]:
    """What a resumed run is compared with: its data, its network, its plan, its settings."""
    precision = settings.precision.lightning_name
    if feeds is not None:
        plan = plan_facts(feeds.train, settings.batches or 0)
        return facts_of_run(settings.values, data.info.key, module.model, plan, precision)
    plan = {} if isinstance(data, StoreData) else {"devices": ranks.world}
    return facts_of_run(settings.values, None, module, plan, precision)


def prepare(
    config: RunConfig, settings: Settings, data: Any, task: Task, feeds: Feeds, training: Training, folder: RunFolder
) -> None:
    """Make a task ready for its first step, and say what is about to train."""
    if folder.is_first and kind_of(config.data).keeps_rows:
        save_split_rows(data.store, folder.path / SPLIT_ROWS)
    folder.put(task.prepare(feeds, folder, config.seed))
    report_attention(task.model, feeds.train.device, product_type(settings.precision.precision), folder)
    curves, precision = training.curves, str(training.trainer.precision)
    curves.judge_early = lambda: report_early(curves, feeds.train, precision, settings.batches or 1, folder)

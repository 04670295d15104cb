"""The story of one run, top to bottom: data, module, decisions, training, evaluation, report.

Each stage is a function that takes what it needs and returns what the next one needs. No stage
changes what an earlier one made, and what a stage chooses by itself it prints with its reason.
Parts of the user's own go the same way; stages that do not serve them return early. On several
devices every rank goes the same way, and the first one reports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch

from flatout.checkpoints.same_run import facts_of_run, plan_facts
from flatout.config import RunConfig
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, end_group
from flatout.distributed.signals import Signals
from flatout.engine.graph_choice import require_captures
from flatout.engine.precision import LIGHTNING_NAMES, product_type
from flatout.perf.verdict.gathering import report_early
from flatout.run.answers import tune
from flatout.run.budget import keep_budget, settle_budget
from flatout.run.closing import (
    Result,
    keep_answers,
    report_kind,
    summarise,
    write_reports,
    write_verdict,
)
from flatout.run.context import OurParts, RunContext, RunParts
from flatout.run.evaluation import evaluate, load_best
from flatout.run.fitting import fit_to_end
from flatout.run.kinds import kind_of
from flatout.run.length import settle_length
from flatout.run.micro_batches import restore_micro_batches
from flatout.run.mixing import add_linear_model, require_mixable
from flatout.run.own_parts import metric_among, report_own_parts
from flatout.run.parts import (
    build_run_parts,
    open_data,
    report_run,
    require_memory_for_model,
)
from flatout.run.pricing import close_price, expect_end
from flatout.run.resolve import Settings, compile_network, exact_products, resolve, share_processor
from flatout.run.resume import find_start
from flatout.run.reuse import reuse_layers
from flatout.run.run_folder import (
    SPLIT_ROWS,
    RunFolder,
    folder_of_one,
    open_run_folder,
    save_split_rows,
)
from flatout.run.trainer import Training, build_checkpoints, build_training
from flatout.tasks.networks import report_attention


def run(config: RunConfig, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run in the folder `path`, or one rank's part of it, from its settings to its report.

    `overrides`: the words that were typed. `number`: of the GPU, where one process trains alone.
    """
    started = time.perf_counter()
    ranks = Ranks.here()
    with (
        Signals() as signals,
        folder_of_one(path) if ranks.is_first else nullcontext(),
        open_run_folder(path, config, overrides, ranks) as folder,
        ExitStack() as stack,
    ):
        # threads as they were, for the next run of this process
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        L.seed_everything(config.seed, verbose=False)
        device = ranks.device(str(config.trainer.get("accelerator", "auto")), number)
        context = RunContext(ranks, device, folder)
        report_run(config, folder)
        require_captures(config.graph, ranks.world, device)
        share_processor(config.threads, ranks, device, folder)
        data = open_data(config, ranks, folder)
        require_memory_for_model(config, data, ranks, device)
        require_mixable(config, data)
        config = settle_length(config, data, ranks, folder)
        config = tune(config, data, context, overrides)
        config = settle_budget(config, context, overrides, run, started)
        parts = build_run_parts(config, data, context)
        settings = resolve(config, parts, context)
        facts = collect_facts(settings, parts, ranks, overrides)
        start = find_start(settings, facts, ranks, folder)
        with exact_products(settings.precision.value, parts.feeds, folder):
            reuse_layers(settings, parts, context, start)
        checkpoints = build_checkpoints(settings, facts, signals, folder)
        training = build_training(settings, parts, context, checkpoints, start)
        if parts.ours is None:
            report_own_parts(parts.module, parts.data, settings.monitor, context)
        else:
            # with FSDP ranks wait for each other in every layer: none can cut its batches alone
            if not config.is_sharded:
                restore_micro_batches(training.loop, parts.ours, facts, ranks, folder)
            prepare_task(settings, parts.ours, training, folder)
        end = expect_end(settings, parts, training, context, started)
        keep_budget(settings, parts.ours, training, end)
        ranks.join(device)
        with training.loggers, exact_products(settings.precision.value, parts.feeds, folder):
            compile_network(settings, parts, context)
            fit_to_end(training, parts, settings, folder, start)
            load_best(training, parts)
            add_linear_model(config, parts, time.perf_counter() - started, folder)
            metrics = evaluate(training, parts, folder, settings.metric)
            metric = settings.metric or metric_among(metrics)
            folder.summary.set("metric", metric)
            answers = keep_answers(config, parts, training, context)
            training.loggers.log_final(metrics, training.trainer.global_step)
            with end.trying():
                write_verdict(settings, parts, training, folder)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(parts, training, seconds, folder)
            if parts.ours is not None:
                report_kind(config, parts.ours, answers.predictor, seconds, folder)
            close_price(end, settings, parts, training, context)
            write_reports(settings, parts, answers, folder)
        return Result(
            folder=folder.path,
            metrics=metrics,
            per_class=answers.per_class,
            predictor=answers.predictor,
            summary=folder.summary.values,
            metric=metric or "loss",
        )


def collect_facts(
    settings: Settings, parts: RunParts, ranks: Ranks, overrides: Sequence[str]
) -> dict[str, Any]:
    """What a resumed run is compared with: its data, its network, its plan, its settings."""
    precision = LIGHTNING_NAMES[settings.precision.value]
    ours = parts.ours
    if ours is not None:
        plan = plan_facts(ours.feeds.train, settings.batches or 0)
        return facts_of_run(settings.values, ours.data.info.key, ours.task.model, plan, precision)
    plan = {} if isinstance(parts.data, StoreData) else {"devices": ranks.world}
    values = settings.values | _typed_for_own_parts(settings, overrides)
    return facts_of_run(values, None, parts.module, plan, precision)


def _typed_for_own_parts(settings: Settings, overrides: Sequence[str]) -> dict[str, str]:
    """The words that were typed for parts of the user's own: `model.width=8`.

    The settings hold such a part as an object without fields, `<my.Network>`, so the words are all
    that can be compared.
    """
    typed = {}
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        group = key.split(".")[0]
        if str(settings.values.get(group)).startswith("<"):
            typed[f"{key} as typed"] = value
    return typed


def prepare_task(settings: Settings, ours: OurParts, training: Training, folder: RunFolder) -> None:
    """Make a task ready for its first step, and say what is about to train."""
    feeds = ours.feeds
    if folder.is_first and kind_of(settings.asked.data).keeps_rows:
        save_split_rows(ours.data.store, folder.path / SPLIT_ROWS)
    folder.put(ours.task.prepare(feeds, folder, settings.asked.seed))
    products = product_type(settings.precision.value)
    report_attention(ours.task.model, feeds.train.device, products, folder)
    curves = training.curves
    precision = str(training.trainer.precision)
    batches = settings.batches or 1
    if settings.asked.monitor.verdict:
        curves.judge_early = lambda: report_early(curves, feeds.train, precision, batches, folder)

"""The story of one run, top to bottom: decisions, training, evaluation, report.

`decide` opens the data and makes a frozen `Run` of everything that was chosen. Each stage then
takes the run, and what the stages before it have made. No stage changes what an earlier one made,
and what a stage chooses by itself it prints with its reason. Parts of the user's own go the same
way (`run/own_parts.py`). On several devices every rank does, and the first one reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning as L
import torch

from flatout.config import RunConfig
from flatout.distributed.ranks import Ranks, end_group
from flatout.distributed.signals import Signals
from flatout.engine.graph_choice import require_captures
from flatout.run.budget import keep_budget
from flatout.run.claimed_folders import folder_of_one
from flatout.run.closing import Result, summarise, write_reports, write_verdict
from flatout.run.context import Run, RunContext
from flatout.run.evaluation import evaluate, load_best, metric_among
from flatout.run.fitting import fit_to_end
from flatout.run.pricing import close_price, expect_end
from flatout.run.resolve import share_processor
from flatout.run.resume import find_start
from flatout.run.run_folder import open_run_folder
from flatout.run.trainer import build_training
from flatout.run.whose_parts import parts_of


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
        _threads_restored(),
    ):
        device = ranks.device(str(config.trainer.get("accelerator", "auto")), number)
        context = RunContext(ranks, device, folder, overrides, began=started, begin=run)
        decided = decide(config, context)
        parts = decided.parts
        start = find_start(decided)
        parts.reuse_layers(decided, start)
        training = build_training(decided, signals, start)
        parts.prepare(decided)
        end = expect_end(decided, training)
        keep_budget(decided, training, end)
        ranks.join(device)
        with training.loggers, parts.exact_products(decided):
            parts.compile_network(decided)
            fit_to_end(decided, training, start)
            load_best(decided, training)
            trained_s = training.checkpoints.seconds_before + time.perf_counter() - started
            parts.add_linear_model(decided, trained_s)
            metrics = evaluate(decided, training)
            metric = decided.settings.metric or metric_among(metrics)
            folder.summary.set("metric", metric)
            answers = parts.keep_answers(decided, training)
            training.loggers.log_final(metrics, training.trainer.global_step)
            with end.trying():
                write_verdict(decided, training)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(decided, training, seconds)
            parts.report_kind(decided, answers.predictor, seconds)
            close_price(decided, training, end)
            write_reports(decided, answers)
        return Result(
            folder=folder.path,
            metrics=metrics,
            per_class=answers.per_class,
            predictor=answers.predictor,
            summary=folder.summary.values,
            metric=metric or "loss",
        )


def decide(config: RunConfig, context: RunContext) -> Run:
    """Open the data and choose all that the settings leave open; only then make the module."""
    ranks = context.ranks
    device = context.device
    folder = context.folder
    whose = parts_of(config)
    L.seed_everything(config.seed, verbose=False)
    folder.say(f"run: {whose.name_of(config)}, seed {config.seed}, in {folder.path}")
    require_captures(config.graph, ranks.world, device)
    share_processor(config.threads, ranks, device, folder)
    parts, settings = whose.make(config, context)
    facts = parts.list_facts(settings, context)
    return Run(
        ranks,
        device,
        folder,
        context.overrides,
        began=context.began,
        begin=context.begin,
        settings=settings,
        parts=parts,
        facts=facts,
    )


@contextmanager
def _threads_restored() -> Iterator[None]:
    """After it torch computes with as many threads as before, for the next run of this process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)

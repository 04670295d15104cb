"""The story of one run, top to bottom: data, module, decisions, training, evaluation, report.

Each stage is a function that takes what it needs and returns what the next one needs; what a stage
chose by itself is printed with its reason, and no stage changes what an earlier one made. The
user's own LightningModule takes the same way; what it cannot have is left out. On several devices
every rank goes the same way, and the first one reports it.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from flatout.checkpoints.folder import read_weights
from flatout.checkpoints.kept import Start
from flatout.checkpoints.same_run import facts_of_run, plan_facts
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.checks.findings import counted
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, end_group, others_watched
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.engine.precision import LIGHTNING_NAMES, product_type
from flatout.errors import UserError, require
from flatout.perf.verdict.gathering import report_early
from flatout.report.closing import EARLY_END, truncation_text
from flatout.run.answers import tune
from flatout.run.closing import (
    Result,
    keep_answers,
    report_kind,
    summarise,
    write_reports,
    write_verdict,
)
from flatout.run.kinds import kind_of
from flatout.run.memory import mind_memory
from flatout.run.own_parts import has_own, metric_among, plain_name, report_own_parts
from flatout.run.parts import build_module, open_data, place_feeds, require_memory_for_model
from flatout.run.resolve import Settings, compile_network, exact_products, resolve, share_processor
from flatout.run.resume import where_to_start
from flatout.run.reuse import reuse_layers
from flatout.run.run_folder import (
    OVERRIDES,
    SPLIT_ROWS,
    RunFolder,
    folder_of_one,
    open_run_folder,
    save_split_rows,
)
from flatout.run.trainer import Training, build_training
from flatout.tasks.networks import report_attention
from flatout.tasks.score_intervals import LEAST_ROWS
from flatout.tasks.task import Task


def run(config: RunConfig, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that
    number.
    """
    started = time.perf_counter()
    ranks = Ranks.here()
    with (
        Signals() as signals,
        folder_of_one(path) if ranks.is_first else nullcontext(),
        open_run_folder(path, config, overrides, ranks) as folder,
        ExitStack() as stack,
    ):
        # as they were, for the next run of this process
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        L.seed_everything(config.seed, verbose=False)
        device = ranks.device(str(config.trainer.get("accelerator", "auto")), number)
        share_processor(config.threads, ranks, device, folder)
        data = open_data(config, ranks, folder)
        require_memory_for_model(config, data, ranks, device)
        config = tune(config, data, ranks, device, overrides, folder)
        module = build_module(config, data, folder)
        feeds = None if config.has_own_parts else place_feeds(config, data, module, device, ranks)
        settings = resolve(config, module, feeds, device, ranks, folder)
        about = facts_to_compare(settings, data, module, feeds, ranks, overrides)
        start = where_to_start(settings, about, ranks, folder)
        with exact_products(settings.precision.value, feeds, folder):
            reuse_layers(settings, data, module, feeds, ranks, folder, start)
        training = build_training(
            settings, module, feeds, device, ranks, folder, about, signals, start
        )
        if feeds is None:
            report_own_parts(module, data, settings.monitor, ranks, folder)
        else:
            # ranks that wait for each other in every layer cannot cut batches alone
            if not config.is_sharded:
                mind_memory(module, training.loop, feeds, about, ranks, config.data.cache, folder)
            prepare(settings, data, module, feeds, training, folder)
        ranks.join(device)
        with training.loggers, exact_products(settings.precision.value, feeds, folder):
            compile_network(settings, module, feeds, ranks, folder)
            fit_to_end(training, module, data, feeds, folder, start)
            load_best(training, module)
            metrics = evaluate(training, module, data, feeds, folder, settings.metric)
            metric = settings.metric or metric_among(metrics)
            folder.summary.set("metric", metric)
            predictor, per_class, charts = keep_answers(
                config, module, feeds, training, ranks, folder
            )
            training.loggers.log_final(metrics, training.trainer.global_step)
            write_verdict(settings, module, feeds, training, folder)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(module, feeds, training, seconds, folder)
            if feeds is not None:
                report_kind(config, data, module, predictor, seconds, folder)
            write_reports(settings, module, per_class, charts, folder)
        return Result(
            folder.path, metrics, per_class, predictor, folder.summary.values, metric or "loss"
        )


def facts_to_compare(
    settings: Settings,
    data: Any,
    module: Any,
    feeds: Feeds | None,
    ranks: Ranks,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """What a resumed run is compared with: its data, its network, its plan, its settings."""
    precision = LIGHTNING_NAMES[settings.precision.value]
    if feeds is not None:
        plan = plan_facts(feeds.train, settings.batches or 0)
        return facts_of_run(settings.values, data.info.key, module.model, plan, precision)
    plan = {} if isinstance(data, StoreData) else {"devices": ranks.world}
    # a part of your own shows no other arguments
    typed = (word.lstrip("+~").partition("=") for word in overrides)
    own = {
        f"{key} as typed": to
        for key, _, to in typed
        if str(settings.values.get(key.split(".")[0]))[:1] == "<"
    }
    return facts_of_run({**settings.values, **own}, None, module, plan, precision)


def prepare(
    settings: Settings, data: Any, task: Task, feeds: Feeds, training: Training, folder: RunFolder
) -> None:
    """Make a task ready for its first step, and say what is about to train."""
    if folder.is_first and kind_of(settings.asked.data).keeps_rows:
        save_split_rows(data.store, folder.path / SPLIT_ROWS)
    folder.put(task.prepare(feeds, folder, settings.asked.seed))
    report_attention(task.model, feeds.train.device, product_type(settings.precision.value), folder)
    curves = training.curves
    precision = str(training.trainer.precision)
    curves.judge_early = lambda: report_early(
        curves, feeds.train, precision, settings.batches or 1, folder
    )


def fit_to_end(
    training: Training,
    module: Any,
    data: Any,
    feeds: Feeds | None,
    folder: RunFolder,
    start: Start | None,
) -> None:
    """Train to the end, or to where nothing gets better, from a checkpoint where there is one."""
    trainer = training.trainer
    listeners = list(training.curves.listeners)
    if feeds is not None:
        count = sum(p.numel() for p in module.model.parameters())
        plan = feeds.train.plan
        rows = plan.rows_per_batch * plan.parts
        folder.say(f"training: {count:,} parameters, {module.total_steps:,} steps of {rows} rows")
    with without_loader_advice(), others_watched(), training.checkpoints.when.signals.waiting():
        # which drop nothing: the run has said so
        if getattr(getattr(module, "model", None), "stored_layers", 0):
            warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
        try:
            trainer.fit(
                module, datamodule=data, ckpt_path=None if start is None else start.checkpoint
            )
        except SystemExit:
            if number := training.checkpoints.when.stopped_by:
                report_signal(number, training, folder)
            elif trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
                raise KeyboardInterrupt from None
            raise
        except (MisconfigurationException, RuntimeError) as error:
            # Lightning refuses several optimizers in automatic optimisation by a RuntimeError.
            if isinstance(error, RuntimeError) and not str(error).startswith(
                "Training with multiple optimizers"
            ):
                raise
            raise UserError("trainer" if feeds else "task", " ".join(str(error).split())) from None
        finally:
            for listener in listeners:
                with suppress(OSError):
                    listener.close()
    require(
        trainer.global_step > 0,
        "trainer",
        "not one step was planned",
        hint="Give it rows, epochs and time.",
    )
    report_early_end(training, folder)
    if skipped := training.loop.skipped:
        described = training.loop.losses.describe_rows(skipped[0])
        folder.say(
            f"{len(skipped)} steps were skipped, their gradient was not finite: the"
            f" first{described}"
        )


def report_early_end(training: Training, folder: RunFolder) -> None:
    """Say after which epoch patience has ended training, which setting decided, and which epoch's
    weights are kept.
    """
    trainer, best = training.trainer, training.checkpoints.best_so_far
    last = trainer.max_epochs or -1
    for stopping in trainer.early_stopping_callbacks if trainer.current_epoch != last else []:
        is_lost = not math.isfinite(float(trainer.callback_metrics.get(stopping.monitor, 0.0)))
        if not trainer.should_stop or not (is_lost or stopping.wait_count >= stopping.patience):
            continue
        after = f"after epoch {trainer.current_epoch}{f' of {last}' if last > 0 else ''}"
        no_better = (
            "is not finite"
            if is_lost
            else f"was no better in {counted(stopping.wait_count, 'validation')}"
        )
        setting = (
            "checkpoint.patience="
            if stopping in training.stopping
            else "your EarlyStopping with patience="
        )
        found = f"step {best.step}" if best.epoch is None else f"epoch {best.epoch}"
        kept = (
            "the last weights are kept"
            if best.value is None
            else f"{best.value:.4f} after {found}, which is kept"
        )
        folder.decision(
            EARLY_END, after, f"{stopping.monitor} {no_better}, {setting}{stopping.patience}", kept
        )


def report_signal(number: int, training: Training, folder: RunFolder) -> None:
    """Say where training stopped; where SLURM gave the warning, ask it for another turn."""
    name, step = signal.Signals(number).name, training.checkpoints.boundary.at.step
    again = "the same command with resume=auto resumes there"
    if not folder.files.get(OVERRIDES):  # no words were typed: most likely a script called `fit`
        again = 'resume=auto resumes there, in a script fit(…, resume="auto")'
    folder.say(f"stopped by {name} after step {step}: {again}")
    if folder.is_first and (line := requeue_with_slurm(number)):
        folder.say(line)


def load_best(training: Training, task: L.LightningModule) -> None:
    with others_watched():
        training.trainer.strategy.barrier()  # the first rank may still be linking it
    state = _best_weights(training)
    strategy = cast(Any, training.trainer.strategy)
    if getattr(task, "is_sharded", False):
        strategy.hand_out(task, state)
    elif state is not None:
        task.load_state_dict(state)


def _best_weights(training: Training) -> dict[str, Tensor] | None:
    """Those of the best checkpoint, or of the last; None where this machine has none
    that is whole.
    """
    for path in (training.checkpoints.folder / name for name in ("best", "last")):
        try:
            if path.exists():
                return read_weights(path)
        except UserError as error:  # spoilt since it was written
            warnings.warn(f"{error}; passed over", UserWarning, stacklevel=2)
    return None


def evaluate(
    training: Training,
    module: Any,
    data: Any,
    feeds: Feeds | None,
    folder: RunFolder,
    metric: str | None,
) -> dict[str, float]:
    """Metrics on the validation rows and any test rows, answers tuned before; `metric` is scored by
    cuts, too.
    """
    metrics = dict[str, float]()
    device = training.trainer.strategy.root_device
    if feeds is not None:
        module.to(device)  # Lightning has taken it back to the host
        folder.put(module.tune_answers(feeds, folder))
    for split, judge in (("val", training.trainer.validate), ("test", training.trainer.test)):
        has_rows = split == "val" or not isinstance(data, StoreData) or split in data.store.splits
        if not (has_own(module, data, split) and has_rows):
            continue
        with without_loader_advice(), others_watched():
            logged = judge(module, datamodule=data, verbose=False)
        if feeds is None:
            found = {
                plain_name(name, split): float(value)
                for each in logged
                for name, value in each.items()
            }
        else:
            found = module.results
        metrics |= {f"{split}/{name}": value for name, value in found.items()}
        if split == "val" and feeds is not None:
            module.count_answers()
    module.to(device)  # Lightning has taken it to the host; answers are kept and ways tried there
    if feeds is not None and feeds.test is not None:
        intervals = module.intervals()
        folder.summary.set(
            "intervals", {f"test/{name}": list(ends) for name, ends in intervals.items()}
        )
        if not intervals:
            folder.say(
                f"test: no intervals: they need {LEAST_ROWS} rows or recordings, and some errors"
                " among them"
            )
        if truncation := module.truncation(metric):
            folder.summary.set("truncation", truncation)
            folder.say(truncation_text(folder.summary.values))
    folder.summary.set("metrics", metrics)
    return metrics


@contextmanager
def without_loader_advice() -> Iterator[None]:
    """Lightning advises DataLoader workers to any loader, and to share metrics that are shared
    already: no news.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings(
            "ignore", message=".*recommended to use `self.log.*sync_dist=True.*"
        )
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings(
            "ignore", message=".*Checkpoint directory.*exists and is not empty.*"
        )
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*Be aware that when using `ckpt_path`.*")
        yield

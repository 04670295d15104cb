"""The story of one run, top to bottom: data, model, task, training, test, report.

Each stage is a function that takes what it needs and returns what the next one needs; what a stage chose by itself is
printed with its reason. On several devices every rank goes through the same story with its share of the rows, and the
first one tells it.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatout.checkpoints import CHECKPOINTS, BestAndLast, FolderCheckpointIO, best_mode, load_weights
from flatout.config import RunConfig
from flatout.data.feed import Feed, choose_feed
from flatout.data.feeding import FeedKind
from flatout.data.plan import Layout, PlanSettings
from flatout.data.store import Store
from flatout.errors import UserError
from flatout.kinds import kind_of
from flatout.kinds.kind import Answers, Feeds, Kind, Prepared
from flatout.memory import keep_freed_memory
from flatout.metrics import require_metric
from flatout.monitor.flush import Curves, Flush, Listener, MetricsFile, NoProfiler, silence_unused_hooks
from flatout.monitor.progress import ProgressLine
from flatout.monitor.signals import agree_on_signals_seldom
from flatout.precision import PrecisionChoice, choose_precision, fast_fp32_products
from flatout.ranks import Ranks, cores_here, end_group, others_watched
from flatout.report.closing import print_closing
from flatout.report.page import read_curves, write_page
from flatout.report.summary import hardware
from flatout.run_folder import RunFolder, new_folder, open_run_folder
from flatout.tasks.step import StepTask, callbacks_of


@dataclass(slots=True)
class Result:
    """What a finished run leaves behind."""

    folder: Path
    metrics: dict[str, float]
    """`val/…` of the best checkpoint and `test/…`."""
    per_class: list[dict[str, Any]]
    predictor: Answers
    summary: dict[str, Any]
    metric: str
    """Name of the validation metric that decided which checkpoint is best."""

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What limited the run; None until there is a rule that can tell."""
        return self.summary["verdict"]

    @property
    def objective(self) -> float:
        """The validation metric of the best checkpoint: what a sweep compares."""
        return self.metrics[f"val/{self.metric}"]

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        """Answers for new texts, or for new encodings."""
        return self.predictor.predict(rows)


def run(config: RunConfig, *, folder: Path | None = None, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that number."""
    started = time.perf_counter()
    ranks = Ranks.here()
    folder = Path(ranks.agreed("folder", lambda: str((folder or new_folder(config)).absolute())))
    with open_run_folder(config, folder, overrides, is_first=ranks.is_first) as place:
        L.seed_everything(config.seed, verbose=False)
        device = ranks.device(config.trainer.get("accelerator", "auto"), number)
        share_processor(ranks, device, place)
        if device.type == "cpu" and keep_freed_memory():
            place.choose("allocator", "keeps freed memory", "no fresh pages each step", "the C library took mallopt")
        kind = prepare_data(config, ranks, place)
        model = build_model(config, kind, place)
        feeds = build_feeds(config, kind.store, model, device, ranks, place)
        task = build_task(config, kind, model, feeds, place)
        kind.before_training(task, feeds, place)
        precision = choose_precision(config.precision, device)
        place.choose("precision", precision.precision.value, precision.why, precision.evidence)
        trainer, flush = build_trainer(config, task, feeds, precision, ranks, place)
        ranks.join(device)
        with fast_fp32_products(precision.precision, device) as found:
            if found is not None:
                place.choose("fp32 products", found.value, found.why, found.evidence)
            train(trainer, task, feeds, flush, place)
            load_best(trainer, task)
            task.to(device)  # Lightning has taken it back to the host
            kind.after_best(task, feeds, place)
            metrics = evaluate(trainer, task, feeds, place)
        per_class, predictor = task.per_class(), kind.predictor(task)
        end_group()
        if ranks.is_first:
            save_model(config, predictor, place)
            summarise(place, kind, task, feeds, flush, time.perf_counter() - started)
            kind.after_training(task, feeds, place)
            show(place, per_class)
        return Result(place.path, metrics, per_class, predictor, place.summary.values, chosen_metric(config, task))


def share_processor(ranks: Ranks, device: torch.device, place: RunFolder) -> None:
    """Divide the cores among the ranks of this machine; torchrun would leave each a single thread."""
    has_own = "SLURM_CPUS_PER_TASK" in os.environ  # srun has divided them
    if ranks.local_world > 1 and not has_own and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(cores_here()) // ranks.local_world)
        torch.set_num_threads(threads)
        if device.type == "cpu":
            evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
            place.choose("threads a rank", threads, "an equal share of the cores", evidence)


def prepare_data(config: RunConfig, ranks: Ranks, place: RunFolder) -> Kind:
    """Open the store, which the first rank builds where it is missing; say what is in it and what run this will be."""
    prepared: list[Prepared] = []

    def prepare() -> str:
        prepared.append(config.data.prepare())
        return prepared[0].report.key

    key = ranks.agreed("store", prepare)
    data = prepared[0] if prepared else config.data.prepare()
    if data.report.key != key:
        what = f"rank {ranks.rank} sees other data than the first rank"
        raise UserError("data", what, mend="Every machine needs the same files, or one folder that all can read.")
    for line in (data.report.line(), *data.facts["lines"]):
        place.log.say(line)
    facts = data.summary()
    rows = {_SHORT[split]: count for split, count in facts.pop("rows").items()}
    cache = {"key": data.report.key, "hit": data.report.hit, "seconds": round(data.report.seconds, 4)}
    place.summary.update("data", {"source": data.source, "rows": rows, **facts, "cache": cache})
    return kind_of(config.data, data)


_SHORT = {"train": "train", "validation": "val", "test": "test"}


def build_model(config: RunConfig, kind: Kind, place: RunFolder) -> nn.Module:
    """The model of the settings, or the one a person handed over."""
    return config.model if isinstance(config.model, nn.Module) else kind.build_model(config.model, place)


def build_feeds(
    config: RunConfig, store: Store, model: nn.Module, device: torch.device, ranks: Ranks, place: RunFolder
) -> Feeds:
    """One feed a split, of the kind asked for or the best that fits."""
    settings, splits = config.data, store.splits
    num_bytes = sum(split.num_bytes for split in splits.values())
    choice = choose_feed(settings.feed, num_bytes, device, None)
    place.choose("feed", choice.kind.value, choice.why, choice.evidence)
    layout = Layout(getattr(model, "layout", Layout.flat))
    shares: dict[str, Any] = {"layout": layout, "rank": ranks.rank, "world": ranks.world}
    training = PlanSettings(
        rows_per_batch=settings.batch_size,
        tokens_per_batch=settings.tokens_per_batch,
        accumulate=settings.accumulate,
        seed=config.seed,
        **shares,
    )
    if ranks.are_several:
        product = f"{settings.batch_size} rows x {settings.accumulate} batches x {ranks.world} ranks"
        value = f"{settings.batch_size * training.parts} rows"
        place.choose("rows a step", value, "each rank trains its share", product)
    evaluation = PlanSettings(rows_per_batch=settings.eval_batch_size, shuffle=False, **shares)
    evaluation_kind = FeedKind.resident if choice.kind is FeedKind.resident else FeedKind.threaded

    def evaluated(name: str) -> Feed:
        return Feed(splits[name], evaluation, kind=evaluation_kind, device=device)

    return Feeds(
        train=Feed(splits["train"], training, kind=choice.kind, device=device, workers=settings.workers),
        validation=evaluated("validation"),
        test=evaluated("test") if "test" in splits else None,
    )


def build_task(config: RunConfig, kind: Kind, model: nn.Module, feeds: Feeds, place: RunFolder) -> StepTask:
    """The loss, with the optimizer that was asked for or that suits the model."""
    epochs = config.trainer.get("max_epochs") or EPOCHS
    total_steps = config.trainer.get("max_steps", -1)
    if total_steps < 1:
        total_steps = epochs * len(feeds.train) // feeds.train.plan.accumulate
    clip = config.optim.clip
    if clip is None:
        clip = getattr(config.model, "recommended_clip", 0.0)
    optim = config.optim
    recommended = getattr(config.model, "recommended_lr", None)
    if optim.lr is None and recommended is not None:
        optim = replace(optim, lr=recommended)
        place.choose("optim.lr", f"{recommended:g}", "usual for such a model", "set optim.lr for another")
    return kind.build_task(model, config.task, optim, total_steps=total_steps, clip=clip, seed=config.seed)


EPOCHS = 8


def build_trainer(
    config: RunConfig, task: StepTask, feeds: Feeds, precision: PrecisionChoice, ranks: Ranks, place: RunFolder
) -> tuple[L.Trainer, Flush]:
    """Lightning's Trainer with our callbacks; a person's own settings come last and win."""
    metric = chosen_metric(config, task)
    flush = Flush(feeds.train, listeners_of(config, task, metric, place), config.monitor.flush_every)
    best = BestAndLast(place.path / CHECKPOINTS, metric, config.checkpoint.min_delta)
    callbacks = [flush, *config.callbacks.values(), best]
    if config.checkpoint.patience is not None:
        callbacks.insert(1, _early_stopping(config, metric))
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "precision": precision.lightning_name,
        "logger": False,
        "profiler": NoProfiler(),
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(place.path),
        "plugins": [FolderCheckpointIO(), *([ranks.environment()] if ranks.are_several else [])],
    }
    if ranks.are_several:
        defaults["strategy"] = ddp(task, feeds.train.device)
    # One process a device is running already, however many were asked for.
    started = ranks.lightning_settings(feeds.train.device)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        trainer = L.Trainer(**{**defaults, **config.trainer, **started}, callbacks=callbacks)
    except (TypeError, ValueError, L.pytorch.utilities.exceptions.MisconfigurationException) as error:
        raise UserError("trainer", str(error), mend="These settings go to Lightning's Trainer.") from None
    silence_unused_hooks(trainer)
    if ranks.are_several:
        agree_on_signals_seldom(trainer)
    return trainer, flush


def listeners_of(config: RunConfig, task: StepTask, metric: str, place: RunFolder) -> list[Listener]:
    """Who is told how training goes; on other ranks than the first, nobody."""
    if not place.is_first:
        return []
    return [
        MetricsFile(place.path / "metrics.csv", ["loss", *task.metric_names]),
        Curves(place.path),
        ProgressLine(task.total_steps, metric, place.log.say, live=config.monitor.progress),
    ]


_ONE_BUCKET_MB = 1 << 14
"""On a CPU what exchanges gradients takes its cores from what computes them: all are exchanged when all are there."""


def ddp(task: StepTask, device: torch.device) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients, and without buffers in each step that never change."""
    # Only the running means of batch normalisation do, and then the first rank's count.
    has_means = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: has_means}
    if device.type == "cpu":
        settings["bucket_cap_mb"] = _ONE_BUCKET_MB
    return DDPStrategy(**settings)


def chosen_metric(config: RunConfig, task: StepTask) -> str:
    """The validation metric that decides what is best."""
    available = [*task.metric_names, "loss"]
    if config.checkpoint.metric is None:
        return task.usual_metric
    require_metric(config.checkpoint.metric, available, "checkpoint.metric")
    return config.checkpoint.metric


def _early_stopping(config: RunConfig, metric: str) -> EarlyStopping:
    return EarlyStopping(
        f"val/{metric}",
        mode=best_mode(metric),
        patience=config.checkpoint.patience or 1,
        min_delta=config.checkpoint.min_delta,
        check_on_train_epoch_end=False,
    )


def train(trainer: L.Trainer, task: StepTask, feeds: Feeds, flush: Flush, place: RunFolder) -> None:
    """Train to the end, or to where nothing gets better."""
    place.log.say(
        f"training: {sum(p.numel() for p in task.model.parameters()):,} parameters, {task.total_steps:,} steps of"
        f" {feeds.train.plan.rows_per_batch * feeds.train.plan.parts} rows"
    )
    with _without_loader_advice(), others_watched():
        try:
            trainer.fit(task, train_dataloaders=feeds.train, val_dataloaders=feeds.validation)
        except SIGTERMException:
            raise SystemExit(128 + signal.SIGTERM) from None
        except SystemExit:
            if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
                raise KeyboardInterrupt from None
            raise
        finally:
            for listener in flush.listeners:
                listener.close()


def load_best(trainer: L.Trainer, task: StepTask) -> None:
    """The weights that were best on the validation rows."""
    best = next(callback for callback in callbacks_of(trainer) if isinstance(callback, BestAndLast))
    with others_watched():
        trainer.strategy.barrier()  # the first rank may still be linking it
    if best.best.exists():
        load_weights(task, best.best)


def evaluate(trainer: L.Trainer, task: StepTask, feeds: Feeds, place: RunFolder) -> dict[str, float]:
    """Metrics on the validation rows, and on the test rows where there are any."""
    metrics: dict[str, float] = {}
    with _without_loader_advice(), others_watched():
        trainer.validate(task, dataloaders=feeds.validation, verbose=False)
        metrics |= {f"val/{name}": value for name, value in task.results.items()}
        if feeds.test is not None:
            trainer.test(task, dataloaders=feeds.test, verbose=False)
            metrics |= {f"test/{name}": value for name, value in task.results.items()}
    place.summary.update("metrics", metrics)
    return metrics


def save_model(config: RunConfig, predictor: Answers, place: RunFolder) -> None:
    """The `model/` folder."""
    if isinstance(config.model, nn.Module):
        place.log.say("model/ is not written: the settings of a model of your own are not known to us")
    else:
        predictor.save(place.path / "model", config.model)


def summarise(place: RunFolder, kind: Kind, task: StepTask, feeds: Feeds, flush: Flush, seconds: float) -> None:
    """Fill the summary with what was trained, on what, and how fast."""
    summary = place.summary
    rates = flush.total.values(is_host_clock=task.device.type == "cpu")
    parameters = list(task.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    summary.update("model", {"name": type(task.model).__name__, "parameters": count, "trainable": trained})
    summary.update("hardware", hardware(feeds.train.device, feeds.train.plan.world, str(task.trainer.precision)))
    summary.update(
        "training",
        {
            "epochs": flush.epochs,
            "steps": flush.steps,
            "rows_per_step": feeds.train.plan.rows_per_batch * feeds.train.plan.parts,
            "seconds": round(seconds, 2),
            "seconds_to_first_step": flush.seconds_to_first_step,
        },
    )
    for name in ("rows_per_s", *(("tokens_per_s", "padding_share") if kind.counts_tokens else ())):
        summary.set(f"speed.{name}", rates[f"speed/{name}"])
    for name, value in rates.items():
        if name.startswith("time/"):
            summary.set(f"speed.step_ms.{name.removeprefix('time/').removesuffix('_ms')}", value)


def show(place: RunFolder, per_class: list[dict[str, Any]]) -> None:
    """Write the page and print the closing table."""
    values = {**place.summary.values, "status": "finished"}
    write_page(place.path, values, read_curves(place.path), per_class)
    artifacts = {"model": "model", "checkpoints": CHECKPOINTS, "page": "report.html", "curves": "metrics.csv"}
    place.summary.update("artifacts", {name: path for name, path in artifacts.items() if (place.path / path).exists()})
    print_closing(values, place.path, per_class)


@contextmanager
def _without_loader_advice() -> Iterator[None]:
    """Lightning advises DataLoader workers to any loader, and to share metrics that are shared already: no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")
        yield

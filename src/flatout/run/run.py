"""The story of one run, top to bottom: data, model, task, training, test, report.

Each stage is a function that takes what it needs and returns what the next one needs; what a stage chose by itself is
printed with its reason. On several devices every rank goes through the same story with its share of the rows, and the
first one tells it.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor

from flatout.bits.exposure_report import report_exposure
from flatout.bits.predictor import GramPredictor
from flatout.bits.task import GramDecoder
from flatout.checkpoints.find_checkpoint import Start, find_checkpoint, set_aside
from flatout.checkpoints.folder import read_weights, require_whole
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.info import TokenInfo
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, cores_here, end_group, others_watched
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.engine.allocator import keep_freed_memory
from flatout.engine.fast_loop import FastLoop
from flatout.engine.limits import limits
from flatout.engine.passes import TRAINING
from flatout.engine.precision import PrecisionChoice, fast_fp32_products, product_type
from flatout.engine.run_length import EPOCHS, batches_in_epoch
from flatout.errors import UserError, require
from flatout.inference.folder import Answers
from flatout.inference.load import build_predictor
from flatout.perf.verdict.judge import judge, report_early
from flatout.perf.verdict.rules import verdict
from flatout.report.sequence_charts import draw_answers
from flatout.report.summary import choice_of, hardware
from flatout.run.build import RunBuilder
from flatout.run.closing import find_peak, save_model, summarise, write_reports
from flatout.run.learning_rate import set_rate
from flatout.run.micro_batches import mind_memory
from flatout.run.resume import about_run, folder_of_one, require_same_run
from flatout.run.run_folder import RunFolder, open_run_folder
from flatout.run.split_rows import SPLIT_ROWS, save_split_rows
from flatout.run.trainer import Training
from flatout.tasks.networks import report_attention
from flatout.tasks.task import Task


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
        """What limited the run; None where it was too short to tell."""
        return self.summary["verdict"]

    @property
    def objective(self) -> float:
        """The validation metric of the best checkpoint: what a sweep compares."""
        return self.metrics[f"val/{self.metric}"]

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        """Answers for new texts, or for new encodings."""
        return self.predictor.predict(rows)


def run(build: RunBuilder, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that number."""
    started = time.perf_counter()
    ranks = Ranks.here()
    title = build.title(overrides)
    compiled_before = choice_of(path, "compile") if build.is_resumed else None
    with (
        Signals() as signals,
        open_run_folder(path, title, is_first=ranks.is_first, is_again=build.is_resumed) as folder,
        folder_of_one(path) if ranks.is_first else nullcontext(),
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
        precision = build.choose_precision(device, folder)
        loop = build.build_loop(rows_of_steps(build.trainer, feeds.train))
        training, start = set_up(build, data, task, loop, precision, ranks, folder, signals)
        ranks.join(device)
        with training.loggers, fast_fp32_products(precision.precision, device) as found:
            if found is not None:
                folder.choose("fp32 products", found.value, found.why, found.evidence)
            build.compile_network(task, feeds, precision, ranks, folder, compiled_before)
            train(training, task, data, folder, signals, start)
            load_best(training, task)
            task.to(device)  # Lightning has taken it back to the host
            put_facts(task.tune_answers(feeds, folder), folder)
            metrics = evaluate(training.trainer, task, data, folder)
            folder.summary.set("metric", build.choose_metric(task))
            take_whole_weights(training, task)
            per_class, predictor = task.per_class(), build_predictor(task)
            charts = draw_answers(task, feeds)
            if ranks.is_first:
                save_model(predictor, build.network, folder)
            find_peak(training, feeds, ranks)
            training.loggers.log_final(metrics, training.curves.steps)
            write_verdict(build, task, feeds, training, folder)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(folder, task, feeds, training, seconds)
            if isinstance(task, GramDecoder):
                report_exposure(task, cast(GramPredictor, predictor), feeds, folder.summary.values, folder.path, folder)
            settings: dict[str, Any] = {"settings": build.compared_settings(task), "charts": charts}
            write_reports(folder, task, per_class, **settings, has_tensorboard=build.writes_tensorboard)
        metric = build.choose_metric(task)
        return Result(folder.path, metrics, per_class, predictor, folder.summary.values, metric)


@contextmanager
def restore_threads() -> Iterator[None]:
    """The next run of this process computes with as many threads as this one found."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_processor(build: RunBuilder, ranks: Ranks, device: torch.device, folder: RunFolder) -> None:
    """Divide the cores among the ranks of this machine, as torchrun would leave each a single thread; keep memory."""
    if device.type == "cpu" and keep_freed_memory():
        folder.choose("allocator", "keeps freed memory", "no fresh pages each step", "the C library took mallopt")
    if build.set_threads():
        return
    has_own = "SLURM_CPUS_PER_TASK" in os.environ  # srun has divided them
    if ranks.local_world > 1 and not has_own and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(cores_here()) // ranks.local_world)
        torch.set_num_threads(threads)
        if device.type == "cpu":
            evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
            folder.choose("threads a rank", threads, "an equal share of the cores", evidence)


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
    about = about_run(build.settings, data.info.key, task.model, feeds.train, batches, precision.lightning_name)
    start = where_to_start(build, about, ranks, folder)
    if not build.shards_weights:  # ranks that wait for each other in every layer cannot cut batches alone
        mind_memory(task, loop, feeds, about, ranks, data.config.cache, folder)
    if folder.is_first and isinstance(data.info, TokenInfo):
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


def where_to_start(build: RunBuilder, about: dict[str, Any], ranks: Ranks, folder: RunFolder) -> Start | None:
    """The checkpoint to resume from, where the run is still the same; None at the beginning."""
    found: list[Start] = []

    def look() -> str:
        if not build.is_resumed:
            return ""
        start, lines = find_checkpoint(folder.path)
        for line in lines:
            folder.say(line)
        if start is None:
            if lines and not build.resume_anyway:
                hint = "Add resume_anyway=true to train it from the beginning."
                raise UserError("resume", f"{folder.path} has no whole checkpoint left", hint=hint)
            why = "has no whole checkpoint left" if lines else "has no checkpoint yet"
            folder.say(f"resume: {folder.path} {why}: it starts from the beginning")
            return ""
        found.append(start)
        return str(start.checkpoint)

    path = ranks.agreed("checkpoint", look)
    start = None
    if path:
        start = found[0] if found else Start(Path(path), require_whole(Path(path)))
        for line in require_same_run(start.about, about, anyway=build.resume_anyway):
            folder.say(line)
        _require_more_to_train(build.trainer, start)
        folder.summary.set("training.resumed_from", start.step)
        position = start.about["position"]
        folder.say(f"resume: continuing from step {start.step}, in epoch {position['epoch'] + 1} ({path})")
    folder.begin()
    if start is not None and folder.is_first:
        set_aside(start, folder.path)
    return start


def _require_more_to_train(trainer: dict[str, Any], start: Start) -> None:
    """A run cannot be asked for less than it has done."""
    epochs, most = trainer.get("max_epochs") or EPOCHS, trainer.get("max_steps") or -1
    begun = start.about["position"]["epoch"] + 1
    hint = "The run's model/ and report are what it has reached so far."
    require(epochs >= begun, "trainer.max_epochs", f"{epochs}, but epoch {begun} has begun", hint=hint)
    require(most == -1 or most >= start.step, "trainer.max_steps", f"{most}, but {start.step} are done", hint=hint)


def train(
    training: Training,
    task: Task,
    data: StoreData[Any, Any],
    folder: RunFolder,
    signals: Signals,
    start: Start | None,
) -> None:
    """Train to the end, or to where nothing gets better."""
    trainer, curves, plan = training.trainer, training.curves, data.feeds.train.plan
    folder.say(
        f"training: {sum(p.numel() for p in task.model.parameters()):,} parameters, {task.total_steps:,} steps of"
        f" {plan.rows_per_batch * plan.parts} rows"
    )
    listeners = list(curves.listeners)
    with _without_loader_advice(), others_watched(), signals.waiting():
        try:
            trainer.fit(task, datamodule=data, ckpt_path=None if start is None else start.checkpoint)
        except SystemExit:
            number = training.checkpoints.stopped_by
            if not number and trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
                raise KeyboardInterrupt from None
            if number:
                tell_of_signal(number, training, folder)
            raise
        finally:
            for listener in listeners:
                with suppress(OSError):
                    listener.close()
    curves.steps, curves.epochs = trainer.global_step, trainer.current_epoch
    require(trainer.global_step > 0, "trainer", "not one step was planned", hint="Give it rows, epochs and time.")
    if skipped := training.loop.skipped:
        rows = training.loop.losses.describe_rows(skipped[0])
        folder.say(f"{len(skipped)} steps were skipped, their gradient was not finite: the first{rows}")


def tell_of_signal(number: int, training: Training, folder: RunFolder) -> None:
    """Say where training stopped; where SLURM gave the warning, ask it for another turn."""
    name, step = signal.Signals(number).name, training.checkpoints.at.step
    folder.say(f"stopped by {name} after step {step}: the same command with resume=auto resumes there")
    if folder.is_first and (line := requeue_with_slurm(number)):
        folder.say(line)


def load_best(training: Training, task: Task) -> None:
    """The weights that were best on the validation rows."""
    with others_watched():
        training.trainer.strategy.barrier()  # the first rank may still be linking it
    state, strategy = _best_weights(training), cast(Any, training.trainer.strategy)
    if task.shares_weights:
        strategy.hand_out(task, state)
    elif state is not None:
        task.load_state_dict(state)


def _best_weights(training: Training) -> dict[str, Tensor] | None:
    """Those of the best checkpoint, or of the last; None where this machine has none that is whole."""
    kept = [training.checkpoints.folder / name for name in ("best", "last")]
    for path in (path for path in kept if path.exists()):
        try:
            return read_weights(path)
        except UserError as error:  # spoilt since it was written
            warnings.warn(f"{error}; passed over", UserWarning, stacklevel=2)
    return None


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
    with _without_loader_advice(), others_watched():
        trainer.validate(task, datamodule=data, verbose=False)
        metrics |= {f"val/{name}": value for name, value in task.results.items()}
        task.count_answers()
        if data.feeds.test is not None:
            trainer.test(task, datamodule=data, verbose=False)
            metrics |= {f"test/{name}": value for name, value in task.results.items()}
    folder.summary.update("metrics", metrics)
    return metrics


def write_verdict(build: RunBuilder, task: Task, feeds: Feeds, training: Training, folder: RunFolder) -> None:
    """Judge what held the run back, and write evidence and verdict into the summary."""
    is_measured = "precision" in (folder.summary.values["tune"] or {}).get("values", {})
    known = build.judging(task, feeds, training.loop.passes.pieces[TRAINING], is_precision_measured=is_measured)
    evidence = judge(task, feeds, training.curves, known, folder)
    if evidence is not None and folder.is_first:
        folder.summary.update("evidence", evidence.as_dict())
        folder.summary.update("verdict", verdict(evidence))


@contextmanager
def _without_loader_advice() -> Iterator[None]:
    """Lightning advises DataLoader workers to any loader, and to share metrics that are shared already: no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*Be aware that when using `ckpt_path`.*")
        yield

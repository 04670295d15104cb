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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from flatout.bits.exposure_report import report_exposure
from flatout.bits.predictor import GramPredictor
from flatout.bits.task import GramDecoder
from flatout.callbacks.profile_steps import TABLE, TRACE
from flatout.checkpoints.exact import CHECKPOINTS
from flatout.checkpoints.folder import read_weights, require_whole
from flatout.config import RunConfig
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.info import TokenInfo
from flatout.data.plans import Placement
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks, cores_here, end_group, others_watched
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.engine.allocator import keep_freed_memory
from flatout.engine.compile import choose_compile, compile_in_place, compile_layers
from flatout.engine.fast_loop import FastLoop
from flatout.engine.limits import limits
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.engine.peaks import measured_peak
from flatout.engine.precision import PrecisionChoice, choose_precision, fast_fp32_products, product_type
from flatout.errors import UserError, require
from flatout.inference.load import Answers, build_predictor
from flatout.models.encoder.network import Transformer
from flatout.perf.tune.probe import Parts
from flatout.perf.tune.settings import TuneConfig
from flatout.perf.tune.tuning import Question, tuned
from flatout.perf.verdict.judge import judge, tell_early
from flatout.report.closing import print_closing
from flatout.report.dashboard import write_dashboard
from flatout.report.hyperparameters import compared_settings
from flatout.report.page import read_curves, write_page
from flatout.report.summary import choice_of, hardware
from flatout.run.micro_batches import mind_memory
from flatout.run.model_memory import require_memory
from flatout.run.problems import build_data, task_class
from flatout.run.resume import Start, about_run, find_checkpoint, folder_of_one, require_same_run, set_aside
from flatout.run.run_folder import RunFolder, open_run_folder, plain, unwritten_run
from flatout.run.split_rows import SPLIT_ROWS, save_split_rows
from flatout.run.trainer import (
    EPOCHS,
    Training,
    batches_in_epoch,
    build_trainer,
    chosen_metric,
    clip_of,
    planned_steps,
    whole_steps,
)
from flatout.tasks.networks import report_attention, report_network
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


def run(config: RunConfig, folder: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run, or one rank's part of it, from its settings to its report; alone, on the GPU of that number."""
    started = time.perf_counter()
    ranks, is_again = Ranks.here(), config.resume is not None
    before = choice_of(folder, "compile") if is_again else None
    with (
        Signals() as signals,
        open_run_folder(config, folder, overrides, is_first=ranks.is_first, is_again=is_again) as place,
        folder_of_one(folder) if ranks.is_first else nullcontext(),
        threads_put_back(),
    ):
        L.seed_everything(config.seed, verbose=False)
        device = ranks.device(config.trainer.get("accelerator", "auto"), number)
        share_processor(config, ranks, device, place)
        data = prepare_data(config, ranks, place)
        require_memory_for_model(config, data, ranks, device)
        build = probed(config, ranks, device)
        config = tuned(Question(config, data.store, ranks, device, overrides, build), place)
        data.config = config.data
        task = build_task(config, data, place)
        feeds = place_feeds(config, data, task, device, ranks)
        config = replace(config, trainer=whole_steps(config.trainer, feeds.train, place))
        set_rate(config, task, feeds, place)
        precision = choose_precision(config.precision, device)
        place.choose("precision", precision.precision.value, precision.why, precision.evidence)
        loop = build_loop(config, feeds)
        training, start = set_up(config, data, task, loop, feeds, precision, ranks, place, signals)
        ranks.join(device)
        with training.loggers, fast_fp32_products(precision.precision, device) as found:
            if found is not None:
                place.choose("fp32 products", found.value, found.why, found.evidence)
            compile_model(config, task, feeds, precision, ranks, place, before)
            train(training, task, data, place, signals, start)
            load_best(training, task)
            task.to(device)  # Lightning has taken it back to the host
            put_facts(task.tune_answers(feeds, place), place)
            metrics = evaluate(config, training.trainer, task, data, place)
            take_whole_weights(training, task)
            per_class, predictor = task.per_class(), build_predictor(task)
            if ranks.is_first:
                save_model(config, predictor, place)
            find_peak(training, feeds, ranks)
            training.loggers.log_final(metrics, training.curves.steps)
            judge(config, task, feeds, training, place)
        end_group()
        if ranks.is_first:
            seconds = training.checkpoints.seconds_before + time.perf_counter() - started
            summarise(place, task, feeds, training, seconds)
            if isinstance(task, GramDecoder):
                report_exposure(task, cast(GramPredictor, predictor), feeds, place.summary.values, place.path, place)
            show(config, task, place, per_class)
        return Result(place.path, metrics, per_class, predictor, place.summary.values, chosen_metric(config, task))


@contextmanager
def threads_put_back() -> Iterator[None]:
    """The next run of this process computes with as many threads as this one found."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_processor(config: RunConfig, ranks: Ranks, device: torch.device, place: RunFolder) -> None:
    """Divide the cores among the ranks of this machine, as torchrun would leave each a single thread; keep memory."""
    if device.type == "cpu" and keep_freed_memory():
        place.choose("allocator", "keeps freed memory", "no fresh pages each step", "the C library took mallopt")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        return
    has_own = "SLURM_CPUS_PER_TASK" in os.environ  # srun has divided them
    if ranks.local_world > 1 and not has_own and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(cores_here()) // ranks.local_world)
        torch.set_num_threads(threads)
        if device.type == "cpu":
            evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
            place.choose("threads a rank", threads, "an equal share of the cores", evidence)


def prepare_data(config: RunConfig, ranks: Ranks, place: RunFolder) -> StoreData[Any, Any]:
    """Open the store, which the first rank builds where it is missing; report what is in it."""
    data = build_data(config.data, seed=config.seed, log=place)

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
    place.summary.update("data", {"source": data.info.source, "rows": rows, **facts, "cache": cache})
    return data


_SHORT = {"train": "train", "validation": "val", "test": "test"}


def require_memory_for_model(config: RunConfig, data: StoreData[Any, Any], ranks: Ranks, device: torch.device) -> None:
    """Refuse a model that this device cannot train, before it is built."""
    copies = ranks.local_world if device.type == "cpu" else 1
    shares = ranks.world if config.shares_weights else 1

    def build(model: Any) -> nn.Module:
        return task_class(config.data)(model, config.task).build(data.info)

    require_memory(config.model, build, device, copies / shares)


def compile_model(
    config: RunConfig,
    task: Task,
    feeds: Feeds,
    precision: PrecisionChoice,
    ranks: Ranks,
    place: RunFolder,
    before: dict[str, Any] | None,
) -> None:
    """Have the model compiled where that is asked for, or its layers where they were found to pay.

    `before`: what the run that resumes here had chosen, so that it computes to the end as it began.
    """
    model, device = task.model, feeds.train.device
    if config.compile:
        compile_in_place(model, device)
        place.choose("compile", True, "asked for", "the first step waits for it")
    if config.compile is not None or not isinstance(model, Transformer) or not model.is_flat:
        return
    if before is not None:
        if before["value"]:
            compile_layers(model)
        place.choose("compile", before["value"], before["why"], before["evidence"])
        return
    if ranks.are_several or config.shares_weights:
        place.choose("compile", False, "compile=auto measures on one device", "compile=true compiles on several")
        return
    plan = feeds.train.plan
    rows = plan.rows_per_batch * float(feeds.train.split.lengths(TOKENS).mean())
    tokens = int(min(rows, plan.tokens_per_batch or rows))
    passes = (task.total_steps or 1) * plan.accumulate
    found = choose_compile(model, device, precision.precision, tokens=tokens, passes=passes)
    place.choose("compile", found.value, found.why, found.evidence)


def probed(config: RunConfig, ranks: Ranks, device: torch.device) -> Callable[[], Parts]:
    """Builds, in a throw-away process, what this run would train."""
    return partial(parts_of, replace(config, callbacks={}, tune=TuneConfig(), compile=False), ranks, device)


def parts_of(config: RunConfig, ranks: Ranks, device: torch.device) -> Parts:
    """Task and feed as a run has them, for whoever only wants to see how fast they are."""
    with unwritten_run() as place:
        L.seed_everything(config.seed, verbose=False)
        data = build_data(config.data, seed=config.seed, log=place)
        data.setup()
        task = build_task(config, data, place)
        feeds = place_feeds(config, data, task, device, ranks)
        config = replace(config, trainer=whole_steps(config.trainer, feeds.train, place))
        set_rate(config, task, feeds, place)
        task.prepare_probe(feeds, config.seed)
        return Parts(task, feeds.train.split, feeds.train.plan, device, config.data.workers, clip_of(config))


def build_task(config: RunConfig, data: StoreData[Any, Any], place: RunFolder) -> Task:
    """The task of the data, with the network of the settings or the one that was handed over."""
    task = task_class(config.data)(config.model, config.task, config.optim)
    report_network(task.build(data.info), config.model, data.info, place)
    return task


def place_feeds(config: RunConfig, data: StoreData[Any, Any], task: Task, device: torch.device, ranks: Ranks) -> Feeds:
    """One feed a split, for this rank and for the layout that the network reads."""
    layout = Layout(getattr(task.model, "layout", Layout.flat))
    repeats = bool(config.trainer.get("overfit_batches"))
    data.place(Placement(ranks.rank, ranks.world, device, layout, repeats))
    return data.feeds


def set_rate(config: RunConfig, task: Task, feeds: Feeds, place: RunFolder) -> None:
    """The planned steps, and the learning rate that was asked for or that suits the model."""
    task.total_steps = planned_steps(config.trainer, feeds.train)
    if (rate := task.take_recommended_rate()) is not None:
        why = "usual for such a model"
        place.choose("optim.lr", f"{rate:g}", why, "set optim.lr for another", anew=True)
    task.optim = scale_rate(config, task.optim, feeds.train.plan, place)


def put_facts(facts: dict[str, Any], place: RunFolder) -> None:
    """Put what a task found into the summary."""
    for name, value in facts.items():
        place.summary.set(name, value)


def build_loop(config: RunConfig, feeds: Feeds) -> FastLoop:
    """The fast loop, which names the rows of a step that fails."""
    steps_an_epoch = batches_in_epoch(config.trainer, feeds.train) // feeds.train.plan.accumulate
    return FastLoop(
        not_finite=config.optim.not_finite,
        describe_rows=lambda step: rows_told(feeds.train, *divmod(step, steps_an_epoch)),
    )


def scale_rate(config: RunConfig, optim: OptimConfig, plan: PlanSettings, place: RunFolder) -> OptimConfig:
    """The learning rate for the rows of a step, and how these come about, in one line where anybody asked."""
    if config.data.effective_batch is None and optim.scale_lr is ScaleRate.none:
        return optim
    if plan.tokens_per_batch is not None:
        what = f"{optim.scale_lr.value}, but data.tokens_per_batch makes steps of unequal rows"
        raise UserError("optim.scale_lr", what, hint="Leave one of them out.")
    rows = plan.rows_per_batch * plan.parts
    scaled = optim.scaled(rows)
    product, rates = f"{plan.rows_per_batch} × {plan.accumulate} × {plan.world}", (optim.highest, scaled.highest)
    is_capped = scaled is not optim and scaled.highest == optim.max_lr
    how = "not scaled" if scaled is optim else f"{optim.scale_lr.value} from {optim.base_batch} rows"
    told = f"{product} = {rows} rows, lr {rates[0]:g} → {rates[1]:g}"
    place.choose("micro × accumulation × devices", told, "as asked", f"lr {how}{', capped' if is_capped else ''}")
    return scaled


def set_up(
    config: RunConfig,
    data: StoreData[Any, Any],
    task: Task,
    loop: FastLoop,
    feeds: Feeds,
    precision: PrecisionChoice,
    ranks: Ranks,
    place: RunFolder,
    signals: Signals,
) -> tuple[Training, Start | None]:
    """The Trainer, and the checkpoint that it begins with; from here on the run is known to be the one it was."""
    batches = batches_in_epoch(config.trainer, feeds.train)
    about = about_run(config, data.info.key, task.model, feeds.train, batches, precision.lightning_name)
    start = where_to_start(config, about, ranks, place)
    if not config.shares_weights:  # ranks that wait for each other in every layer cannot cut batches by themselves
        mind_memory(task, loop, feeds, about, ranks, config.data.cache, place)
    if place.is_first and isinstance(data.info, TokenInfo):
        save_split_rows(data.store, place.path / SPLIT_ROWS)
    put_facts(task.prepare(feeds, place, config.seed), place)
    report_attention(task.model, feeds.train.device, product_type(precision.precision), place)
    parts: dict[str, Any] = {"about": about, "signals": signals, "start": start}
    training = build_trainer(config, task, loop, feeds.train, precision, ranks, place, **parts)
    trainer, curves = training.trainer, training.curves
    curves.judge_early = lambda: tell_early(curves, feeds.train, str(trainer.precision), batches, place)
    device, world = feeds.train.device, feeds.train.plan.world
    place.summary.update("hardware", hardware(device, world, str(trainer.precision)) | limits().facts())
    return training, start


def rows_told(feed: Feed, epoch: int, step: int, most: int = 12) -> str:
    """The rows of the table that an optimizer step trains, in words."""
    numbers = feed.rows_of_step(epoch, step)
    if "rows" in feed.split.columns:
        numbers = feed.split.fixed("rows")[numbers] + 1
    shown = ", ".join(str(number) for number in sorted(numbers.tolist())[:most])
    return f" (rows {shown}{', …' if len(numbers) > most else ''} of the table)"


def where_to_start(config: RunConfig, about: dict[str, Any], ranks: Ranks, place: RunFolder) -> Start | None:
    """The checkpoint to go on from, where the run is still the same; None at the beginning."""
    found: list[Start] = []

    def look() -> str:
        if config.resume is None:
            return ""
        start, lines = find_checkpoint(place.path)
        for line in lines:
            place.log.say(line)
        if start is None:
            if lines and not config.resume_anyway:
                hint = "Add resume_anyway=true to train it from the beginning."
                raise UserError("resume", f"{place.path} has no whole checkpoint left", hint=hint)
            why = "has no whole checkpoint left" if lines else "has no checkpoint yet"
            place.log.say(f"resume: {place.path} {why}: it starts from the beginning")
            return ""
        found.append(start)
        return str(start.checkpoint)

    path = ranks.agreed("checkpoint", look)
    start = None
    if path:
        start = found[0] if found else Start(Path(path), require_whole(Path(path)))
        for line in require_same_run(start.about, about, anyway=config.resume_anyway):
            place.log.say(line)
        _require_more_to_train(config, start)
        place.summary.set("training.resumed_from", start.step)
        position = start.about["position"]
        place.log.say(f"resume: going on from step {start.step}, in epoch {position['epoch'] + 1} ({path})")
    place.begin()
    if start is not None and place.is_first:
        set_aside(start, place.path)
    return start


def _require_more_to_train(config: RunConfig, start: Start) -> None:
    """A run cannot be asked for less than it has done."""
    epochs, most = config.trainer.get("max_epochs") or EPOCHS, config.trainer.get("max_steps") or -1
    begun = start.about["position"]["epoch"] + 1
    hint = "The run's model/ and report are what it has reached so far."
    require(epochs >= begun, "trainer.max_epochs", f"{epochs}, but epoch {begun} has begun", hint=hint)
    require(most == -1 or most >= start.step, "trainer.max_steps", f"{most}, but {start.step} are done", hint=hint)


def train(
    training: Training,
    task: Task,
    data: StoreData[Any, Any],
    place: RunFolder,
    signals: Signals,
    start: Start | None,
) -> None:
    """Train to the end, or to where nothing gets better."""
    trainer, curves, plan = training.trainer, training.curves, data.feeds.train.plan
    place.log.say(
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
                tell_of_signal(number, training, place)
            raise
        finally:
            for listener in listeners:
                with suppress(OSError):
                    listener.close()
    curves.steps, curves.epochs = trainer.global_step, trainer.current_epoch
    require(trainer.global_step > 0, "trainer", "not one step was planned", hint="Give it rows, epochs and time.")
    if skipped := training.loop.skipped:
        rows = training.loop.losses.describe_rows(skipped[0])
        place.log.say(f"{len(skipped)} steps were skipped, their gradient was not finite: the first{rows}")


def tell_of_signal(number: int, training: Training, place: RunFolder) -> None:
    """Say where training stopped; where SLURM gave the warning, ask it for another turn."""
    name, step = signal.Signals(number).name, training.checkpoints.at.step
    place.log.say(f"stopped by {name} after step {step}: the same command with resume=auto goes on from there")
    if place.is_first and (told := requeue_with_slurm(number)):
        place.log.say(told)


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


def evaluate(
    config: RunConfig, trainer: L.Trainer, task: Task, data: StoreData[Any, Any], place: RunFolder
) -> dict[str, float]:
    """Metrics on the validation rows, and on the test rows where there are any."""
    metrics: dict[str, float] = {}
    with _without_loader_advice(), others_watched():
        trainer.validate(task, datamodule=data, verbose=False)
        metrics |= {f"val/{name}": value for name, value in task.results.items()}
        task.count_answers()
        if data.feeds.test is not None:
            trainer.test(task, datamodule=data, verbose=False)
            metrics |= {f"test/{name}": value for name, value in task.results.items()}
    place.summary.update("metrics", metrics)
    place.summary.set("metric", chosen_metric(config, task))
    return metrics


def find_peak(training: Training, feeds: Feeds, ranks: Ranks) -> None:
    """Where no table tells what the device could do, try it: now, so that no first step waits for it.

    The run's threads and its way of making fp32 products are still set. So a CPU has no curve of its MFU: measured
    before the first step it would delay every run, for a curve with the shape of that of rows a second.
    """
    throughput = training.curves.throughput
    if ranks.is_first and throughput.peak is None and throughput.total.flops:
        throughput.peak = measured_peak(feeds.train.device, str(training.trainer.precision))


def save_model(config: RunConfig, predictor: Answers, place: RunFolder) -> None:
    """The `model/` folder."""
    if isinstance(config.model, nn.Module):
        place.log.say("model/ is not written: the settings of a model of your own are not known to us")
    else:
        predictor.save(place.path / "model", config.model)


def summarise(place: RunFolder, task: Task, feeds: Feeds, training: Training, seconds: float) -> None:
    """Fill the summary with what was trained, on what, and how fast."""
    summary, curves = place.summary, training.curves
    throughput, timer = curves.throughput, curves.timer
    rates = throughput.total.values()
    parameters = list(task.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    summary.update("model", {"name": type(task.model).__name__, "parameters": count, "trainable": trained})
    if (peak := throughput.peak) is not None:
        summary.update("hardware", {"peak_tflops": peak.tflops, "peak_source": peak.source})
    summary.update(
        "training",
        {
            "epochs": curves.epochs,
            "steps": curves.steps,
            "rows_per_step": feeds.train.plan.rows_per_batch * feeds.train.plan.parts,
            "seconds": round(seconds, 2),
            "seconds_to_first_step": timer.seconds_to_first_step,
            "skipped_steps": len(training.loop.skipped),
            "out_of_memory": training.loop.passes.times_out,
        },
    )
    for name in ("rows_per_s", *(("tokens_per_s", "padding_share") if task.counts_tokens else ())):
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


def show(config: RunConfig, task: Task, place: RunFolder, per_class: list[dict[str, Any]]) -> None:
    """Write the page, print the closing table, and complete what TensorBoard shows."""
    values = {**place.summary.values, "status": "finished"}
    write_page(place.path, values, read_curves(place.path), per_class)
    artifacts = {"model": "model", "checkpoints": CHECKPOINTS, "page": "report.html", "curves": "metrics.csv"}
    artifacts |= {"trace": TRACE, "operators": TABLE}
    place.summary.update("artifacts", {name: path for name, path in artifacts.items() if (place.path / path).exists()})
    print_closing(values, place.path, per_class)
    if "tensorboard" in config.logger:
        settings = compared_settings(plain(config)) | {"optim.lr": task.optim.highest}
        write_dashboard(place.path, values, settings, task.counted)


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

"""Stages that runs of our tasks and runs of the user's own modules share."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from torch import Tensor

from flatout.checkpoints.folder import read_weights, require_whole
from flatout.checkpoints.kept import CHECKPOINTS, Start, find_checkpoint, set_aside
from flatout.checkpoints.same_run import require_same_run
from flatout.distributed.ranks import Ranks, cores_here, others_watched
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.engine.allocator import keep_freed_memory, let_segments_grow
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, require
from flatout.inference.folder import Answers
from flatout.report.closing import EARLY_END
from flatout.run.run_folder import RunFolder
from flatout.run.trainer import Training

if TYPE_CHECKING:
    from flatout.run.build import RunBuilder


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
        """The validation metric of the best checkpoint: what a sweep compares; NaN where a module logs none."""
        return self.metrics.get(f"val/{self.metric}", math.nan)

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        """Answers for new texts, or for new encodings."""
        return self.predictor.predict(rows)


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
        folder.choose(
            "allocator", "malloc keeps freed memory", "avoids page faults in each step", "mallopt accepted it"
        )
    if device.type == "cuda" and let_segments_grow():
        why, evidence = "batches have another shape in each step, and gaps would stay", "PYTORCH_ALLOC_CONF was not set"
        folder.choose("allocator", "segments of a GPU's memory grow", why, evidence)
    if build.set_threads():
        return
    has_own = "SLURM_CPUS_PER_TASK" in os.environ  # srun has divided them
    if ranks.local_world > 1 and not has_own and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(cores_here()) // ranks.local_world)
        torch.set_num_threads(threads)
        if device.type == "cpu":
            evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
            folder.choose("threads a rank", threads, "an equal share of the cores", evidence)


def where_to_start(build: RunBuilder, about: dict[str, Any], ranks: Ranks, folder: RunFolder) -> Start | None:
    """The checkpoint to resume from, where the run is still the same; None at the beginning."""
    found: list[Start] = []

    def look() -> str:
        if not build.is_resumed:
            return ""
        start, lines = find_checkpoint(folder.path / CHECKPOINTS)
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
        set_aside(start, folder.path / CHECKPOINTS)
    return start


def _require_more_to_train(trainer: dict[str, Any], start: Start) -> None:
    """A run cannot be asked for less than it has done."""
    epochs, most = trainer.get("max_epochs") or EPOCHS, trainer.get("max_steps") or -1
    begun = start.about["position"]["epoch"] + 1
    hint = "The run's model/ and report are what it has reached so far."
    require(epochs >= begun, "trainer.max_epochs", f"{epochs}, but epoch {begun} has begun", hint=hint)
    require(most == -1 or most >= start.step, "trainer.max_steps", f"{most}, but {start.step} are done", hint=hint)


def fit_to_end(
    training: Training,
    module: L.LightningModule,
    data: L.LightningDataModule,
    folder: RunFolder,
    signals: Signals,
    start: Start | None,
) -> None:
    """Train to the end, or to where nothing gets better, from a checkpoint where there is one."""
    trainer, curves, listeners = training.trainer, training.curves, list(training.curves.listeners)
    with without_loader_advice(), others_watched(), signals.waiting():
        try:
            trainer.fit(module, datamodule=data, ckpt_path=None if start is None else start.checkpoint)
        except SystemExit:
            number = training.checkpoints.when.stopped_by
            if not number and trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
                raise KeyboardInterrupt from None
            if number:
                report_signal(number, training, folder)
            raise
        finally:
            for listener in listeners:
                with suppress(OSError):
                    listener.close()
    curves.steps, curves.epochs = trainer.global_step, trainer.current_epoch
    require(trainer.global_step > 0, "trainer", "not one step was planned", hint="Give it rows, epochs and time.")
    report_early_end(training, folder)


def report_early_end(training: Training, folder: RunFolder) -> None:
    """Say after which epoch patience has ended training, which setting decided, and which epoch's weights are kept."""
    trainer, best = training.trainer, training.checkpoints.best_so_far
    last = trainer.max_epochs or -1
    for stopping in trainer.early_stopping_callbacks if trainer.current_epoch != last else []:
        is_lost = not math.isfinite(float(trainer.callback_metrics.get(stopping.monitor, 0.0)))
        if not trainer.should_stop or not (is_lost or stopping.wait_count >= stopping.patience):
            continue
        after = f"after epoch {trainer.current_epoch}{f' of {last}' if last > 0 else ''}"
        no_better = "is not finite" if is_lost else f"was no better in {stopping.wait_count} validations"
        setting = "checkpoint.patience=" if stopping in training.stopping else "your EarlyStopping with patience="
        found = f"step {best.step}" if best.epoch is None else f"epoch {best.epoch}"
        kept = "the last weights are kept" if best.value is None else f"{best.value:.4f} after {found}, which is kept"
        folder.choose(EARLY_END, after, f"{stopping.monitor} {no_better}, {setting}{stopping.patience}", kept)


def report_signal(number: int, training: Training, folder: RunFolder) -> None:
    """Say where training stopped; where SLURM gave the warning, ask it for another turn."""
    name, step = signal.Signals(number).name, training.checkpoints.boundary.at.step
    folder.say(f"stopped by {name} after step {step}: the same command with resume=auto resumes there")
    if folder.is_first and (line := requeue_with_slurm(number)):
        folder.say(line)


def load_best(training: Training, task: L.LightningModule) -> None:
    """The weights that were best on the validation rows."""
    with others_watched():
        training.trainer.strategy.barrier()  # the first rank may still be linking it
    state, strategy = _best_weights(training), cast(Any, training.trainer.strategy)
    if getattr(task, "shares_weights", False):
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


@contextmanager
def without_loader_advice() -> Iterator[None]:
    """Lightning advises DataLoader workers to any loader, and to share metrics that are shared already: no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*Be aware that when using `ckpt_path`.*")
        yield

"""The loggers of a run: TensorBoard, CSV, W&B, MLflow, or your own, several at once.

They are Lightning's loggers, in the Trainer, so what a module or a callback logs reaches them too.
A run adds two things. A logger that fails is dropped with one warning, and training continues. All
folders lie inside the run folder.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from flatout.errors import UserError, check_settings, did_you_mean, require, setting
from flatout.files import is_plain_part
from flatout.masking import mask_words

_GUARDED = ("log_metrics", "log_hyperparams", "log_graph", "save", "after_save_checkpoint")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run writes, and what it is called."""

    folder: Path
    experiment: str
    # the step that a resumed run continues from; 0: no checkpoint yet; None: a new run
    resumed_from: int | None = None


@dataclass(kw_only=True, slots=True)
class TensorBoardConfig:
    """An event file in the run folder."""

    flush_seconds: int = setting(
        120, "Seconds until new points are on disk at the latest.", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "logger.tensorboard")

    def build(self, place: RunPlace) -> Logger:
        purge = None if place.resumed_from is None else place.resumed_from + 1
        settings: dict[str, Any] = {"purge_step": purge, "flush_secs": self.flush_seconds}
        return RunTensorBoard(
            str(place.folder), name="", version="", default_hp_metric=False, **settings
        )


@dataclass(kw_only=True, slots=True)
class CSVConfig:
    """Lightning's table of all that is logged, in a folder of the run folder."""

    folder: str = setting(
        "csv", "Its folder; a resumed run begins another table.", allowed="a name", example="curves"
    )

    def __post_init__(self) -> None:
        require(
            is_plain_part(self.folder), "logger.csv.folder", f"{self.folder!r}", allowed="a name"
        )

    def build(self, place: RunPlace) -> Logger:
        version = f"from-step-{place.resumed_from}" if place.resumed_from else ""
        return CSVLogger(
            str(place.folder), name=self.folder, version=version, flush_logs_every_n_steps=1
        )


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """A run in Weights & Biases; its files lie in the run folder."""

    project: str | None = setting(None, "Its project; null: the experiment's name.", example="news")
    name: str | None = setting(None, "Its name; null: that of the run folder.", example="first")
    entity: str | None = setting(None, "User or team; null: yours.", example="my_team")
    group: str | None = setting(None, "Group of runs in the project.", example="lstm")
    tags: list[str] = setting(list, "Tags of the run.", example="[lstm,news]")
    offline: bool = setting(
        False, "Nothing is sent: `wandb sync` does it later. WANDB_MODE=offline does the same."
    )

    def build(self, place: RunPlace) -> Logger:
        from lightning.pytorch.loggers import WandbLogger

        where = f"{socket.gethostname()}:{place.folder.absolute()}"
        return WandbLogger(
            name=self.name or place.folder.name,
            project=self.project or place.experiment,
            entity=self.entity,
            group=self.group,
            tags=self.tags or None,
            save_dir=str(place.folder),
            id=xxhash.xxh3_64_hexdigest(where.encode()),  # known to a resume
            resume="allow",
            offline=self.offline,
        )


@dataclass(kw_only=True, slots=True)
class MLflowConfig:
    """A run in MLflow."""

    tracking_uri: str | None = setting(
        None, "Null: MLFLOW_TRACKING_URI, or in the run.", example="http://server:5000"
    )
    experiment: str | None = setting(
        None, "Its experiment; null: the experiment's name.", example="news"
    )
    name: str | None = setting(None, "Its name; null: that of the run folder.", example="first")

    def build(self, place: RunPlace) -> Logger:
        from lightning.pytorch.loggers import MLFlowLogger

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        folder = place.folder.absolute()
        asked = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        known = folder / "mlflow_run_id"  # of the run in MLflow that a resumed run continues
        with _foreign_warnings_ignored():
            logger = MLFlowLogger(
                self.experiment or place.experiment,
                run_name=self.name or folder.name,
                tracking_uri=asked or f"sqlite:///{folder}/mlflow.db",
                artifact_location=None if asked else str(folder / "mlflow"),
                run_id=known.read_text(encoding="utf-8").strip() if known.is_file() else None,
            )
            known.write_text(f"{logger.run_id}\n", encoding="utf-8")
        return logger


LOGGERS = {
    "tensorboard": TensorBoardConfig,
    "csv": CSVConfig,
    "wandb": WandbConfig,
    "mlflow": MLflowConfig,
}
"""The settings class behind each name of `conf/logger/`."""


def chosen_loggers(value: Any) -> dict[str, Any]:
    """Loggers by name: settings of ours, or Lightning loggers, from a name, several names, or a
    mapping.
    """
    if value is None:
        value = "tensorboard"
    if value is False or value == "none":
        return {}
    names = [value] if isinstance(value, str) else value
    if isinstance(names, Logger):
        return {type(names).__name__: names}
    if not isinstance(names, Mapping):
        allowed = [*LOGGERS, "none"]
        for name in names:
            hint = did_you_mean(str(name), allowed)
            require(name in allowed, "logger", repr(name), allowed=", ".join(allowed), hint=hint)
        names = {name: LOGGERS[name]() for name in names if name != "none"}
    for name, each in names.items():
        is_logger = isinstance(each, (Logger, *LOGGERS.values()))
        require(
            is_logger,
            f"logger.{name}",
            f"{type(each).__name__} is no logger",
            allowed=", ".join(LOGGERS),
        )
        package = next((package for package, kind in LOGGERS.items() if type(each) is kind), "csv")
        # each other's package has its name
        if package != "csv" and importlib.util.find_spec(package) is None:
            others = ", ".join(each for each in LOGGERS if each not in (package, "wandb", "mlflow"))
            what, hint = (
                f"the package {package} is not installed",
                f"pip install 'flatout[{package}]'.",
            )
            raise UserError(f"logger={package}", what, allowed=f"{others} need no extra", hint=hint)
    return dict(names)


class RunTensorBoard(TensorBoardLogger):
    """The event file lies in the run folder itself; settings come at the end, with the final
    metrics.
    """

    def save(self) -> None:
        """The writer flushes by time; a flush at each point would wait for the disk."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """`report/dashboard.py` writes them, in an event file that a resumed run replaces."""


class RunLoggers:
    """The loggers of one run: opened before training, closed when the final metrics are known."""

    def __init__(
        self,
        loggers: Mapping[str, Logger],
        *,
        metrics: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        charts: dict[str, dict[str, list[Any]]] | None = None,
    ) -> None:
        """`metrics`: names that the run logs itself, at their own step.

        `charts`: layout of TensorBoard's curves.
        """
        self.loggers = dict(loggers)
        self.settings = settings or {}
        self.charts = charts
        self._metrics = frozenset(metrics)
        # `log_metrics` of each logger that still works
        self._write: dict[str, Callable[..., Any]] = {}
        self._is_open = False

    def for_trainer(self, *, is_first: bool = True) -> list[Logger] | bool:
        """The argument `logger` of Lightning's Trainer; ranks after the first have one that writes
        nothing.
        """
        return (list(self.loggers.values()) or False) if is_first else [DummyLogger()]

    def __enter__(self) -> RunLoggers:
        for name, logger in self.loggers.items():
            with _starting(name):
                self._open(logger)
            self._guard(name, logger)
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        status = "success" if kind is None else "failed"
        for name, logger in self.loggers.items():
            for method in (*_GUARDED, "finalize"):
                vars(logger).pop(method, None)
            if name in self._write:
                self._guarded(name, _close)(logger, status)
        self._write = {}

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        for write in list(self._write.values()):
            write(values, step)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Log the metrics of a validation; Lightning logs those that the run does not
        log itself.
        """
        if self._metrics:
            self.on_flush(step, epoch, values)

    def log_final(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of the best checkpoint; TensorBoard has them on its page of settings."""
        values = {f"final/{name.replace('/', '_')}": value for name, value in metrics.items()}
        for name, write in list(self._write.items()):
            if not isinstance(self.loggers[name], RunTensorBoard):
                write(values, step)

    def close(self) -> None:
        """Leaving the context closes the loggers, after the final metrics."""

    def _open(self, logger: Logger) -> None:
        """Start a logger and log the settings; a missing key of W&B or a wrong address
        shows here.
        """
        with _command_masked():
            experiment = getattr(logger, "experiment", None)
        if not isinstance(logger, RunTensorBoard):
            logger.log_hyperparams(dict(self.settings))
        elif self.charts is not None and experiment is not None:
            experiment.add_custom_scalars(self.charts)

    def _guard(self, name: str, logger: Logger) -> None:
        for method in _GUARDED:
            vars(logger)[method] = self._guarded(name, getattr(logger, method))
        write = self._write[name] = vars(logger)["log_metrics"]

        def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> None:
            kept = {name: value for name, value in metrics.items() if name not in self._metrics}
            if kept.keys() - {"epoch"}:
                write(kept, step)

        vars(logger)["log_metrics"] = log_metrics
        # Lightning calls it after fit, after validate and after test
        vars(logger)["finalize"] = lambda status: None

    def _guarded(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._is_open and name not in self._write:
                return None
            try:
                with _foreign_warnings_ignored():
                    return act(*args, **kwargs)
            except Exception as error:  # packages share no class for a full disk or lost network
                self._write.pop(name, None)
                warnings.warn(f"logger {name} ends here: {error}", RuntimeWarning, stacklevel=2)
                return None

        return guarded


def build_loggers(
    chosen: Mapping[str, Any], place: RunPlace, more: Any = None
) -> dict[str, Logger]:
    """Lightning's loggers by name; `more`: the argument `logger` that settings of the Trainer
    carry.
    """
    found: dict[str, Logger] = {}
    for name, each in chosen.items():
        with _starting(name):
            found[name] = each if isinstance(each, Logger) else each.build(place)
    extra: Iterable[Any] = (
        [more] if isinstance(more, Logger) else more if isinstance(more, list | tuple) else []
    )
    return found | {f"trainer.logger {number}": each for number, each in enumerate(extra, 1)}


def _close(logger: Logger, status: str) -> None:
    logger.finalize(status)
    finish = getattr(getattr(logger, "experiment", None), "finish", None)
    if finish is not None:  # W&B: the next run of this process is another run
        finish(exit_code=0 if status == "success" else 1)


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """A logger that cannot start is a mistake to correct before training."""
    try:
        with _foreign_warnings_ignored():
            yield
    except UserError:
        raise
    except Exception as error:
        # packages of loggers share no class; any of theirs means: cannot start
        raise UserError(
            f"logger={name}", f"cannot start: {error}", hint="Set logger=none to train without."
        ) from None


@contextmanager
def _command_masked() -> Iterator[None]:
    """Hide the secrets of the command line, which W&B reads and sends as it starts."""
    command = sys.argv
    sys.argv = mask_words(command)
    try:
        yield
    finally:
        sys.argv = command


@contextmanager
def _foreign_warnings_ignored() -> Iterator[None]:
    """Packages of loggers warn of each other's deprecations."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield

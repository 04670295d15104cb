"""The loggers of a run: TensorBoard, CSV, W&B, MLflow, Trackio, or your own, several at once.

They are Lightning's loggers, in the Trainer, so they also get what a module or a callback logs.
`RunLoggers` wraps their methods: a logger that fails is dropped with one warning, and training
continues. All files lie inside the run folder. Open this file to add a logger: its settings class
goes into `LOGGERS`. Loggers of other packages are found by their names (`plugins/installed.py`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import xxhash
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from flatout.distributed.both_lightnings import either
from flatout.engine.lightning_internals import set_method, unset_method
from flatout.errors import UserError, check_settings, did_you_mean, require, setting
from flatout.files import is_plain_part
from flatout.masking import mask_words
from flatout.plugins.installed import PartGroup, find_part, names_of_parts

# Methods of a logger that may fail without ending the training.
_GUARDED = ("log_metrics", "log_hyperparams", "log_graph", "save", "after_save_checkpoint")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder and the names of a run, for its loggers."""

    folder: Path
    experiment: str
    # The step that a resumed run continues from; 0: it has no checkpoint yet; None: a new run.
    resumed_from: int | None = None


@dataclass(kw_only=True, slots=True)
class TensorBoardConfig:
    """An event file in the run folder."""

    flush_seconds: int = setting(
        120, "Seconds until new points are on disk at the latest.", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "logger.tensorboard")

    def build(self, run_place: RunPlace) -> Logger:
        purge = None if run_place.resumed_from is None else run_place.resumed_from + 1
        return RunTensorBoard(
            str(run_place.folder),
            name="",
            version="",
            default_hp_metric=False,
            purge_step=purge,
            flush_secs=self.flush_seconds,
        )


@dataclass(kw_only=True, slots=True)
class CSVConfig:
    """Lightning's CSV table of all logged values, in a folder of the run folder."""

    folder: str = setting(
        "csv", "Its folder; a resumed run begins another table.", allowed="a name", example="curves"
    )

    def __post_init__(self) -> None:
        require(
            is_plain_part(self.folder), "logger.csv.folder", f"{self.folder!r}", allowed="a name"
        )

    def build(self, run_place: RunPlace) -> Logger:
        version = f"from-step-{run_place.resumed_from}" if run_place.resumed_from else ""
        return CSVLogger(
            str(run_place.folder), name=self.folder, version=version, flush_logs_every_n_steps=1
        )


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """A run in Weights & Biases, with its local files in the run folder."""

    project: str | None = setting(None, "Its project; null: the experiment's name.", example="news")
    name: str | None = setting(None, "Its name; null: that of the run folder.", example="first")
    entity: str | None = setting(None, "User or team; null: yours.", example="my_team")
    group: str | None = setting(None, "Group of runs in the project.", example="lstm")
    tags: list[str] = setting(list, "Tags of the run.", example="[lstm,news]")
    offline: bool = setting(
        False, "Nothing is sent; `wandb sync` sends it later. WANDB_MODE=offline does the same."
    )

    def build(self, run_place: RunPlace) -> Logger:
        from lightning.pytorch.loggers import WandbLogger

        # A resumed run finds its id again: it follows from the folder.
        address = f"{socket.gethostname()}:{run_place.folder.absolute()}"
        return WandbLogger(
            name=self.name or run_place.folder.name,
            project=self.project or run_place.experiment,
            entity=self.entity,
            group=self.group,
            tags=self.tags or None,
            save_dir=str(run_place.folder),
            id=xxhash.xxh3_64_hexdigest(address.encode()),
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

    def build(self, run_place: RunPlace) -> Logger:
        # MLflow would report its use to its makers, and keep a number of this machine in the home
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from lightning.pytorch.loggers import MLFlowLogger

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        folder = run_place.folder.absolute()
        server = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        # The id of the run in MLflow, which a resumed run continues.
        id_file = folder / "mlflow_run_id"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
        with _foreign_warnings_ignored(), _kept_in_environment("MLFLOW_TRACKING_URI"):
            logger = MLFlowLogger(
                self.experiment or run_place.experiment,
                run_name=self.name or folder.name,
                tracking_uri=server or _address_of_database(folder / "mlflow.db"),
                artifact_location=None if server else str(folder / "mlflow"),
                run_id=run_id,
            )
            id_file.write_text(f"{logger.run_id}\n", encoding="utf-8")
        return logger


@contextmanager
def _kept_in_environment(name: str) -> Iterator[None]:
    """Context manager: a variable has its value again at the end.

    MLflow leaves the address of a run in it, and the next run of the process would go there too.
    """
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _address_of_database(path: Path) -> str:
    """The address of MLflow's database in a file: behind a `?` in it would stand options."""
    require(
        not re.search(r"[%?#]", str(path)),
        "output",
        f"MLflow keeps no database in a folder of such a name ({path.parent})",
        allowed="a name without %, ? and #",
    )
    return f"sqlite:///{path}"


@runtime_checkable
class BuildsLogger(Protocol):
    """Settings of a logger: a dataclass above, or one of another package."""

    def build(self, run_place: RunPlace) -> Logger:
        """Lightning's logger for a run."""


LoggersByName: TypeAlias = Mapping[str, Logger | BuildsLogger]
LOGGERS: dict[str, type[BuildsLogger]] = {
    "tensorboard": TensorBoardConfig,
    "csv": CSVConfig,
    "wandb": WandbConfig,
    "mlflow": MLflowConfig,
}
"""The settings class behind each name of `conf/logger/`."""


def chosen_loggers(
    value: Logger | LoggersByName | Iterable[str] | bool | None,
) -> dict[str, Logger | BuildsLogger]:
    """The setting `logger` as loggers, or settings of them, by name.

    `value`: a name, several names, a mapping by name, or a Lightning logger. None is
    "tensorboard"; False and "none" are no logger.
    """
    if value is False or value == "none":
        return {}
    if isinstance(value, _kinds_of_loggers()):
        return {type(value).__name__: value}
    if not isinstance(value, Mapping):
        value = _default_loggers(value)
    for name, logger in value.items():
        require(
            isinstance(logger, (*_kinds_of_loggers(), BuildsLogger)),
            f"logger.{name}",
            f"{type(logger).__name__} is no logger",
            allowed=", ".join(LOGGERS),
        )
        for package, config in LOGGERS.items():  # each but csv has the name of its package
            is_used = package != "csv" and type(logger) is config
            if is_used and importlib.util.find_spec(package) is None:
                others = [name for name in ("tensorboard", "csv") if name != package]
                raise UserError(
                    f"logger={package}",
                    f"the package {package} is not installed",
                    allowed=f"{', '.join(others)} need no extra",
                    hint=f"pip install 'flatout[{package}]'.",
                )
    return dict(value)


def _kinds_of_loggers() -> tuple[type[Logger], ...]:
    """The base class of loggers in each package of Lightning. For `isinstance`."""
    kind: type = Logger  # abstract, which a type checker refuses as an argument
    return either(kind)


def _default_loggers(names: object) -> dict[str, BuildsLogger]:
    """The loggers of these names with default settings."""
    allowed = [*LOGGERS, *names_of_parts(PartGroup.loggers), "none"]
    if isinstance(names, bool):
        raise UserError("logger", "true", allowed=", ".join(allowed))
    if names is None:
        names = "tensorboard"
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Iterable):
        what = f"{type(names).__name__} is no logger"
        raise UserError("logger", what, allowed=", ".join(allowed))
    for name in names:
        require(
            name in allowed,
            "logger",
            repr(name),
            allowed=", ".join(allowed),
            hint=did_you_mean(str(name), allowed),
        )
    chosen = [name for name in names if name != "none"]
    return {name: (LOGGERS.get(name) or find_part(PartGroup.loggers, name))() for name in chosen}


class RunTensorBoard(TensorBoardLogger):
    """Lightning's TensorBoard logger, with its event file in the run folder itself.

    It writes no settings: a run writes them at its end, with the final metrics.
    """

    @property
    def log_dir(self) -> str:
        """The run folder, under its very name: Lightning would expand variables such as `$HOME`."""
        return str(self.save_dir)

    def save(self) -> None:
        """Do nothing: the writer flushes by time, as a flush for each point is slow."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `report/dashboard.py` writes them to a file that a resumed run replaces."""


class RunLoggers:
    """Context manager: opens the loggers of a run, and closes them after the final metrics."""

    def __init__(
        self,
        loggers: Mapping[str, Logger],
        *,
        metrics: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        charts: dict[str, dict[str, list[Any]]] | None = None,
    ) -> None:
        """`metrics`: names that the run logs itself, at their own step; Lightning's are dropped.

        `settings`: hyperparameters to log. `charts`: layout of TensorBoard's curves.
        """
        self.loggers = dict(loggers)
        self.settings = settings or {}
        self.charts = charts
        self._metrics = frozenset(metrics)
        # `log_metrics` of each logger that has not failed.
        self._write: dict[str, Callable[..., Any]] = {}
        self._is_open = False

    def for_trainer(self, *, is_first: bool = True) -> list[Logger] | bool:
        """The argument `logger` of Lightning's Trainer. Ranks but the first write nothing."""
        if not is_first:
            return [DummyLogger()]
        return list(self.loggers.values()) or False

    def __enter__(self) -> RunLoggers:
        self._show_error_of_thread = threading.excepthook
        threading.excepthook = self._leave_to_writer
        with ExitStack() as on_failure:
            on_failure.push(self)
            for name, logger in self.loggers.items():
                with _starting(name):
                    self._open(logger)
                self._guard(name, logger)
            on_failure.pop_all()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        status = "success" if kind is None else "failed"
        for name, logger in self.loggers.items():
            for method in (*_GUARDED, "finalize"):
                unset_method(logger, method)
            if name in self._write:
                self._guarded(name, _close)(logger, status)
        self._write = {}
        threading.excepthook = self._show_error_of_thread

    def _leave_to_writer(self, error: threading.ExceptHookArgs) -> None:
        """Print the error of a thread, unless it is TensorBoard's: its next write raises that."""
        if type(error.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
            self._show_error_of_thread(error)

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        for write in list(self._write.values()):
            write(values, step)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Log the metrics of a validation, unless Lightning logs them."""
        if self._metrics:
            self.on_flush(step, epoch, values)

    def log_final(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of the best checkpoint. TensorBoard shows them beside the settings."""
        values = {f"final/{name.replace('/', '_')}": value for name, value in metrics.items()}
        for name, write in list(self._write.items()):
            if not isinstance(self.loggers[name], RunTensorBoard):
                write(values, step)

    def close(self) -> None:
        """Do nothing: leaving the context closes the loggers, after the final metrics."""

    def _open(self, logger: Logger) -> None:
        """Start a logger and log the settings.

        Fails here where a key of W&B is missing, or an address is wrong.
        """
        with _command_masked():
            experiment = _experiment_of(logger)
        if not isinstance(logger, RunTensorBoard):
            logger.log_hyperparams(dict(self.settings))
        elif self.charts is not None and experiment is not None:
            experiment.add_custom_scalars(self.charts)

    def _guard(self, name: str, logger: Logger) -> None:
        """Replace methods of the logger until the context ends."""
        for method in _GUARDED:
            set_method(logger, method, self._guarded(name, getattr(logger, method)))
        write: Callable[..., Any] = logger.log_metrics
        self._write[name] = write

        def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> None:
            others = {name: value for name, value in metrics.items() if name not in self._metrics}
            if others.keys() - {"epoch"}:
                write(others, step)

        set_method(logger, "log_metrics", log_metrics)
        # Lightning would finalize after each of fit, validate and test.
        set_method(logger, "finalize", lambda status: None)

    def _guarded(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """`act`, but an error drops the logger `name` with a warning."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._is_open and name not in self._write:
                return None
            try:
                with _foreign_warnings_ignored():
                    return act(*args, **kwargs)
            except Exception as error:
                # A full disk or a lost network is another class of error in each package.
                self._write.pop(name, None)
                warnings.warn(f"logger {name} ends here: {error}", RuntimeWarning, stacklevel=2)
                return None

        return guarded


def build_loggers(
    chosen: LoggersByName, run_place: RunPlace, more: Logger | Iterable[Logger] | bool | None = None
) -> dict[str, Logger]:
    """Build Lightning's loggers, by name.

    `more`: the setting `trainer.logger`, one logger or several; they are named by their number.
    """
    loggers: dict[str, Logger] = {}
    for name, logger in chosen.items():
        with _starting(name):
            loggers[name] = logger.build(run_place) if isinstance(logger, BuildsLogger) else logger
    if isinstance(more, _kinds_of_loggers()):
        more = [more]
    if isinstance(more, list | tuple):
        for number, logger in enumerate(more, 1):
            loggers[f"trainer.logger {number}"] = logger
    return loggers


def _experiment_of(logger: Logger) -> Any:
    """The package's own object of a logger, which starts it; None if it has none."""
    return getattr(logger, "experiment", None)


def _close(logger: Logger, status: str) -> None:
    logger.finalize(status)
    finish = getattr(_experiment_of(logger), "finish", None)
    if finish is not None:  # W&B would continue this run in the next run of the process
        finish(exit_code=0 if status == "success" else 1)


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """Context manager: an error means that a logger cannot start, and becomes a `UserError`."""
    try:
        with _foreign_warnings_ignored():
            yield
    except UserError:
        raise
    except Exception as error:
        # Each package raises classes of its own.
        raise UserError(
            f"logger={name}", f"cannot start: {error}", hint="Set logger=none to train without."
        ) from None


@contextmanager
def _command_masked() -> Iterator[None]:
    """Context manager: hide secrets of the command line, which W&B sends when it starts."""
    command = sys.argv
    sys.argv = mask_words(command)
    try:
        yield
    finally:
        sys.argv = command


@contextmanager
def _foreign_warnings_ignored() -> Iterator[None]:
    """Context manager: ignore deprecation warnings of loggers' packages about each other."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield

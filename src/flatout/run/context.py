"""What the stages of a run hand to each other; no stage changes what an earlier one made.

`RunContext` is where a run happens. `Run` adds all that is decided before training: a stage takes
it, and little else. `RunParts` is what trains, with the methods in which a task of flatout
(`run/our_parts.py`) and a module of the user's own (`run/own_parts.py`) differ. `Training` is the
Trainer with its callbacks, `RunAnswers` the network when it is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from flatout.errors import UserError

if TYPE_CHECKING:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.strategies import Strategy
    from torch import Tensor, nn

    from flatout.callbacks.loggers import RunLoggers
    from flatout.callbacks.run_curves import RunCurves
    from flatout.checkpoints.exact import ExactCheckpoint
    from flatout.checkpoints.kept import Start
    from flatout.config import RunConfig
    from flatout.data.batches.feed import Feed, Feeds
    from flatout.data.batches.store_data import StoreData
    from flatout.distributed.ranks import Ranks
    from flatout.engine.fast_loop import FastLoop
    from flatout.engine.optimizer import OptimConfig
    from flatout.engine.precision import Precision
    from flatout.inference.run_predictor import RunPredictor
    from flatout.models.contract import ModelConfig
    from flatout.perf.verdict.evidence import Evidence
    from flatout.report.figures import Chart
    from flatout.run.run_folder import RunFolder
    from flatout.run_log import Choice
    from flatout.tasks.task import Task


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where one rank's part of a run happens."""

    ranks: Ranks
    device: torch.device  # of this rank
    folder: RunFolder  # what ranks but the first one write there is dropped
    overrides: Sequence[str] = ()  # the words that were typed
    _: KW_ONLY
    began: float  # by `time.perf_counter`
    begin: Callable[..., Any]  # begins another run, such as a short try of this one


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run has decided; the rest of its settings is as they were asked for."""

    asked: RunConfig
    # all settings as plain values, as checkpoints and dashboards compare them
    values: dict[str, Any]
    # arguments of Lightning's Trainer; epochs and validations end where an optimizer step does
    trainer: dict[str, Any]
    precision: Choice[Precision]
    optim: OptimConfig
    _: KW_ONLY
    clip: float | None = None  # the longest gradient; None: as the Trainer's arguments say
    batches: int | None = None  # of an epoch; None where the user's own DataModule decides
    total_steps: int | None = None
    # the plain name of the validation metric that decides which checkpoint is best; None: none does
    metric: str | None
    monitor: str | None  # the name under which it is logged
    mode: str  # whether it is better when higher (`max`) or lower (`min`)


@dataclass(frozen=True, slots=True)
class OurParts:
    """A task of flatout with its network built, its data, and a feed for each split."""

    task: Task
    data: StoreData[Any, Any]
    feeds: Feeds


@dataclass(frozen=True, slots=True)
class Run(RunContext):
    """Everything that a stage needs: where the run happens, what is decided, and what trains."""

    _: KW_ONLY
    settings: Settings
    parts: RunParts
    facts: dict[str, Any]  # with which a resumed run is compared


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that later stages ask."""

    trainer: L.Trainer
    curves: RunCurves
    loggers: RunLoggers
    checkpoints: ExactCheckpoint
    loop: FastLoop
    stopping: list[EarlyStopping]  # of `checkpoint.patience`; the user's own are not among them


class NoAnswers:
    """Stands for a predictor: flatout does not know what the answers of the user's module mean."""

    def __init__(self, name: str) -> None:
        self.name = name

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        raise UserError(
            "predict",
            f"{self.name} is your own",
            hint="Use trainer.predict in a script of your own.",
        )

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        self.predict([])


Answers: TypeAlias = "RunPredictor | NoAnswers"  # what answers for new rows after training


@dataclass(frozen=True, slots=True)
class RunAnswers:
    """The trained network, ready to answer, with what is shown of its answers."""

    predictor: Answers
    per_class: list[dict[str, Any]]  # scores of each class
    charts: list[Chart]


class RunParts:
    """What trains. A run asks here for all that depends on whose the module is.

    The class is asked while there are only settings, and makes the parts (`make`).
    """

    __slots__ = ()

    blames: ClassVar[str]  # the setting that is wrong where Lightning refuses to train
    # whether the words of a command must be the same for its run to be finished
    compares_words: ClassVar[bool]
    may_draw: ClassVar[bool]  # whether its steps draw random numbers that flatout does not count

    @property
    @abstractmethod
    def module(self) -> L.LightningModule:
        """What trains."""

    @property
    @abstractmethod
    def data(self) -> L.LightningDataModule:
        """What it trains on."""

    # Of the settings alone.

    @classmethod
    @abstractmethod
    def name_of(cls, config: RunConfig) -> str:
        """The name of the model, as a run begins with it."""

    @classmethod
    @abstractmethod
    def require_startable(cls, config: RunConfig, world: int, *, is_here: bool) -> None:
        """Refuse what cannot train on `world` devices, or, unless `is_here`, not elsewhere."""

    @classmethod
    @abstractmethod
    def of_this_process(cls, config: RunConfig) -> RunConfig:
        """The settings that another process has sent, with parts that share no memory with it."""

    @classmethod
    @abstractmethod
    def open_answers(cls, config: RunConfig, folder: Path) -> Answers:
        """What answers for new rows with the model of a finished run."""

    @classmethod
    @abstractmethod
    def metric_of(cls, config: RunConfig) -> str:
        """The validation metric that the settings name, else the usual one."""

    @classmethod
    @abstractmethod
    def metrics_of(cls, config: RunConfig) -> list[str]:
        """The metrics to choose from; some depend on the data, as those of two classes do."""

    @classmethod
    @abstractmethod
    def mode_of(cls, config: RunConfig) -> str:
        """Whether that metric is better when higher (`max`) or lower (`min`)."""

    @classmethod
    @abstractmethod
    def leaves_length_open(cls, config: RunConfig) -> bool:
        """Whether the number of training rows decides how many epochs there are."""

    # How they come from the settings.

    @classmethod
    @abstractmethod
    def make(cls, config: RunConfig, context: RunContext) -> tuple[Self, Settings]:
        """Open the data, choose all that the settings leave open, and only then make the module."""

    @abstractmethod
    def list_facts(self, settings: Settings, context: RunContext) -> dict[str, Any]:
        """What a resumed run is compared with: its data, its network, its plan, its settings."""

    # Before training.

    def reuse_layers(self, run: Run, start: Start | None) -> None:
        """Let batches bring outputs of frozen layers, where that is asked for or pays."""

    @abstractmethod
    def exact_products(self, run: Run) -> AbstractContextManager[None]:
        """Inside it, products of fp32 are made in the faster of the ways that are exact."""

    def compile_network(self, run: Run) -> None:
        """Compile as asked; by default where that pays."""

    @abstractmethod
    def trainer_arguments(self, settings: Settings) -> dict[str, Any]:
        """Arguments of Lightning's Trainer that the settings do not have."""

    def callbacks(self, settings: Settings) -> list[L.Callback]:
        """Callbacks that do what a task and a feed of flatout do themselves."""
        return []

    @abstractmethod
    def curve_names(self, settings: Settings) -> list[str]:
        """Names of the validation metrics that have curves."""

    @abstractmethod
    def wrap_loggers(self, loggers: dict[str, Any], run: Run, *, has_card: bool) -> RunLoggers:
        """The loggers of a run, with what they log at its beginning."""

    def connect(self, run: Run, loop: FastLoop, curves: RunCurves) -> None:
        """Let a new loop and its curves know the rows of a step, and what fits into memory."""

    @abstractmethod
    def prepare(self, run: Run) -> None:
        """Make the module ready for its first step, and say what is about to train."""

    # Training.

    def report_start(self, run: Run) -> None:
        """Say how many weights and steps there are."""

    def expected_warnings(self) -> Sequence[str]:
        """Patterns of Lightning's warnings that are intended here."""
        return ()

    # Evaluation.

    @abstractmethod
    def take_weights(self, state: dict[str, Tensor] | None, strategy: Strategy) -> None:
        """Load trained weights; None where no checkpoint is whole."""

    def tune_answers(self, run: Run, device: torch.device) -> None:
        """Choose thresholds or a temperature on the validation rows."""

    @abstractmethod
    def can_judge(self, split: str) -> bool:
        """Whether there are rows of a split, `val` or `test`, and steps that judge them."""

    @abstractmethod
    def scores_of(self, split: str, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split just judged, by plain name; `logged`: by Lightning."""

    def report_test(self, run: Run) -> None:
        """Write what the test rows say beyond their scores."""

    def add_linear_model(self, run: Run, seconds: float) -> None:
        """Let a linear model answer with the network, where that helps; `seconds`: of the run."""

    # The price.

    def train_feed(self) -> Feed | None:
        """The feed whose plan says how long the run is; None: the user's own data decide."""
        return None

    def shares_of_rows(self) -> dict[str, float]:
        """Rows of each split for a row of training, as far as they are known."""
        return {}

    def pace_facts(self, settings: Settings) -> dict[str, Any]:
        """What decides how long a step takes; runs that are alike in it share their notes.

        The network stands in it by `network`. Empty where nothing is known.
        """
        return {}

    # The end.

    @abstractmethod
    def keep_answers(self, run: Run, training: Training) -> RunAnswers:
        """Save the trained network, and collect what is shown of its answers; on every rank."""

    @abstractmethod
    def find_evidence(self, run: Run, training: Training) -> Evidence | None:
        """What limited the training, with trials of what could be faster; None: too few steps."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The network whose weights the summary counts."""

    @abstractmethod
    def rows_per_step(self, training: Training) -> int:
        """Rows of an optimizer step on all devices."""

    def rate_names(self) -> list[str]:
        """Names of the speeds in the summary."""
        return ["rows_per_s"]

    def batch_size_sets_steps(self, settings: Settings) -> bool:
        """Whether steps are one batch of `data.batch_size` rows, and epochs alone end the run."""
        return False

    def report_kind(self, run: Run, answers: Answers, seconds: float) -> None:
        """Add what this kind of data has beside each result; `seconds`: of the whole run."""

    def write_dashboard(self, run: Run, summary: dict[str, Any]) -> None:
        """Complete what TensorBoard shows."""

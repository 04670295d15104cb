"""A task: a network, a loss, metrics and an optimizer, as an ordinary LightningModule.

It works in a plain `L.Trainer` with Lightning's own accumulation, clipping, precision, loggers and
strategies. Flat batches know the rows of their whole optimizer step, over ranks and micro-batches.
So the loss of a batch is its share of the step's mean loss, exact also where batches have unequal
rows. `training_step` undoes Lightning's division.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.store.store import GROUPS
from flatout.distributed.both_lightnings import InBothLightnings, adopt_hooks, either
from flatout.distributed.collectives import sum_over_ranks
from flatout.engine import lightning_internals as internals
from flatout.engine.optimizer import OptimConfig
from flatout.engine.schedule import StepSchedule
from flatout.engine.weight_average import WeightAverage
from flatout.errors import UserError, class_name, require, settings_of
from flatout.models.contract import ModelConfig, Network, contract
from flatout.run_log import RunLog
from flatout.tasks.abstention import HeldOutAnswers
from flatout.tasks.metrics import Counted
from flatout.tasks.own_metrics import compute_metrics, own_metrics, update_metrics
from flatout.tasks.score_intervals import Interval

if TYPE_CHECKING:
    from flatout.data.batches.feed import Feed, Feeds
    from flatout.data.info import DataInfo
    from flatout.tasks.error_intervals import HeldOutErrors

# What the outputs of a task mean; None: they have no names.
OutputLabels = TypeVar("OutputLabels")
Forward = Callable[[FlatBatch], Tensor]  # a network, or what stands in for it: a compiled one

AVERAGE = "average"  # where a checkpoint keeps the running mean of the weights
EPOCHS_DONE = "epochs_done"
# splits of a store, by what Lightning's hooks call them
SPLITS = {"val": "validation", "test": "test"}


class Task(InBothLightnings, L.LightningModule, Generic[OutputLabels]):
    """A network, a loss and an optimizer; subclasses define the loss and the metrics."""

    labels_are_of_tokens = False  # whether targets belong to tokens rather than to rows
    reads_rows = False  # whether a training step reads the numbers of its rows on the device
    leaves_out_unlabelled = False  # whether the loss of each token without a label is left out
    smaller_rows = "Shorten rows with data.max_length, or set precision=bf16."
    """What helps where a single row needs too much memory."""
    is_sharded = False
    """Whether each rank holds slices of the weights, so that none can compute a batch without the
    others."""
    is_in_fast_loop = False
    needs_info = False  # whether a network that was given needs the data's description as well
    # whether each row's part of the metrics is kept for their intervals, as in a test
    keeps_rows = False
    counts_tokens = True  # whether tokens a second mean anything to the user
    is_prepared = False
    settings: type  # the Config of the loss
    info: Any = None  # the description of the data that the network was built for
    held_out: HeldOutAnswers | None = None  # what `tune_answers` found on the validation rows
    # of a regression on recordings, from the last validation
    held_out_errors: HeldOutErrors | None = None
    metrics: Any  # the metrics of a split: have `reset`, `compute` and `intervals`
    _loss_sum: Tensor

    def __init__(
        self,
        model: nn.Module | ModelConfig | Mapping[str, Any],
        config: object = None,
        optim: OptimConfig | None = None,
        *,
        labels: OutputLabels | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Take a network, or the Config of one that is built when the data are known.

        `labels`: names of the outputs of a network that is built, for a Trainer without a
        datamodule of flatout.
        """
        super().__init__()
        self.is_built = isinstance(model, nn.Module)
        self.model: nn.Module = nn.Identity()
        self.model_config: ModelConfig | None = None
        if isinstance(model, nn.Module):
            self.model = model
        elif isinstance(model, Mapping):  # of a checkpoint
            from flatout.models import model_class  # all models: only a checkpoint needs them here

            self.model_config = settings_of(model_class(model["kind"], "model"), model["config"])
        else:
            self.model_config = model
        self.config: Any = settings_of(self.settings, config)
        self.optim = settings_of(OptimConfig, optim)
        self.total_steps = total_steps
        self.results: dict[str, float] = {}  # metrics of the last validation or test, by plain name
        self.counted: Counted | None = None  # what `count_answers` has found
        self.average: WeightAverage | None = None
        """A running mean of the weights, during training, if `optim.ema` asks for one."""
        self._kept_average: dict[str, Tensor] = {}
        # of a checkpoint that was loaded before any data described the network
        self._kept_weights: dict[str, Any] = {}
        self.register_buffer("_loss_sum", torch.zeros(()), persistent=False)
        self._rows_judged = 0
        self._groups: Tensor | None = None
        self._asked: tuple[nn.Module | None, Network] = (None, Network())
        self.own_metrics = nn.ModuleDict()  # those of `configure_metrics`, by name
        if labels is not None:
            self.take_labels(labels)
            self._add_own_metrics()

    @property
    def network(self) -> Network:
        """The interface of the model: its layout, its products, and whatever else it defines."""
        # Each step asks twice, and a model of the user's is searched for its answers, so they are
        # kept. In a tuple, as torch would register the model once more as an attribute.
        if self._asked[0] is not self.model:
            self._asked = (self.model, contract(self.model))
        return self._asked[1]

    if not TYPE_CHECKING:  # to mypy it stays the property of Lightning

        @L.LightningModule.trainer.setter
        def trainer(self, trainer: L.Trainer | None) -> None:
            adopt_hooks(self, L.LightningModule, trainer)
            L.LightningModule.trainer.fset(self, trainer)

    def decides_on_host(self) -> str:
        """What the host decides in each step, so that a captured step would repeat it."""
        return self.network.decides_on_host()

    def step_tensors(self) -> list[Tensor]:
        """Tensors that a training step changes in place, beside weights and buffers."""
        return []

    # What subclasses define.

    @abstractmethod
    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        """The network of a Config, for the data that `info` describes."""

    @abstractmethod
    def take_info(self, info: DataInfo) -> None:
        """Learn from the data's description what the outputs mean; makes loss and metrics ready."""

    def take_labels(self, labels: OutputLabels) -> None:
        """Learn what the outputs mean; makes loss and metrics ready.

        For tasks whose outputs have names.
        """
        raise UserError(
            type(self).__name__, "takes no labels", hint="Give the Trainer a datamodule."
        )

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        """Override to precompute statistics of the data before training starts.

        These may be class weights, or a baseline. Returned values are written to `summary.json`.
        """
        return {}

    def prepare_probe(self, feeds: Feeds, seed: int) -> None:
        """Override to add what makes a training step slower, where only its speed is measured."""

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """Override to choose thresholds or a temperature on the validation rows, after training.

        Returned values are written to `summary.json`.
        """
        return {}

    @abstractmethod
    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        """Sum of the losses of the real rows, divided by `batch.step_rows`."""

    def training_loss(self, batch: FlatBatch, model: Forward | None = None) -> Tensor:
        """The loss of a training batch; `model`: a form of the network, such as a compiled one."""
        forward = self.model if model is None else model
        return self.loss(forward(batch), batch)

    @abstractmethod
    def judge(self, batch: FlatBatch) -> Tensor:
        """Add a batch of validation or test to the metrics, and return the sum of its losses."""

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Override to add metrics: objects of torchmetrics that compute one number, by name.

        It is called when the labels are known. In a validation or test each gets the answers to
        a batch and what they should be; docs/own_loss.md has their shapes for each task.
        """
        return {}

    def add_answers(self, answers: Tensor, targets: Tensor) -> None:
        """Add answers to a batch, and what they should be, to the metrics of a subclass."""
        update_metrics(self._where_of_metrics, self.own_metrics, answers, targets)

    def start_judging(self, split: str) -> None:
        """Reset the metrics; a split (val, test) begins."""
        self.metrics.reset()

    def judged(self) -> dict[str, float]:
        """The metrics of a split that has ended."""
        return self.metrics.compute()

    @abstractmethod
    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        """The answers to the real rows of a batch, by name; `predict_step` returns them."""

    @property
    @abstractmethod
    def metric_names(self) -> Sequence[str]:
        """Names of the metrics of a validation, without the loss."""

    @property
    def all_metric_names(self) -> list[str]:
        """The same, with those of `configure_metrics`."""
        return [*self.metric_names, *self.own_metrics]

    @property
    def usual_metric(self) -> str:
        """The metric that decides which checkpoint is best, unless the settings name another."""
        return self.metric_names[0]

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric of the last test that has one.

        A collective: all ranks call it together.
        """
        return self.metrics.intervals(self.over_ranks)

    def truncation(self, metric: str | None = None) -> dict[str, Any]:
        """Scores of the last test on cut rows and on whole ones; empty if unknown.

        By this metric, or by the usual one.
        """
        return {}

    def per_class(self) -> list[dict[str, Any]]:
        """Scores of each class over the last evaluation; empty where there are none."""
        return []

    def count_answers(self) -> None:
        """Override to keep counts of the answers to the split just judged, for pictures."""

    # What Lightning calls.

    def configure_model(self) -> None:
        if self._trainer is None:  # in `load_from_checkpoint`
            return
        # Lightning would have new tensors on a GPU; it moves the network afterwards
        with torch.device("cpu"):
            data: Any = internals.datamodule_of(self.trainer)
            if not self.is_built or (
                self.info is None and (self.needs_info or not hasattr(self, "labels"))
            ):
                name = type(self).__name__
                info: Any = getattr(data, "info", None)
                require(
                    info is not None,
                    name,
                    "no datamodule says how many classes and words there are",
                    hint=(
                        f"Give the Trainer a datamodule, or pass {name}(network, labels=…) a"
                        " network that is built."
                    ),
                )
                self.build(info)
            if not self.is_prepared and self.trainer.state.fn == "fit" and hasattr(data, "feeds"):
                self.prepare(data.feeds, data.run_log, data.seed)
        if (
            share_out := getattr(self.trainer.strategy, "share_out", None)
        ) is not None and not self.is_sharded:
            share_out(self.model)
            self.is_sharded = True

    def take_whole(self, model: nn.Module) -> None:
        """Take a network with whole weights, where this rank held slices of them."""
        self.model = model
        self.is_sharded = False

    def build(self, info: DataInfo) -> nn.Module:
        """Build the network for some data, once; a network that was given stays."""
        self.info = info
        self.take_info(info)
        if self.model_config is not None and not self.is_built:
            self.model = self.build_model(self.model_config, info)
            self.is_built = True
            if self._kept_weights:
                self.load_state_dict(self._kept_weights)
                self._kept_weights = {}
        self._add_own_metrics()
        return self.model

    def _add_own_metrics(self) -> None:
        taken = [*self.metric_names, "loss"]
        self.own_metrics = own_metrics(self._where_of_metrics, self.configure_metrics(), taken)

    @property
    def _where_of_metrics(self) -> str:
        return f"{type(self).__name__}.configure_metrics"

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights; if the network is not built yet, they are kept until it is."""
        if not self.is_built:
            self._kept_weights = dict(state_dict)
            state_dict = {}
            strict = False
        return super().load_state_dict(state_dict, strict, assign)

    def prepare(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        """Call `prepare_training` once, before weights are restored from a checkpoint."""
        self.is_prepared = True
        return self.prepare_training(feeds, log, seed)

    def configure_optimizers(self) -> Any:
        optimizer = self.optim.build(self.model, fused=self._may_fuse())
        total = int(self.total_steps or self.trainer.estimated_stepping_batches)
        schedule = StepSchedule(optimizer, self.optim.rates(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def with_optim(self, optim: OptimConfig) -> Self:
        """The same task and network with other settings of the optimizer."""
        other = copy.copy(self)
        other._trainer = self._trainer  # Lightning leaves it out of copies
        other.optim = optim
        return other

    def _may_fuse(self) -> bool:
        """Whether the optimizer may be one fused kernel, which also unscales the gradients."""
        # In mixed precision Lightning then clips no gradients, since they would be scaled. The fast
        # loop clips them by the scaled length, but knows no other way of clipping.
        clips = bool(self.trainer.gradient_clip_val)
        if not self.is_in_fast_loop:
            return not (clips and self.trainer.precision in ("16-mixed", "bf16-mixed"))
        is_ours = not internals.overrides(self, "configure_gradient_clipping", L.LightningModule)
        is_length = str(self.trainer.gradient_clip_algorithm or "norm") == "norm"
        return self.trainer.precision != "16-mixed" or (is_ours and (is_length or not clips))

    def on_fit_start(self) -> None:
        if self.optim.ema:
            self.average = WeightAverage(self.model, self.optim.ema)
            self.average.load_state_dict(self._kept_average)

    def on_fit_end(self) -> None:
        self.average = None

    def training_step(self, batch: FlatBatch, batch_idx: int) -> Tensor:
        loss = self.training_loss(batch)
        # Lightning divides by the batches of a step and averages over ranks; a share of the step's
        # mean must not be.
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        loss = loss if parts == 1 else loss * parts
        if not self.is_in_fast_loop:
            self.log("train/loss", loss.detach(), batch_size=batch.num_real)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.after_optimizer_step(1)  # Lightning counts the step after this

    def after_optimizer_step(self, uncounted: int = 0) -> None:
        """Update the mean of the weights, and let layers train whose time has come."""
        done = self.trainer.global_step + uncounted
        if self.average is not None:
            self.average.add(done - 1)
        self.thaw_layers(done)

    def thaw_layers(self, done: int) -> None:
        """Let layers train whose time has come after so many steps."""
        if self.network.thaw(self.epochs_done(done)):
            strategy: Any = self.trainer.strategy
            if isinstance(strategy, either(DDPStrategy)):
                internals.rebuild_ddp(strategy, self)
            elif self.is_sharded:
                strategy.let_thawed_train(self.model)

    def validation_step(self, batch: FlatBatch, batch_idx: int) -> None:
        if batch.num_real:  # a rank for which no row is left keeps in step with the others
            self._loss_sum += self.judge(batch)
            self._rows_judged += batch.num_real
        elif self.is_sharded:
            self.outputs(batch)

    def test_step(self, batch: FlatBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: FlatBatch, batch_idx: int) -> dict[str, Tensor]:
        """Answers to a batch, and the numbers of its rows: batches are sorted by length."""
        return {"rows": batch.rows[: batch.num_real], **self.answer(batch)}

    def on_validation_epoch_start(self) -> None:
        if self.average is not None:
            self.average.exchange()
        self.keeps_rows = False
        self._reset_own_metrics()
        self.start_judging("val")

    def on_test_epoch_start(self) -> None:
        self.keeps_rows = True
        self._groups = self._number_groups()
        self._reset_own_metrics()
        self.start_judging("test")

    def on_validation_epoch_end(self) -> None:
        self._close_split("val")
        self.put_back_weights()

    def on_test_epoch_end(self) -> None:
        self._close_split("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.average is not None:
            checkpoint[AVERAGE] = self.average.state_dict()
        checkpoint[EPOCHS_DONE] = self.epochs_done(self.trainer.global_step)
        from flatout.models import has_name, kind_of

        settings: dict[str, Any] = {"config": asdict(self.config), "optim": asdict(self.optim)}
        if self.model_config is not None and has_name(self.model_config):
            settings["model"] = {
                "kind": kind_of(self.model_config),
                "config": asdict(self.model_config),
            }
        # For `load_from_checkpoint`, as plain values: torch opens no others with `weights_only`.
        # A class is kept as its name, and nothing is imported by it when the checkpoint is opened.
        plain_settings = json.loads(json.dumps(settings, default=class_name))
        checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, plain_settings)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning calls it before the optimizer and the mean of the weights exist."""
        self._kept_average = checkpoint.get(AVERAGE, {})
        self.network.thaw(checkpoint.get(EPOCHS_DONE, 0.0))

    # What a run asks for beyond Lightning.

    def outputs(self, batch: FlatBatch) -> Tensor:
        """The network's answers to a batch that is not trained on."""
        return self.answer_in_pieces(batch, self.model)

    def answer_in_pieces(self, batch: FlatBatch, answer: Callable[[FlatBatch], Tensor]) -> Tensor:
        """What a function answers to a batch.

        In a fast loop, a batch that runs out of memory is answered in smaller pieces.
        """
        pieces = None if self._trainer is None else internals.pieces_of(self._trainer)
        return answer(batch) if pieces is None else pieces.evaluate(batch, answer)

    def put_back_weights(self) -> None:
        """Put the trained weights back if a validation has put their running mean in the model."""
        if self.average is not None and self.average.is_in_model:
            self.average.exchange()

    def position_state(self) -> dict[str, Any]:
        """State that the next step depends on beyond weights, optimizer and batch.

        Exact checkpoints keep it.
        """
        return {}

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        """Restore `position_state` of this rank; of the last rank if there were fewer ranks."""

    @property
    def computed_tokens(self) -> Callable[[FlatBatch], int]:
        """Counts the tokens computed for a batch, padding included."""
        return self.network.computed_tokens

    @torch.inference_mode()
    def gathered(
        self,
        feed: Feed,
        of_batch: Callable[[FlatBatch], tuple[Tensor, ...]],
        *,
        most: int,
        in_all: int | None = None,
    ) -> list[Tensor]:
        """What `of_batch` makes of a feed's batches, on the host, until there are `most` of it.

        It may be rows or words. Every rank gets the same ones. `in_all`: how many a whole pass
        gives; None: the rows of the feed.
        """
        self.model.eval()
        batches: list[tuple[Tensor, ...]] = []
        count = 0
        # Unless all rows are read they are drawn at random: the first ones are the shortest.
        for batch in feed.all_rows(shuffle=(in_all or feed.split.num_rows) > most):
            with self.trainer.precision_plugin.forward_context():
                batches.append(tuple(part.cpu() for part in of_batch(batch)))
            count += len(batches[-1][0])
            if count >= most:
                break
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    def kept_rows(self, batch: FlatBatch) -> Tensor | None:
        """Numbers of the real rows of a batch in a test; None elsewhere: no intervals are made.

        Rows of one `data.group` have the same number: intervals draw them together.
        """
        if not self.keeps_rows:
            return None
        rows = real_rows(batch.rows, batch)
        return rows if self._groups is None else self._groups.to(rows.device)[rows]

    def _number_groups(self) -> Tensor | None:
        """The number of each test row's group, from 0; None where rows belong to no groups."""
        # imported here: a task that is only trained by hand needs no feed
        from flatout.data.batches.feed import Feed

        feed = None if self._trainer is None else self._trainer.test_dataloaders
        if not isinstance(feed, Feed) or GROUPS not in feed.split.columns:
            return None
        groups = feed.split.fixed(GROUPS)
        return torch.from_numpy(np.unique(groups, return_inverse=True)[1])

    @property
    def num_groups(self) -> int | None:
        """Groups that the intervals of the last test draw; None where they draw rows."""
        return None if self._groups is None else int(self._groups.max()) + 1

    def over_ranks(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of some counts over all ranks."""
        return sum_over_ranks(counts, self.device)

    def _close_split(self, split: str) -> None:
        loss, rows = self.over_ranks(np.array([float(self._loss_sum), self._rows_judged]))
        scores = {**self.judged(), **compute_metrics(self._where_of_metrics, self.own_metrics)}
        self.results = {"loss": float(loss) / max(1.0, float(rows)), **scores}
        self.log_dict(
            {f"{split}/{name}": value for name, value in self.results.items()}, batch_size=1
        )
        self._loss_sum.zero_()
        self._rows_judged = 0

    def _reset_own_metrics(self) -> None:
        for metric in self.own_metrics.values():
            assert isinstance(metric, Metric)
            metric.reset()

    def epochs_done(self, steps: int) -> float:
        """The epochs of the training, or a fraction, that so many optimizer steps make."""
        # An IterableDataset has no length: Lightning then counts infinitely many batches.
        batches = int(min(self.trainer.num_training_batches, 1 << 62))
        return steps / max(1, -(-batches // self.trainer.accumulate_grad_batches))


def real_rows(values: Tensor, batch: FlatBatch, before: int = 0) -> Tensor:
    """The rows that count; nearly always all of them. So many rows stand before the batch's own."""
    return values if batch.num_real == batch.num_rows else values[: before + batch.num_real]


def real_tokens(values: Tensor, batch: FlatBatch) -> Tensor:
    """The tokens of the rows that count."""
    return (
        values
        if batch.num_real == batch.num_rows
        else values[: int(batch.lengths[: batch.num_real].sum())]
    )

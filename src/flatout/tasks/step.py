"""The training step every task shares: backward, clip, learning rate, optimizer, and not one wait for the device.

Optimisation is manual because it is cheaper (Lightning's automatic way costs twice as much a step) and because the
loss is already divided by the rows of the whole optimizer step, over all ranks and micro-batches: the gradients of
micro-batches simply add up to those of the full batch. Losses stay on the device until `take_losses` brings a run of
them over in one transfer.
"""

from __future__ import annotations

import inspect
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.checkpoints.position import of_all_ranks
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import Layout
from flatout.engine.optimizer import NotFinite, OptimConfig, clip_gradients, gradient_is_finite, gradient_length
from flatout.engine.out_of_memory import ERRORS, give_back_memory, in_short, is_out_of_memory
from flatout.engine.weight_average import WeightAverage
from flatout.errors import UserError
from flatout.models.lean import LeanEmbedding
from flatout.tasks.metrics import Counted
from flatout.tasks.pieces import Passes, running_statistics

_MOST_IN_A_ROW = 20
"""Steps that may be skipped one after the other."""
PHASES = ("forward", "backward", "optimizer")
AVERAGE = "average"
"""Where a checkpoint keeps the running mean of the weights."""


class StepTask(L.LightningModule):
    """A model, a loss and an optimizer; subclasses say what the loss and the metrics are."""

    labels_are_of_tokens = False
    """Whether targets are one a token rather than of the row."""
    smaller_rows = "Shorten rows with data.max_length, or set precision=bf16."
    """What helps where a single row needs too much memory."""
    finds_at_once = True
    """Whether a step that went wrong on a CPU is found there and then; elsewhere the device leaves it out itself."""
    _loss_sum: Tensor

    def __init__(self, model: nn.Module, optim: OptimConfig, *, total_steps: int, clip: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.results: dict[str, float] = {}
        """Metrics of the last validation or test, by plain name."""
        self.counted: Counted | None = None
        """What `count_answers` has found."""
        self.optim, self.total_steps, self.clip = optim, total_steps, clip
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        """Host seconds in each phase: true on CPU, the time to enqueue the work elsewhere."""
        self.edge: Callable[[int], float] = edge_on_host
        """The clock that is read at the edges of a batch's phases: its beginning is 0, the ends are 1 to 3."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._trained: list[nn.Parameter] = []
        self.passes = Passes(self)
        """Through each step's batches, in pieces where memory asks for it."""
        self.running_statistics: list[Tensor] = []
        """What each forward pass of a training changes by itself."""
        self._is_plain = self._steps_directly = self._is_scaled = self.exchanges = False
        self.shares_weights = False
        """Whether each rank holds slices of the weights, so that none can go through a batch without the others."""
        self._steps_done = 0
        self._lean: list[LeanEmbedding] = []
        self.average: WeightAverage | None = None
        """A running mean of the weights, while there is training and it is asked for."""
        self._thaw: Callable[[float], bool] | None = getattr(model, "thaw", None)
        self.register_buffer("_loss_sum", torch.zeros(()), persistent=False)
        self._rows_judged = 0
        self._stepper: list[LightningOptimizer] = []  # in a list, so that it is no submodule and no state
        self._is_updating = self._is_under_way = False
        self._kept_average: dict[str, Tensor] = {}
        self._broken: Tensor | None = None
        self.tell_rows: Callable[[int], str] = lambda step: ""
        """Names the rows of an optimizer step, counted from 0, where one went wrong."""
        self.before_validation: Callable[[], None] = lambda: None
        """Told when a validation is about to begin, before its hooks."""
        self.skipped: list[int] = []
        """Steps, counted from 0, that were left out because their gradient was not finite."""

    @abstractmethod
    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        """Sum of the losses of the real rows, divided by `batch.step_rows`."""

    @abstractmethod
    def judge(self, batch: FlatBatch) -> Tensor:
        """Take a batch of validation or test into the metrics; the sum of its losses."""

    @abstractmethod
    def start_judging(self, split: str) -> None:
        """Forget what the metrics have seen; a split (val, test) begins."""

    @abstractmethod
    def judged(self) -> dict[str, float]:
        """The metrics of a split that is over."""

    @property
    @abstractmethod
    def metric_names(self) -> list[str]:
        """Names of the metrics of a validation, without the loss."""

    @property
    @abstractmethod
    def usual_metric(self) -> str:
        """The metric that decides what is best when nobody said so."""

    def per_class(self) -> list[dict[str, Any]]:
        """Scores of each class over the last evaluation; empty where there are none."""
        return []

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this name before and after each of five hooks a step, and Module.__setattr__ searches
        # parameters, buffers and submodules each time: 35 µs a step on a fast core.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        share_out = getattr(self.trainer.strategy, "share_out", None)
        if share_out is not None:
            share_out(self.model)
            self.shares_weights = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A fused step cannot be un-scaled and clipped, which fp16 needs.
        return self.optim.build(self.model, fused=self.trainer.precision != "16-mixed")

    def setup(self, stage: str) -> None:
        """Before DDP looks at the weights: a kept gradient is never seen by autograd, so DDP must not wait for it."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, [])
        if stage != "fit":
            return
        strategy = self.trainer.strategy
        is_known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and self._scaler() is None
        is_lean = is_known and strategy.root_device.type == "cpu"
        self._lean[:] = [module for module in self.model.modules() if is_lean and isinstance(module, LeanEmbedding)]
        for embedding in self._lean:
            embedding.keeps_gradient = True
        tables = {id(embedding.weight) for embedding in self._lean}
        names = [name for name, weight in self.named_parameters() if id(weight) in tables]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def on_fit_start(self) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self._stepper[:] = [optimizer]
        self._trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self.optim.ema:
            self.average = WeightAverage(self.model, self.optim.ema)
            self.average.load_state_dict(self._kept_average)
        self._losses = [loss.to(self.device) for loss in self._losses]
        self._norms = [norm.to(self.device) for norm in self._norms]
        self._is_scaled = self._scaler() is not None
        self._is_plain = isinstance(self.trainer.strategy, SingleDeviceStrategy) and not self._is_scaled
        self.exchanges = _are_several()
        self.running_statistics = running_statistics(self.model)
        self.passes.restart()
        if self.exchanges:
            torch.manual_seed(torch.initial_seed() + dist.get_rank())  # other rows, other dropout
            for embedding in self._lean:
                dist.broadcast(embedding.weight.detach(), 0)  # as DDP does with all others
        callbacks = callbacks_of(self.trainer)
        self._steps_directly = self._is_plain and not any(
            type(callback).on_before_optimizer_step is not Callback.on_before_optimizer_step for callback in callbacks
        )

    def on_fit_end(self) -> None:
        self.average = None
        for embedding in self._lean:
            embedding.keeps_gradient = False

    def _on_before_batch_transfer(self, batch: FlatBatch, dataloader_idx: int = 0) -> FlatBatch:
        # Lightning looks for three hooks here, each inside two context managers: 45 µs a step for nothing, since
        # feeds place their batches. A batch made by hand is moved.
        return batch

    def _apply_batch_transfer_handler(
        self, batch: FlatBatch, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> FlatBatch:
        wanted = device or self.device
        return batch if batch.tokens.device.type == wanted.type else batch.to(wanted)

    def training_step(self, batch: FlatBatch, batch_idx: int) -> None:
        edge = self.edge
        started = edge(0)
        self._is_under_way = True
        forward_s = self.passes.train(batch)
        backwarded = edge(2)
        if batch.ends_step:
            self._losses.append(self.passes.end_step())
            self._step()
            self._is_under_way = False
        phase_s = self.phase_s
        phase_s["forward"] += forward_s
        phase_s["backward"] += backwarded - started - forward_s
        phase_s["optimizer"] += edge(3) - backwarded

    # Lightning inspects this signature every step; one that lies ready is found at once.
    training_step.__dict__["__signature__"] = inspect.signature(training_step)

    def validation_step(self, batch: FlatBatch, batch_idx: int) -> None:
        if batch.num_real:  # a rank for which no row is left keeps in step with the others
            self._loss_sum += self.judge(batch)
            self._rows_judged += batch.num_real
        elif self.shares_weights:
            self.outputs(batch)

    def outputs(self, batch: FlatBatch) -> Tensor:
        """The model's answers to a batch that is not trained on."""
        return self.passes.judge(batch, self.model)

    def begin_step(self) -> None:
        """Told before the first forward pass of an optimizer step."""
        return

    def set_back(self) -> None:
        """To where `begin_step` was: the step's passes are repeated."""
        for embedding in self._lean:
            embedding.clear()
        self._stepper[0].optimizer.zero_grad()

    def test_step(self, batch: FlatBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_validation_model_zero_grad(self) -> None:
        self.before_validation()
        super().on_validation_model_zero_grad()

    def on_validation_epoch_start(self) -> None:
        if self.average is not None:
            self.average.exchange()
        self.start_judging("val")

    def on_test_epoch_start(self) -> None:
        self.start_judging("test")

    def on_validation_epoch_end(self) -> None:
        self._close_split("val")
        self.put_back_weights()

    def put_back_weights(self) -> None:
        """The trained weights, where a validation has put their mean in their place."""
        if self.average is not None and self.average.is_in_model:
            self.average.exchange()

    def is_torn(self) -> bool:
        """Whether weights or running statistics are no longer those that the last step has left."""
        has_statistics = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules())
        return self._is_updating or (self._is_under_way and has_statistics)

    def unread(self) -> dict[str, Any]:
        """Losses and gradient lengths that nobody has taken yet."""
        return {
            "losses": torch.stack(self._losses) if self._losses else None,
            "norms": torch.stack(self._norms) if self._norms else None,
            "skipped": list(self.skipped),
            "pieces": dict(self.passes.pieces),
        }

    def take_unread(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        """What `unread` told on each rank; on other ranks than then, the first takes the sum of all losses."""
        is_same_world = len(of_ranks) == (dist.get_world_size() if _are_several() else 1)
        own = of_ranks[rank if is_same_world else 0]
        losses, norms = own["losses"], own["norms"]
        if losses is not None and not is_same_world:
            losses = sum(each["losses"] for each in of_ranks) if rank == 0 else torch.zeros_like(losses)
        self._losses = [] if losses is None else list(losses.unbind())
        self._norms = [] if norms is None else list(norms.unbind())
        self.skipped = list(own["skipped"])
        for name in self.passes.pieces:
            counts = [each.get("pieces", {}).get(name, 1) for each in ([own] if is_same_world else of_ranks)]
            self.passes.pieces[name] = max(self.passes.least[name], *counts)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.average is not None:
            checkpoint[AVERAGE] = self.average.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before the optimizer and the mean of the weights are there."""
        self._kept_average = checkpoint.get(AVERAGE, {})
        self._steps_done = checkpoint["global_step"]
        if self._thaw is not None and checkpoint["global_step"]:
            self._thaw(self._epochs_done(checkpoint["global_step"]))

    def on_test_epoch_end(self) -> None:
        self._close_split("test")

    @torch.inference_mode()
    def gathered(self, feed: Feed, of_batch: Callable[[FlatBatch], tuple[Tensor, ...]], *, most: int) -> list[Tensor]:
        """What is made of a feed's first batches by all ranks, on the host, until there are so many of it."""
        self.model.eval()
        found: list[tuple[Tensor, ...]] = []
        count = 0
        for batch in feed.afresh():
            with self.trainer.precision_plugin.forward_context():
                found.append(tuple(part.cpu() for part in of_batch(batch)))
            count += int(self.over_ranks(np.array([len(found[-1][0])]))[0])
            if count >= most:
                break
        own = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return [torch.cat(parts) for parts in zip(*of_all_ranks(own), strict=True)]

    def count_answers(self) -> None:
        """Keep what the answers of the split just judged were, for pictures of them; nothing for most."""
        return

    def over_ranks(self, counts: NDArray[Any]) -> NDArray[Any]:
        """Sums of some counts over all ranks."""
        if not _are_several():
            return counts
        summed = torch.from_numpy(np.asarray(counts)).to(self.device)
        dist.all_reduce(summed)
        return summed.cpu().numpy()

    def _close_split(self, split: str) -> None:
        loss, rows = self.over_ranks(np.array([float(self._loss_sum), self._rows_judged]))
        self.results = {"loss": float(loss) / max(1, rows), **self.judged()}
        self.log_dict({f"{split}/{name}": value for name, value in self.results.items()}, batch_size=1)
        self._loss_sum.zero_()
        self._rows_judged = 0

    def computed_tokens(self, batch: FlatBatch) -> int:
        """Tokens computed for a batch, padding included; a model of a person's own need not count them itself."""
        count = getattr(self.model, "computed_tokens", None)
        if count is not None:
            return int(count(batch))
        is_padded = getattr(self.model, "layout", Layout.flat) == Layout.padded
        return batch.longest() * batch.num_rows if is_padded else batch.num_tokens

    def take_losses(self) -> tuple[list[float], list[float]]:
        """Losses and gradient lengths of the steps since the last call. The one place that waits for the device.

        It comes before every validation, so no checkpoint is written of weights that a loss like this has spoilt.
        """
        if not self._losses:
            return [], []
        losses, count = torch.stack(self._losses).float(), len(self._losses)
        if _are_several():
            dist.all_reduce(losses)  # each rank's loss is its share of the step's
        both = torch.cat([losses, torch.stack(self._norms).float()] if self._norms else [losses]).tolist()
        losses_of, norms_of = both[:count], both[count:]
        wrong = {place for place, value in enumerate(losses_of) if not math.isfinite(value)}
        left_out = wrong | {place for place, value in enumerate(norms_of) if not math.isfinite(value)}
        if not self._is_scaled:  # a scaler looks for steps it must leave out by just that
            wrong = left_out
        first = self._steps_done - count
        if wrong and (self.optim.not_finite is NotFinite.stop or self._is_scaled):
            raise self._not_finite(first + min(wrong))
        self.skipped += [first + place for place in sorted(left_out) if first + place not in self.skipped]
        if left_out and _are_too_many(self.skipped[-count - _MOST_IN_A_ROW :]):
            raise self._not_finite(self.skipped[-1])
        self._losses, self._norms = [], []
        return _without(losses_of, wrong), _without(norms_of, left_out)

    def require_sound(self) -> None:
        """Refuse to keep weights while a step that went wrong is waiting to be found; no wait where none can."""
        if self._broken is not None and self.optim.not_finite is NotFinite.stop and bool(self._broken):
            self.take_losses()

    def backward_of(self, loss: Tensor, ends_step: bool) -> None:
        """Add the gradients of a part of a step; ranks exchange them all after the last."""
        if self._is_plain:
            loss.backward()
            return
        # Ranks average their gradients, but each loss is already a share of the whole step's.
        loss = loss * self.trainer.world_size
        with nullcontext() if ends_step else _gradients_kept_apart(self.trainer):
            self.manual_backward(loss)

    def _step(self) -> None:
        stepper = self._stepper[0]
        optimizer = stepper.optimizer
        step = self.trainer.global_step
        self._steps_done = step + 1
        lr = self.optim.lr_at(step, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        if self.exchanges:
            for embedding in self._lean:
                embedding.exchange()
        is_wanted = self._is_sound(optimizer, step)
        self._is_updating = True
        if not optimizer.state and is_wanted:
            self._update_first(stepper)
        else:
            self._update(stepper, is_wanted)
        for embedding in self._lean:
            embedding.clear()
        optimizer.zero_grad()
        if self.average is not None:
            self.average.add(step)
        if self._thaw is not None and self._thaw(self._epochs_done(step + 1)):
            self._tell_of_thawed()
        self._is_updating = False

    def _update(self, stepper: LightningOptimizer, is_wanted: bool) -> None:
        if self._steps_directly or not is_wanted:
            # Lightning's way to the optimizer serves scalers, closures and hooks; where there are none it is 30 µs
            # for nothing. Its own count of steps is kept.
            stepper._on_before_step()
            if is_wanted:
                stepper.optimizer.step()
            stepper._on_after_step()
        else:
            stepper.step()

    def _update_first(self, stepper: LightningOptimizer) -> None:
        """The step in which the optimizer makes its state; smaller batches would not help where memory lacks for it.

        What activations have left is given back and the step tried once more, if no weight was changed yet.
        """
        before = [weight._version for weight in self._trained]
        why = ""
        try:
            self._update(stepper, True)
        except ERRORS as error:
            is_untouched = before == [weight._version for weight in self._trained]
            if not is_out_of_memory(error):
                raise
            why = in_short(error)
        if not why:
            return
        if not is_untouched or self._is_scaled:
            raise self._no_memory_for_state(why)
        stepper.optimizer.state.clear()
        give_back_memory()
        try:
            self._update(stepper, True)
        except ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise self._no_memory_for_state(in_short(error)) from None

    def _no_memory_for_state(self, why: str) -> UserError:
        what = f"memory ran out in the first step of the optimizer, whose state is twice the weights ({why})"
        mend = "Freeze layers, train with model.lora.rank=8, or take a smaller model; smaller batches change little."
        return UserError("training", what, mend=mend)

    def _is_sound(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Clip the gradient; whether the step may be taken, which elsewhere than on a CPU the device decides itself."""
        if self._is_scaled:  # its scaler leaves such steps out itself, and is not done with the gradient yet
            return True
        if self.clip:
            length = clip_gradients(self._trained, self.clip)
            self._norms.append(length)
        stops = self.optim.not_finite is NotFinite.stop
        if self.finds_at_once and self.device.type == "cpu":
            is_finite = math.isfinite(length) if self.clip else gradient_is_finite(self._trained)
            if is_finite and (not stops or math.isfinite(self._losses[-1])):
                return True
            if stops:
                raise self._not_finite(step)
            self.skipped.append(step)
            if _are_too_many(self.skipped[-_MOST_IN_A_ROW:]):
                raise self._not_finite(step)
            return False
        if not self.clip:
            length = gradient_length(self._trained)
            self._norms.append(length)
        # A fused optimizer leaves a step out where this number is 1, and once it is, so are all that follow: nothing
        # is waited for, and the next flush finds which step it was.
        broken = (~torch.isfinite(length)).float()
        if stops and self._broken is not None:
            broken = torch.maximum(broken, self._broken)
        self._broken = broken
        vars(optimizer)["found_inf"] = broken
        return True

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip once Lightning has taken the scaler's factor out of the gradient, which can be done only once a step."""
        if self._is_scaled:
            length = clip_gradients(self._trained, self.clip) if self.clip else gradient_length(self._trained)
            self._norms.append(length)

    def _not_finite(self, step: int) -> UserError:
        what = f"the loss or its gradient is not finite at step {step + 1}{self.tell_rows(step)}"
        mend = (
            "Lower optim.lr, set precision=fp32, or leave such steps out with optim.not_finite=skip."
            " No weight was changed by it, and the last checkpoint is kept."
        )
        return UserError("training", what, mend=mend)

    def _epochs_done(self, steps: int) -> float:
        return steps / self.total_steps * (self.trainer.max_epochs or 1)

    def _tell_of_thawed(self) -> None:
        """DDP exchanges the gradients of those weights that were trained when it was set up: set it up anew."""
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            strategy.model = strategy._setup_model(self)
        elif self.shares_weights:
            strategy.let_thawed_train(self.model)

    def _scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)


def edge_on_host(edge: int) -> float:
    return time.perf_counter()


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _are_too_many(skipped: list[int]) -> bool:
    """Whether of these steps too many were left out one right after the other."""
    steps = sorted(skipped)
    later = steps[_MOST_IN_A_ROW - 1 :]
    return any(last - step == _MOST_IN_A_ROW - 1 for step, last in zip(steps, later, strict=False))


def _without(values: list[float], places: set[int]) -> list[float]:
    return [value for place, value in enumerate(values) if place not in places]


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The trainer's callbacks, which Lightning sets without declaring them."""
    return list(vars(trainer)["callbacks"])


def _gradients_kept_apart(trainer: L.Trainer) -> Any:
    """Within an accumulation window ranks need not exchange gradients."""
    blocked = getattr(trainer.strategy, "block_backward_sync", None)
    return blocked() if blocked else nullcontext()

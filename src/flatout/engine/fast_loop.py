"""The fast loop: an optimizer step without closures, profiling contexts and device syncs, in
Lightning's own Trainer.

Add `Trainer(callbacks=[FastLoop()])`. It trains a LightningModule with automatic optimisation and
one optimizer of torch, on one device, with DDP or with FSDP. Gradients, hooks and counters equal
those of Lightning's loop. It adds a guard against losses that are not finite (`step_losses.py`),
and repeats a step in smaller pieces after out-of-memory.

`FastLoop` decides whether it trains, and takes the place of Lightning's optimisation. Each batch
comes to `_run_batch`, which hands it to `Step` (`step.py`); the edges are those of its clock:

    edge 0 | add_gradients: forward, backward | edge 2 | update: clip, check, update | edge 3

Lightning's own loop trains where this one could compute something else. Such are a module that
overrides `optimizer_step`, an optimizer that may ask for the loss again, and a strategy or a
precision of another package. One printed line says so. Lightning's loop also takes the steps of
learning rate and batch size finders, which train before the training begins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.optim import LBFGS, Optimizer

from flatout.distributed.both_lightnings import either
from flatout.engine import lightning_internals as internals
from flatout.engine.captures import GraphUse
from flatout.engine.clipping import gradient_norm, is_fused
from flatout.engine.lightning_side import LightningSide
from flatout.engine.pieces import Pieces
from flatout.engine.step import Step
from flatout.engine.step_graph import StepGraphs
from flatout.engine.step_losses import NotFinite, StepLosses
from flatout.engine.stretch import Stretches
from flatout.errors import UserError, require
from flatout.models.lean import LeanEmbedding

# Lightning's strategies and precisions that step as the fast loop does.
_LIGHTNING_PARTS = (
    SingleDeviceStrategy,
    DDPStrategy,
    MixedPrecision,
    HalfPrecision,
    DoublePrecision,
    Precision,
)
# If another package's strategy or precision overrides one of these, its steps may differ.
_METHODS_OF_A_STEP = (
    "training_step",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "clip_gradients",
)

_MOST_UNREAD = 5_000  # losses that wait to be read; curves read them every 50 steps


def fast_loop_of(trainer: L.Trainer) -> FastLoop | None:
    """The fast loop among a trainer's callbacks; None if it has none."""
    for callback in internals.callbacks_of(trainer):
        if isinstance(callback, FastLoop):
            return callback
    return None


class FastLoop(Callback):
    """Takes optimizer steps in place of Lightning's automatic optimisation.

    `not_finite`: stop the training at a loss or gradient that is not finite, or skip that step.
    `graph`: whether steps on a GPU are captured and replayed, see `step_graph.py`.
            auto: those of flatout's tasks, where a proof in the run shows that they are equal and
            faster. on: also those of any module, where they are equal.
    """

    def __init__(
        self, *, not_finite: NotFinite = NotFinite.stop, graph: GraphUse = GraphUse.auto
    ) -> None:
        require(graph in list(GraphUse), "graph", repr(graph), allowed=", ".join(GraphUse))
        self.graph = GraphUse(graph)
        self._skipped_profiler: Profiler | None = None
        self.graphs: StepGraphs[Any, Any] | None = None
        """The captured steps of the training that this loop has begun; None: all are plain."""
        self.graph_facts: dict[str, Any] = {}
        """Of the last training: how many steps were replayed, and why others were not."""
        # Whether a resumed training has replayed steps so far; None: that was never asked.
        self._captured_before: bool | None = None
        self.phase_s = dict.fromkeys(internals.PHASES, 0.0)
        """Host seconds in each phase: exact on a CPU, the time to enqueue the work elsewhere."""
        self.losses = StepLosses(not_finite)
        self.pieces = Pieces()
        self.checks_on_host = True
        """Whether the host checks each gradient on a CPU before the update. Set it to False to test
        on a CPU how a GPU does it: the optimizer leaves the step out, the host learns of it later.
        """
        # Learning rate of the last step. The optimizer already has that of the next one.
        self.last_lr = 0.0
        # Whether this loop takes the steps of the training, and not Lightning's.
        self.is_active = False
        self.step: Step | None = None
        """The steps of the training that this loop has begun."""
        self._lean_embeddings: list[LeanEmbedding] = []
        self._left_out_of_ddp: list[str] = []  # their weights, where DDP trains

    @property
    def skipped(self) -> list[int]:
        """Steps, counted from 0, that were left out because their gradient was not finite."""
        return self.losses.skipped

    def take_losses(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the steps since the last call, in one transfer from the
        device.
        """
        return self.losses.take(self.trainer.global_step, is_scaled=self._is_scaled())

    def edge(self, number: int) -> float:
        """The host's clock at an edge of a batch: 0 begins it; 1, 2, 3 end forward, backward, and
        the optimizer.

        `StepTimer` replaces this method on a GPU by one that also records an event.
        """
        return time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rate": self.last_lr}
        # A resumed training goes on as it began, though its proof may come out otherwise.
        if self.graphs is not None:
            state["captures"] = self.graphs.replays_when_resumed()
        elif self._captured_before is not None:
            state["captures"] = self._captured_before
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_lr = state_dict["rate"]
        self._captured_before = state_dict.get("captures")

    def position_state(self) -> dict[str, Any]:
        """For a checkpoint: losses not reported yet, and into how many pieces batches are cut."""
        if not self.is_active:
            return {}
        return {**self.losses.state(), "pieces": dict(self.pieces.counts)}

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        """Restore `position_state`, of which `of_ranks` has one entry a rank.

        If the number of ranks is another now, each takes the mean losses of all ranks and the
        largest number of pieces.
        """
        if "losses" in of_ranks[0]:  # not if Lightning's own loop wrote the checkpoint
            is_same_world = len(of_ranks) == self.trainer.world_size
            self.losses.load(of_ranks, rank, is_same_world=is_same_world)
            self.pieces.load(of_ranks, rank, is_same_world=is_same_world)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            # A training that an error ended has not released them, and may have had another module.
            self._release_embedding_gradients()
        self.trainer = trainer
        self.module = pl_module
        self.pieces.set_up(trainer, pl_module)
        if stage == "fit":
            self.step = None
            self.graphs = None
            self._set_active(_reason_against_module(trainer, pl_module))
            self._set_up_embedding_gradients()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_active:
            self._set_active(_reason_against_optimizer(trainer))
        optimization: internals.PluggedOptimization | None = None
        if self.is_active:
            # Only now: between `setup` and here other callbacks (a batch size finder) may train, in
            # Lightning's loop.
            optimization = internals.plug_optimization(
                trainer, self._takes_batches_of, self._run_batch
            )
        if optimization is None:
            self._stop(trainer, pl_module)
            return
        self._skipped_profiler = internals.skip_profiling(trainer)
        others = [callback for callback in internals.callbacks_of(trainer) if callback is not self]
        self.side = LightningSide(trainer, pl_module, optimization, others)
        # A checkpoint restores losses on the host; they are stacked with later ones on the device.
        self.losses.to(pl_module.device)
        self.step = Step(
            self.side,
            self.pieces,
            self.losses,
            self._lean_embeddings,
            checks_on_host=self.checks_on_host and pl_module.device.type == "cpu",
        )
        if self.side.has_several_ranks:
            # Each rank draws its own dropout.
            torch.manual_seed(torch.initial_seed() + dist.get_rank())
            for embedding in self._lean_embeddings:
                # All ranks start with rank 0's weights. DDP does this for the weights it knows.
                dist.broadcast(embedding.weight.detach(), 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.step is None:
            return
        from flatout.engine.graph_choice import choose_graphs  # it imports much

        # Only here: the loaders stand now, and the weights are restored.
        self.graphs = choose_graphs(
            trainer, pl_module, self.step, self.graph, captured_before=self._captured_before
        )
        if self.graphs is not None and self.graphs.ring is not None:
            stretches = Stretches(trainer, self.graphs, self._run_stretch)
            internals.plug_turns(trainer, stretches.take_turn)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if internals.is_fitting(trainer) and self.is_active and self.losses.may_be_broken:
            self.take_losses()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Where the device decides, the host has not heard yet of the last steps.
        if self.is_active and self.losses.broken is not None:
            self.take_losses()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # The step stays: before the last checkpoint is saved, `is_state_partial` is asked.
        internals.unplug_optimization(trainer)
        internals.unplug_turns(trainer)
        internals.restore_profiling(self._skipped_profiler)

    def _set_active(self, reason_against: str) -> None:
        if reason_against and self.graph is GraphUse.on:
            raise UserError("graph", f"on, but {reason_against}", hint="Leave it at auto.")
        if reason_against:
            print(f"fast loop: off, {reason_against}; Lightning's own loop trains")
        self.is_active = not reason_against
        _mark_module(self.module, self.is_active)

    def _stop(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        internals.unplug_optimization(trainer)
        internals.unplug_turns(trainer)
        internals.restore_profiling(self._skipped_profiler)
        self._release_embedding_gradients()
        if self.graphs is not None:
            self.graph_facts = self.graphs.facts()
            print(f"step graph: {self.graphs.summary()}", flush=True)
        self.is_active = False
        self.step = None
        self.graphs = None
        self._captured_before = None
        _mark_module(module, False)

    def _takes_batches_of(self, optimizer: Optimizer) -> bool:
        """Whether a batch belongs to the training that this loop has begun.

        A batch size or learning rate finder trains with other callbacks or another optimizer.
        """
        is_ours = self.step is not None and optimizer is self.step.optimizer
        return is_ours and self in internals.callbacks_of(self.trainer)

    def is_state_partial(self) -> bool:
        """Whether a step that did not end has changed weights or running statistics.

        Such a state lies between two steps; a checkpoint of it could not be resumed.
        """
        return self.step is not None and self.step.is_partial()

    def _run_batch(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Train on one batch; take the optimizer step if it is the step's last batch.

        Stands for `run` of Lightning's automatic optimisation: same arguments, same result.
        """
        assert self.step is not None
        step = self.step
        side = self.side
        edge = self.edge
        # So many are unread only where no part of the Trainer reads them: they are dropped, as they
        # would fill memory and checkpoints. Not in a hook: `ExactCheckpoint` saves nothing after an
        # error where a callback with a state may have missed its hook.
        if len(self.losses.values) > _MOST_UNREAD:
            self.take_losses()
        # An edge never waits for the device: it is an event or the host's clock (see `edge`).
        started = edge(0)
        arguments = tuple(kwargs.values())
        ends_step = side.begin_batch(arguments, batch_idx)
        batch = arguments[0] if self.graphs is None else self.graphs.take(arguments[0])
        if batch is None:
            return self._end_replay(started)
        passes = partial(step.add_gradients, batch, ends_step=ends_step, edge=edge)
        forward_s = side.run_passes(passes)
        backwarded = edge(2)
        if ends_step:
            self.last_lr = optimizer.param_groups[0]["lr"]
            step.update()
            # Every rank gets here after each step, so all of them join this collective.
            if side.has_several_ranks:
                self.pieces.agree()
        phase_s = self.phase_s
        phase_s["forward"] += forward_s
        phase_s["backward"] += backwarded - started - forward_s
        phase_s["optimizer"] += edge(3) - backwarded
        return side.take_outputs()

    def _end_replay(self, started: float) -> dict[str, Any]:
        """End a batch whose step was replayed."""
        assert self.step is not None
        assert self.graphs is not None
        self.last_lr = self.step.optimizer.param_groups[0]["lr"]
        self._time_replays(started)
        return self.graphs.take_outputs()

    def _run_stretch(
        self, batches: Sequence[Any], steps: Sequence[Any], rates: Sequence[list[float]]
    ) -> None:
        """Take the captured steps of many batches, with the rates of each step."""
        assert self.step is not None
        assert self.graphs is not None
        started = self.edge(0)
        self.graphs.replay_all(batches, steps, rates)
        self.last_lr = rates[-1][0]
        self._time_replays(started)
        self.step.is_at_once = False

    def _time_replays(self, started: float) -> None:
        """Pass the edges of replays, whose whole time counts as the forward pass."""
        self.phase_s["forward"] += self.edge(1) - started
        self.edge(2)
        self.edge(3)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """With fp16, note the gradient's norm here, where Lightning has just unscaled it."""
        if self.step is not None and self._is_scaled() and not is_fused(optimizer):
            self.losses.norms.append(gradient_norm(self.step.weights))

    def _is_scaled(self) -> bool:
        """Whether losses are multiplied by a gradient scaler (fp16)."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def _set_up_embedding_gradients(self) -> None:
        """On a CPU, let each lean embedding reuse one gradient table in all steps.

        Autograd never sees these gradients, so DDP would wait for them for ever. DDP is set to
        ignore them; the embeddings exchange the rows that were used themselves.
        """
        strategy = self.trainer.strategy
        is_supported = self.is_active and isinstance(
            strategy, either(SingleDeviceStrategy) + either(DDPStrategy)
        )
        embeddings = list[LeanEmbedding]()
        if is_supported and not self._is_scaled() and strategy.root_device.type == "cpu":
            modules = self.module.modules()
            embeddings = [layer for layer in modules if isinstance(layer, LeanEmbedding)]
        tables = {id(embedding.weight) for embedding in embeddings}
        names = [name for name, weight in self.module.named_parameters() if id(weight) in tables]
        if names and isinstance(strategy, either(DDPStrategy)):
            if internals.leave_out_of_ddp(self.module, names):
                self._left_out_of_ddp = names
            else:
                embeddings = []
        self._lean_embeddings[:] = embeddings
        for embedding in self._lean_embeddings:
            embedding.keeps_gradient = True

    def _release_embedding_gradients(self) -> None:
        for embedding in self._lean_embeddings:
            embedding.clear()
            embedding.keeps_gradient = False
            embedding.weight.grad = None
        self._lean_embeddings.clear()
        if self._left_out_of_ddp:
            internals.take_back_into_ddp(self.module, self._left_out_of_ddp)
            self._left_out_of_ddp = []


def _mark_module(module: Any, is_active: bool) -> None:
    """Set the module's `is_in_fast_loop`, if it has one.

    A flatout task with it logs no loss itself and may use a fused optimizer.
    """
    if hasattr(type(module), "is_in_fast_loop"):
        module.is_in_fast_loop = is_active


def reason_against(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Why Lightning's own loop has to train; "" if the fast loop can.

    The trainer must have its optimizers already, as from `on_fit_start` on.
    """
    return _reason_against_module(trainer, module) or _reason_against_optimizer(trainer)


def _reason_against_module(trainer: L.Trainer, module: L.LightningModule) -> str:
    name = type(module).__name__
    base = L.LightningModule
    if not module.automatic_optimization:
        return f"{name} uses manual optimisation"
    if internals.overrides(module, "optimizer_step", base) and not hasattr(
        module, "after_optimizer_step"
    ):
        return f"{name} overrides optimizer_step"
    if internals.overrides(module, "optimizer_zero_grad", base):
        return f"{name} overrides optimizer_zero_grad"
    precision = trainer.precision_plugin
    strategy = trainer.strategy
    if not _steps_like_lightning(precision):
        return f"the precision {type(precision).__name__} computes in its own way"
    # `share_out` is a method of flatout's own FSDP strategy.
    is_supported = _steps_like_lightning(strategy) or hasattr(strategy, "share_out")
    return "" if is_supported else f"the strategy {type(strategy).__name__} steps in its own way"


def _steps_like_lightning(part: Strategy | Precision) -> bool:
    """Whether this is a class of Lightning, or a subclass that overrides no method of a step."""
    for base in _LIGHTNING_PARTS:
        if isinstance(part, either(base)):
            return not any(internals.overrides(part, name, base) for name in _METHODS_OF_A_STEP)
    return False


def _reason_against_optimizer(trainer: L.Trainer) -> str:
    kind = type(trainer.optimizers[0])
    if kind.__name__ == "_MockOptimizer":  # Lightning's stand-in for no optimizer
        return "the module has no optimizer"
    # An optimizer that calls its closure twice (SAM, LBFGS) needs Lightning's closure. All others
    # of torch ignore it.
    needs_no_closure = (
        kind.step.__module__.startswith(("torch.optim.", "flatout.")) and kind is not LBFGS
    )
    return (
        ""
        if needs_no_closure
        else f"{kind.__name__} may want the loss computed again while it steps"
    )

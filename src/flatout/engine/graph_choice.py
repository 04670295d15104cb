"""Whether the steps of a training may be captured, or why not.

Asked once, before the first step, for `FastLoop(graph=...)`. With `auto` a training is taken only
where everything that a step reads is known to lie on the device. What that is stands below, each
reason beside its condition. With `on` any module is: what its steps read is watched in the run
(`step_watch.py`). In both cases `StepGraphs` proves that replays equal plain steps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol, cast

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD, Adam, AdamW

from flatout.data.batches.shapes import Shapes
from flatout.data.batches.signatures import Signatures
from flatout.distributed.both_lightnings import either
from flatout.engine.captures import CAPTURES, GraphUse
from flatout.engine.clipping import is_fused
from flatout.engine.fused_adamw import FusedAdamW
from flatout.engine.step_graph import StepGraphs
from flatout.engine.step_ring import StepRing
from flatout.engine.step_watch import StepWatch
from flatout.engine.stretch import reason_against
from flatout.engine.thaws import Thaws, why_unknown
from flatout.errors import UserError, require
from flatout.models.contract import Network, contract

if TYPE_CHECKING:
    from flatout.data.batches.feed import Feed
    from flatout.engine.step import Step
    from flatout.engine.thaws import ThawingTask

_LEAST_STEPS = 200
"""A capture takes about as long as ten plain steps, and up to eight of them may be needed."""
_LEAST_STEPS_WHERE_ASKED = 2
"""With `graph=on`: behind a thaw one step is plain, and the next one may be captured."""
# what can be fused on a GPU, so that the host decides nothing
_STEP_ON_DEVICE = (FusedAdamW, AdamW, Adam, SGD)


class _TaskOfOurs(Protocol):
    """A task of flatout, of which the engine knows nothing else."""

    labels_are_of_tokens: bool
    reads_rows: bool
    leaves_out_unlabelled: bool

    def decides_on_host(self) -> str: ...


def choose_graphs(
    trainer: L.Trainer,
    module: L.LightningModule,
    step: Step,
    asked: GraphUse,
    *,
    captured_before: bool | None = None,
) -> StepGraphs[Any, Any] | None:
    """Captured steps for a training; None where plain steps take all of it.

    With `on`, `UserError` says why it cannot be. With `auto` a line says it, where there is a GPU.
    `captured_before`: whether a resumed training has replayed steps; None: it was not resumed.
    """
    device = module.device
    stays_plain = asked is GraphUse.auto and captured_before is False
    if asked is GraphUse.off or stays_plain:
        return None
    has_nothing_of_ours = not (_is_of_flatout(module) or _has_plan(trainer.train_dataloader))
    is_watched = has_nothing_of_ours and asked is GraphUse.on
    reason = _reason_against_device(device.type) or _reason_against_trainer(trainer, step)
    if not (reason or is_watched):
        feed = trainer.train_dataloader
        reason = _reason_against_module(module, feed) or _reason_against_feed(feed)
    if not reason and asked is GraphUse.auto and trainer.estimated_stepping_batches < _LEAST_STEPS:
        reason = f"the training has fewer than {_LEAST_STEPS} steps"
    thaws = None if reason or is_watched else _thaws_of(module, asked)
    if thaws is not None:
        reason = thaws.reason_against()
    if not reason and is_watched:
        capture = CAPTURES[device.type](device)
        watch = StepWatch(module, has_replayed=bool(captured_before))
        return StepGraphs(step, Signatures(device), capture, watch=watch)
    if not reason:
        feed = trainer.train_dataloader
        assert feed is not None
        shapes = _choose_shapes(feed, module)
        graphs = StepGraphs(
            step,
            shapes,
            CAPTURES[device.type](device),
            must_gain=asked is GraphUse.auto and not captured_before,
            must_replay=asked is GraphUse.on,
        )
        graphs.thaws = thaws
        graphs.why_alone = reason_against(trainer) or _reason_against_ring(feed, shapes)
        if not graphs.why_alone:
            graphs.ring = StepRing(step, shapes)
        return graphs
    if asked is GraphUse.on:
        raise UserError("graph", f"on, but {reason}", hint="Leave it at auto.")
    if device.type in CAPTURES:
        print(f"step graph: off, {reason}; plain steps train", flush=True)
    return None


def _thaws_of(module: L.LightningModule, asked: GraphUse) -> Thaws | None:
    """When layers of a task of flatout thaw; None: never."""
    task = cast("ThawingTask", module)
    if not task.network.unfreeze_epochs:
        return None
    return Thaws(task, _LEAST_STEPS if asked is GraphUse.auto else _LEAST_STEPS_WHERE_ASKED)


def _choose_shapes(feed: Feed, module: L.LightningModule) -> Shapes:
    """The shapes of a task of flatout: of its rows, or of the windows of long texts."""
    task = cast("_TaskOfOurs", module)
    tags = task.labels_are_of_tokens
    network = contract(module.model)
    if network.window:
        from flatout.models.encoder.window_shapes import WindowShapes  # only long texts need it

        return WindowShapes.planned_windows(feed, network.window, tags=tags)
    return Shapes.planned(
        feed,
        is_padded=network.layout == "padded",
        tags=tags,
        reads_rows=task.reads_rows,
        fillers_count=task.leaves_out_unlabelled,
    )


def planned_token_counts(
    asked: GraphUse, task: L.LightningModule, feed: Feed, steps: int
) -> list[int]:
    """Tokens of the batches of captured steps, of a task that runs flat; empty if none are.

    Asked before there is a Trainer, so its reasons against captured steps are not among these.
    """
    is_captured = asked is not GraphUse.off and feed.device.type in CAPTURES
    if not is_captured or (asked is GraphUse.auto and steps < _LEAST_STEPS):
        return []
    if _reason_against_module(task, feed) or _reason_against_feed(feed):
        return []
    return _choose_shapes(feed, task).token_counts


def require_captures(asked: GraphUse, world: int, device: torch.device) -> None:
    """Refuse `graph=on` where no step can be captured; before any data is read."""
    if asked is not GraphUse.on:
        return
    reason = _reason_against_device(device.type)
    if not reason and world > 1:
        reason = f"{world} devices train"
    require(not reason, "graph", f"on, but {reason}", hint="Leave it at auto.")


def require_static_steps(asked: GraphUse, task: L.LightningModule, feed: Feed) -> None:
    """Refuse `graph=on` for a task of flatout whose steps the host decides; before training."""
    if asked is GraphUse.on:
        reason = _reason_against_module(task, feed) or _reason_against_feed(feed)
        require(not reason, "graph", f"on, but {reason}", hint="Leave it at auto.")


def _reason_against_ring(feed: Feed, shapes: Shapes) -> str:
    """Why the batches of many steps cannot stand on the device at once; empty if they can."""
    if feed.has_ragged_labels and not shapes.tags:
        return "as rows have several labels"
    return f"as a step reads {shapes.steps_read_more}" if shapes.steps_read_more else ""


def _reason_against_device(kind: str) -> str:
    if kind in CAPTURES:
        return ""
    return f"steps are captured on {', '.join(CAPTURES).upper()} devices, not on a {kind.upper()}"


def _is_of_flatout(module: L.LightningModule) -> bool:
    return type(module).__module__.startswith("flatout.")


def _reason_against_trainer(trainer: L.Trainer, step: Step) -> str:
    side = step.side
    optimizer = step.optimizer
    if not isinstance(trainer.strategy, either(SingleDeviceStrategy)):
        return "several devices train"
    if trainer.accumulate_grad_batches != 1:
        return "a step has several batches"
    if side.hooks:
        return f"{min(side.hooks)} is called within each step"
    if side.clips_in_its_own_way():
        return "gradients are clipped by the module, or by value"
    name = type(optimizer).__name__
    if type(optimizer) not in _STEP_ON_DEVICE:
        return f"{name} does not step on the device alone"
    if not is_fused(optimizer):
        return f"{name} does not step on the device alone, as it lacks fused=True"
    if step.decides_on_host:
        return "the host looks at each gradient before the step"
    return ""


def _has_plan(loader: object) -> bool:
    """Whether batches come from a feed of flatout, which knows their sizes beforehand."""
    return hasattr(loader, "planned_sizes")


def _reason_against_module(module: L.LightningModule, loader: object) -> str:
    # The loss of a task of flatout reads nothing of the host but shapes.
    if not _is_of_flatout(module):
        if _has_plan(loader):
            return f"{type(module).__name__} is no task of flatout's, but reads flat batches"
        return f"{type(module).__name__} is no task of flatout's, which graph=on may capture"
    network = module.model
    name = type(network).__name__
    if not isinstance(network, Network):
        return f"{name} is no network of flatout's"
    if not _says_what_the_host_decides(network):
        return f"{name} is no network of flatout's, and defines no decides_on_host"
    if reason := why_unknown(network):
        return reason
    decision = cast("_TaskOfOurs", module).decides_on_host()
    return f"the host decides in each step {decision}" if decision else ""


def _says_what_the_host_decides(network: Network) -> bool:
    """Whether a network is flatout's, or answers `decides_on_host` by its own class.

    A subclass of somebody's may count its passes or draw on the host: what its base answers says
    nothing of that.
    """
    kinds = type(network).__mro__
    own = list(itertools.takewhile(lambda kind: not kind.__module__.startswith("flatout."), kinds))
    return not own or any("decides_on_host" in kind.__dict__ for kind in own)


def _reason_against_feed(loader: object) -> str:
    if not _has_plan(loader):
        return f"a {type(loader).__name__} has no plan of its batches"
    feed = cast("Feed", loader)
    if feed.transform is not None or feed.complete is not None:
        return "batches are changed as they are made"
    if feed.plan.tokens_per_batch is not None:
        return "data.tokens_per_batch gives each batch other rows"
    return ""

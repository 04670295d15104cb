"""When layers thaw in a training whose steps are captured (`model.unfreeze_epochs`).

A captured step has fixed which weights are trained. So the captured steps between two thaws serve
these weights only: a stretch ends with the step before a thaw, and behind it steps are captured
anew. A capture takes as long as some plain steps, so none is made shortly before a thaw:

    steps      0 ......... 400 ......... 800 ...    with layers that thaw behind 400 and 800
    captures   x      -      x      -      x        x: may be made, -: plain, or replays of before
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol, runtime_checkable

import lightning as L

from flatout.models.contract import Network


@runtime_checkable
class _KnowsThaws(Protocol):
    """A network that knows before when its layers thaw."""

    unfreeze_epochs: float

    def is_thaw_due(self, epochs: float) -> bool: ...

    def epochs_frozen(self) -> float: ...

    def layers_waiting(self) -> int: ...


class ThawingTask(Protocol):
    """What is asked of a task of flatout."""

    trainer: L.Trainer
    network: Network

    def epochs_done(self, steps: int) -> float: ...

    def thaw_layers(self, done: int) -> None: ...


class Thaws:
    """The thaws of one training."""

    def __init__(self, task: ThawingTask, least: int) -> None:
        """`least`: steps up to a thaw, from which on steps are captured."""
        network = task.network
        assert isinstance(network, _KnowsThaws)
        self._task = task
        self._network = network
        self._least = least
        self._waiting = network.layers_waiting()  # layers, when `notice` was called last

    def steps_to_next(self, most: int) -> int:
        """How many steps there are up to the next behind which layers thaw; at most `most`."""
        done = self._task.trainer.global_step

        def is_due(steps: int) -> bool:
            return self._network.is_thaw_due(self._task.epochs_done(done + steps))

        return min(most, 1 + bisect_left(range(1, most + 1), x=True, key=is_due))

    def is_near(self) -> bool:
        """Whether a step that is captured now would be replayed too rarely."""
        return self.steps_to_next(self._least) < self._least

    def follow(self) -> None:
        """Let layers train whose time has come after the step that was counted last."""
        self._task.thaw_layers(self._task.trainer.global_step)

    def notice(self) -> bool:
        """Whether layers have joined the training since this was asked last."""
        waiting_before = self._waiting
        self._waiting = self._network.layers_waiting()
        return self._waiting < waiting_before

    def reason_against(self) -> str:
        """Why captures never pay in this training; empty where they do."""
        steps_an_epoch = 1 / self._task.epochs_done(1)
        apart = steps_an_epoch * self._network.epochs_frozen()
        in_all = self._task.trainer.estimated_stepping_batches
        behind_last = in_all - steps_an_epoch * self._network.unfreeze_epochs
        if max(apart, behind_last) >= self._least:
            return ""
        return f"layers thaw every {apart:.0f} steps, and steps are captured from {self._least} on"


def why_unknown(network: Network) -> str:
    """Why it cannot be known when layers thaw; empty where it is known, or none do."""
    never_thaws = type(network).thaw is Network.thaw and not network.unfreeze_epochs
    if never_thaws or isinstance(network, _KnowsThaws):
        return ""
    return "the network decides by itself when layers thaw"

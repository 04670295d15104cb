"""What the host does for a step of a stretch: operators beside the replay, and calls of functions.

Both are counted over two turns of Lightning's loop, 100 steps, with curves and exact checkpoints.
So the gathering of batches, the row of curves and Lightning's own work for each turn are in them.
The steps run on the device of `tests/elsewhere`, which captures as a card does. While counts are
taken a replay does nothing, as its operators are not the host's.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import lightning as L
from lightning.pytorch.plugins.precision import MixedPrecision
from torch._ops import OpOverload

from benchmarks.dispatched import launches_kernel
from flatout import (
    BiLSTMConfig,
    CellsConfig,
    HeadlinesConfig,
    OptimConfig,
    RNNConfig,
    TextCNNConfig,
    TransformerConfig,
    VocabularyConfig,
)
from flatout.callbacks import ExactCheckpoint
from flatout.callbacks.run_curves import RunCurves
from flatout.data import SequenceData, TextData
from flatout.engine import FastLoop
from flatout.engine.lightning_internals import callbacks_of, set_callbacks
from flatout.tasks import Classifier, SequenceRegressor

Parts = tuple[Any, Any]  # a datamodule and a task

_FIRST = 460  # steps before the counts: an epoch, in which all shapes are captured
_TURNS = 2
MOST_OPERATORS = 1.0
MOST_CALLS = {
    "LSTM on windows": 60.0,
    "BiLSTM": 62.0,
    "TextCNN": 62.0,
    "encoder of 2 layers": 152.0,
}
"""Ceilings, which are lowered when the host does less."""
_OF_TENSOR_CLASSES = ("torch/_library/", "torch/utils/backend_registration", "tests/elsewhere/")
_OPTIM = OptimConfig(lr=1e-3)


def _text(model: Any, **settings: Any) -> Parts:
    sample = HeadlinesConfig(rows=3_000, eval_rows=20, classes=8)
    return TextData(sample=sample, batch_size=8, **settings), Classifier(model, optim=_OPTIM)


def _windows() -> Parts:
    sample = CellsConfig(cells=4, cycles=6, samples=150)
    data = SequenceData(sample=sample, batch_size=8, lookback=30, stride=1)
    return data, SequenceRegressor(RNNConfig(hidden=8), optim=_OPTIM)


def _encoder() -> Parts:
    pieces = VocabularyConfig(kind="wordpiece")
    model = TransformerConfig(hidden=16, layers=2, heads=2)
    return _text(model, max_length=64, vocabulary=pieces)


CASES: dict[str, Callable[[], Parts]] = {
    "LSTM on windows": _windows,
    "BiLSTM": partial(_text, BiLSTMConfig(embedding=8, hidden=8)),
    "TextCNN": partial(_text, TextCNNConfig(embedding=8, filters=4)),
    "encoder of 2 layers": _encoder,
}


@dataclass
class StepCounts:
    """What was counted, and over how many steps."""

    steps: int = 0
    steps_at_once: int = 0
    operators: int = 0
    calls: int = 0

    def a_step(self) -> dict[str, float]:
        """Operators and calls of a step, and the share of the steps in stretches."""
        return {
            "operators": self.operators / self.steps,
            "calls": self.calls / self.steps,
            "share at once": self.steps_at_once / self.steps,
        }


class TurnCounter(L.Callback):
    """Counts some turns of Lightning's loop, then ends the training.

    `not_host`: functions of the device, whose own calls are not the host's.
    """

    def __init__(self, loop: FastLoop, curves: RunCurves, not_host: set[CodeType]) -> None:
        self.loop = loop
        self.curves = curves
        self.counts = StepCounts()
        self._not_host = not_host
        self._depth = 0
        self._turns = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Lightning would ask this callback, too, and those calls are not the training's
        set_callbacks(trainer, [each for each in callbacks_of(trainer) if each is not self])
        epoch_loop = trainer.fit_loop.epoch_loop
        vars(epoch_loop)["advance"] = partial(self._take_turn, trainer, epoch_loop.advance)

    def _take_turn(self, trainer: L.Trainer, take: Callable[[Any], None], fetcher: Any) -> None:
        if not self._turns:
            # whole turns, from behind a row of curves on
            is_behind_row = not self.curves.distance()["steps_since"]
            if trainer.global_step < _FIRST or not is_behind_row:
                take(fetcher)
                return
            self._begin(trainer)
        self._turns += 1
        take(fetcher)
        if self._turns == _TURNS:
            self._end(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        from tests.elsewhere.device import There

        assert self.loop.graphs is not None
        self._at_once = self.loop.graphs.counts.at_once
        self._first = trainer.global_step
        There.watch = self._count_operator
        sys.setprofile(self._count_call)

    def _end(self, trainer: L.Trainer) -> None:
        from tests.elsewhere.device import There

        sys.setprofile(None)
        There.watch = None
        assert self.loop.graphs is not None
        self.counts.steps = trainer.global_step - self._first
        self.counts.steps_at_once = self.loop.graphs.counts.at_once - self._at_once
        trainer.should_stop = True

    def _count_operator(self, operator: OpOverload) -> None:
        self.counts.operators += launches_kernel(operator)

    def _count_call(self, frame: FrameType, event: str, argument: object) -> None:
        # what torch calls for a tensor that is a class of Python, as those of the device are
        is_of_class = any(part in frame.f_code.co_filename for part in _OF_TENSOR_CLASSES)
        if event in ("call", "c_call") and not self._depth and not is_of_class:
            self.counts.calls += 1
        if frame.f_code in self._not_host:
            self._depth += (event == "call") - (event == "return")


def print_counts() -> None:
    """The counts of all cases, as the last line that is printed."""
    print(json.dumps(count_stretches()))


def count_stretches() -> dict[str, dict[str, float]]:
    """The counts of all cases. Changes torch for the whole process."""
    # Tests lie beside the benchmarks, and only this bench needs them.
    from tests.elsewhere import capture
    from tests.elsewhere.device import There, add_device
    from tests.elsewhere.one_operator import KERNELS
    from tests.elsewhere.steps import with_kernels_of_a_gpu

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    add_device(KERNELS)
    capture.add_capture()
    with_kernels_of_a_gpu()
    dispatcher: Any = There.__torch_dispatch__  # a class method
    dispatch = dispatcher.__func__.__code__
    not_host = {dispatch, capture.Captured.replay.__code__}
    return {name: _count(make, not_host) for name, make in CASES.items()}


def _count(make: Callable[[], Parts], not_host: set[CodeType]) -> dict[str, float]:
    from tests.elsewhere import capture
    from tests.elsewhere.device import NAME, OneDevice

    data, task = make()
    loop = FastLoop(graph="on")
    curves = RunCurves([])
    counter = TurnCounter(loop, curves, not_host)
    plain_replay = capture.Recording.replay

    def replay(recording: capture.Recording) -> None:
        # those of the proof compute
        if loop.graphs is None or not loop.graphs.evidence:
            plain_replay(recording)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(capture.Recording, "replay", replay),
    ):
        exact = ExactCheckpoint(folder, every_minutes=None, others_draw=False)
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=2,
            limit_val_batches=0,
            gradient_clip_val=0.5,
            callbacks=[loop, curves, exact, counter],
            accelerator="auto",
            strategy=OneDevice(),
            plugins=[MixedPrecision("bf16-mixed", NAME)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, datamodule=data)
    return counter.counts.a_step()

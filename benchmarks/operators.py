"""Operators of a training step on a GPU, by phase, for models that are so small that a GPU waits.

A GPU computes a small model faster than the host can ask for it, so a step takes as long as the
host needs to launch its operators. Views and allocations launch nothing and are not counted. The
steps run on the device of `tests/elsewhere`, with the branches that a GPU takes, so any machine
counts alike. cuDNN's layers and flash attention are one operator each way there.

A recurrent layer or a product may be several kernels: measured on an H200, the 38 operators of an
LSTM's step were 57 kernels, the 162 of an encoder of two layers 180.

`MOST` has a ceiling for each phase of each model. `tests/engine/test_operators.py` holds them.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.plugins.precision import MixedPrecision
from torch._ops import OpOverload

from benchmarks import claim, stretches
from benchmarks.claim import Claim, Options, bounded
from benchmarks.dispatched import launches_kernel
from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    CellsConfig,
    EncodingConfig,
    HeadlinesConfig,
    OptimConfig,
    PeopleConfig,
    RNNConfig,
    TextCNNConfig,
    TransformerConfig,
    VocabularyConfig,
)
from flatout.bits import BitData, GramDecoder
from flatout.bits.task import GramsConfig
from flatout.callbacks.run_curves import RunCurves
from flatout.data import SequenceData, TextData
from flatout.engine import FastLoop
from flatout.models.series import is_even
from flatout.tasks import Classifier, SequenceRegressor

Parts = tuple[Any, Any]  # a datamodule and a task
Counts = dict[str, float]  # operators by phase

PHASES = ("feed", "forward", "loss", "backward", "clip and check", "optimizer")
_FIRST_COUNTED_STEP = 20  # the steps before make state and caches
_OPTIM = OptimConfig(lr=1e-3)
_HEADLINES = HeadlinesConfig(rows=512, eval_rows=20, classes=8)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with small data, trained as its experiments are."""

    make: Callable[[], Parts]
    precision: str = "bf16"
    clip: float = 0.0  # the longest gradient; 0: any
    is_padded: bool = False  # whether rows of the batch that is counted differ in length


def _text(model: Any) -> Parts:
    data = TextData(sample=_HEADLINES, batch_size=8, max_length=40)
    return data, Classifier(model, optim=_OPTIM)


def _encoder() -> Parts:
    pieces = VocabularyConfig(kind="wordpiece")
    data = TextData(sample=_HEADLINES, batch_size=8, max_length=64, vocabulary=pieces)
    model = TransformerConfig(hidden=96, layers=2, heads=4)
    return data, Classifier(model, optim=_OPTIM)


def _windows() -> Parts:
    sample = CellsConfig(cells=4, cycles=6, samples=90)
    data = SequenceData(sample=sample, batch_size=8, lookback=30, stride=2)
    return data, SequenceRegressor(RNNConfig(hidden=8), optim=_OPTIM)


def _bits() -> Parts:
    encoding = EncodingConfig(size=64, hashes=2)
    sample = PeopleConfig(rows=1_200)
    data = BitData(sample=sample, batch_size=16, encoding=encoding, vocabulary=50)
    task = GramsConfig(exposure=False)
    return data, GramDecoder(BitMLPConfig(widths=[8]), task, _OPTIM)


def _bilstm() -> Parts:
    return _text(BiLSTMConfig(embedding=8, hidden=8))


def _textcnn() -> Parts:
    return _text(TextCNNConfig(embedding=8, filters=4))


CASES = {
    "LSTM on windows, fp32": Case(_windows, "fp32", clip=0.5),
    "LSTM on windows, bf16": Case(_windows, clip=0.5),
    "BiLSTM, fp32": Case(_bilstm, "fp32", clip=0.5),
    "BiLSTM, bf16": Case(_bilstm, clip=0.5),
    "BiLSTM, bf16, padded": Case(_bilstm, clip=0.5, is_padded=True),
    "TextCNN, bf16": Case(_textcnn),
    "TextCNN, bf16, padded": Case(_textcnn, is_padded=True),
    "bit_mlp, bf16": Case(_bits),
    "encoder of 2 layers, bf16": Case(_encoder, clip=1.0, is_padded=True),
}
# In the order of `PHASES`.
MOST = {
    "LSTM on windows, fp32": (0.5, 2, 2, 6, 5, 4),
    "LSTM on windows, bf16": (0.5, 4, 3, 8, 5, 4),
    "BiLSTM, fp32": (0.7, 11, 3, 18, 5, 4),
    "BiLSTM, bf16": (0.7, 13, 4, 21, 5, 4),
    "BiLSTM, bf16, padded": (0.7, 26, 4, 21, 5, 4),
    "TextCNN, bf16": (0.7, 17, 4, 32, 5, 4),
    "TextCNN, bf16, padded": (0.7, 31, 4, 33, 5, 4),
    "bit_mlp, bf16": (0.9, 17, 12, 21, 5, 4),
    "encoder of 2 layers, bf16": (0.7, 48, 4, 77, 5, 4),
}


def claims(options: Options) -> Iterator[Claim]:
    """Operators of a step of each model, at most as many as the ceilings allow."""
    # A process has such a device for good, so it is made in one that ends.
    counted = claim.measured_apart("benchmarks.operators:print_counts", {})
    for name, counts in counted.items():
        note = ", ".join(f"{phase} {counts[phase]:.3g}" for phase in PHASES)
        total = sum(counts.values())
        yield bounded(f"{name}: operators of a step", total, "", most=sum(MOST[name]), note=note)
    in_stretches = claim.measured_apart("benchmarks.stretches:print_counts", {})
    for name, counts in in_stretches.items():
        note = f"{counts['share at once']:.0%} of the steps in stretches"
        ceilings = {"operators": stretches.MOST_OPERATORS, "calls": stretches.MOST_CALLS[name]}
        for what, most in ceilings.items():
            title = f"{name}: {what} of a step in a stretch, beside its replay"
            yield bounded(title, counts[what], "", most=most, note=note)


def print_counts() -> None:
    """The operators of all models, as the last line that is printed."""
    print(json.dumps(count_all()))


def count_all() -> dict[str, Counts]:
    """The operators of a step of each model. Changes torch for the whole process."""
    # Tests lie beside the benchmarks, and only this bench needs them.
    from tests.elsewhere.device import add_device
    from tests.elsewhere.one_operator import KERNELS
    from tests.elsewhere.steps import with_kernels_of_a_gpu

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    add_device(KERNELS)
    with_kernels_of_a_gpu()
    return {name: _count(case) for name, case in CASES.items()}


def _count(case: Case) -> Counts:
    from tests.elsewhere.device import NAME, OneDevice

    data, task = case.make()
    counter = StepCounter(case)
    plugins = []
    if case.precision == "bf16":
        plugins.append(MixedPrecision("bf16-mixed", NAME))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=1,
            limit_val_batches=0,
            gradient_clip_val=case.clip or None,
            # Curves are read every 50 steps, and cost no operator in those between.
            callbacks=[FastLoop(), RunCurves([]), counter],
            accelerator="auto",
            strategy=OneDevice(),
            plugins=plugins,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, datamodule=data)
        return {"feed": _count_feed(data.feeds.train), **counter.counts}


def _count_feed(feed: Any) -> float:
    """Operators of a batch, which are those of an epoch divided by its batches."""
    from tests.elsewhere.device import There

    operators = list[OpOverload]()
    There.watch = operators.append
    feed.set_epoch(feed.epoch + 1)
    num_batches = len(list(feed))
    There.watch = None
    return sum(map(launches_kernel, operators)) / num_batches


class StepCounter(L.Callback):
    """Counts the operators of one step, by the phase in which they run."""

    def __init__(self, case: Case) -> None:
        self.is_padded = case.is_padded
        self.counts = dict.fromkeys(PHASES[1:], 0)
        self._phase = ""

    def begin(self, phase: str, *unused: Any) -> None:
        self._phase = phase

    def count(self, operator: OpOverload) -> None:
        if launches_kernel(operator):
            self.counts[self._phase] += 1

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        # All that `training_step` does beside the model's forward pass is the loss.
        module.model.register_forward_pre_hook(partial(self.begin, "forward"))
        module.model.register_forward_hook(partial(self.begin, "loss"))
        trainer.optimizers[0].register_step_pre_hook(partial(self.begin, "optimizer"))

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        from tests.elsewhere.device import There

        is_warm = trainer.global_step + 1 >= _FIRST_COUNTED_STEP
        if is_warm and is_even(batch) != self.is_padded:
            self.begin("loss")
            There.watch = self.count

    def on_before_backward(self, trainer: L.Trainer, module: Any, loss: Any) -> None:
        self.begin("backward")

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        self.begin("clip and check")

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        from tests.elsewhere.device import There

        if There.watch is not None:
            There.watch = None
            trainer.should_stop = True

"""One optimizer step: what it keeps, what it asks of the device, and that its bits are those of the
plain way.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

import flatout.engine
from flatout.engine import FastLoop
from tests.engine.test_fused_steps import Regression, train_module

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


class Mark:
    """Lives as long as the graph of a loss does."""


class MarksGraphs(Regression):
    """Hangs a mark on the last node of each loss; notes after each batch which of them live."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[weakref.ref[Mark]] = []
        self.living: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        mark = Mark()
        assert loss.grad_fn is not None
        loss.grad_fn.metadata["mark"] = mark
        self.marks.append(weakref.ref(mark))
        return loss

    def on_train_batch_end(self, *unused: Any) -> None:
        self.living.append(sum(mark() is not None for mark in self.marks))


@pytest.mark.parametrize("callbacks", [[], [FastLoop]])
def test_nothing_of_a_loss_s_graph_lives_after_its_batch(
    tmp_path: Path, callbacks: list[type[L.Callback]]
) -> None:
    """Else autograd keeps its nodes of the first step for ever, and no later step can be captured
    as a CUDA graph.
    """
    module = MarksGraphs()
    made: list[L.Callback] = [callback() for callback in callbacks]
    train_module(tmp_path, module, *made, scaled=False, clip=None)
    assert module.living == [0] * 8


def test_a_step_is_read_in_one_sitting() -> None:
    """Its path from batch to optimizer, in three files; none of them knows the loop."""
    engine = Path(flatout.engine.__file__).parent
    texts = [
        (engine / name).read_text(encoding="utf-8")
        for name in ("step.py", "lightning_side.py", "clipping.py")
    ]
    assert sum(len(text.splitlines()) for text in texts) <= 600
    assert not any("fast_loop" in text for text in texts)

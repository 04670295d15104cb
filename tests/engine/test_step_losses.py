"""Losses of the steps since the last row of metrics.csv: a step that an error ends is
none of them.
"""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from flatout import UserError
from flatout.engine.fast_loop import FastLoop
from tests.trainers import quiet_trainer


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class RaisesBefore(L.Callback):
    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step = step
        self.error = error

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step:
            raise self.error("planted")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_an_error_ends_leaves_no_loss_and_no_norm(tmp_path, error, clip):
    torch.manual_seed(0)
    loop = FastLoop()
    callbacks = [loop, RaisesBefore(3, error)]
    trainer = quiet_trainer(callbacks=callbacks, gradient_clip_val=clip, default_root_dir=tmp_path)
    with pytest.raises((error, SystemExit)):
        trainer.fit(Line(), DataLoader(torch.randn(8, 3), batch_size=1))
    assert trainer.global_step == 3
    assert len(loop.losses.values) == 3
    assert len(loop.losses.norms) == (3 if clip else 0)


def test_what_a_checkpoint_keeps_of_the_losses_is_on_the_host():
    """Ranks send it to each other as objects, and each would open a context on the GPU of every
    other.
    """
    losses = FastLoop().losses
    with FakeTensorMode():
        losses.values = [torch.ones((), device="cuda")]
        losses.norms = [torch.ones((), device="cuda")]
        state = losses.state()
    assert {state[name].device.type for name in ("losses", "norms")} == {"cpu"}


class Infinite(Line):
    """A loss that is infinite in the second step, whose gradient is not."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (torch.inf if batch_idx == 1 else 0.0)


def test_a_step_that_was_taken_is_not_among_those_left_out(tmp_path):
    loop = FastLoop(not_finite="skip")
    module = Infinite()
    quiet_trainer(callbacks=[loop], max_epochs=1).fit(module, DataLoader(torch.randn(6, 3), 2))
    losses, _ = loop.take_losses()
    assert loop.skipped == []
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ("stop", UserError),
        ("skip", None),
    ],
)
def test_what_is_not_finite_stops_or_is_left_out_also_where_a_text_says_so(tmp_path, given, ends):
    rows = torch.randn(6, 3)
    rows[3] = torch.nan
    loop = FastLoop(not_finite=given)
    module = Line()
    trainer = quiet_trainer(callbacks=[loop], max_epochs=1)
    if ends is None:
        trainer.fit(module, DataLoader(rows, 2))
        assert loop.skipped == [1]
    else:
        with pytest.raises(ends, match="step 2"):
            trainer.fit(module, DataLoader(rows, 2))


def test_another_word_is_refused():
    with pytest.raises(UserError, match=r"^not_finite: 'foo' \(stop or skip\)"):
        FastLoop(not_finite="foo")

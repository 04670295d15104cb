"""Optimizer steps that read everything from the device: clipping folded in, fp16 without a wait,
steps left out.

A GPU's scaler works on a CPU too, so what is said of fp16 is tested on any machine.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from flatout.engine import FastLoop
from flatout.engine.clipping import clip_divisor, clip_divisor_and_check
from flatout.engine.step import Step
from flatout.engine.step_losses import NotFinite, StepLosses
from flatout.engine.weight_average import WeightAverage
from tests.trainers import flat_weights, quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*lr_scheduler.step.*"
)


class Regression(L.LightningModule):
    """Two layers and a fused AdamW; `breaks_at` makes the loss of a step infinite."""

    def __init__(self, breaks_at: int | None = None, *, fused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.breaks_at = breaks_at
        self.fused = fused

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = (self.net(inputs).float() - targets).square().mean() * 30
        return loss * float("inf") if batch_idx == self.breaks_at else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


class Scaled(MixedPrecision):
    """fp16's scaler around products in fp32, so that both ways give the same numbers."""

    def __init__(self) -> None:
        super().__init__(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        )

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


class Hooked(L.Callback):
    """Notes the lengths of gradients that hooks see."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        weights = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(weights)))


def batches() -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        [torch.randn(5, 6, generator=random), torch.randn(5, 1, generator=random)] for _ in range(8)
    ]


def train_module(
    folder: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    scaled: bool,
    clip: float | None,
) -> L.Trainer:
    settings: dict[str, Any] = {"plugins": [Scaled()]} if scaled else {}
    trainer = quiet_trainer(
        folder,
        gradient_clip_val=clip,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(module, train_dataloaders=torch.utils.data.DataLoader(batches(), batch_size=None))
    return trainer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("breaks_at", [None, 2])
def test_fp16_steps_of_a_fused_optimizer_equal_those_of_lightning(tmp_path, clip, breaks_at):
    plain = Regression(breaks_at, fused=False)
    fast = Regression(breaks_at)
    train_module(tmp_path, plain, scaled=True, clip=clip)
    loop = FastLoop()
    loop.losses.policy = type(loop.losses.policy).skip
    trainer = train_module(tmp_path, fast, loop, scaled=True, clip=clip)
    torch.testing.assert_close(flat_weights(fast), flat_weights(plain), rtol=1e-6, atol=1e-7)
    assert (
        fast.trainer.precision_plugin.scaler.get_scale()
        == plain.trainer.precision_plugin.scaler.get_scale()
    )
    assert trainer.global_step == len(batches())


def test_an_fp16_step_reads_nothing_from_the_device(tmp_path, monkeypatch):
    loop = FastLoop()
    reads = []
    updates = []
    update = Step._update_scaled

    def watched(step: Step, scaler: torch.amp.GradScaler) -> None:
        with monkeypatch.context() as patch:
            for name in ("item", "__float__", "__bool__", "tolist", "cpu"):
                patch.setattr(Tensor, name, lambda tensor, *_, _name=name: reads.append(_name))
            update(step, scaler)
        updates.append(1)

    monkeypatch.setattr(Step, "_update_scaled", watched)
    train_module(tmp_path, Regression(), loop, scaled=True, clip=0.5)
    assert reads == []
    assert len(updates) == len(batches())


def test_hooks_see_fp16_gradients_without_the_factor(tmp_path):
    ours = Hooked()
    theirs = Hooked()
    train_module(tmp_path, Regression(), FastLoop(), ours, scaled=True, clip=0.5)
    train_module(tmp_path, Regression(fused=False), theirs, scaled=True, clip=0.5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_folded_into_the_step_equals_clipping_before_it(tmp_path, fused):
    plain = Regression(fused=fused)
    fast = Regression(fused=fused)
    train_module(tmp_path, plain, scaled=False, clip=0.5)
    train_module(tmp_path, fast, FastLoop(), scaled=False, clip=0.5)
    torch.testing.assert_close(flat_weights(fast), flat_weights(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("number", [0.0, 0.1, 0.5, 3.0, 1e30, float("inf"), float("nan")])
def test_a_divisor_made_with_its_check_equals_one_made_without(number):
    norm = torch.tensor(number)
    broken = torch.zeros(())
    divisor = clip_divisor_and_check(norm, torch.tensor(1 / 0.5), broken)
    expected = clip_divisor(norm, 0.5)
    assert torch.allclose(divisor, expected, rtol=1e-6, equal_nan=True)
    assert bool(broken) is not math.isfinite(number)
    assert torch.equal(norm, torch.tensor(number)) or math.isnan(number)


def test_a_flag_stays_with_stop_and_is_set_back_with_skip():
    norms = [torch.tensor(2.0), torch.tensor(float("inf")), torch.tensor(2.0)]
    for policy, expected in ((NotFinite.stop, [0, 1, 1]), (NotFinite.skip, [0, 1, 0])):
        losses = StepLosses(policy)
        flags = []
        for norm in norms:
            losses.flag_broken(norm, 0.5)
            flags.append(int(losses.broken))
        assert flags == expected


def test_a_short_gradient_is_divided_by_one():
    assert float(clip_divisor(torch.tensor(0.2), 0.5)) == 1.0
    assert float(clip_divisor(torch.tensor(5.0), 0.5)) == pytest.approx(10.0, rel=1e-5)


def test_the_mean_of_the_weights_leaves_out_what_is_frozen_and_holds_running_statistics():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    average = WeightAverage(model, 0.5)
    names = set(average.state_dict())
    assert names == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "2.weight", "2.bias"}
    before = model[1].running_mean.clone()
    model.train()(torch.randn(8, 2) + 5)
    after = model[1].running_mean.clone()
    average.add(100)
    average.exchange()
    torch.testing.assert_close(model[1].running_mean, (before + after) / 2)
    average.exchange()
    assert torch.equal(model[1].running_mean, after)


def test_a_mean_of_an_earlier_version_holds_more_and_is_read():
    model = nn.Linear(2, 3)
    everything = {name: weight.detach() + 1 for name, weight in model.named_parameters()}
    model.weight.requires_grad_(False)
    average = WeightAverage(model, 0.5)
    average.load_state_dict(everything)
    assert average.state_dict().keys() == {"bias"}
    assert torch.equal(average.state_dict()["bias"], everything["bias"])


class Unfused(Regression):
    """A regression with any optimizer of torch."""

    def __init__(self, breaks_at: int | None, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__(breaks_at)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "kind",
    [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam],
)
def test_an_optimizer_that_cannot_leave_a_step_out_itself_is_asked_for_none_that_is_not_finite(
    tmp_path, kind, clip
):
    """As on a GPU, where the loop hands what it finds to the optimizer."""

    def train(breaks_at: int | None) -> tuple[FastLoop, L.LightningModule]:
        loop = FastLoop()
        module = Unfused(breaks_at, kind)
        loop.checks_on_host = False
        loop.losses.policy = type(loop.losses.policy).skip
        train_module(tmp_path, module, loop, scaled=False, clip=clip)
        loop.take_losses()
        return loop, module

    _, plain = train(None)
    loop, broken = train(2)
    assert loop.skipped == [2]
    assert flat_weights(broken).isfinite().all()
    assert not torch.equal(flat_weights(broken), flat_weights(plain))


@pytest.mark.parametrize("captured", [True, False])
def test_a_checkpoint_of_captured_steps_is_resumed_on_a_cpu(captured, tmp_path):
    loop = FastLoop()
    loop.load_state_dict({"rate": 0.01, "captures": captured})
    module = Regression()
    train_module(tmp_path, module, loop, scaled=False, clip=None)
    assert loop.graph_facts == {}
    expected = Regression()
    train_module(tmp_path, expected, FastLoop(), scaled=False, clip=None)
    for weight, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other)

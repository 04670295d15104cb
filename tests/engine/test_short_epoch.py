"""Steps past Lightning's loop and torch's wrappers: the same hooks, counters, logged values and bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from flatout.data.datamodules import SequenceData
from flatout.data.sequences.shape import SequenceShape
from flatout.engine import FastLoop, fast_loop
from flatout.engine import lightning_internals as internals
from flatout.engine.direct_step import can_step_directly, drop_gradients, step_directly
from flatout.engine.optimizer import OptimConfig
from flatout.models.rnn import RNNConfig
from flatout.tasks.sequences import SequenceRegressionConfig, SequenceRegressor

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


class Notes(L.Callback):
    """Notes each hook around a batch with the counters it sees, and logs a value."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, trainer: L.Trainer, number: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        counts = (loop.batch_progress.state_dict(), loop.scheduler_progress.state_dict(), loop._batches_that_stepped)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((name, number, trainer.global_step, trainer.current_epoch, rate, counts))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.note("start", trainer, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("end", trainer, batch_idx)
        if batch_idx % 3 == 0:
            pl_module.log("seen", float(batch_idx), batch_size=1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("validation", trainer, -1)


def fit_sequences(folder: Path, **settings: Any) -> tuple[Notes, dict[str, torch.Tensor], dict[str, Any], bool]:
    torch.manual_seed(0)
    values = np.random.default_rng(0).standard_normal((260, 3)).cumsum(0)
    table = pa.table({name: values[:, number] for number, name in enumerate(["a", "b", "y"])})
    data = SequenceData(
        source=table,
        features=["a", "b"],
        target="y",
        split_by="time",
        lookback=6,
        batch_size=16,
        cache=str(folder),
    )
    task = SequenceRegressor(RNNConfig(hidden=5), SequenceRegressionConfig(baselines=False), OptimConfig(lr=0.02))
    notes = Notes()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[notes, FastLoop()],
        **{"max_epochs": 2, **settings},
        **off,
        default_root_dir=folder,
    )
    trainer.fit(task, datamodule=data)
    is_unplugged = not {"advance", "on_advance_end"} & set(vars(trainer.fit_loop.epoch_loop))
    return notes, task.model.state_dict(), dict(trainer.callback_metrics), is_unplugged


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 2, "val_check_interval": 4},
        {"max_steps": 17, "max_epochs": -1, "limit_val_batches": 0},
    ],
)
def test_the_short_epoch_calls_the_hooks_and_moves_the_counters_of_lightning_s_loop(tmp_path, monkeypatch, settings):
    plugged: list[bool] = []
    plug = internals.plug_short_epoch

    def note_plugging(*arguments: Any) -> bool:
        plugged.append(plug(*arguments))
        return plugged[-1]

    monkeypatch.setattr(internals, "plug_short_epoch", note_plugging)
    ours = fit_sequences(tmp_path, **settings)
    monkeypatch.setattr(internals, "plug_short_epoch", lambda *arguments: False)
    monkeypatch.setattr(fast_loop, "can_step_directly", lambda optimizer: False)
    theirs = fit_sequences(tmp_path, **settings)
    assert plugged == [True]
    assert len(ours[0].seen) > 20
    assert ours[0].seen == theirs[0].seen
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
    assert ours[2] == theirs[2]
    assert "seen" in ours[2]
    assert ours[3]


class StopsAtThree(L.Callback):
    """Asks the training to stop in its third batch."""

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


def test_a_callback_can_stop_an_epoch_half_way(tmp_path):
    table = pa.table({"a": np.random.default_rng(1).standard_normal(200), "y": np.arange(200.0)})
    data = SequenceData(
        source=table, features=["a"], target="y", split_by="time", lookback=4, batch_size=8, cache=str(tmp_path)
    )
    task = SequenceRegressor(RNNConfig(hidden=3), SequenceRegressionConfig(baselines=False))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=5, callbacks=[StopsAtThree(), FastLoop()], **off, default_root_dir=tmp_path
    )
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == 3


def make_two(lr: float = 0.01) -> list[tuple[nn.Module, torch.optim.AdamW]]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = OptimConfig(lr=lr, weight_decay=0.1).build(model)
        assert isinstance(optimizer, torch.optim.AdamW)
        found.append((model, optimizer))
    return found


def make_gradients(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 6, generator=random)).square().mean().backward()


def test_a_direct_step_has_the_bits_of_torch_s_step():
    (ours, direct), (theirs, usual) = make_two()
    assert can_step_directly(direct)
    for seed in range(6):
        for model, optimizer in ((ours, direct), (theirs, usual)):
            make_gradients(model, seed)
            if seed == 3:
                vars(optimizer)["grad_scale"] = torch.tensor(2.5)
        is_direct = step_directly(direct)
        assert is_direct == (seed > 0)  # torch makes the state
        if not is_direct:
            direct.step()
        usual.step()
        for model, optimizer in ((ours, direct), (theirs, usual)):
            vars(optimizer).pop("grad_scale", None)
            drop_gradients(optimizer)
            assert all(weight.grad is None for weight in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(float(state["step"]) == 6 for state in direct.state.values())


def test_weights_without_a_gradient_or_a_state_are_left_to_torch():
    (model, optimizer), _ = make_two()
    make_gradients(model, 0)
    model[0].weight.grad = None
    optimizer.step()
    drop_gradients(optimizer)
    make_gradients(model, 1)
    before = [weight.detach().clone() for weight in model.parameters()]
    assert not step_directly(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model[0].weight.grad = None
    assert step_directly(optimizer)
    assert torch.equal(before[0], model[0].weight)
    drop_gradients(optimizer)
    assert not step_directly(optimizer)
    assert not torch.equal(before[2], model[2].weight)


def test_an_optimizer_with_hooks_or_of_another_kind_takes_its_own_step():
    (model, optimizer), _ = make_two()
    make_gradients(model, 0)
    optimizer.step()
    optimizer.register_step_post_hook(lambda *rest: None)
    assert not step_directly(optimizer)
    assert not can_step_directly(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not can_step_directly(torch.optim.AdamW(model.parameters(), lr=0.1))
    assert not can_step_directly(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, amsgrad=True))


def test_layers_called_past_their_module_give_its_states():
    for cell in ("lstm", "gru"):
        model = RNNConfig(cell=cell, hidden=5, layers=2).build(shape=SequenceShape(inputs=3, targets=1))
        inputs = torch.randn(4, 7, 3)
        found = []
        for is_training in (True, False):
            model.train(is_training)
            model.zero_grad()
            answers, after = model.run(inputs, model.make_state(4))
            answers.sum().backward()
            found.append([answers, *after, *(weight.grad.clone() for weight in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

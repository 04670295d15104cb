"""`FastLoop` in somebody's Trainer: hooks, counters, logs, outputs and weights of a training
without it.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from flatout import UserError
from flatout.engine import FastLoop, fast_loop
from flatout.models.lean import LeanEmbedding
from tests.callbacks.plain import Rows, Small, loader
from tests.params import at_once
from tests.plain_trainer.fast_loop_cases import (
    CASES,
    LEFT_TO_LIGHTNING,
    NoneNowAndThen,
    StepOfItsOwn,
)
from tests.same import same
from tests.trainers import QUIET, copies_of_gradients, make_values, quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*returned `None`.*",
    "ignore:.*Swapping scheduler.*",
    "ignore:.*configure_optimizers. returned .None.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:The .batch_size. .* not used.*",
)
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
HOOKS = [
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_end"),
]


class Notes(L.Callback):
    """Notes each hook in its order, with the counters and gradients that it sees, and logs a value
    in it.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.outputs: list[Any] = []

    def note(self, name: str, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        counts = loop.automatic_optimization.optim_progress.optimizer.state_dict()
        gradients = copies_of_gradients(module)
        self.seen.append((name, trainer.global_step, copy.deepcopy(counts), gradients))
        if trainer.training:
            module.log(f"in {name}", float(len(self.seen)))
        if name == "on_train_batch_end":
            self.outputs.append(copy.deepcopy(rest[0]))


for hook in HOOKS:
    setattr(Notes, hook, lambda self, *arguments, _name=hook: self.note(_name, *arguments))


def train_noting(
    folder: Path,
    make: Callable[[], L.LightningModule],
    *,
    is_fast: bool,
    callbacks: Callable[[], list[L.Callback]] = list,
    **settings: Any,
) -> tuple[Notes, L.LightningModule, L.Trainer]:
    L.seed_everything(3, verbose=False)
    notes = Notes()
    module = make()
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(
        **(QUIET | given | make_values(settings)),
        callbacks=[*([FastLoop()] if is_fast else []), notes, *callbacks()],
        default_root_dir=folder,
    )
    trainer.fit(module, loader(), loader())
    return notes, module, trainer


@pytest.mark.parametrize("case", at_once(*list(CASES)[::4], of=CASES, seconds=1))
def test_hooks_logs_outputs_and_weights_are_those_of_a_trainer_without_it(tmp_path, capsys, case):
    make, settings = CASES[case]
    found = [train_noting(tmp_path, make, is_fast=is_fast, **settings) for is_fast in (False, True)]
    (theirs, their_module, plain), (ours, our_module, fast) = found
    assert [each[:2] for each in ours.seen] == [each[:2] for each in theirs.seen]
    assert same(ours.seen, theirs.seen, **CLOSE)
    assert same(ours.outputs, theirs.outputs, **CLOSE)
    assert same(dict(fast.callback_metrics), dict(plain.callback_metrics), **CLOSE)
    assert same(our_module.state_dict(), their_module.state_dict(), **CLOSE)
    assert same(fast.fit_loop.state_dict(), plain.fit_loop.state_dict(), **CLOSE)
    assert same(getattr(our_module, "asked", None), getattr(their_module, "asked", None), **CLOSE)
    assert getattr(our_module, "steps", None) == getattr(their_module, "steps", None)
    assert ("fast loop: off" in capsys.readouterr().out) == (case in LEFT_TO_LIGHTNING)


@pytest.mark.parametrize("answer", [{}, {"rows": 3}, 0.5, "a", (1, 2)])
def test_what_no_training_step_may_return_is_refused_in_lightning_s_words(tmp_path, answer):
    class Odd(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return answer

    messages = []
    for is_fast in (False, True):
        with pytest.raises(Exception, match="training_step") as raised:
            train_noting(tmp_path, Odd, is_fast=is_fast)
        messages.append((raised.type, str(raised.value)))
    assert messages[0] == messages[1]


def test_a_hook_set_on_a_callback_itself_is_called(tmp_path):
    calls = []
    for is_fast in (False, True):
        heard: list[float] = []
        hooks = {
            "on_before_backward": lambda trainer, module, loss, heard=heard: heard.append(
                loss.item()
            )
        }
        train_noting(
            tmp_path,
            Small,
            is_fast=is_fast,
            callbacks=lambda hooks=hooks: [LambdaCallback(**hooks)],
        )
        calls.append(heard)
    assert len(calls[0]) == 20
    assert calls[0] == pytest.approx(calls[1])


class Rated(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-4
        self.batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(), self.batch_size)

    def val_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize("is_first", at_once(True, of=[True, False], seconds=4))
@pytest.mark.parametrize(
    "make",
    [
        lambda: LearningRateFinder(num_training_steps=40, early_stop_threshold=None),
        lambda: BatchSizeFinder(init_val=5, max_trials=2),
    ],
)
def test_finders_find_what_they_find_without_it(tmp_path, make, is_first):
    found = []
    for is_fast in (False, True):
        L.seed_everything(3, verbose=False)
        module = Rated()
        loops = [FastLoop()] if is_fast else []
        callbacks = [*loops, make()] if is_first else [make(), *loops]
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **QUIET
        )
        trainer.fit(module)
        found.append(
            (module.lr, module.batch_size, module.layer.weight.detach(), trainer.global_step)
        )
    assert found[0][0] != 1e-4 or found[0][1] != 4
    assert same(*found, **CLOSE)


@pytest.mark.soak(seconds=3)
def test_a_tuner_finds_what_it_finds_without_it(tmp_path):
    found = []
    for is_fast in (False, True):
        L.seed_everything(3, verbose=False)
        module = Rated()
        loops = [FastLoop()] if is_fast else []
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=loops, default_root_dir=tmp_path, **QUIET
        )
        Tuner(trainer).lr_find(module, num_training=40, early_stop_threshold=None)
        Tuner(trainer).scale_batch_size(module, init_val=5, max_trials=2)
        trainer.fit(module)
        found.append(
            (module.lr, module.batch_size, module.layer.weight.detach(), trainer.global_step)
        )
    assert found[0][0] != 1e-4
    assert found[0][1] != 4
    assert same(*found, **CLOSE)


def test_a_second_training_of_another_module_is_its_own(tmp_path, capsys):
    _, _, trainer = train_noting(tmp_path, Small, is_fast=True)
    second = StepOfItsOwn()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(second, loader(), loader())
    assert second.steps == 20
    assert "overrides optimizer_step" in capsys.readouterr().out


def test_a_training_that_an_error_ended_leaves_lightning_s_own_loop(tmp_path):
    class Fails(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 4:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    loop = FastLoop()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[loop], default_root_dir=tmp_path, **QUIET
    )
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(Fails(), loader(), loader())
    assert (
        type(trainer.fit_loop.epoch_loop.automatic_optimization).__name__
        == "_AutomaticOptimization"
    )
    assert "profile" not in vars(trainer.profiler)


class NotesContexts(L.Callback):
    """Notes whether the profiler makes a context of its own for each hook."""

    def __init__(self) -> None:
        self.are_own: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        contexts = [trainer.profiler.profile(name) for name in ("one", "other")]
        self.are_own.append(contexts[0] is not contexts[1])
        with contexts[0]:
            pass


@pytest.mark.parametrize("profiler", [None, SimpleProfiler])
def test_only_a_profiler_that_was_asked_for_makes_a_context_for_each_hook(tmp_path, profiler):
    notes = NotesContexts()
    _, _, trainer = train_noting(
        tmp_path, Small, is_fast=True, callbacks=lambda: [notes], profiler=profiler
    )
    assert set(notes.are_own) == {profiler is not None}
    assert "profile" not in vars(trainer.profiler)
    if profiler is not None:
        times = trainer.profiler.recorded_durations
        assert len(times["[Callback]NotesContexts.on_train_batch_end"]) == 20


@pytest.mark.parametrize("names", [None, ["layer.bias"]])
def test_what_a_module_leaves_out_of_ddp_is_the_same_after_training(tmp_path, names):
    class WithWords(Small):
        def __init__(self) -> None:
            super().__init__()
            self.words = LeanEmbedding(5, 2)

    module = WithWords()
    if names is not None:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    loop = FastLoop()
    trainer = L.Trainer(strategy="ddp", devices=1, accelerator="cpu", callbacks=[loop], **QUIET)
    loop.setup(trainer, module, "fit")
    assert module._ddp_params_and_buffers_to_ignore == [*(names or []), "words.weight"]
    loop.on_fit_end(trainer, module)
    # DDP reads the list where there is one
    assert hasattr(module, "_ddp_params_and_buffers_to_ignore") == (names is not None)
    train_noting(tmp_path, lambda: module, is_fast=True)
    assert vars(module).get("_ddp_params_and_buffers_to_ignore") == names


class Copies(L.Callback):
    """Pickles and copies module and Trainer while they train."""

    def __init__(self) -> None:
        self.copies = 0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if batch_idx == 2:
            torch.save(pl_module, io.BytesIO())
            assert same(copy.deepcopy(pl_module).state_dict(), pl_module.state_dict(), **CLOSE)
            assert len(pickle.dumps(pl_module)) < 20_000  # without a Trainer in it
            self.copies += 1


def test_nothing_is_planted_that_cannot_be_pickled(tmp_path):
    copies = Copies()
    _, module, trainer = train_noting(tmp_path, Small, is_fast=True, callbacks=lambda: [copies])
    assert copies.copies == 2
    assert pickle.loads(pickle.dumps(trainer)).global_step == trainer.global_step
    assert pickle.loads(pickle.dumps(FastLoop())).skipped == []  # as ddp_spawn does
    assert not {"answer_in_pieces", "is_in_fast_loop"} & vars(module).keys()


class HoldsNothing(L.Callback):
    """Refers to each batch without holding it, and copies the callbacks within a step."""

    def __init__(self) -> None:
        self.batches: list[weakref.ref[Tensor]] = []

    def __deepcopy__(self, memo: object) -> HoldsNothing:
        return HoldsNothing()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: list[Tensor], batch_idx: int
    ) -> None:
        self.batches.append(weakref.ref(batch[0]))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert len(copy.deepcopy(trainer.callbacks)) == len(trainer.callbacks)


def test_after_a_training_neither_a_batch_nor_its_graph_is_kept(tmp_path):
    holds = HoldsNothing()
    _, _, trainer = train_noting(tmp_path, Small, is_fast=True, callbacks=lambda: [holds])
    assert len(holds.batches) == 20
    assert [batch() for batch in holds.batches] == [None] * 20
    assert len(copy.deepcopy(trainer.callbacks)) == len(trainer.callbacks)


def test_a_training_step_that_answers_none_is_warned_of_in_lightning_s_words(tmp_path):
    said = []
    for is_fast in (False, True):
        Closure.warning_cache.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            train_noting(tmp_path, NoneNowAndThen, is_fast=is_fast)
        words = [str(each.message) for each in warned]
        said.append([each for each in words if "training_step` returned" in each])
    assert len(said[0]) == 1
    assert said[1] == said[0]


class BreaksAtFour(Small):
    """The loss of the fourth batch is not a number."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx == 3 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize(("policy", "validates"), [("stop", 0), ("stop", 1), ("skip", 0)])
def test_what_a_device_finds_not_finite_is_heard_of_although_no_curves_are_read(policy, validates):
    """As on a GPU: the host decides nothing, and this Trainer has no other part of flatout."""
    loop = FastLoop(not_finite=policy)
    loop.checks_on_host = False
    trainer = quiet_trainer(
        callbacks=[loop],
        limit_val_batches=validates,
        max_epochs=2 - validates,
        limit_train_batches=5,
        num_sanity_val_steps=0,
    )
    if policy == "skip":
        trainer.fit(BreaksAtFour(), loader(), loader())
        assert loop.skipped == [3, 8]
        return
    with pytest.raises(UserError, match="not finite at step 4"):
        trainer.fit(BreaksAtFour(), loader(), loader())
    assert trainer.global_step == 5 * (2 - validates)


def test_losses_that_no_part_reads_are_dropped_after_some_time(monkeypatch):
    monkeypatch.setattr(fast_loop, "_MOST_UNREAD", 4)
    loop = FastLoop()
    quiet_trainer(callbacks=[loop]).fit(Small(), loader())
    assert len(loop.losses.values) == 5

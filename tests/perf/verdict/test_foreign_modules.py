"""`Verdict` beside modules of others: which are raced, and which cannot be copied."""

from __future__ import annotations

import copy
import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification

from flatout.callbacks import Verdict
from flatout.perf.verdict import experiments, own_tries
from flatout.perf.verdict.findings import VerdictFinding
from flatout.perf.verdict.shared_copies import copy_deeply
from tests.callbacks.plain import Rows, Small
from tests.perf.verdict.trainings import Drawing, Notes, trainer_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*running in `Trainer.barebones=True.*",
)


class Texts(Dataset[Any]):
    """Batches of a tokenizer: mappings of tensors."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> Any:
        return {"input_ids": torch.arange(8) + number % 5, "labels": torch.tensor(number % 2)}


class OfTransformers(Small):
    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        self.layer = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return {"loss": self.layer(labels=batch.pop("labels"), **batch).loss}


class TwoOptimizers(Small):
    """Manual optimisation, which asks its Trainer for what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0]).square().mean() + 0 * self.trainer.current_epoch)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.logger.experiment.add_scalar("loss", 1.0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.layer, self.other)]


@pytest.mark.parametrize(
    ("module", "data"),
    [
        pytest.param(OfTransformers, Texts, marks=pytest.mark.soak(seconds=4)),
        (TwoOptimizers, Drawing),
    ],
)
def test_foreign_modules_are_raced(module, data, tmp_path, long_enough):
    verdict = Verdict(seconds=4, log=Notes())
    logger = L.pytorch.loggers.logger.DummyLogger()
    trainer_of(tmp_path, verdict, logger=logger).fit(module(), DataLoader(data(), 2))
    assert verdict.evidence.tried, verdict.evidence.not_tried


def endless_rows() -> Any:
    while True:
        yield torch.rand(4, 3), torch.ones(4).long()


class Once(IterableDataset[Any]):
    """Rows of a stream that has one position."""

    def __init__(self) -> None:
        self.rows = (row for row in range(200))

    def __iter__(self) -> Any:
        return ((torch.full((3,), float(row)), row % 2) for row in self.rows)


class OfSeveral(Small):
    def training_step(self, batch: list[list[torch.Tensor]], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0], batch_idx)


class ByLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2)


class Locked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Sharing(Small):
    """Its step computes with the weights of the module that it was made with, whatever
    copies it.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Linear(3, 2)
        self.layer = torch.nn.Sequential(layer)
        self.layer.forward = lambda numbers: layer(numbers)


@pytest.mark.parametrize(
    ("module", "loader", "why"),
    [
        (Small, lambda: DataLoader(Once(), 2), "its loader can be read once"),
        (Small, endless_rows, "its loader can be read once"),
        (OfSeveral, lambda: [DataLoader(Rows(), 1)], "several loaders are read at once"),
        (ByLBFGS, lambda: DataLoader(Rows(), 1), "LBFGS computes its loss again while it steps"),
        (
            Locked,
            lambda: DataLoader(Rows(), 1),
            "its module cannot be copied (cannot pickle '_thread.lock' object)",
        ),
        (
            Sharing,
            lambda: DataLoader(Rows(), 1),
            "its steps reach the module itself, not a copy of it",
        ),
    ],
)
def test_what_cannot_be_copied_is_said_in_one_sentence_and_the_run_keeps_its_verdict(
    module, loader, why, tmp_path, long_enough
):
    weights = []
    for callbacks in ([], [Verdict(log=Notes())]):
        L.seed_everything(3, verbose=False)
        trained = module()
        trainer_of(tmp_path, *callbacks, max_steps=40).fit(trained, loader())
        weights.append(list(trained.state_dict().values()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert callbacks[0].evidence.not_tried == f"nothing was tried: {why}"
    assert callbacks[0].verdict["sentence"].endswith(f"[nothing was tried: {why}]")


def test_a_module_that_keeps_a_tensor_of_its_last_step_is_copied_without_the_graph():
    module = Small()
    module.last = (2 * next(module.parameters())).sum()
    copied, last = copy_deeply("module", (module, module.last))
    assert copied.last is last
    assert last.is_leaf
    assert torch.equal(last, module.last.detach())
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(module)


def test_beside_other_processes_ways_of_one_thread_are_raced_by_their_own_clock(
    long_enough, monkeypatch, tmp_path
):
    busy = VerdictFinding("cpu", "other processes on these cores", 0.5, "planted")
    for module in (own_tries, experiments):
        monkeypatch.setattr(module, "starved", lambda evidence: busy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = Verdict(log=Notes())
    trainer_of(tmp_path, found, max_steps=40).fit(Small(), DataLoader(Rows(), 1))
    causes = {tried.cause for tried in found.evidence.tried}
    assert "batch" in causes
    assert causes <= {"batch", "precision"}
    assert found.evidence.alone_ms is None

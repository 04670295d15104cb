"""BitData in a plain Trainer with a hand-written LightningModule."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from tests.refusals import refused
from tests.trainers import quiet_trainer
from torch import Tensor, nn

from flatout import BitsDataConfig, EncodingConfig, PeopleConfig
from flatout.bits import BitData
from flatout.data.batches.flat_batch import FlatBatch


class LineOfBits(L.LightningModule):
    """One linear layer from bits to grams."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line = nn.Linear(num_inputs, num_outputs)
        self.rows: dict[str, list[int]] = {"train": [], "val": [], "test": []}
        self.steps: list[tuple[int, int]] = []

    def training_step(self, batch: FlatBatch, number: int) -> Tensor:
        self.rows["train"] += batch.rows[: batch.num_real].tolist()
        self.steps.append((batch.num_real, batch.step_rows))
        targets = batch.multi_hot(self.line.out_features)
        losses = F.binary_cross_entropy_with_logits(
            self.line(batch.bits(torch.float32)), targets, reduction="sum"
        )
        return losses * self.trainer.accumulate_grad_batches / batch.step_rows

    def validation_step(self, batch: FlatBatch, number: int) -> None:
        self.rows["val"] += batch.rows.tolist()

    def test_step(self, batch: FlatBatch, number: int) -> None:
        self.rows["test"] += batch.rows.tolist()

    def predict_step(self, batch: FlatBatch, number: int) -> Tensor:
        return self.line(batch.bits(torch.float32))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def bit_data(**settings) -> BitData:
    encoding = EncodingConfig(size=64, hashes=2)
    return BitData(
        **{
            "sample": PeopleConfig(rows=200),
            "encoding": encoding,
            "batch_size": 16,
            **settings,
        }
    )


def module_for(data: BitData) -> LineOfBits:
    data.setup()
    return LineOfBits(data.info.num_inputs, data.info.labels.num_targets)


def test_fit_validate_test_and_predict_read_each_row_of_their_split_once():
    data = bit_data()
    trainer = quiet_trainer(num_sanity_val_steps=0)
    module = module_for(data)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    for split, name in (
        ("train", "train"),
        ("validation", "val"),
        ("test", "test"),
    ):
        assert sorted(module.rows[name]) == list(range(data.store.splits[split].num_rows))
    trainer.validate(module, datamodule=data, verbose=False)
    assert len(module.rows["val"]) == 2 * data.store.splits["validation"].num_rows
    answers = torch.cat(trainer.predict(module, datamodule=data))
    assert answers.shape == (data.store.splits["test"].num_rows, data.info.labels.num_targets)


def test_four_accumulated_batches_train_as_one_large_batch_does():
    modules = []
    for batch_size, accumulate in ((64, 1), (16, 4)):
        data = bit_data(batch_size=batch_size)
        modules.append(module_for(data))
        trainer = quiet_trainer(accumulate_grad_batches=accumulate, limit_val_batches=0)
        trainer.fit(modules[-1], datamodule=data)
    once, four = modules
    torch.testing.assert_close(four.line.weight, once.line.weight, rtol=0, atol=1e-6)
    for start in range(0, len(four.steps), 4):
        step = four.steps[start : start + 4]
        assert {rows for _, rows in step} == {sum(real for real, _ in step)}


def test_a_state_after_some_batches_leaves_exactly_the_rest():
    whole = bit_data(seed=2)
    begun = bit_data(seed=2)
    resumed = bit_data(seed=2)
    for data in (whole, begun, resumed):
        data.setup()
    batches = iter(begun.train_dataloader())
    for _ in range(3):
        next(batches)
    resumed.load_state_dict(begun.state_dict())
    expected = [batch.rows.tolist() for batch in whole.train_dataloader()]
    assert [batch.rows.tolist() for batch in resumed.train_dataloader()] == expected[3:]


def test_info_describes_grams_and_encodings():
    data = bit_data()
    data.setup()
    info = data.info
    assert (info.num_inputs, info.is_set, info.numbers) == (64, False, None)
    assert (info.labels.num_outputs, info.labels.hashed) == (1036, info.facts["hashed"])
    assert (
        info.labels.num_rows
        == info.summary()["rows"]["train"]
        == data.store.splits["train"].num_rows
    )
    assert info.text_columns == ["GivenName", "Surname", "Birthday"]
    assert info.lines[1].startswith("records: train ")


def test_sets_of_numbers_are_described_too():
    data = bit_data(encoding=EncodingConfig(kind="twostep"), vocabulary=50)
    data.setup()
    assert (data.info.num_inputs, data.info.is_set, len(data.info.numbers)) == (50, True, 50)


def test_settings_of_hydra_make_the_same_data():
    config = BitsDataConfig(sample=PeopleConfig(rows=90), effective_batch=32, batch_size=16)
    data = BitData.of(config, seed=4)
    assert data.config == config
    data.setup()
    assert (data.feeds.train.plan.rows_per_batch, data.feeds.train.plan.accumulate) == (16, 2)


def test_mistakes_are_one_sentence():
    with refused("BitData.bit", fix="'bits'"):
        BitData(bit="bloomfilter")
    data = bit_data(accumulate=2)
    module = module_for(data)
    with refused("data.accumulate", 2, "3 batches", fix="accumulate_grad_batches=2"):
        quiet_trainer(accumulate_grad_batches=3).fit(module, datamodule=data)

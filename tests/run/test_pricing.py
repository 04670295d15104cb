"""A run keeps what it was expected to take and took."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatout import TextCNNConfig, TextDataConfig, fit
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import RunCurves
from flatout.ladder.compare_runs import describe_spent
from flatout.report.run_report import RunReport
from flatout.run.short_try import EndSoon
from tests.fitting import quiet_fit

TABLE = {
    "text": [f"word{number % 9} and nr{number}" for number in range(80)],
    "label": ["x", "y"] * 40,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same steps."""
    folder = tmp_path_factory.mktemp("runs")
    data = TextDataConfig(source=TABLE, batch_size=8, cache=str(folder / "cache"))
    model = TextCNNConfig(embedding=4, filters=4, ngrams="off")
    price = {"per_hour": 3.6, "watts": 100.0}
    return [
        quiet_fit(data, model, epochs=2, folder=folder / name, price=price).summary["price"]
        for name in ("first", "second")
    ]


def test_parts_add_up_to_what_the_run_took(runs):
    price = runs[0]
    assert sum(price["took_parts_s"].values()) == pytest.approx(price["took_s"], rel=0.05)
    assert price["plan"]["steps"] == 2 * price["plan"]["steps_an_epoch"]
    assert price["plan"]["validations"] == 2
    assert price["money"] == pytest.approx(price["took_s"] / 1_000)
    assert price["kwh"] == pytest.approx(price["took_s"] * 100 / 3.6e6)
    tokens = price["plan"]["computed_tokens"] * (1 - price["plan"]["padding_share"])
    assert price["kwh_per_million_tokens"] == pytest.approx(price["kwh"] / tokens * 1e6)
    assert RunReport({"price": price}).cost.endswith("EUR")
    assert "kWh (price.watts)" in RunReport({"price": price}).cost
    assert RunReport({"price": price}).spent == {"kwh": price["kwh"], "money": price["money"]}


def test_two_groups_are_compared_by_what_their_runs_took(runs):
    first, second = ([{"price": price}] for price in runs)
    sentence = describe_spent(first, second)
    assert sentence.startswith("a run took ")
    assert [unit in sentence for unit in (" s,", " kWh,", " EUR")] == [True] * 3
    assert describe_spent(first, [{"price": None}]) == ""


def test_the_second_run_of_equal_steps_is_expected_by_the_first(runs):
    first, second = runs
    assert RunReport({"price": first}).time == ""  # over before it could be said
    raw_s = first["took_s"] - first["took_parts_s"]["evaluation"]
    assert second["raw_s"] >= 0.5 * raw_s
    assert RunReport({"price": second}).time.startswith("expected ")


class LookAtLine(L.Callback):
    """Keeps what the progress line says of the time that is left."""

    def __init__(self) -> None:
        self.said = ""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (curves,) = (each for each in trainer.callbacks if isinstance(each, RunCurves))
        (line,) = (each for each in curves.listeners if isinstance(each, ProgressLine))
        self.said = line.time_left()


def test_the_progress_line_of_a_run_says_what_is_left_of_its_time(tmp_path, capsys):
    data = TextDataConfig(source=TABLE, batch_size=8, cache=str(tmp_path / "cache"))
    model = TextCNNConfig(embedding=4, filters=4, ngrams="off")
    look = LookAtLine()
    for _ in range(2):  # the second is expected by the first
        fit(data, model, epochs=2, folder=tmp_path / "run", callbacks={"look": look}, logger="none")
    assert re.fullmatch(r"\d[\d.]* \w+ \([\d.]+–[\d.]+\) left", look.said)
    assert "expected: " in capsys.readouterr().out


def test_a_try_that_reaches_its_last_step_corrects_no_later_estimate(tmp_path):
    data = TextDataConfig(source=TABLE, batch_size=8, cache=str(tmp_path / "cache"))
    model = TextCNNConfig(embedding=4, filters=4, ngrams="off")

    def ratios(**settings: Any) -> list[float]:
        summary = quiet_fit(data, model, epochs=2, folder=tmp_path / "run", **settings).summary
        return cast("list[float]", summary["price"]["ratios"])

    assert ratios() == []
    ratios(callbacks={"end_soon": EndSoon(60.0)})
    assert ratios() == []
    assert len(ratios()) == 1


class Endless(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(lambda: torch.ones(2), None)


class Stream(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Endless(), batch_size=4)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_a_stream_without_an_end_has_the_length_that_max_steps_gives_it(tmp_path):
    settings = {"folder": tmp_path / "run", "trainer": {"accelerator": "cpu", "max_steps": 12}}
    plan = quiet_fit(Stream(), Line(), **settings).summary["price"]["plan"]
    assert plan["steps"] == plan["steps_an_epoch"] == 12

"""Tasks in a plain `L.Trainer`: the same losses and weights as with the fast loop, and as `fit`
gives them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pytest
import torch

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    EncodingConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    PeopleConfig,
    Predictor,
    TaggedTweetsConfig,
    TextCNNConfig,
    UserError,
    fit,
)
from flatout.bits import BitData, GramDecoder
from flatout.bits.task import GramsConfig
from flatout.callbacks import ExactCheckpoint
from flatout.data import TagData, TextData
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine import FastLoop
from flatout.engine.run_length import planned_steps
from flatout.tasks import Classifier, Tagger
from tests.encoders import calm_encoder
from tests.params import at_once
from tests.refusals import refused
from tests.trainers import flat_weights, quiet_trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*TensorBoard support.*",
    "ignore:.*number of training batches.*",
    "ignore:You defined a `validation_step`",
)
HEADLINES = HeadlinesConfig(rows=300, eval_rows=60, classes=4)
TAGS = TaggedTweetsConfig(rows=160, eval_rows=40)
OPTIM = OptimConfig(lr=0.01, eps=1e-6)
"""AdamW divides a gradient by its own size: with its usual eps a gradient of rounding alone makes a
whole step."""
_BITS = {"encoding": EncodingConfig(size=64, hashes=2), "vocabulary": 100}


def parts(kind: str) -> tuple[L.LightningDataModule, L.LightningModule]:
    """A DataModule and a task without dropout, as a user writes them."""
    if kind == "tags":
        encoder = calm_encoder()
        return TagData(sample=TAGS, batch_size=32, seed=3), Tagger(encoder, optim=OPTIM)
    if kind == "bits":
        bits = BitData(sample=PeopleConfig(rows=300), batch_size=32, seed=3, **_BITS)
        return bits, GramDecoder(
            BitMLPConfig(widths=[8], dropout=0.0), GramsConfig(exposure=False), OPTIM
        )
    config = BiLSTMConfig(embedding=8, hidden=8, dropout=0.0)
    return TextData(sample=HEADLINES, batch_size=32, seed=3), Classifier(config, optim=OPTIM)


class Losses(L.Callback):
    """The loss of each optimizer step, from the outputs of its batches."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: dict[str, torch.Tensor],
        batch: FlatBatch,
        batch_idx: int,
    ) -> None:
        self._sum += float(outputs["loss"])
        if batch.ends_step:
            self.of_steps.append(self._sum)
            self._sum = 0.0


def train(
    kind: str, folder: Path, *callbacks: L.Callback, accumulate: int = 1
) -> tuple[list[float], torch.Tensor]:
    """The loss of each step of two epochs, and the weights at the end."""
    L.seed_everything(3, verbose=False)
    data, task = parts(kind)
    losses = Losses()
    trainer = quiet_trainer(
        folder,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        callbacks=[*callbacks, losses],
    )
    trainer.fit(task, datamodule=data)
    return losses.of_steps, flat_weights(task.model)


@pytest.mark.parametrize("accumulate", at_once(4, of=[1, 4], seconds=1))
@pytest.mark.parametrize("kind", ["text", *at_once(of=["tags", "bits"], seconds=1)])
def test_the_fast_loop_and_lightning_s_own_loop_give_the_same_losses_and_weights(
    tmp_path, kind, accumulate
):
    plain, plain_weights = train(kind, tmp_path, accumulate=accumulate)
    fast, fast_weights = train(kind, tmp_path, FastLoop(), accumulate=accumulate)
    assert len(plain) > 2
    assert fast == pytest.approx(plain, abs=1e-6)
    torch.testing.assert_close(fast_weights, plain_weights, atol=1e-6, rtol=0)


def test_accumulated_batches_give_the_losses_of_one_large_batch(tmp_path):
    found = []
    for rows, accumulate in ((32, 1), (8, 4)):
        L.seed_everything(3, verbose=False)
        data = TextData(sample=HEADLINES, batch_size=rows)
        losses = Losses()
        trainer = quiet_trainer(
            tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, callbacks=[losses]
        )
        task = Classifier(
            TextCNNConfig(embedding=8, filters=4, dropout=0.0, embedding_dropout=0.0), optim=OPTIM
        )
        trainer.fit(task, datamodule=data)
        found.append(losses.of_steps)
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_fit_takes_a_datamodule_and_a_task_and_gives_the_losses_of_a_plain_trainer(tmp_path):
    plain, _ = train("text", tmp_path)
    settings: dict[str, Any] = {
        "precision": "fp32",
        "trainer": {"accelerator": "cpu"},
        "tune": "off",
    }
    settings |= {
        "monitor": MonitorConfig(flush_every=1, progress=False),
        "optim": replace(OPTIM, clip=0.5),
    }
    result = fit(*parts("text"), max_epochs=2, folder=tmp_path / "run", **settings)
    rows = (result.folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    place = rows[0].split(",").index("train/loss")
    losses = [float(row.split(",")[place]) for row in rows[1:] if row.split(",")[place]]
    assert losses == pytest.approx(plain, abs=1e-6, rel=1e-5)  # the file has six digits


def test_predictions_name_their_rows(tmp_path):
    data, task = parts("text")
    trainer = quiet_trainer(tmp_path)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, verbose=False)
    assert set(task.results) >= {"loss", "accuracy"}
    answers = trainer.predict(task, datamodule=data)
    rows = torch.cat([each["rows"] for each in answers])
    shares = torch.cat([each["probabilities"] for each in answers])
    assert sorted(rows.tolist()) == list(range(60))
    torch.testing.assert_close(shares.sum(-1), torch.ones(60))


class Means(torch.nn.Module):
    """Somebody's own network: the mean of the words' vectors, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(2000, 8)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        rows = self.words(batch.tokens.long()).split(batch.lengths.tolist())
        return self.layer(torch.stack([row.mean(0) for row in rows]))


@pytest.mark.parametrize("checks", at_once(0, of=[0, 2], seconds=1))
def test_a_network_of_one_s_own_learns_what_its_outputs_mean_from_the_data(tmp_path, checks):
    data, _ = parts("text")
    task = Classifier(Means(), optim=OptimConfig(lr=0.1))
    trainer = quiet_trainer(tmp_path, max_epochs=4, num_sanity_val_steps=checks)
    trainer.fit(task, datamodule=data)
    assert task.results["accuracy"] > 0.4
    assert len(task.labels.classes) == 4


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("weights_only", [True, *at_once(of=[None], seconds=1)])
def test_a_task_is_loaded_from_lightning_s_checkpoint(tmp_path, is_own, weights_only):
    data, task = parts("text")
    settings: Any = {"config": {"label_smoothing": 0.1}, "optim": {"lr": 0.02, "warmup": 0.2}}
    task = Classifier(Means() if is_own else task.model_config, **settings)
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    given = {"model": Means()} if is_own else {}
    again = Classifier.load_from_checkpoint(
        tmp_path / "kept.ckpt", weights_only=weights_only, **given
    )
    if not is_own:
        assert again.config == task.config
        assert again.optim.lr == 0.02
        assert again.model_config == task.model_config
    found = [
        quiet_trainer(tmp_path).test(each, datamodule=parts("text")[0], verbose=False)
        for each in (task, again)
    ]
    assert found[0] == found[1]
    again.train()
    torch.testing.assert_close(again.state_dict(), task.state_dict(), atol=0, rtol=0)


def test_texts_without_labels_are_predicted_by_a_plain_trainer(tmp_path):
    rows = [
        f"{word} of today {number},{topic}"
        for number in range(60)
        for word, topic in (("goal", 0), ("soup", 1))
    ]
    (tmp_path / "news.csv").write_text("\n".join(["title,topic", *rows]), encoding="utf-8")
    (tmp_path / "new.csv").write_text('title\ngoal of today 3\n""\na soup\ngoal', encoding="utf-8")
    given = {
        "source": str(tmp_path / "news.csv"),
        "text": "title",
        "label": "topic",
        "batch_size": 16,
    }
    task = Classifier(BiLSTMConfig(hidden=8, embedding=8), optim=OptimConfig(lr=0.05))
    trainer = quiet_trainer(tmp_path, max_epochs=3)
    trainer.fit(task, datamodule=TextData(**given))
    for new in (str(tmp_path / "new.csv"), {"title": ["goal of today 3", None, "a soup", "goal"]}):
        (answers,) = trainer.predict(task, datamodule=TextData(**given, predict=new))
        shares = answers["probabilities"][answers["rows"].argsort()]
        assert (shares[[0, 3], 0] > 0.5).all()
        assert shares[2, 1] > 0.5
        assert len(shares) == 4
    predictor = Predictor.of(task)
    labels = [each.label for each in predictor.predict(["goal", "soup"])]
    assert labels == ["0", "1"]
    assert predictor.predict([]) == []
    for table in ({"title": ["goal", "soup"]}, pa.table({"title": ["goal", "soup"]}).to_pandas()):
        assert [each.label for each in predictor.predict(table)] == labels
    for wrong, words in PREDICTED_WRONGLY:
        with pytest.raises(UserError, match=words):
            predictor.predict(wrong)
    with pytest.raises(UserError, match=r"TextData.predict: no column 'title' in"):
        trainer.predict(task, datamodule=TextData(**given, predict={"text": ["goal"]}))


PREDICTED_WRONGLY: list[Any] = [
    ({"text": ["goal"]}, "predict: no column 'title'"),
    ([None], r"predict: row 0 is None \(a text, or a pair of texts, of whole characters\)"),
    (["whole", "half \ud800"], r"predict: row 1 is 'half \\ud800' "),
    (["goal", 3], "predict: row 1 is 3"),
    (None, "predict: None is neither a row nor a list of rows"),
]


def test_a_task_without_data_and_without_a_network_says_what_it_lacks(tmp_path):
    trainer = quiet_trainer(tmp_path)
    with refused("Classifier", "no datamodule"):
        trainer.fit(Classifier(BiLSTMConfig()), train_dataloaders=[0])


def test_bits_in_a_classifier_are_refused_in_one_sentence(tmp_path):
    data, _ = parts("bits")
    trainer = quiet_trainer(tmp_path)
    with refused("Classifier", "BitInfo", "no classes", fix="GramDecoder"):
        trainer.fit(Classifier(BiLSTMConfig()), datamodule=data)


def test_a_script_of_a_user_runs_with_mixed_precision_accumulation_and_clipping(tmp_path):
    """The label column has the name that the built-in sample gives to its topics."""
    rows = [
        f"{word} of today {number},{topic}"
        for number in range(200)
        for word, topic in (("goal", "a"), ("soup", "b"))
    ]
    (tmp_path / "news.csv").write_text("\n".join(["title,topic", *rows]), encoding="utf-8")
    data = TextData(source=str(tmp_path / "news.csv"), text="title", label="topic", batch_size=16)
    task = Classifier(BiLSTMConfig(hidden=8, embedding=8), optim=OPTIM)
    settings: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "max_epochs": 5,
    }
    trainer = quiet_trainer(tmp_path, precision="bf16-mixed", **settings)
    trainer.fit(task, datamodule=data)
    assert trainer.global_step > 3
    assert task.results["accuracy"] > 0.9


class MeansOfWeights(L.Callback):
    """The running mean of the weights after each step."""

    def __init__(self) -> None:
        self.of_steps: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        means = pl_module.average.state_dict()
        self.of_steps.append(torch.cat([means[name].flatten() for name in sorted(means)]))


def test_the_mean_of_the_weights_is_the_same_in_both_loops(tmp_path):
    found = []
    for loop in ([], [FastLoop()]):
        L.seed_everything(3, verbose=False)
        data, task = parts("text")
        task.optim = replace(OPTIM, ema=0.9)
        means = MeansOfWeights()
        quiet_trainer(tmp_path, callbacks=[*loop, means], limit_val_batches=0).fit(
            task, datamodule=data
        )
        found.append(means.of_steps)
    assert len(found[0]) == len(found[1]) > 5
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(plain, fast, atol=1e-6, rtol=0)


class Opens(torch.nn.Module):
    """The mean of vectors that are trained from the second epoch on."""

    unfreeze_epochs = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = torch.nn.EmbeddingBag(400, 8)
        self.line = torch.nn.Linear(8, 4)
        self.vectors.weight.requires_grad_(False)

    def thaw(self, epochs: float) -> bool:
        joins = epochs >= 1 and not self.vectors.weight.requires_grad
        self.vectors.weight.requires_grad_(joins or self.vectors.weight.requires_grad)
        return joins

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        return self.line(self.vectors(batch.tokens.long() % 400, batch.offsets[:-1]))


def thawed_weights(folder: Path, checkpoint: Path | None = None, **settings: Any) -> torch.Tensor:
    L.seed_everything(3, verbose=False)
    data = TextData(sample=HEADLINES, batch_size=32, seed=3)
    data.prepare_data()
    task = Classifier(Opens(), labels=data.info.labels, optim=OPTIM)
    exact = ExactCheckpoint(folder, every_steps=4, every_minutes=None, keep=20)
    settings = {
        "max_epochs": 3,
        "enable_checkpointing": True,
        "limit_val_batches": 0,
        **settings,
    }
    quiet_trainer(folder.parent, callbacks=[exact], **settings).fit(
        task, datamodule=data, ckpt_path=checkpoint
    )
    assert task.model.vectors.weight.requires_grad
    return flat_weights(task)


def test_layers_thaw_by_epochs_also_where_steps_are_counted_and_resume_thawed(tmp_path):
    whole = thawed_weights(tmp_path / "whole")  # of ten steps an epoch
    assert torch.equal(thawed_weights(tmp_path / "again", tmp_path / "whole" / "step-12"), whole)
    assert torch.equal(thawed_weights(tmp_path / "steps", max_epochs=-1, max_steps=30), whole)


def test_the_rows_that_a_temperature_is_found_on_are_short_and_long_ones(tmp_path):
    task = parts("text")[1]
    sample = replace(HEADLINES, eval_rows=3000)
    data = TextData(sample=sample, batch_size=32, seed=3)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(task, datamodule=data)
    lengths = data.feeds.validation.split.lengths("tokens")
    rows = task.gathered(data.feeds.validation, lambda batch: (batch.rows,), most=600)[0].numpy()
    assert len(set(rows)) == len(rows) < len(lengths)
    assert lengths[rows].mean() == pytest.approx(lengths.mean(), rel=0.05)
    # as a tagger counts
    words: dict[str, Any] = {"most": int(lengths.sum() / 4), "in_all": int(lengths.sum())}
    rows = task.gathered(data.feeds.validation, lambda each: (each.tokens, each.rows), **words)[
        1
    ].numpy()
    assert lengths[rows].mean() == pytest.approx(lengths.mean(), rel=0.05)
    assert len(rows) < len(lengths) / 2


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 2, "max_steps": 1000}, 20),
        ({"max_epochs": 2, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 1000}, 1000),
    ],
)
def test_a_schedule_ends_with_the_epochs_or_the_steps_whichever_come_first(length, steps):
    data = parts("text")[0]
    data.prepare_data()
    data.setup("fit")
    assert planned_steps(length, data.feeds.train) == steps

"""A loss, a metric and an optimizer of one's own, in runs of flatout's data and models: the package
and the commands of the docs page.
"""

from __future__ import annotations

import csv
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    CellsConfig,
    EncodingConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    PeopleConfig,
    RNNConfig,
    RunConfig,
    SequenceDataConfig,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.bits import GramDecoder
from flatout.checkpoints.folder import read_weights
from flatout.data import TextData
from flatout.report.summary import read_summary
from flatout.run.job import RunJob
from flatout.tasks import (
    Classifier,
    MaskedLanguageModel,
    SequenceLabeller,
    SequenceRegressor,
    Tagger,
)
from tests.composed import run_train
from tests.params import at_once
from tests.tasks.test_plain_trainer import quiet_trainer
from tests.verbs import verb
from tests.warm import begin_warm

PAGE = (Path(__file__).parents[2] / "docs" / "own_loss.md").read_text(encoding="utf-8")
CODE, _ = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^(?:PYTHONPATH=\. )?python -m train (.+)$", PAGE, re.MULTILINE)
OTHERS = """
import lightning as L

class Hinge(torch.nn.Module):
    pass


class Labelled(Focal):
    def __init__(self, model, config=None, optim=None, *, scale=1.0):
        super().__init__(model, config, optim)


class Whole(L.LightningModule):
    def training_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return None


class Rows(L.LightningDataModule):
    def train_dataloader(self):
        return []


class Headed(Focal):
    def build_model(self, config, info):
        return super().build_model(config, info)
"""
QUICK = [
    "data.sample.rows=320",
    "data.sample.eval_rows=60",
    "model.hidden=8",
    "model.embedding=8",
    "trainer.max_epochs=2",
    "precision=fp32",
    "monitor.progress=false",
    "monitor.verdict=false",
    "monitor.rival=false",
    "trainer.accelerator=cpu",
    "logger=none",
]
FOCAL = ["task._target_=mypkg.Focal", "allow_targets=[mypkg]"]
OWN_OPTIMIZER = ["optim._target_=mypkg.SignDescent", "optim.lr=1e-3"]
QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": "none",
    "precision": "fp32",
    "monitor": MonitorConfig(verdict=False, progress=False, rival=False),
    "trainer": {"accelerator": "cpu"},
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `mypkg.py`, which Python finds."""
    (tmp_path / "mypkg.py").write_text(CODE + OTHERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mypkg", raising=False)
    return tmp_path


def run_of(folder: Path, name: str = "runs") -> Path:
    (run,) = (folder / name / "default").iterdir()
    return run


def losses(run: Path) -> list[str]:
    """The losses of training and validation, as `metrics.csv` has them."""
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return [row["train/loss"] or row["val/loss"] for row in csv.DictReader(file)]


def test_a_focal_loss_without_focus_gives_the_losses_of_the_plain_classifier(package, monkeypatch):
    assert run_train([*QUICK, f"output={package}/plain"], monkeypatch) == 0
    words = [*FOCAL, "task.gamma=0", *QUICK, f"output={package}/none"]
    assert run_train(words, monkeypatch) == 0
    assert losses(run_of(package, "none")) == losses(run_of(package, "plain"))
    assert run_train([*FOCAL, *QUICK, f"output={package}/focal"], monkeypatch) == 0
    assert losses(run_of(package, "focal")) != losses(run_of(package, "plain"))


def test_its_metric_is_in_table_curves_and_summary_and_chooses_the_best(
    package, monkeypatch, capsys
):
    words = [*shlex.split(COMMANDS[0]), *QUICK, f"output={package}/runs"]
    assert run_train(words, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "checkpoint.mode: max (by the name of kappa;" in printed
    assert "by val/kappa" in printed and "test/kappa" in printed
    summary = read_summary(run_of(package))
    assert summary["metric"] == "kappa"
    assert {"val/kappa", "test/kappa"} <= set(summary["metrics"])
    assert "val/kappa" in (run_of(package) / "metrics.csv").read_text().splitlines()[0]


def test_the_run_is_opened_again_without_its_class(package, monkeypatch, capsys):
    assert run_train([*FOCAL, *QUICK, f"output={package}/runs"], monkeypatch) == 0
    run = run_of(package)
    monkeypatch.delitem(sys.modules, "mypkg")
    (package / "mypkg.py").unlink()
    assert load_predictor(run).predict(["a headline"])[0].label
    rows = package / "rows.csv"
    rows.write_text("text,label\n" + "a word,sport\nanother,food\n" * 12, encoding="utf-8")
    assert verb("evaluate", str(run), str(rows)) == 0
    assert verb("predict", str(run), str(rows), "--out", str(package / "answers.csv")) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_run_with_own_loss_and_optimizer_continues_to_the_same_weights(
    package, monkeypatch, capsys
):
    words = [*FOCAL, *OWN_OPTIMIZER, "optim.schedule=constant", "optim.warmup=3", *QUICK]
    longer = "trainer.max_epochs=3"
    assert run_train([*words, longer, f"output={package}/whole"], monkeypatch) == 0
    assert "fast loop: off, SignDescent may want the loss" in capsys.readouterr().out
    assert run_train([*words, f"output={package}/cut"], monkeypatch) == 0
    run = run_of(package, "cut")
    again = [*words, longer, f"output={package}/cut", f"resume={run}"]
    assert run_train([*again, "task.gamma=1"], monkeypatch) == 2
    assert "task.gamma was 2.0 and is 1" in capsys.readouterr().err
    assert run_train(again, monkeypatch) == 0
    assert "resume: continuing from step" in capsys.readouterr().out
    there = read_weights(run_of(package, "whole") / "checkpoints" / "last")
    here = read_weights(run / "checkpoints" / "last")
    assert all(torch.equal(here[name], weight) for name, weight in there.items())


def test_a_command_trains_it_from_its_folder(package, monkeypatch):
    monkeypatch.chdir(package)
    words = [*shlex.split(COMMANDS[0]), *QUICK, "output=runs"]
    done = begin_warm(["train", *words], PYTHONPATH=str(package))
    printed, _ = done.communicate(timeout=120)
    assert done.returncode == 0, printed
    assert "test/kappa" in printed


@pytest.mark.soak(seconds=6)
def test_two_devices_add_up_its_metric(package, monkeypatch):
    assert run_train([*FOCAL, *QUICK, f"output={package}/one"], monkeypatch) == 0
    words = [*FOCAL, *QUICK, "trainer.devices=2", f"output={package}/two"]
    assert run_train(words, monkeypatch) == 0
    one, two = (
        read_summary(run_of(package, name))["metrics"]["test/kappa"] for name in ("one", "two")
    )
    assert two == pytest.approx(one, abs=0.05)


@pytest.mark.parametrize("command", at_once(COMMANDS[1], of=COMMANDS[1:], seconds=2))
def test_each_optimizer_of_the_page_trains(command, package, monkeypatch):
    words = [*shlex.split(command), *QUICK, f"output={package}/runs"]
    assert run_train(words, monkeypatch) == 0
    assert read_summary(run_of(package))["status"] == "finished"


def test_fit_takes_the_class_or_a_task_with_its_settings(package):
    mypkg = importlib.import_module("mypkg")
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40))
    model = BiLSTMConfig(embedding=8, hidden=8)
    by_class = fit(data, model, task=mypkg.Focal, folder=package / "a", **QUIET)
    config = mypkg.FocalConfig(gamma=2.0)
    by_task = fit(data, mypkg.Focal(model, config), folder=package / "b", **QUIET)
    assert by_class.metrics == by_task.metrics and "test/kappa" in by_task.metrics
    other = fit(
        data, mypkg.Focal(model, mypkg.FocalConfig(gamma=0.0)), folder=package / "c", **QUIET
    )
    assert other.metrics["val/loss"] != by_task.metrics["val/loss"]


class Watched(Classifier):
    """Notes what the newest task of this class is given."""

    given: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, model: Any, config: Any = None, optim: Any = None) -> None:
        Watched.given.clear()
        super().__init__(model, config, optim)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("optim", "total_steps"):
            Watched.given.append((name, value))
        super().__setattr__(name, value)


def test_a_task_is_given_its_learning_rate_when_it_is_made_and_never_again(tmp_path):
    sample = HeadlinesConfig(rows=96, eval_rows=8, classes=2)
    data = TextDataConfig(sample=sample, batch_size=8, effective_batch=32)
    optim = OptimConfig(lr=0.01, scale_lr="sqrt", base_batch=8)
    model = BiLSTMConfig(embedding=4, hidden=4)
    result = fit(data, model, task=Watched, optim=optim, folder=tmp_path, **QUIET)
    (_, given), length = Watched.given
    assert (given.lr, given.scale_lr) == (pytest.approx(0.02), "none")
    assert length == ("total_steps", None)  # Lightning counts the steps
    assert result.summary["training"]["steps"] == 3


def test_a_task_that_builds_its_network_has_no_model_folder(package, capsys):
    mypkg = importlib.import_module("mypkg")
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40))
    model = BiLSTMConfig(embedding=8, hidden=8)
    result = fit(data, model, task=mypkg.Headed, folder=package / "a", **QUIET)
    assert not (result.folder / "model").exists()
    assert "model/ is not written: Headed builds a network of its own" in capsys.readouterr().out


class MeanOfAnswers(torchmetrics.MeanMetric):
    """The share of right answers or the error, whichever the shapes allow."""

    def update(self, answers, targets) -> None:
        if answers.ndim > targets.ndim:
            super().update((answers.argmax(-1) == targets).float())
        else:
            super().update((answers.float() - targets.float()).abs())


ENCODER = TransformerConfig(hidden=16, layers=1, heads=2)
HEADLINES = HeadlinesConfig(rows=80, eval_rows=40)
LABELLED = {
    "run": np.repeat(np.arange(30), 12),
    "a": np.sin(np.arange(360.0)),
    "kind": np.repeat(np.array(["a", "b"] * 15), 12),
}
PARTS: dict[type, tuple[Any, Any]] = {
    Tagger: (
        TextDataConfig(problem="tags", sample=TaggedTweetsConfig(rows=80, eval_rows=40)),
        ENCODER,
    ),
    MaskedLanguageModel: (TextDataConfig(problem="none", sample=HEADLINES), ENCODER),
    GramDecoder: (
        BitsDataConfig(
            sample=PeopleConfig(rows=300),
            encoding=EncodingConfig(size=64, hashes=2),
            vocabulary=100,
        ),
        BitMLPConfig(widths=[16]),
    ),
    SequenceRegressor: (
        SequenceDataConfig(sample=CellsConfig(cells=4, cycles=3, samples=60), batch_size=4),
        RNNConfig(hidden=8),
    ),
    SequenceLabeller: (
        SequenceDataConfig(
            source=LABELLED,
            features=["a"],
            target="kind",
            group=["run"],
            problem="label",
            batch_size=8,
        ),
        RNNConfig(hidden=8, bidirectional=True),
    ),
}
"""For each task but `Classifier` small data and a small model."""


def double_loss_of(kind: type) -> type:
    """A subclass of a task whose loss is twice that of its base, with a metric of its own."""

    def sum_losses(self, outputs, targets):
        return 2 * kind.sum_losses(self, outputs, targets)

    def configure_metrics(self):
        return {"mean_of_answers": MeanOfAnswers()}

    methods = {"sum_losses": sum_losses, "configure_metrics": configure_metrics}
    return type(kind)(f"Double{kind.__name__}", (kind,), methods)


@pytest.mark.parametrize(
    "kind",
    at_once(Tagger, SequenceLabeller, of=PARTS, seconds=3),
    ids=lambda kind: kind.__name__,
)
def test_each_task_takes_a_loss_and_a_metric(kind, tmp_path):
    data, model = PARTS[kind]
    optim = OptimConfig(lr=1e-3, clip=0)
    settings = {**QUIET, "optim": optim, "trainer": {"accelerator": "cpu", "max_steps": 1}}
    plain = fit(data, model, task=kind, folder=tmp_path / "plain", **settings)
    double = fit(data, model, task=double_loss_of(kind), folder=tmp_path / "double", **settings)
    first, second = (float(losses(result.folder)[0]) for result in (plain, double))
    assert second == pytest.approx(2 * first, rel=1e-4)
    assert double.metrics["val/mean_of_answers"] > 0
    if kind is Tagger:
        words = double.metrics["val/word_accuracy"]
        assert double.metrics["val/mean_of_answers"] == pytest.approx(words, abs=0.02)


MISTAKES = {
    "a setting that its Config lacks": (
        [*FOCAL, "task.gama=1"],
        "task.gama: no such key",
    ),
    "a value of another type": ([*FOCAL, "task.gamma=abc"], "task.gamma: 'abc' does not fit"),
    "a value out of range": (
        [*FOCAL, "task.label_smoothing=2"],
        "task.label_smoothing: 2",
    ),
    "a package not trusted": (FOCAL[:1], "_target_ mypkg.Focal is from a package not trusted"),
    "no task": (
        ["task._target_=mypkg.Hinge", FOCAL[1]],
        "task: Hinge is no LightningModule",
    ),
    "no class of a run": (
        ["task._target_=mypkg.FocalConfig", FOCAL[1]],
        "FocalConfig is no class of a kind a run is made of",
    ),
    "a task for other data": (
        ["task._target_=flatout.tasks.Tagger"],
        "task: Tagger is a Tagger, and these data need a Classifier. Subclass Classifier",
    ),
    "a class of the same settings for other data": (
        ["task._target_=flatout.tasks.SequenceLabeller"],
        "task: SequenceLabeller is a SequenceLabeller, and these data need a Classifier",
    ),
    "no metric of the task": (
        [*FOCAL, "checkpoint.metric=kapa"],
        "no metric 'kapa'",
    ),
    "no optimizer": (
        ["optim._target_=torch.nn.Linear"],
        "optim._target_: Linear is no optimizer. Name a subclass of torch.optim.Optimizer",
    ),
    "an optimizer of a package not trusted": (
        OWN_OPTIMIZER[:1],
        "_target_ mypkg.SignDescent is from a package not trusted",
    ),
    "an argument that it lacks": (
        [*OWN_OPTIMIZER, FOCAL[1], "+optim.arguments.betta=1"],
        "unexpected keyword argument 'betta'",
    ),
    "an optimizer that torch lacks": (
        ["optim._target_=torch.optim.Lion"],
        "torch.optim.Lion: there is no such class",
    ),
    "an optimizer beside a module of one's own": (
        ["task._target_=mypkg.Whole", "optim._target_=torch.optim.RAdam", FOCAL[1]],
        "optim._target_: a module of your own makes its optimizer itself. Leave it out",
    ),
    "own data": (
        [*FOCAL, "data._target_=mypkg.Rows"],
        "task: Focal reads the batches of flatout's DataModules, and Rows is your own",
    ),
}


@pytest.mark.parametrize("name", at_once(*list(MISTAKES)[::3], of=MISTAKES, seconds=1))
def test_a_mistake_is_one_sentence_and_exit_code_2(name, package, monkeypatch, capsys):
    words, message = MISTAKES[name]
    quick = [word for word in QUICK if "own data" not in name or not word.startswith("data.")]
    assert run_train([*words, *quick, f"output={package}/runs"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1 and "Traceback" not in said


def test_a_file_names_no_class_that_the_command_line_does_not_trust(package, monkeypatch, capsys):
    folder = package / "conf" / "experiment"
    folder.mkdir(parents=True)
    head = "# @package _global_\n"
    texts = {
        "optimizer": "optim: {optimizer: mypkg.SignDescent}\n",
        "trusted": "allow_targets: [mypkg]\noptim: {optimizer: mypkg.SignDescent}\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(head + text, encoding="utf-8")
        words = [f"--config-dir={package}/conf", f"+experiment={name}", *QUICK]
        assert run_train([*words, f"output={package}/runs"], monkeypatch) == 2
        assert "mypkg" not in sys.modules
    said = capsys.readouterr().err
    assert "is from a package not trusted" in said and "allow_targets: stands in a file" in said
    words = [f"--config-dir={package}/conf", "+experiment=optimizer", FOCAL[1], *QUICK]
    assert run_train([*words, f"output={package}/runs"], monkeypatch) == 0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"kappa": "accuracy"}, "'kappa' is no metric of torchmetrics"),
        ({"accuracy": MeanOfAnswers()}, "'accuracy' cannot be the name of a metric, or is one"),
        ({"a/b": MeanOfAnswers()}, "'a/b' cannot be the name of a metric"),
        ({"keys": MeanOfAnswers()}, "'keys' cannot be the name of a metric"),
        (
            {"kappa": torchmetrics.classification.MulticlassCohenKappa(2)},
            "'kappa' does not take these answers: ",
        ),
        (
            {"each": torchmetrics.classification.MulticlassRecall(12, average="none")},
            "'each' computes 12 numbers. Average them",
        ),
    ],
)
def test_a_metric_that_cannot_be_served_is_one_sentence(metrics, message, tmp_path):
    kind = type("Measured", (Classifier,), {"configure_metrics": lambda self: metrics})
    data = TextDataConfig(sample=HeadlinesConfig(rows=100, eval_rows=40))
    with pytest.raises(UserError) as raised:
        fit(data, BiLSTMConfig(embedding=8, hidden=8), task=kind, folder=tmp_path / "a", **QUIET)
    assert f"Measured.configure_metrics: {message}" in str(raised.value)


def test_python_refuses_what_is_no_task_or_takes_arguments_of_its_own(package):
    mypkg = importlib.import_module("mypkg")
    with pytest.raises(UserError, match=r"task: Linear is no task that takes \(model, config,"):
        RunConfig(task=torch.nn.Linear)
    with pytest.raises(UserError, match="task: Labelled is no task that takes"):
        fit("news.csv", mypkg.Labelled(BiLSTMConfig(), scale=2.0))
    with pytest.raises(UserError, match="task: Focal is a Classifier, and these data need a Gram"):
        RunConfig(task=mypkg.Focal, data=BitsDataConfig())


def test_a_job_of_a_sweep_takes_its_metric(package):
    mypkg = importlib.import_module("mypkg")
    config = RunConfig(task=mypkg.Focal, checkpoint={"metric": "kappa"})
    assert (RunJob(config).metric, RunJob(config).mode) == ("kappa", "max")


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*number of training batches.*",
    "ignore:.*TensorBoard support.*",
)
def test_a_checkpoint_is_opened_by_its_class(package):
    mypkg = importlib.import_module("mypkg")
    data = TextData(sample=HeadlinesConfig(rows=100, eval_rows=40))
    optim = OptimConfig(optimizer=torch.optim.RAdam)
    config = mypkg.FocalConfig(gamma=3.0)
    task = mypkg.Focal(BiLSTMConfig(embedding=8, hidden=8), config, optim)
    trainer = quiet_trainer(package, max_epochs=1)
    trainer.fit(task, datamodule=data)
    assert "val/kappa" in trainer.callback_metrics
    trainer.save_checkpoint(package / "one.ckpt")
    opened = mypkg.Focal.load_from_checkpoint(package / "one.ckpt")
    assert opened.config == config and opened.optim.optimizer == "RAdam"
    trainer = quiet_trainer(package, max_epochs=1)
    trainer.test(opened, datamodule=data, verbose=False)
    with pytest.raises(UserError, match=r"optim\._target_: RAdam is a name that a checkpoint"):
        quiet_trainer(package, max_epochs=1).fit(opened, datamodule=data)

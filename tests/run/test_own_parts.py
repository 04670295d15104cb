"""`python -m train` with a LightningModule and a DataModule of one's own: the package and commands
of the docs page.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout import CheckpointConfig, RunConfig, UserError, fit
from flatout.checkpoints.folder import read_weights
from flatout.engine.optimizer import OptimConfig
from flatout.perf.verdict import experiments, own_tries
from flatout.report.page import read_curves
from flatout.report.summary import read_summary
from flatout.run.job import RunJob
from tests.composed import only_folder, run_train
from tests.params import at_once
from tests.refusals import refused
from tests.run_files import read_log

PAGE = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^PYTHONPATH=\. (python -m train .+)$", PAGE, re.MULTILINE)
OTHERS = """

class NoOptimizer(MyModule):
    configure_optimizers = L.LightningModule.configure_optimizers


class NoLoader(L.LightningDataModule):
    pass


class Manual(MyModule):
    def __init__(self, hidden: int = 8, lr: float = 0.05) -> None:
        super().__init__(hidden, lr)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class NoLoss(MyModule):
    def training_step(self, batch, batch_idx):
        return {"los": super().training_step(batch, batch_idx)}


class AFloat(MyModule):
    def training_step(self, batch, batch_idx):
        return 0.5


class Several(MyModule):
    def configure_optimizers(self):
        return [super(Several, self).configure_optimizers() for _ in range(2)]


class Standing(MyModule):
    def configure_optimizers(self):
        return None


class Unsendable(MyModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = lambda numbers: 2 * numbers


class OfTexts(MyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.EmbeddingBag(30_000, 20)

    def training_step(self, batch, batch_idx):
        starts = batch.offsets[:-1].long()
        logits = self.net(batch.tokens.long(), starts)
        return torch.nn.functional.cross_entropy(logits, batch.targets.long())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=batch.num_real)


class Clipped(OfTexts):
    longest = 0.0

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        self.longest = max(self.longest, float(torch.stack(norms).norm()))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_longest", self.longest, batch_size=batch.num_real)
"""
QUICK = [
    "trainer.max_epochs=2",
    "precision=fp32",
    "monitor.progress=false",
    "trainer.accelerator=cpu",
    "logger=none",
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `mypkg.py`, which Python finds."""
    (tmp_path / "mypkg.py").write_text(CODE + OTHERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mypkg", raising=False)
    return tmp_path


def own(module: str = "MyModule", data: str = "MyData") -> list[str]:
    return [f"task._target_=mypkg.{module}", f"data._target_=mypkg.{data}", "allow_targets=[mypkg]"]


def summary_of(folder: Path) -> dict[str, Any]:
    run = only_folder(folder / "runs" / "default")
    return read_summary(run)


def weights(folder: Path) -> torch.Tensor:
    run = only_folder(folder / "runs" / "default")
    return torch.cat(
        [weight.flatten() for weight in read_weights(run / "checkpoints" / "last").values()]
    )


@pytest.mark.soak(seconds=9)
def test_the_command_of_the_page_trains_and_ends_with_summary_verdict_and_report(package):
    words = [*shlex.split(COMMANDS[0])[1:], f"output={package}/runs"]
    done = subprocess.run(
        [sys.executable, *words], cwd=package, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "own parts: MyModule with MyData" in done.stdout
    assert "fast loop: off" not in done.stdout
    said = "checkpoint.mode: max (by the name of val_accuracy; checkpoint.mode=min or max sets it)"
    assert said in done.stdout
    assert said in PAGE
    line, *_ = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert line.count("val loss") == 1
    assert "val accuracy" in line
    summary = summary_of(package)
    assert summary["status"] == "finished"
    assert summary["training"]["steps"] == 80
    assert summary["metric"] == "accuracy"
    assert summary["metrics"]["val/accuracy"] > 0.7
    assert summary["model"] == {"name": "MyModule", "parameters": 114, "trainable": 114}
    assert summary["training"]["rows_per_step"] == 10
    assert summary["verdict"]["sentence"]
    run = only_folder(package / "runs" / "default")
    names = {"report.html", "metrics.csv", "config.yaml", "log.txt"}
    assert names <= {path.name for path in run.iterdir()}
    assert (run / "checkpoints" / "best").is_dir()
    assert "val/accuracy" in (run / "metrics.csv").read_text().splitlines()[0]


def test_a_run_continues_to_the_weights_of_an_uninterrupted_one(package, monkeypatch, capsys):
    words = [*own(), *QUICK, "trainer.max_epochs=3"]
    assert run_train([*words, f"output={package}/whole/runs"], monkeypatch) == 0
    first = [*own(), *QUICK, f"output={package}/cut/runs"]
    assert run_train(first, monkeypatch) == 0
    folder = only_folder(package / "cut" / "runs" / "default")
    assert run_train([*words, f"output={package}/cut/runs", f"resume={folder}"], monkeypatch) == 0
    assert "resume: continuing from step 80" in capsys.readouterr().out
    assert torch.equal(weights(package / "cut"), weights(package / "whole"))


@pytest.mark.soak(seconds=3)
def test_a_run_whose_module_gets_other_arguments_is_another_run(package, monkeypatch, capsys):
    words = [*own(), *QUICK, f"output={package}/runs"]
    assert run_train([*words, "task.lr=0.05"], monkeypatch) == 0
    folder = only_folder(package / "runs" / "default")
    before = (folder / "overrides.txt").read_bytes()
    longer = ["trainer.max_epochs=3", f"resume={folder}"]
    assert run_train([*words, *longer, "task.lr=0.01"], monkeypatch) == 2
    assert (
        "this is not the run that was begun: task.lr as typed was 0.05 and is 0.01"
        in capsys.readouterr().err
    )
    assert (folder / "overrides.txt").read_bytes() == before
    # not "nothing left to train"
    assert run_train([*words, f"resume={folder}", "task.lr=0.01"], monkeypatch) == 2
    assert run_train([*words, f"resume={folder}", "task.lr=0.05"], monkeypatch) == 0
    assert run_train([*words, *longer, "task.lr=0.05"], monkeypatch) == 0


def test_a_module_with_manual_optimisation_is_trained_by_lightning_s_own_loop(
    package, monkeypatch, capsys
):
    words = [*own("Manual"), *QUICK, f"output={package}/runs"]
    assert run_train(words, monkeypatch) == 0
    assert "fast loop: off, Manual uses manual optimisation" in capsys.readouterr().out
    assert summary_of(package)["training"]["steps"] == 80


def test_accumulation_and_clipping_are_the_trainer_s(package, monkeypatch):
    words = [
        "+trainer.accumulate_grad_batches=4",
        "+trainer.gradient_clip_val=0.5",
        f"output={package}/runs",
    ]
    assert run_train([*own(), *QUICK, *words], monkeypatch) == 0
    training = summary_of(package)["training"]
    assert (training["steps"], training["rows_per_step"]) == (20, 40)


@pytest.mark.soak(seconds=2)
def test_clipping_and_accumulation_may_be_set_as_for_any_other_run(package, monkeypatch):
    words = [
        *shlex.split(COMMANDS[1])[3:],
        *QUICK,
        "data.sample.rows=320",
        "data.sample.eval_rows=60",
    ]
    words = [word.replace("OfTexts", "Clipped") for word in words]
    more = ["data.batch_size=32", "data.accumulate=2", "optim.clip=0.001"]
    assert run_train([*words, *more, f"output={package}/runs"], monkeypatch) == 0
    assert (
        summary_of(package)["training"]["steps"],
        summary_of(package)["training"]["rows_per_step"],
    ) == (10, 64)
    assert summary_of(package)["metrics"]["val/longest"] == pytest.approx(0.001, rel=1e-3)


def test_a_job_of_one_s_own_module_knows_its_metric_and_its_mode(package):
    mypkg = importlib.import_module("mypkg")
    parts = {"task": mypkg.MyModule(), "data": mypkg.MyData()}
    job = RunJob(RunConfig(**parts, checkpoint=CheckpointConfig(metric="val_accuracy")))
    assert (job.metric, job.mode, job.metrics) == ("accuracy", "max", ["accuracy"])
    lower = CheckpointConfig(metric="val_accuracy", mode="min")
    assert RunJob(RunConfig(**parts, checkpoint=lower)).mode == "min"
    assert (RunJob(RunConfig(**parts)).metric, RunJob(RunConfig(**parts)).mode) == ("loss", "min")
    clipped = RunConfig(**parts | {"task": mypkg.Manual()}, optim=OptimConfig(clip=1.0))
    with pytest.raises(UserError, match=r"optim\.clip: Manual uses manual optimisation"):
        RunJob(clipped)
    with refused("task", "Unsendable", "other processes"):
        RunJob(RunConfig(**parts | {"task": mypkg.Unsendable()}))


def test_a_module_of_one_s_own_trains_on_data_of_flatout(package, monkeypatch):
    words = [
        *shlex.split(COMMANDS[1])[3:],
        *QUICK,
        "data.sample.rows=300",
        "data.sample.eval_rows=60",
    ]
    assert run_train([*words, f"output={package}/runs"], monkeypatch) == 0
    assert summary_of(package)["metrics"]["val/loss"] > 0


@pytest.mark.parametrize(
    "word",
    [
        "EMAWeightAveraging",
        *at_once(of=["StochasticWeightAveraging +callbacks.mean.swa_lrs=0.05"], seconds=1),
    ],
)
def test_weights_are_averaged_by_lightning_s_own_callbacks(word, package, monkeypatch):
    words = f"+callbacks.mean._target_=lightning.pytorch.callbacks.{word}".split()
    assert run_train([*own(), *QUICK, *words, f"output={package}/runs"], monkeypatch) == 0
    assert summary_of(package)["status"] == "finished"


@pytest.mark.soak(seconds=5)
def test_other_ways_are_tried_for_a_module_of_one_s_own(package, monkeypatch):
    monkeypatch.setattr(experiments, "SHARE", 1000.0)
    monkeypatch.setattr(own_tries, "starved", lambda evidence: None)
    for name, value in {
        "ROWS_AROUND": 16,
        "_CALM_S": 0.05,
        "MOST_ROUNDS": 5,
        "_FED_S": 0.02,
    }.items():
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(own_tries, "_COMPILES", 2.0)
    assert (
        run_train(
            [*own(), *QUICK, f"output={package}/plain/runs", "monitor.verdict=false"], monkeypatch
        )
        == 0
    )
    assert summary_of(package / "plain")["evidence"]["tried"] == []
    assert run_train([*own(), *QUICK, f"output={package}/runs"], monkeypatch) == 0
    evidence = summary_of(package)["evidence"]
    assert evidence["not_tried"] == ""
    assert evidence["tried"]
    assert {each["override"].partition("=")[0] for each in evidence["tried"]} <= OVERRIDES
    assert torch.equal(weights(package), weights(package / "plain"))


OVERRIDES = {"DataLoader(batch_size", "DataLoader(num_workers", "threads", "precision"}


@pytest.mark.soak(seconds=7)
def test_two_devices_train_as_one_does(package, monkeypatch, capfd):
    """Each rank reads half of the rows: DistributedSampler deals them out, so the order differs and
    the rows do not.
    """
    words = [
        *own(),
        *QUICK,
        "checkpoint.metric=val_accuracy",
        "task.lr=0.5",
        f"output={package}/runs",
    ]
    assert run_train([*words, "trainer.devices=2"], monkeypatch) == 0
    run = only_folder(package / "runs" / "default")
    assert "need self.log(…, sync_dist=True)" in read_log(run)
    summary = summary_of(package)
    assert summary["training"]["steps"] == 40
    assert summary["training"]["rows_per_step"] == 20
    assert summary["hardware"]["count"] == 2
    assert summary["metrics"]["val/accuracy"] > 0.9
    assert run_train([*words, "trainer.devices=2", "resume=auto"], monkeypatch) == 0
    assert "has finished; there is nothing left to train" in capfd.readouterr().out
    again = [*words, "trainer.max_epochs=3", "resume=auto"]
    assert run_train(again, monkeypatch) == 2
    assert "devices was 2 and is 1" in capfd.readouterr().err
    assert run_train([*again, "trainer.devices=2"], monkeypatch) == 0
    assert "resume: continuing from step 40" in read_log(run)


def test_a_finished_run_of_ones_own_module_is_not_trained_again(package, monkeypatch, capsys):
    words = [*own(), *QUICK, f"output={package}/runs"]
    assert run_train(words, monkeypatch) == 0
    capsys.readouterr()
    assert run_train([*words, "resume=auto"], monkeypatch) == 0
    said = capsys.readouterr()
    assert "has finished; there is nothing left to train" in said.out
    assert not said.err
    assert summary_of(package)["training"]["steps"] == 80


MISTAKES = {
    "no optimizer": (
        own("NoOptimizer"),
        "task: NoOptimizer has no configure_optimizers. Define it: it returns the",
    ),
    "no loader": (
        own(data="NoLoader"),
        "data: NoLoader has no train_dataloader. Define it: it returns a DataLoader",
    ),
    "a package not trusted": (own()[:2], "_target_ mypkg.MyData is from a package not trusted"),
    "own data for a task of ours": (
        own()[1:],
        "task: Classification reads the batches of flatout's DataModules, and",
    ),
    "a module in the place of data": (
        own(data="MyModule"),
        "data: MyModule is no LightningDataModule",
    ),
    "bits for a classifier": (
        ["data=people", "model=bitmlp"],
        "task: classification does not fit bit strings",
    ),
    "a wrong argument": ([*own(), "task.hiden=3"], "unexpected keyword argument 'hiden'"),
    "fsdp": (
        [*own(), "trainer.strategy=fsdp", "trainer.devices=2"],
        "fsdp: does not serve modules of your own",
    ),
    "parts that cannot be sent": (
        [*own("Unsendable"), "trainer.devices=2"],
        "task: Unsendable cannot be sent to other processes",
    ),
    "a rate for a module that makes its optimizer": (
        [*own(), "optim.lr=1e-3"],
        "optim.lr: a module of your own makes its optimizer itself. Leave it out, and set it in",
    ),
    "a network for a module that builds its own": (
        [*own(), "model.hidden=8"],
        "model: a module of your own builds its network itself. Leave it out, and pass",
    ),
    "an optimizer for such a module": (
        [*own(), "optim.name=sgd"],
        "optim.name: a module of your own makes its optimizer itself.",
    ),
    "clipping set twice": (
        [*own(), "optim.clip=1", "+trainer.gradient_clip_val=1"],
        "optim.clip: is set, and trainer.gradient_clip_val too. Leave one of them out.",
    ),
    "clipping in manual optimisation": (
        [*own("Manual"), "optim.clip=1"],
        (
            "optim.clip: Manual uses manual optimisation: it clips and accumulates by itself. Leave"
            " it out."
        ),
    ),
    "a metric that is not logged": (
        [*own(), "checkpoint.metric=val_f1"],
        "checkpoint.metric: 'val_f1' is not logged (val_loss, val_accuracy)",
    ),
}


ANSWERS = {
    "no loss in the answer": (
        own("NoLoss"),
        "task: In automatic_optimization, when `training_step` returns a dict, the",
    ),
    "a float as the loss": (
        own("AFloat"),
        "task: In automatic optimization, `training_step` must return a Tensor, a dict",
    ),
    "several optimizers": (
        own("Several"),
        "task: Training with multiple optimizers is only supported with manual",
    ),
}
"""What a module answers is known when it trains."""
MISTAKES |= ANSWERS


def test_fit_takes_a_module_in_the_place_of_the_model(package):
    mypkg = importlib.import_module("mypkg")
    parts: Any = {"output": package / "runs", "logger": "none", "epochs": 1, "precision": "fp32"}
    fit(mypkg.MyData(), mypkg.MyModule(), **parts)
    assert summary_of(package)["model"]["name"] == "MyModule"
    with pytest.raises(UserError, match=r"optim\.lr: a module of your own makes its optimizer"):
        fit(mypkg.MyData(), mypkg.MyModule(), optim={"lr": 1e-3}, **parts)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.*")
def test_a_module_without_an_optimizer_runs_to_its_end(package, monkeypatch, capsys):
    assert run_train([*own("Standing"), *QUICK, f"output={package}/runs"], monkeypatch) == 0
    assert "fast loop: off, the module has no optimizer;" in capsys.readouterr().out
    assert summary_of(package)["status"] == "finished"


@pytest.mark.parametrize("name", at_once(*list(MISTAKES)[::4], of=MISTAKES, seconds=1))
def test_a_mistake_is_one_sentence_and_exit_code_2(package, monkeypatch, capsys, name):
    words, message = MISTAKES[name]
    assert run_train([*words, *QUICK, f"output={package}/runs"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said
    is_trained = name in ("a metric that is not logged", *ANSWERS)
    assert is_trained or not list((package / "runs").glob("*/*"))


@pytest.mark.parametrize(
    "name", ["val/accuracy", *at_once(of=["valid_accuracy", "accuracy"], seconds=1)]
)
def test_a_metric_may_be_logged_under_any_usual_name(name, package, monkeypatch):
    text = (package / "mypkg.py").read_text().replace("val_accuracy", name)
    (package / "mypkg.py").write_text(text)
    words = [
        *own(),
        *QUICK,
        f"checkpoint.metric={name}",
        "trainer.max_epochs=1",
        f"output={package}/runs",
    ]
    assert run_train(words, monkeypatch) == 0
    summary = summary_of(package)
    assert summary["metric"] == "accuracy"
    assert summary["metrics"]["val/accuracy"] > 0
    run = only_folder(package / "runs" / "default")
    assert any(row.get("val/accuracy") for row in read_curves(run))

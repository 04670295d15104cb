"""Runs with secrets: no file of theirs holds one, a resume takes the same one and
refuses another.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flatout.checkpoints.kept import CHECKPOINTS
from tests.composed import only_folder, run_train
from tests.params import at_once
from tests.verbs import verb

SECRET = "sw0rdfish-of-the-clinic"
SMALL = [
    *("data=people", "task=grams", "model=bitmlp", "data.sample.rows=120", "data.encoding.size=64"),
    *("model.widths=[8]", "task.exposure=false", "trainer.max_epochs=1", "precision=fp32"),
    *("monitor.progress=false", "monitor.verdict=false", "output=runs", "data.cache=cache"),
]


def files_with(secret: str, place: Path) -> list[Path]:
    """All files below a folder whose name or bytes hold a secret."""
    files = [path for path in place.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret in str(path) or secret.encode() in path.read_bytes()]


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    "word",
    [SECRET, *at_once(of=["${oc.env:THE_SECRET}"], seconds=5)],
    ids=["typed", "of the environment"],
)
def test_no_file_of_a_run_holds_its_secret_and_a_resume_refuses_another(
    in_tmp, monkeypatch, capfd, word
):
    monkeypatch.setenv("THE_SECRET", SECRET)
    words = [
        *SMALL,
        "logger=[tensorboard,csv]",
        "checkpoint.every_steps=1",
        f"data.encoding.secret={word}",
    ]
    assert run_train(words, monkeypatch) == 0
    assert run_train([*words, "resume=auto"], monkeypatch) == 0
    printed = capfd.readouterr()
    assert "there is nothing left to train" in printed.out
    assert SECRET not in printed.out + printed.err
    assert files_with(SECRET, in_tmp) == []
    run = only_folder(in_tmp / "runs" / "default")
    more = ["trainer.max_epochs=2", f"resume={run}"]
    assert run_train([*words, *more], monkeypatch) == 0
    assert "resume: continuing from step" in capfd.readouterr().out
    monkeypatch.setenv("THE_SECRET", "another")
    another = word.replace(SECRET, "another")
    words[-1] = f"data.encoding.secret={another}"
    assert run_train([*words, "trainer.max_epochs=3", f"resume={run}"], monkeypatch) == 2
    assert "data.encoding.secret was ***-" in capfd.readouterr().err
    shutil.rmtree(run / CHECKPOINTS)
    assert run_train([*words, "trainer.max_epochs=3", f"resume={run}"], monkeypatch) == 2
    assert "data.encoding.secret was ***-" in capfd.readouterr().err
    assert files_with(SECRET, in_tmp) == []


@pytest.mark.soak(seconds=15)
@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_no_file_of_a_logger_holds_a_secret(in_tmp, monkeypatch, logger):
    pytest.importorskip(logger, reason=f"the extra `{logger}` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*SMALL, f"logger={logger}", f"data.encoding.secret={SECRET}"]
    assert run_train(words, monkeypatch) == 0
    assert files_with(SECRET, in_tmp) == []


@pytest.mark.soak(seconds=25)
def test_no_file_of_trials_holds_a_secret_and_the_same_command_goes_on(in_tmp, monkeypatch, capfd):
    words = ["-m", *SMALL, "logger=none", f"data.encoding.secret={SECRET}", "seed=1"]
    words += ["hydra.sweep.dir=runs/many"]
    assert run_train(words, monkeypatch) == 0
    assert run_train([*words, "resume=auto"], monkeypatch) == 0
    printed = capfd.readouterr()
    assert "resume: continuing in" in printed.out
    assert SECRET not in printed.out + printed.err
    assert files_with(SECRET, in_tmp) == []


@pytest.mark.soak(seconds=15)
def test_a_sweep_keeps_no_secret_and_is_resumed_by_typing_it_again(in_tmp, capfd):
    words = [*SMALL, "logger=none", f"data.encoding.secret={SECRET}", "optim.lr=choice(0.1,0.01)"]
    assert verb("sweep", *words, "trials=1", "confirm=0", "hydra.sweep.dir=runs/searched") == 0
    assert files_with(SECRET, in_tmp) == []
    capfd.readouterr()
    resume = ("sweep", "resume", "runs/searched", "data.cache=cache")
    assert verb(*resume) == 2
    assert (
        "sweep resume: the folder holds no secrets, as of data.encoding.secret"
        in capfd.readouterr().err
    )
    assert verb(*resume, "data.encoding.secret=another") == 2
    capfd.readouterr()
    assert verb(*resume, f"data.encoding.secret={SECRET}") == 0
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    assert files_with(SECRET, in_tmp) == []

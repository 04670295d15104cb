"""torchrun and our own launch start the same run; what a launcher has wrong is refused in one
message.

`tests/soak/test_launchers.py` has srun, two machines, and ranks and launchers that are killed.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import train
from tests.refusals import require_printed
from tests.run_files import losses, read_log
from tests.started import SMALL, begin, free_port, slurm


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the small run on two ranks that torchrun started, and all that it printed."""
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train"]
    process = begin(
        [*torchrun, *SMALL, f"hydra.run.dir={folder}/run"], FLATOUT_CACHE=str(folder / "cache")
    )
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return folder / "run", said


@pytest.mark.soak(seconds=19)
def test_torchrun_starts_the_same_run(ours, of_torchrun):
    folder, said = of_torchrun
    assert losses(folder) == losses(ours[0])
    assert len(losses(folder)) > 5
    assert said.count("run folder:") == 1
    assert "threads a rank:" in said


def refusal(words: list[str], rank: int, port: int, monkeypatch, capfd) -> str:
    """What `python -m train` prints in this process, as one of two ranks of srun that ends with
    exit code 2.
    """
    for name, value in slurm(rank, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, *words])
    assert left.value.code == 2
    return capfd.readouterr().err.strip()


def test_a_port_in_use_is_said(tmp_path, monkeypatch, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        said = refusal([f"output={tmp_path}"], 0, port, monkeypatch, capfd)
    (line,) = said.splitlines()
    require_printed(line, "MASTER_PORT: ", f"127.0.0.1:{port} is in use", "Set MASTER_PORT")


def test_other_devices_than_torchrun_started_are_refused(tmp_path, monkeypatch, capfd):
    said = refusal([f"output={tmp_path}", "trainer.devices=1"], 0, free_port(), monkeypatch, capfd)
    require_printed(said, "trainer.devices: ", "2 ranks", "Leave trainer.devices out")


def test_many_trials_are_not_started_by_many_ranks(tmp_path, monkeypatch, capfd):
    words = ["-m", "model.hidden=32,64", f"hydra.sweep.dir={tmp_path}/many"]
    said = refusal(words, 0, free_port(), monkeypatch, capfd)
    require_printed(said, "-m: ", "several ranks", "all trials")


@pytest.mark.soak(seconds=15)
def test_the_experiment_for_many_devices_runs_on_two(tmp_path):
    words = [
        "+experiment=bert_a16",
        "model.hidden=32",
        "model.layers=2",
        "model.heads=4",
        "data.sample.rows=300",
    ]
    words += [
        "data.batch_size=16",
        "trainer.devices=2",
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
    ]
    train.main([*words, f"hydra.run.dir={tmp_path}/run"])
    said = read_log(tmp_path / "run")
    assert (
        "rows a step: 64 rows (each rank trains its share; 16 rows x 2 batches x 2 ranks)" in said
    )

"""Ray: the script of docs/many_devices.md, whose workers are ranks of one run; and parts of builds
and answers.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout import (
    CheckpointConfig,
    OptimConfig,
    fit,
)
from tests.composed import only_folder
from tests.run_files import losses, read_log
from tests.soak.ray_clusters import SETTINGS, of_session, running, script_of_the_page

pytestmark = pytest.mark.soak(seconds=60)
DRIVER = """
import pickle, sys
from pathlib import Path

import ray
from ray_train import train_with_ray

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    settings = pickle.loads(Path(sys.argv[1]).read_bytes())
    train_with_ray(settings, workers=2, use_gpu=False, storage=sys.argv[2])
"""


def by_two_workers(
    settings: dict[str, Any], folder: Path, ray_folder: str, *, killed: bool
) -> Path:
    """The folder of a run that Ray trained with the script of the page; `killed`: a worker of it
    was.
    """
    (folder / "ray_train.py").write_text(script_of_the_page(), encoding="utf-8")
    (folder / "driver.py").write_text(DRIVER, encoding="utf-8")
    (folder / "settings").write_bytes(pickle.dumps({**settings, "output": str(folder / "outputs")}))
    (folder / "home").mkdir()
    command = [sys.executable, "driver.py", "settings", str(folder / "storage")]
    return run_of(command, folder, ray_folder, killed=killed)


def run_of(command: list[str], folder: Path, ray_folder: str, *, killed: bool) -> Path:
    """The folder of the run that a command trained; `killed`: a worker of it was."""
    own = {
        "RAY_TMPDIR": ray_folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(folder / "home"),
    }
    with running(command, folder, **own) as process:
        while killed and not list((folder / "outputs").glob("*/*/checkpoints/last")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        if killed:
            worker = next(
                each
                for each in of_session(process.pid)
                if "RayTrainWorker" in " ".join(each.cmdline())
            )
            worker.kill()
        told, _ = process.communicate(timeout=240)
        _, alive = psutil.wait_procs(of_session(process.pid), timeout=30)
    assert process.returncode == 0, told
    assert not alive
    (found,) = (each for each in (folder / "outputs" / "default").iterdir() if each.is_dir())
    return found


def test_two_workers_of_ray_train_like_one_process_with_twice_the_batch(ray_folder, tmp_path):
    pytest.importorskip("ray")
    folder = by_two_workers(SETTINGS, tmp_path, ray_folder, killed=False)
    said = read_log(folder)
    assert (
        "rows a step: 32 rows (each rank trains its share; 16 rows x 1 batches x 2 ranks)" in said
    )
    alone = fit(
        **{**SETTINGS, "data": replace(SETTINGS["data"], batch_size=32)}, folder=tmp_path / "alone"
    )
    assert len(losses(folder)) == len(losses(alone.folder)) == 32
    assert losses(folder) == pytest.approx(losses(alone.folder), rel=1e-5)


def test_ray_starts_a_run_again_whose_worker_was_killed(ray_folder, tmp_path):
    pytest.importorskip("ray")
    settings = {
        **SETTINGS,
        "epochs": 40,
        "resume": "auto",
        "checkpoint": CheckpointConfig(patience=None),
    }
    settings["optim"] = OptimConfig(lr=1e-4)  # at 1e-3 rounding alone grows
    folder = by_two_workers(settings, tmp_path, ray_folder, killed=True)
    assert "resume: continuing from step" in read_log(folder)
    whole = {**settings, "resume": None, "data": replace(SETTINGS["data"], batch_size=32)}
    alone = fit(**whole, folder=tmp_path / "alone")
    assert len(losses(folder)) == len(losses(alone.folder)) == 640
    assert losses(folder) == pytest.approx(losses(alone.folder), rel=1e-4)


def test_the_words_on_ray_train_one_run_whose_killed_worker_is_begun_again(ray_folder, tmp_path):
    pytest.importorskip("ray")
    words = [
        "data.sample.rows=503",
        "data.sample.eval_rows=101",
        "data.sample.classes=4",
        "model=transformer",
    ]
    words += [
        "model.hidden=32",
        "model.layers=2",
        "model.heads=4",
        "model.dropout=0",
        "model.attention_dropout=0",
    ]
    words += [
        "precision=fp32",
        "trainer.max_epochs=20",
        "checkpoint.patience=null",
        "monitor.flush_every=1",
    ]
    # at 1e-3 rounding alone grows
    words += ["monitor.progress=false", "trainer.accelerator=cpu", "optim.lr=1e-4"]
    (tmp_path / "home").mkdir()
    train = [sys.executable, "-m", "train", *words]
    folder = run_of(
        [*train, "data.batch_size=16", "on=ray", "workers=2"], tmp_path, ray_folder, killed=True
    )
    assert "resume: continuing from step" in read_log(folder)
    assert not list(folder.parent.glob(".*")), "Ray's notes are gone"
    subprocess.run(
        [*train, "data.batch_size=32", "name=alone"], cwd=tmp_path, check=True, capture_output=True
    )
    alone = only_folder(tmp_path / "outputs" / "alone")
    assert len(losses(folder)) == len(losses(alone)) == 320
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-4)


def test_a_mistake_that_a_worker_of_ray_finds_is_one_sentence_and_leaves_no_folder(
    ray_folder, tmp_path
):
    pytest.importorskip("ray")
    (tmp_path / "rows.csv").write_text("text,label\na,b\n", encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    for words, said in {
        "workers=1 data.source=rows.csv data.text=txet": "data.text: no column 'txet' in rows.csv",
        "workers=4000": "workers: 4000 (1 to ",
        "workers=0": "workers: 0 (1 to ",
    }.items():
        command = [sys.executable, "-m", "train", "on=ray", *words.split()]
        with running(command, tmp_path, **own) as process:
            told, _ = process.communicate(timeout=200)
        assert process.returncode == 2, told
        assert said in told
        assert "Traceback" not in told
        assert not (tmp_path / "outputs").exists()

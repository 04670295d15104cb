"""Ray: the script of docs/many_devices.md, whose workers are ranks of one run; and parts of builds
and answers.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout import (
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    TextDataConfig,
    TransformerConfig,
    fit,
)
from flatout.data import encoded_units
from flatout.data.text_data import TextData
from tests.composed import only_folder
from tests.run_files import losses, read_csv, read_log

pytestmark = pytest.mark.soak(seconds=60)
PAGE = Path(__file__).parents[2] / "docs" / "many_devices.md"
SETTINGS: dict[str, Any] = {
    "data": TextDataConfig(
        sample=HeadlinesConfig(rows=503, eval_rows=101, classes=4), batch_size=16
    ),
    "model": TransformerConfig(hidden=32, layers=2, heads=4, dropout=0.0, attention_dropout=0.0),
    "precision": "fp32",
    "epochs": 2,
    "monitor": MonitorConfig(flush_every=1, progress=False),
    "trainer": {"accelerator": "cpu"},
}
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

CLUSTER = """
import os, sys, threading, time
from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from flatout.data import encoded_units
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import encode_part
from flatout.distributed.engine import on_ray


def do(folder, number, count):
    (folder / f"begun-{number}-{os.getpid()}").touch()
    time.sleep(3)
    encoded_units.UNIT_ROWS = 200
    config = TextDataConfig(source=str(folder / "rows"), cache=str(folder / "cache"))
    return encode_part(config, number, count)


def lose(cluster, node, folder):
    while len(list(folder.glob("begun-*"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    threading.Thread(target=lose, args=(cluster, node, folder)).start()
    print("parts:", on_ray(partial(do, folder), 4, folder / "cache"))
    cluster.shutdown()
"""

PREDICT = """
import os, sys, threading, time
from pathlib import Path

from ray.cluster_utils import Cluster

from flatout.__main__ import main


def lose(cluster, node, folder):
    while not list(folder.glob("*.csv")):
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)
    print("removed", flush=True)


if __name__ == "__main__":
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    threading.Thread(target=lose, args=(cluster, node, Path(sys.argv[-1]))).start()
    main(sys.argv[1:-1])
"""

MISTAKE = """
import sys, types
from functools import partial
from pathlib import Path

from flatout.__main__ import main
from flatout.cli import build
from flatout.distributed import engine


def mine(config, number, count):
    return 0, 0


if __name__ == "__main__":
    if sys.argv[1] == "version":
        engine.version = lambda name: "9.9"
    else:
        here = sys.modules["only_here"] = types.ModuleType("only_here")
        here.mine, mine.__module__ = mine, "only_here"
        import flatout.data.text_preparation

        flatout.data.text_preparation.encode_part = mine
    words = ["data.sample.rows=100", "data.sample.eval_rows=20", "data.cache=cache"]
    main(["build", *words, "--on", "ray", "--parts", "1"])
"""

SWEEP = """
import os, sys, threading, time
from pathlib import Path

from ray.cluster_utils import Cluster

from flatout.__main__ import main
from flatout.sweep.trials import _Running

begin = _Running._begin


def counted(running, *, is_again):
    print("begun", running.trial.number, flush=True)
    begin(running, is_again=is_again)


def lose(cluster, node, folder):
    while len(list(folder.glob("**/metrics.csv"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"], _Running._begin = cluster.address, counted
    threading.Thread(target=lose, args=(cluster, node, Path(sys.argv[-1]))).start()
    main(sys.argv[1:-1])
"""


def script_of_the_page() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return script


def of_session(session: int) -> list[psutil.Process]:
    """Processes of a session: Ray puts its workers into groups of their own, but not into other
    sessions.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def running(
    command: list[str], folder: Path, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A command with a session of its own, of which no process stays."""
    everything = {**os.environ, **environment}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(
        command, cwd=folder, env=everything, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        left = of_session(process.pid)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
        psutil.wait_procs(left, timeout=30)


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """For Ray's own files, with a path short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


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
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(folder / "home")}
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


def test_parts_of_a_build_survive_the_loss_of_a_machine(ray_folder, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "rows").mkdir()
    for number in range(8):
        rows = [
            f"w{number * row} of {row} and {'x' * (row % 9)},{'ab'[row % 2]}" for row in range(50)
        ]
        text = "\n".join(["text,label", *rows, ""])
        (tmp_path / "rows" / f"part-{number}.csv").write_text(text, encoding="utf-8")
    (tmp_path / "driver.py").write_text(CLUSTER, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    with running([sys.executable, "driver.py", str(tmp_path)], tmp_path, **own) as process:
        told, _ = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert "parts: [(1, 0), (1, 0), (1, 0), (1, 0)]" in told
    begun = [path.name.split("-")[1] for path in tmp_path.glob("begun-*")]
    assert len(begun) > len(set(begun)) == 4
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 200)
    stores = []
    for cache in ("cache", "fresh"):
        data = TextData(source=str(tmp_path / "rows"), cache=str(tmp_path / cache))
        data.prepare_data()
        folder = tmp_path / cache
        found = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*.bin"))
        }
        stores.append({path: content for path, content in found.items() if ".surveys" not in path})
    assert stores[0] == stores[1] and sum(".units" in path for path in stores[0]) == 4 * 15


def test_answers_by_ray_are_those_of_one_process(ray_folder, tmp_path):
    pytest.importorskip("ray")
    run = fit(**{**SETTINGS, "epochs": 1}, folder=tmp_path / "run")
    (tmp_path / "rows").mkdir()
    for number in range(4):
        text = "\n".join(["text", *(f"w{number * row} of {row}" for row in range(30)), ""])
        (tmp_path / "rows" / f"{number}.csv").write_text(text, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    words = [
        sys.executable,
        "-m",
        "flatout",
        "predict",
        str(run.folder),
        str(tmp_path / "rows"),
        "--out",
    ]
    for out, more in {"alone/": [], "ray/": ["--on", "ray", "--parts", "2"]}.items():
        with running([*words, out, *more], tmp_path, **own) as process:
            told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, told
        assert f"written to {out}: 120 rows" in told
    alone = bytes_of_files(tmp_path / "alone")
    by_ray = bytes_of_files(tmp_path / "ray")
    assert len(alone) == 5  # and what they answer
    assert alone == by_ray


def bytes_of_files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def test_answers_survive_the_loss_of_a_machine(ray_folder, tmp_path):
    pytest.importorskip("ray")
    run = fit(**{**SETTINGS, "epochs": 1}, folder=tmp_path / "run")
    (tmp_path / "rows").mkdir()
    for number in range(12):
        text = "\n".join(["text", *(f"w{number * row} of {row}" for row in range(2000)), ""])
        (tmp_path / "rows" / f"{number}.csv").write_text(text, encoding="utf-8")
    (tmp_path / "driver.py").write_text(PREDICT, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    words = ["predict", str(run.folder), str(tmp_path / "rows"), "--out"]
    by_ray = [*words, f"{tmp_path}/ray/", "--on", "ray", "--parts", "2", f"{tmp_path}/ray"]
    for command in (
        [sys.executable, "driver.py", *by_ray],
        [sys.executable, "-m", "flatout", *words, f"{tmp_path}/alone/"],
    ):
        with running(command, tmp_path, **own) as process:
            told, _ = process.communicate(timeout=300)
        assert process.returncode == 0, told
        assert "removed" in told or "driver.py" not in command
    alone = bytes_of_files(tmp_path / "alone", "*.csv")
    assert len(alone) == 12
    assert alone == bytes_of_files(tmp_path / "ray", "*.csv")
    assert (tmp_path / "ray" / "answers.json").read_bytes() == (
        tmp_path / "alone" / "answers.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [("version", ", not 9.9."), ("package", "lacks a package (No module named 'only_here')")],
)
def test_a_machine_of_another_version_or_without_a_package_is_one_sentence(
    ray_folder, tmp_path, mistake, said
):
    pytest.importorskip("ray")
    (tmp_path / "driver.py").write_text(MISTAKE, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    with running([sys.executable, "driver.py", mistake], tmp_path, **own) as process:
        told, _ = process.communicate(timeout=200)
    assert process.returncode == 2, told
    assert f"on: a machine of the cluster {'has flatout' if mistake == 'version' else ''}" in told
    assert said in told and "Every machine of the cluster needs this package" in told
    assert "Traceback" not in told


def values_of(folder: Path) -> dict[str, float]:
    """What each setting of a sweep reached."""
    rows = read_csv(next(folder.glob("**/sweep.csv")))
    return {row["model.hidden"]: float(row["value"]) for row in rows}


def test_trials_by_ray_reach_what_they_reach_here_and_one_is_trained_again_whose_machine_was_lost(
    ray_folder, tmp_path
):
    pytest.importorskip("ray")
    words = [
        "sweep",
        "model.hidden=choice(8,16,24)",
        "sampler=grid",
        "pruner=none",
        "model.embedding=8",
        "precision=fp32",
    ]
    words += [
        "data.sample.rows=3000",
        "data.sample.eval_rows=200",
        "data.batch_size=16",
        "trainer.max_epochs=4",
    ]
    words += [
        "monitor.verdict=false",
        "monitor.rival=false",
        "monitor.flush_every=1",
        "logger=none",
    ]
    (tmp_path / "driver.py").write_text(SWEEP, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    ways = {
        "here": [sys.executable, "-m", "flatout", *words],
        "ray": [sys.executable, "driver.py", *words, "on=ray", "parallel=2"],
    }
    for way, command in ways.items():
        end = [str(tmp_path / way)] if way == "ray" else []
        with running([*command, f"output={tmp_path / way}", *end], tmp_path, **own) as process:
            told, _ = process.communicate(timeout=400)
        assert process.returncode == 0, told
    assert told.count("begun") == 4
    assert values_of(tmp_path / "ray") == values_of(tmp_path / "here")
    assert len(values_of(tmp_path / "ray")) == 3


QUEUED = """
import time
from pathlib import Path
from types import SimpleNamespace
import ray
from flatout.sweep.trial import Board, Trial
from flatout.sweep.trials import Place, TimeLimits, make_slots, run_trials

class Job:
    def train(self, folder, overrides, *, resumes):
        time.sleep(5)
        return SimpleNamespace(objective=1.0, metrics={})

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
trials = iter(
    [
        Trial(number, Path.cwd() / str(number), Job(), [], [f"number={number}"])
        for number in range(3)
    ]
)
board = Board("trials", "val/accuracy", "max", 3)
slots = make_slots(3, Place.ray)
limits = TimeLimits(trial_s=12.0)
for trial, ending in run_trials(lambda: next(trials, None), slots, board, limits=limits):
    print("ended", trial.number, ending.status.value, 5 <= ending.seconds < 12)
"""


def test_a_trial_that_waits_for_a_free_device_of_a_cluster_has_its_whole_limit_from_when_it_begins(
    ray_folder, tmp_path
):
    pytest.importorskip("ray")
    (tmp_path / "driver.py").write_text(QUEUED, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    with running([sys.executable, "driver.py"], tmp_path, **own) as process:
        told, _ = process.communicate(timeout=200)
    found = sorted(line for line in told.splitlines() if line.startswith("ended"))
    assert found == [f"ended {number} complete True" for number in range(3)], told

"""Trials of a sweep by Ray: they reach what they reach here, wherever they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.run_files import read_csv
from tests.soak.ray_clusters import running

pytestmark = pytest.mark.soak(seconds=60)

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

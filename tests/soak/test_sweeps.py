"""Sweeps in a storm: trials crash and hang, and the sweep is killed often.

No trial is lost or counted twice.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.run_files import read_csv
from tests.started import begin, wait_for

TRIALS = 12
KILLS = 3
WORDS = [
    "model.hidden=choice(8,16,24)",
    "optim.lr=tag(log,interval(1e-4,1e-1))",
    "+callbacks.planted._target_=tests.sweep.planted.PlantedByNumber",
    "+callbacks.planted.crash=4",
    "+callbacks.planted.hang=6",
    "data.sample.rows=300",
    "data.sample.eval_rows=60",
    "trainer.max_epochs=3",
    f"trials={TRIALS}",
    "trial_for=20s",
]
TRUST = "+allow_targets=[tests]"


def command(*words: str) -> subprocess.Popen[str]:
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return begin(["flatout", "sweep", *words], PYTHONPATH=os.pathsep.join(places))


@pytest.mark.soak(seconds=120)
def test_a_sweep_that_is_killed_often_accounts_for_every_trial(tmp_path, rounds, started, survive):
    problems = []
    for number in range(rounds):
        folder = tmp_path / str(number)
        first = [*WORDS, f"seed={number}", f"hydra.sweep.dir={folder}"]
        for kill in range(KILLS):
            started.append(
                command(*([*first, TRUST] if kill == 0 else ["resume", str(folder), TRUST]))
            )
            wait_for(folder / str(3 * kill + 2) / "metrics.csv", started[-1])
            started[-1].kill()
            started[-1].communicate()
        started.append(command("resume", str(folder), TRUST))
        said, _ = started[-1].communicate(timeout=600)
        problems.append(lost_trials(folder) if started[-1].returncode == 0 else [said])
    survive(problems)


def lost_trials(folder: Path) -> list[str]:
    """The problems of a sweep's table: each trial once, and exactly the planted ones failed."""
    rows = {int(row["number"]): row["status"] for row in read_csv(folder / "sweep.csv")}
    problems = [] if sorted(rows) == list(range(TRIALS)) else [f"the trials are {sorted(rows)}"]
    failed = sorted(number for number, status in rows.items() if status == "failed")
    return problems if failed == [4, 6] else [*problems, f"the failed trials are {failed}"]

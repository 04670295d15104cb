"""The folder of a run is that of no other run, however many begin in the same second."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from flatout.config import RunConfig
from flatout.distributed.ranks import Ranks
from flatout.errors import RunBroke, UserError
from flatout.report.summary import read_summary
from flatout.run.claimed_folders import claim_folder, claim_named_folder, folder_of_one
from flatout.run.run_folder import FolderWatch, open_run_folder
from tests.composed import run_train
from tests.params import at_once
from tests.run_files import read_log
from tests.started import free_port

TINY = [
    "data.sample.rows=200",
    "data.sample.eval_rows=40",
    "trainer.max_epochs=1",
    "data.batch_size=64",
]
FAST = [
    *TINY,
    "precision=fp32",
    "monitor.progress=false",
    "model.embedding=8",
    "model.hidden=8",
    "logger=none",
]


def test_of_ten_runs_that_begin_at_once_each_has_a_folder_of_its_own(tmp_path):
    gate = threading.Barrier(10)

    def begin(_: int) -> Path:
        (tmp_path / "now").mkdir(exist_ok=True)  # Hydra makes it before the run begins
        gate.wait()
        return claim_folder(tmp_path / "now")

    with ThreadPoolExecutor(10) as pool:
        folders = list(pool.map(begin, range(10)))
    assert sorted(folder.name for folder in folders) == sorted(
        ["now", *(f"now_{number}" for number in range(2, 11))]
    )


def test_a_link_beside_a_folder_that_is_taken_is_passed_over(tmp_path):
    claim_folder(tmp_path / "now")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "now_2").symlink_to(tmp_path / "elsewhere")
    assert claim_folder(tmp_path / "now") == tmp_path / "now_3"
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.soak(seconds=3)
def test_runs_of_the_same_second_lose_no_result(tmp_path, monkeypatch, capsys):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = "# @package _global_\nhydra:\n  run:\n    dir: ${output}/${name}/now\n"
    (tmp_path / "conf" / "experiment" / "here.yaml").write_text(file)
    words = [
        "--config-dir",
        str(tmp_path / "conf"),
        "+experiment=here",
        f"output={tmp_path}",
        "name=loop",
        *FAST,
    ]
    for seed in (1, 2):
        assert run_train([*words, f"seed={seed}"], monkeypatch) == 0
    seeds = {folder.name: read_summary(folder)["seed"] for folder in (tmp_path / "loop").iterdir()}
    assert seeds == {"now": 1, "now_2": 2}


@pytest.mark.soak(seconds=120)
def test_of_ten_commands_that_begin_at_once_none_loses_its_result(tmp_path):
    train = [
        sys.executable,
        "-m",
        "train",
        "name=loop",
        f"output={tmp_path}",
        *FAST,
        "monitor.verdict=false",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    begun = [
        subprocess.Popen([*train, f"seed={seed}"], cwd=tmp_path, **quiet) for seed in range(10)
    ]
    said = [process.communicate(timeout=400)[1] for process in begun]
    assert [process.returncode for process in begun] == [0] * 10, said
    summaries = [read_summary(folder) for folder in (tmp_path / "loop").iterdir()]
    assert sorted(each["seed"] for each in summaries) == list(range(10))
    assert {each["status"] for each in summaries} == {"finished"}


def test_a_named_folder_with_a_finished_run_is_refused(tmp_path, monkeypatch, capsys):
    words = [f"hydra.run.dir={tmp_path}/same", *FAST]
    assert run_train([*words, "seed=1"], monkeypatch) == 0
    assert run_train([*words, "seed=2"], monkeypatch) == 2
    assert read_summary(tmp_path / "same")["seed"] == 1
    what = (
        f"hydra.run.dir: {tmp_path}/same holds a finished run. Name another folder, or add"
        f" resume={tmp_path}/same"
    )
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", at_once("log.txt", of=["config.yaml", "report.html", "log.txt"], seconds=1)
)
def test_a_named_folder_with_files_of_something_else_is_left_as_it_is(
    name, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine: 1\n")
    for words in ([], ["data.text=txet"]):
        assert run_train([f"hydra.run.dir={tmp_path}/mine", *FAST, *words], monkeypatch) == 2
    assert (
        f"hydra.run.dir: {tmp_path}/mine has a {name}, and no summary.json of a run. Name"
        in capsys.readouterr().err
    )
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == {
        name: "mine: 1\n"
    }


@pytest.mark.soak(seconds=3)
def test_a_mistake_leaves_the_record_of_an_interrupted_run_as_it_is(tmp_path, monkeypatch, capsys):
    words = [f"hydra.run.dir={tmp_path}/same", *FAST]
    assert run_train([*words, "seed=1"], monkeypatch) == 0
    summary = tmp_path / "same" / "summary.json"
    summary.write_text(
        summary.read_text().replace('"status": "finished"', '"status": "interrupted"')
    )
    shutil.rmtree(tmp_path / "same" / "checkpoints")  # with them the folder itself is refused
    before = {path: path.read_bytes() for path in (tmp_path / "same").iterdir() if path.is_file()}
    assert run_train([*words, "seed=2", "data.text=txet"], monkeypatch) == 2
    assert "no column 'txet'" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in before}
    assert [path.name for path in before if after[path] != before[path]] in ([], ["log.txt"])


@pytest.mark.parametrize("is_written", [False, True], ids=["at its very beginning", "under way"])
def test_a_named_folder_in_which_another_process_trains_is_refused(is_written, tmp_path):
    place = claim_named_folder(tmp_path / "same")
    if is_written:
        (place / "summary.json").write_text('{"schema": 1, "status": "running"}')
    with (
        folder_of_one(place),
        pytest.raises(UserError, match=r"another process trains in .*same\. Name another"),
    ):
        claim_named_folder(place)


def test_a_named_folder_with_a_run_that_was_killed_is_taken_again(tmp_path):
    place = claim_named_folder(tmp_path / "same")
    (place / "summary.json").write_text('{"schema": 1, "status": "running"}')
    assert claim_named_folder(place) == place


class Killed(Dataset):
    """Rows that end the process which asks for them, as the system does where memory is out."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return place


@pytest.mark.soak(seconds=3)
def test_a_worker_that_the_system_has_ended_is_told_in_one_sentence_with_the_way_on(tmp_path):
    told = (
        r"^DataLoader worker \(pid.* Out of memory is the usual cause: use fewer workers .*"
        r" resume=.*killed$"
    )
    loader = DataLoader(Killed(), num_workers=1, multiprocessing_context="forkserver")
    with (
        pytest.raises(RunBroke, match=told),
        open_run_folder(tmp_path / "killed", RunConfig(), [], Ranks()),
    ):
        list(loader)
    assert read_summary(tmp_path / "killed")["status"] == "failed"


HOLDS = """
import sys, time
from pathlib import Path
from flatout.run.claimed_folders import folder_of_one
with folder_of_one(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_the_folder_of_a_process_that_was_killed_is_free_again(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.run.claimed_folders._PATIENCE_S", 0.2)
    (tmp_path / "log.txt").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match="still being trained in by another"),
            folder_of_one(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait(30)
        with folder_of_one(tmp_path):
            assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "log.txt"]
    finally:
        holder.kill()
        holder.communicate()


def test_a_folder_in_which_nothing_was_written_goes_with_its_lock(tmp_path):
    (tmp_path / "run").mkdir()
    with folder_of_one(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").is_file()
    assert not (tmp_path / "run").exists()


def open_late(run: Path, rank: int, port: int, found: Path) -> None:
    """Open the folder of a run to resume, as one of two ranks; the second one when the first has
    begun.
    """
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks.here()
    ranks.agreed("are connected", lambda: True)
    while rank == 1 and not found.with_name("begun").exists():
        time.sleep(0.02)
    with open_run_folder(run, RunConfig(resume=str(run)), [], ranks) as folder:
        if rank == 0:
            folder.begin()
            folder.summary.write()
            found.with_name("begun").touch()
        found.write_text(json.dumps(folder.before))
        ranks.gathered("are done", lambda: True)


def test_a_rank_that_is_late_knows_the_choices_of_a_resumed_run(tmp_path):
    choice = {
        "name": "reuse",
        "value": True,
        "why": "it pays",
        "evidence": "",
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"schema": 1, "choices": [choice]}))
    found = [tmp_path / f"rank_{rank}.json" for rank in (0, 1)]
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=open_late, args=(tmp_path / "run", rank, port, found[rank]))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [json.loads(path.read_text()) for path in found] == [{"reuse": choice}] * 2


@pytest.mark.parametrize(
    ("end", "has_traceback"),
    [
        (KeyboardInterrupt(), False),
        (SystemExit(143), False),
        (SystemExit("why"), True),
    ],
    ids=["Ctrl-C", "SIGTERM", "an exit of one's own"],
)
def test_the_log_of_a_run_that_a_signal_ended_holds_no_traceback(tmp_path, end, has_traceback):
    with (
        pytest.raises(type(end)),
        open_run_folder(tmp_path, RunConfig(), [], Ranks()) as folder,
    ):
        folder.say("begun\x1b[2J")
        raise end
    log = read_log(tmp_path)
    assert "begun\\x1b[2J" in log
    assert f"interrupted: {tmp_path}" in log
    assert ("Traceback" in log) is has_traceback


def test_a_log_that_is_renamed_in_mid_run_does_not_end_the_run(tmp_path):
    with open_run_folder(tmp_path, RunConfig(), [], Ranks()):
        (tmp_path / "log.txt").rename(tmp_path / "log.txt.1")
        FolderWatch(tmp_path).on_flush(1, 0.1, {})
    assert read_summary(tmp_path)["status"] == "finished"

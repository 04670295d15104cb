"""Launchers, processes and machines: srun, torchrun across addresses, ranks and launchers that are
killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flatout.checkpoints.folder import require_whole
from tests.run_files import losses
from tests.started import SMALL, begin, free_port, said_by_all, slurm, wait_for

pytestmark = pytest.mark.soak(seconds=25)
LAST = Path("checkpoints", "last")
LONG = ["trainer.max_epochs=10000", "checkpoint.patience=null"]


def test_srun_starts_the_same_run(ours, tmp_path, started):
    port = free_port()
    place = f"hydra.run.dir={tmp_path}/run"
    started += [begin(["train", *SMALL, place], **slurm(rank, port)) for rank in (1, 0)]
    said = said_by_all(started, 120)
    assert [process.returncode for process in started] == [0, 0], said
    assert losses(tmp_path / "run") == losses(ours[0])
    assert "run folder:" in said[1]
    assert "run folder:" not in said[0]


def test_the_folder_of_the_first_rank_is_that_of_all_and_the_store_is_built_once(
    ours, tmp_path, started
):
    """Ranks that start seconds apart would name different folders."""
    port = free_port()
    started.append(begin(["train", *SMALL, f"output={tmp_path}"], **slurm(1, port)))
    time.sleep(2)
    started.append(begin(["train", *SMALL, f"output={tmp_path}"], **slurm(0, port)))
    said = said_by_all(started, 120)
    assert [process.returncode for process in started] == [0, 0], said
    assert len(list((tmp_path / "default").iterdir())) == 1
    assert re.search(r"cache: \w+ built in", said[1])


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """In their order: what the warm server has forked."""
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        (child for child in children if child.ppid() != process.pid), key=lambda child: child.pid
    )


@pytest.mark.parametrize("which", [0, 1])
def test_when_a_rank_is_killed_the_run_ends_and_says_so_and_the_checkpoint_is_kept(
    which, tmp_path, started
):
    run = tmp_path / "run"
    started.append(begin(["train", *SMALL, *LONG, f"hydra.run.dir={run}", "trainer.devices=2"]))
    process = started[0]
    wait_for(run / LAST, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    ranks[which].kill()
    killed = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode == 1
    last = run / "checkpoints" / "last"
    assert re.search(r"rank [01] of 2 was ended by SIGKILL", said)
    assert f"The last checkpoint is {last}" in said
    assert "Traceback" not in said
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    require_whole(last)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def rank_of_torchrun(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank below the one that was begun."""
    children = psutil.Process(process.pid).children(recursive=True)
    (found,) = (child for child in children if child.environ().get("RANK") == f"{rank}")
    return found


@pytest.mark.parametrize("which", [0, 1])
def test_torchrun_starts_a_run_again_whose_rank_was_killed_and_it_ends_as_if_nothing_was(
    which, tmp_path, started
):
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "train",
    ]
    words = [
        *SMALL,
        "trainer.max_epochs=60",
        "checkpoint.patience=null",
        "monitor.verdict=false",
        "resume=auto",
    ]
    for name in ("whole", "killed"):
        started.append(begin([*torchrun, *words, f"output={tmp_path}/{name}"], OMP_NUM_THREADS="1"))
        if name == "killed":
            while not (found := list((tmp_path / name).glob("*/*/checkpoints/last"))):
                assert started[-1].poll() is None
                time.sleep(0.02)
            rank_of_torchrun(started[-1], which).kill()
        said, _ = started[-1].communicate(timeout=120)
        assert started[-1].returncode == 0, said
    assert "resume: continuing from step" in said
    (whole,) = filter(Path.is_dir, (tmp_path / "whole").glob("*/*"))
    (run,) = filter(Path.is_dir, (tmp_path / "killed").glob("*/*"))
    assert run == found[0].parents[1]
    assert losses(run) == losses(whole)


@pytest.mark.soak(seconds=80)
@pytest.mark.parametrize("which", [0, 1])
def test_two_torchruns_start_a_run_again_whose_rank_was_killed(which, tmp_path, started):
    """As on two machines: an agent for each rank."""
    words = [
        *SMALL,
        "trainer.max_epochs=30",
        "checkpoint.patience=null",
        "monitor.verdict=false",
        "resume=auto",
    ]
    whole = begin(["train", *words, "trainer.devices=2", f"hydra.run.dir={tmp_path}/whole"])
    started.append(whole)
    (said,) = said_by_all([whole], 300)
    assert whole.returncode == 0, said
    torchrun = [
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
        "--max-restarts=2",
        "-m",
        "train",
    ]
    run = tmp_path / "run"
    agents = [
        begin([*torchrun, *words, f"hydra.run.dir={run}"], OMP_NUM_THREADS="1") for _ in range(2)
    ]
    started += agents
    wait_for(run / LAST, agents[0])
    ranks = [rank for agent in agents for rank in psutil.Process(agent.pid).children()]
    (rank,) = (rank for rank in ranks if rank.environ().get("RANK") == f"{which}")
    rank.kill()
    printed = said_by_all(agents, 600)
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert "resume: continuing from step" in "".join(printed)
    assert losses(run) == losses(tmp_path / "whole")


def test_without_a_launcher_to_watch_them_the_other_rank_ends_by_itself(tmp_path, started):
    run = tmp_path / "run"
    port = free_port()
    started += [
        begin(["train", *SMALL, *LONG, f"hydra.run.dir={run}"], **slurm(rank, port))
        for rank in (0, 1)
    ]
    wait_for(run / LAST, started[0])
    os.kill(started[1].pid, signal.SIGKILL)
    said, _ = started[0].communicate(timeout=60)
    assert started[0].returncode == 1
    assert "another rank is gone" in said
    assert "Traceback" not in said
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_when_the_launcher_is_killed_no_rank_is_left(tmp_path, started):
    run = tmp_path / "run"
    started.append(begin(["train", *SMALL, *LONG, f"hydra.run.dir={run}", "trainer.devices=2"]))
    wait_for(run / LAST, started[0])
    children = psutil.Process(started[0].pid).children(recursive=True)
    assert len(children) >= 3
    started[0].kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_a_signal_to_one_rank_stops_all(tmp_path, started):
    run = tmp_path / "run"
    port = free_port()
    started += [
        begin(["train", *SMALL, *LONG, f"hydra.run.dir={run}"], **slurm(rank, port))
        for rank in (0, 1)
    ]
    wait_for(run / LAST, started[0])
    os.kill(started[1].pid, signal.SIGTERM)
    said_by_all(started, 60)
    assert [process.returncode for process in started] == [143, 143]
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"


@pytest.fixture
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """What to write before a command so that it runs on the one or the other: two network
    namespaces and a wire.
    """
    names = (f"flatout-a-{os.getpid()}", f"flatout-b-{os.getpid()}")
    wires = ("fla0", "fla1")
    ends = list(zip(names, wires, strict=True))
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {wires[0]} netns {names[0]} type veth peer name {wires[1]} netns {names[1]}",
        *(
            f"ip -n {name} addr add 10.77.0.{i}/24 dev {wire}"
            for i, (name, wire) in enumerate(ends, 1)
        ),
        *(f"ip -n {name} link set {wire} up" for name, wire in ends),
        *(f"ip -n {name} link set lo up" for name in names),
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                # Making them takes rights that not every machine gives; two addresses of one
                # machine are tested below.
                pytest.skip(f"no network namespaces here: {error}")
        yield (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def torchrun_on(node: int, address: str, port: int) -> list[str]:
    meet = [f"--master-addr={address}", f"--master-port={port}"]
    return [
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={node}",
        "--nproc-per-node=1",
        *meet,
        "-m",
        "train",
    ]


def test_two_machines_with_a_wire_between_them_train_the_same_run(
    ours, two_machines, tmp_path, started
):
    for node, before in enumerate(two_machines):
        words = [*torchrun_on(node, "10.77.0.1", 29511), *SMALL, f"hydra.run.dir={tmp_path}/run"]
        environment = {"GLOO_SOCKET_IFNAME": f"fla{node}", "OMP_NUM_THREADS": "1"}
        started.append(begin(words, before, **environment))
    said = said_by_all(started, 120)
    assert [process.returncode for process in started] == [0, 0], said
    assert losses(tmp_path / "run") == losses(ours[0])
    assert (
        "rows a step: 64 rows (each rank trains its share; 32 rows x 1 batches x 2 ranks)"
        in said[0]
    )
    assert "run folder:" not in said[1]


def test_two_addresses_of_one_machine_meet_as_well(ours, tmp_path, started):
    port = free_port()
    for node in (0, 1):
        words = [*torchrun_on(node, "127.0.0.2", port), *SMALL, f"hydra.run.dir={tmp_path}/run"]
        started.append(begin(words, OMP_NUM_THREADS="1"))
    said = said_by_all(started, 120)
    assert [process.returncode for process in started] == [0, 0], said
    assert losses(tmp_path / "run") == losses(ours[0])


TWICE = """
from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, fit

for number in range(3):
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=51, classes=3), batch_size=32)
    result = fit(data, BiLSTMConfig(hidden=8, embedding=8), epochs=1, output=OUTPUT, seed=number)
    print("value", number, round(result.objective, 6), flush=True)
"""


def test_a_script_may_train_more_than_once(tmp_path, started):
    script = tmp_path / "twice.py"
    script.write_text(TWICE.replace("OUTPUT", repr(str(tmp_path / "runs"))))
    started.append(
        begin(["torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)])
    )
    (said,) = said_by_all(started, 120)
    assert started[0].returncode == 0, said
    values = sorted(line for line in said.splitlines() if line.startswith("value"))
    assert len(values) == 6
    assert values[::2] == values[1::2]
    assert len(list((tmp_path / "runs" / "default").iterdir())) == 3

"""Two agents of torchrun, as on two machines, a rank each: what happens when one rank dies, and
when one cannot train.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from flatout.distributed.attendance import Attendance, attend
from flatout.distributed.meeting import find_store, host_store
from flatout.errors import EXIT_CODE
from tests.distributed import gathering_rank
from tests.faults.agents import SMALL, Moment, begin_agents, kill_once, run_of
from tests.faults.runs import differences, finished, write_rows
from tests.params import at_once
from tests.started import free_port, said_by_all
from tests.warm import begin_function

ONE_EPOCH = replace(SMALL, trainer={"max_epochs": 1})


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("untouched") / "runs"
    return finished(replace(SMALL, trainer={"max_epochs": 1, "devices": 2}), folder)


KILLED = [Moment(1, "ready"), Moment(0, "on_train_batch_end", 7)]


@pytest.mark.parametrize("moment", at_once(KILLED[1], of=KILLED, seconds=20), ids=str)
def test_a_rank_that_is_killed_is_started_again_with_the_others_to_the_same_bytes(
    moment, tmp_path, untouched
):
    assert kill_once(ONE_EPOCH, tmp_path, moment) == []
    assert differences(run_of(tmp_path), untouched) == []


def test_a_rank_that_sees_other_data_ends_all_with_a_sentence_each(tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    write_rows(second / "rows.csv", rows=100)
    agents = begin_agents(ONE_EPOCH, tmp_path, second=second, restarts=0, kind="static")
    printed = said_by_all(agents, 90)
    assert [agent.returncode for agent in agents] == [EXIT_CODE, EXIT_CODE]
    assert "rank 0: rank 1 has ended. Read the message of rank 1" in printed[0]
    assert "data: rank 1 sees other data than the first rank." in printed[1]


def test_a_rank_that_does_not_see_the_checkpoint_ends_all_with_a_sentence_each(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        # a folder is hidden from one agent by a mount of its own, which containers may forbid
        pytest.skip("unshare -m is refused here: it needs the right to mount")
    agents = begin_agents(ONE_EPOCH, tmp_path)
    said_by_all(agents, 90)
    assert [agent.returncode for agent in agents] == [0, 0]
    for start in tmp_path.glob("start-*"):
        start.unlink()
    agents = begin_agents(SMALL, tmp_path, Moment(1, "hidden"), restarts=0, kind="static")
    printed = said_by_all(agents, 90)
    assert [agent.returncode for agent in agents] == [EXIT_CODE, EXIT_CODE]
    assert "rank 0: rank 1 has ended. Read the message of rank 1" in printed[0]
    assert re.search(r"resume: rank 1 does not see \S+step-10: resume needs one disk", printed[1])


@pytest.mark.parametrize("killed", [1, 2])
def test_ranks_without_a_launcher_that_watches_end_when_one_of_them_is_killed(killed):
    """As by srun: the others wait for a value of the one that is killed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        begin_function(gathering_rank.main, killed, RANK=str(rank), **place) for rank in range(3)
    ]
    printed = said_by_all(ranks, 60)
    codes = [EXIT_CODE] * 3
    codes[killed] = -signal.SIGKILL
    assert [rank.returncode for rank in ranks] == codes, printed
    assert f"rank 0: rank {killed} has ended." in printed[0]
    assert "Without one the system ended it" in printed[0]


def test_a_stranger_at_the_port_of_the_first_rank_is_taken_for_no_rank(agents):
    attendance = Attendance(agents)
    port = int(agents.get("attendance").decode().split()[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(bytes(19) + b"\1")
        assert not attendance.has_lost(1)
    connection = attend(agents, 1)
    assert not attendance.has_lost(1)
    connection.close()
    assert attendance.has_lost(1)
    for held in (attendance._server, *attendance._of_rank.values()):
        held.close()


def open_store(name: str) -> dist.TCPStore:
    """A store of a first rank, or of a program that has the port now."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("id", name)
    return store


class Joining:
    """Rank 1, in a thread, looks for its store where the agents' store says that it is."""

    def __init__(self, agents: dist.TCPStore) -> None:
        self._agents = dist.TCPStore("127.0.0.1", agents.port, wait_for_workers=False)
        self._thread = threading.Thread(target=self._join)
        self._thread.start()

    def _join(self) -> None:
        self._store = find_store(self._agents, 1, 2)

    def joined(self) -> dist.Store:
        self._thread.join(timeout=60)
        return self._store


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The agents' store."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return open_store("of the agents")


def test_a_rank_that_finds_an_earlier_process_in_its_place_ends_that_round_and_joins_the_next(
    agents,
):
    """Agents that do not restart together: rank 1 is new, the first rank does not know it yet."""
    before = open_store("before")
    before.set("joined/1", "the rank 1 that has died")
    agents.set("flatout/store", f"{before.port} before")
    rank_1 = Joining(agents)
    before.wait(["ended"], timedelta(seconds=60))
    assert before.get("ended") == b"1"
    hosted = host_store(agents, 2)
    hosted.set("value", "of this round")
    assert rank_1.joined().get("value") == b"of this round"


def test_a_port_that_another_program_has_now_is_not_taken_for_the_store(agents):
    other = open_store("of another job")
    agents.set("flatout/store", f"{other.port} before")
    rank_1 = Joining(agents)
    hosted = host_store(agents, 2)
    hosted.set("value", "of this round")
    joined = rank_1.joined()
    assert joined.get("value") == b"of this round"
    assert not other.check(["joined/1"])
    assert joined.timeout == timedelta(minutes=30), "or the process group would be impatient"

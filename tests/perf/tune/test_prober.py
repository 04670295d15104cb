"""The throw-away process: whatever happens in it is an answer, and it never outlives who started
it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from flatout.distributed.processes import warm_start
from flatout.perf.tune.answers import NoAnswer
from flatout.perf.tune.probe import Child
from tests.params import at_once
from tests.perf.tune import planted


@pytest.fixture
def asked():
    children: list[Child] = []

    def ask(build, what="about", seconds=60.0, **question):
        children.append(Child(build, threads=1))
        return children[-1].ask(what, time.time() + seconds, **question)

    yield ask
    for child in children:
        child.close()


@pytest.mark.parametrize(
    ("build", "why", "is_memory"),
    [
        (planted.mistaken, "data: is not there", False),
        (
            planted.killed,
            "its process was ended by SIGKILL, out of memory is the usual cause",
            True,
        ),
        *at_once(
            of=[
                (planted.broken, "RuntimeError: a defect", False),
                (planted.too_large, "out of memory", True),
            ],
            seconds=3,
        ),
    ],
)
def test_an_end_before_its_time_is_an_answer(asked, build, why, is_memory):
    assert asked(build) == NoAnswer(why, is_memory=is_memory)


@pytest.mark.soak(seconds=2)
def test_one_that_hangs_is_ended_when_the_time_is_over(asked, tmp_path):
    note = tmp_path / "pid"
    found = asked(partial(planted.hanging, str(note)), seconds=1.0)
    assert found == NoAnswer("the time was over, and its process was ended")
    assert not note.exists() or not planted.alive(int(note.read_text()))


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="looks at semaphores as Linux shows them")
def test_semaphores_of_a_child_that_is_ended_go_with_it(tmp_path):
    note = tmp_path / "name"
    child = Child(partial(planted.hanging_with_semaphore, str(note)), threads=1)
    asking = threading.Thread(target=child.ask, args=("about", time.time() + 600), daemon=True)
    asking.start()
    assert planted.within(60, lambda: note.exists() and note.read_text())
    semaphore = Path("/dev/shm", f"sem.{note.read_text().removeprefix('/')}")
    assert semaphore.exists()
    os.kill(child._apart.pid, signal.SIGKILL)
    asking.join()
    assert planted.within(10, lambda: not semaphore.exists())


def test_several_questions_share_one_child_and_a_lost_one_is_replaced(tmp_path):
    child = Child(planted.small_parts, threads=1)
    try:
        assert child.ask("about", time.time() + 60)["longest"] > 1
        first = child._apart.pid
        assert child.ask("feeds", time.time() + 60, kinds=["resident"])["resident"] > 0
        assert child._apart.pid == first
        lost = child.ask("feeds", time.time() + 60, kinds=["no such kind"])
        assert isinstance(lost, NoAnswer)
        assert lost.why.startswith("ValueError")
        assert child.ask("about", time.time() + 60)["longest"] > 1
    finally:
        child.close()


def _ask_for_ever(note: str) -> None:
    Child(partial(planted.hanging, note), threads=1).ask("about", time.time() + 600)


@pytest.mark.soak(seconds=5)
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes as Linux shows them")
def test_a_child_ends_with_the_process_that_started_it(tmp_path):
    warm_start()
    note = tmp_path / "pid"
    process = multiprocessing.get_context("forkserver").Process(
        target=_ask_for_ever, args=(str(note),)
    )
    process.start()
    assert planted.within(60, lambda: note.exists() and note.read_text())
    number = int(note.read_text())
    assert planted.alive(number)
    process.kill()
    process.join()
    assert planted.within(10, lambda: not planted.alive(number))

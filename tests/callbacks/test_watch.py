"""The thread that looks at the hardware: means for each flush, medians for the summary, and never
in the way.
"""

from __future__ import annotations

import threading
import time

import pytest

from flatout.callbacks.hardware_watch import Watch


class Counting:
    name = "gpu"

    def __init__(self, breaks_at: int = 10**9) -> None:
        self.looks = 0
        self.breaks_at = breaks_at
        self.threads = set()

    def sample(self) -> dict[str, float]:
        self.looks += 1
        self.threads.add(threading.current_thread().name)
        if self.looks >= self.breaks_at:
            raise ValueError("unplugged")
        return {"gpu/power_w": 10.0 * self.looks}

    def facts(self) -> dict[str, object]:
        return {"pcie": None}


def until(holds, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def test_a_flush_gets_the_mean_since_the_last_one_and_the_summary_medians_of_all():
    watch = Watch([Counting()])
    assert (watch.take(), watch.summary()) == ({}, {})
    for _ in range(2):
        watch.look()
    assert watch.take() == {"gpu/power_w": 15.0}
    assert watch.take() == {}
    watch.look()
    assert watch.take() == {"gpu/power_w": 30.0}
    assert watch.summary() == {"gpu": {"power_w": 20.0, "pcie": None}}


def test_it_looks_from_entering_to_leaving_and_in_a_thread_of_its_own():
    source = Counting()
    with Watch([source], every_s=0.005):
        assert until(lambda: source.looks >= 3)
    assert not any(thread.name == "watch" for thread in threading.enumerate())
    assert source.threads == {"watch"}


def test_without_anything_to_look_at_there_is_no_thread():
    before = threading.active_count()
    with Watch([]) as watch:
        assert threading.active_count() == before
    assert (watch.take(), watch.summary()) == ({}, {})


def test_a_source_that_breaks_is_said_once_and_the_others_are_looked_at_on():
    said = []
    broken = Counting(breaks_at=2)
    whole = Counting()
    with Watch([broken, whole], said.append, every_s=0.005):
        assert until(lambda: whole.looks >= 5)
    assert broken.looks == 2
    assert said == ["gpu: no longer watched (unplugged); training continues"]


def test_when_all_are_broken_the_thread_ends():
    source = Counting(breaks_at=1)
    with Watch([source], lambda line: None, every_s=0.005):
        assert until(lambda: not any(thread.name == "watch" for thread in threading.enumerate()))
    assert source.looks == 1


@pytest.mark.xdist_group("timing")
def test_a_driver_that_hangs_does_not_keep_a_run_from_ending():
    let_go = threading.Event()

    class Hanging(Counting):
        def sample(self) -> dict[str, float]:
            super().sample()
            let_go.wait(30)
            return {}

    source = Hanging()
    with Watch([source], every_s=0.01):
        assert until(lambda: source.looks == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    let_go.set()

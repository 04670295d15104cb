"""Several processes at one cache: one builds, the others wait, and the dead are replaced."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import platform
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.data.caches import RECIPE, build, left_in, refuse

from flatout.data.store import cache as cache_module
from flatout.data.store.cache import Cache, recipe_key
from flatout.data.store.lock import lock
from flatout.data.store.store import (
    StoreWriter,
)
from flatout.perf.tune.answers import AnswerStore
from flatout.sweep.many import alone_in


def slow_build(writer: StoreWriter) -> None:
    marker = Path(writer.folder.parent) / f"build-{time.monotonic_ns()}.txt"
    marker.touch()
    time.sleep(0.3)
    build(writer)


def open_in_child(folder: Path) -> None:
    Cache(folder).open_or_build("rows.csv", RECIPE, slow_build)


def test_of_many_processes_one_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=open_in_child, args=(tmp_path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert len(list(tmp_path.glob("build-*.txt"))) == 1


def test_what_dead_builders_left_is_taken_away_whatever_they_built(tmp_path):
    for name in (
        f".building-{recipe_key(RECIPE)}-999999",
        ".building-another-abcdef",
        ".removed-another-abcdef",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").touch()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    assert left_in(tmp_path) == [report.key]


def slow_other_build(writer: StoreWriter) -> None:
    build(writer)
    (writer.folder.parent / "begun").touch()
    while not (writer.folder.parent / "go on").exists():
        time.sleep(0.01)


def open_another_in_child(folder: Path) -> None:
    _, report = Cache(folder).open_or_build(
        "rows.csv", RECIPE | {"max_length": 7}, slow_other_build
    )
    assert not report.hit


def test_a_living_builder_of_another_store_is_left_alone(tmp_path):
    child = multiprocessing.get_context("fork").Process(
        target=open_another_in_child, args=(tmp_path,)
    )
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    Cache(tmp_path).clear()
    assert len(list(tmp_path.glob(".building-*"))) == 1
    (tmp_path / "go on").touch()
    child.join(30)
    assert child.exitcode == 0
    assert [entry.rows for entry in Cache(tmp_path).entries()] == [{"train": 10}]


def test_a_builder_whose_folder_was_taken_away_begins_again(tmp_path):
    times = []

    def interrupted(writer: StoreWriter) -> None:
        times.append(1)
        if len(times) == 1:
            shutil.rmtree(writer.folder)
        build(writer)

    store, _ = Cache(tmp_path).open_or_build("rows.csv", RECIPE, interrupted)
    assert len(times) == 2
    assert store.splits["train"].fixed("targets").tolist() == list(range(10))


def test_a_whole_store_is_not_taken_away_for_the_damaged_one_that_lay_there_before(tmp_path):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    damaged = cache_module._identity(tmp_path / report.key)
    cache.clear()
    store, _ = cache.open_or_build("rows.csv", RECIPE, build)
    cache._remove(store.folder, damaged)
    assert cache.opened(report.key) is not None
    assert left_in(tmp_path) == [report.key]


@pytest.mark.soak(seconds=2)
# The test halts a builder in its tracks, by a signal that only Unix has.
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows stops no process")
def test_a_builder_that_is_stopped_is_waited_for_and_named(tmp_path, capfd, monkeypatch):
    # older tokenizers print a warning of any fork
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    child = multiprocessing.get_context("fork").Process(target=open_in_child, args=(tmp_path,))
    child.start()
    while not list(tmp_path.glob("build-*.txt")):
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, [child.pid, signal.SIGCONT]).start()
    started = time.monotonic()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, refuse)
    assert report.hit
    assert time.monotonic() - started >= 1.9
    child.join(30)
    words = (
        f"cache: waiting for process {child.pid} on {platform.node()}, which is building this store"
    )
    assert capfd.readouterr().err.splitlines() == [words]


def test_a_builder_that_is_killed_is_replaced_at_once(tmp_path):
    child = multiprocessing.get_context("fork").Process(
        target=open_another_in_child, args=(tmp_path,)
    )
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    child.kill()
    child.join()
    started = time.monotonic()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE | {"max_length": 7}, build)
    assert not report.hit
    assert time.monotonic() - started < 1
    assert not list(tmp_path.glob(".building-*"))


@pytest.fixture
def without_flock(monkeypatch):
    """A disk that has no flock, as filelock sees it."""

    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)


@pytest.mark.usefixtures("without_flock")
def test_without_locks_each_builds_for_itself_and_leaves_the_folders_of_others(tmp_path):
    with (
        lock(tmp_path, recipe_key(RECIPE)) as is_held,
        lock(tmp_path, recipe_key(RECIPE), waits=False) as is_free,
    ):
        assert not is_held
        assert not is_free
    (tmp_path / f".building-{recipe_key(RECIPE)}-7@here-aaaa").mkdir()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    assert not report.hit
    Cache(tmp_path).clear()
    assert left_in(tmp_path) == [f".building-{recipe_key(RECIPE)}-7@here-aaaa"]


@pytest.mark.usefixtures("without_flock")
def test_without_locks_sweeps_and_measurements_go_on(tmp_path):
    with alone_in(tmp_path / "sweep"), alone_in(tmp_path / "sweep"):
        pass
    answers = AnswerStore(str(tmp_path))
    with answers.measuring("key", 0.1), answers.measuring("key", 0.1):
        pass


def busy_build(writer: StoreWriter) -> None:
    (writer.folder.parent / "begun").touch()
    until = time.monotonic() + 6
    while time.monotonic() < until:
        sum(number * number for number in range(10_000))
    build(writer)


def open_busily(folder: Path) -> None:
    Cache(folder).open_or_build("rows.csv", RECIPE, busy_build)


@pytest.mark.soak(seconds=7)
@pytest.mark.xdist_group("timing")
def test_a_slow_builder_that_lives_is_waited_for(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=open_busily, args=(tmp_path,))
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, refuse)
    assert report.hit
    child.join(30)
    assert child.exitcode == 0

"""Every test starts from the same seeds, treats warnings as errors, and has a cache folder of its
own.

Each worker of pytest-xdist computes on one thread, and so do the processes that its tests start. A
test that is marked neither `soak` nor `gpu` may use 20 s of processor time, its child processes
included.
"""

from __future__ import annotations

import os

# before torch is imported; child processes inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from _pytest.fixtures import FixtureDef
from hypothesis import settings

from flatout.data.store.store import Column, Store, StoreSplit, StoreWriter
from flatout.distributed.imports import importing
from tests.soak import choosing

# Examples are drawn anew from a fixed seed, so that a failure on one machine is a failure on all.
settings.register_profile("flatout", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("flatout")
torch.set_num_threads(1)
# what tests import late is searched for garbage again and again: a tenth of the time
gc.set_threshold(10_000, 20, 50)
# of a shell in the background: commands inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").is_file()
BUDGET_S = 20.0
"""Processor time for the call of one test of the default suite; wall time would depend on what else
runs.

What a fixture prepares for several tests does not count, nor does a run that measures coverage,
which is slower."""

FOREIGN_WARNINGS = (
    # Said inside other people's packages about other people's packages.
    "ignore:.*pkg_resources.*:DeprecationWarning",
    "ignore:.*pynvml package is deprecated.*:FutureWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*torch.jit.script.*:DeprecationWarning",
    # From Python 3.14 on the objects kept out of garbage collection include the dictionary that
    # refers to this generator, so Hypothesis finds no reference to it.
    "ignore:It looks like .register_random.:hypothesis.errors.HypothesisWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for line in FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_xdist_auto_num_workers() -> int:
    """As many as cores: more, as tests also wait, were measured and are in each other's way."""
    return len(psutil.Process().cpu_affinity())


def pytest_addoption(parser: pytest.Parser) -> None:
    choosing.add_options(parser)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choosing.set_time_limits(config, items)
    choosing.leave_out_others(config, items)
    keep_together(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Without the garbage collector, which would look at all that is imported again and again, and
    finds nothing.
    """
    with importing():
        return (yield)


def keep_together(items: list[pytest.Item]) -> None:
    """One worker runs all tests that share a module's fixture, so that it is prepared once."""
    for item in items:
        found: dict[str, Sequence[FixtureDef[Any]]] = vars(item)["_fixtureinfo"].name2fixturedefs
        is_sharing = any(each[-1].scope in ("class", "module") for each in found.values())
        if is_sharing and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    choosing.print_table(terminalreporter)


def running_children(process: int) -> list[int]:
    """The ids of the processes below a process, theirs included."""
    # psutil reads about every process of the machine for it: twice a test, that is a fiftieth of
    # the suite's time
    if not LISTS_CHILDREN:
        return [child.pid for child in psutil.Process(process).children(recursive=True)]
    found: list[int] = []
    with suppress(OSError):  # ended meanwhile
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                found += [child, *running_children(child)]
    return found


def processor_time() -> float:
    """Seconds that this process, its ended children and all running ones have computed."""
    total = sum(os.times()[:4])
    for child in running_children(os.getpid()):
        with suppress(psutil.Error):  # ended meanwhile
            total += sum(psutil.Process(child).cpu_times()[:4])
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    is_free = item.get_closest_marker("soak") or item.get_closest_marker("gpu")
    if is_free or "COVERAGE_RUN" in os.environ:
        return (yield)
    before = processor_time()
    result = yield
    spent = processor_time() - before
    if spent > BUDGET_S:
        pytest.fail(
            f"used {spent:.0f} s of processor time; a test outside tests/soak has {BUDGET_S:.0f} s"
        )
    return result


@pytest.fixture(autouse=True)
def _same_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path.cwd()
    environment = dict(os.environ)
    yield
    os.chdir(folder)
    # what a command in this process left, such as its rank
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How many times as many cases a soak test has, by `--rounds`."""
    return int(request.config.getoption("--rounds"))


@pytest.fixture
def survive(record_property: Callable[[str, object], None]) -> choosing.Survive:
    """Takes the problems of each case, counts them for the table, and fails where there are any."""
    return choosing.survive_with(record_property)


SplitMaker = Callable[..., StoreSplit]


@pytest.fixture
def make_split(tmp_path: Path) -> SplitMaker:
    """Makes a real store split of random rows: `make_split(lengths, classes=3)`; several=True for
    several labels.
    """
    made = 0

    def make(
        lengths: Sequence[int] | np.ndarray,
        *,
        classes: int = 3,
        several: bool = False,
        vocabulary: int = 50,
    ) -> StoreSplit:
        nonlocal made
        made += 1
        folder = tmp_path / f"store-{made}"
        folder.mkdir()
        random_numbers = np.random.default_rng(made)
        lengths = np.asarray(lengths, dtype=np.int32)
        writer = StoreWriter(folder)
        split = writer.split(
            "train",
            {"tokens": Column("uint16", ragged=True), "targets": Column("int32", ragged=several)},
        )
        tokens = random_numbers.integers(3, vocabulary, int(lengths.sum()))
        counts = random_numbers.integers(0, classes, len(lengths))
        flat = random_numbers.integers(0, classes, int(counts.sum()))
        targets = (flat, counts) if several else random_numbers.integers(0, classes, len(lengths))
        split.append(tokens=(tokens, lengths), targets=targets)
        writer.close({})
        return Store(folder).splits["train"]

    return make

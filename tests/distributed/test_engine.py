"""Parts on a cluster: what is wrong with it is one sentence, before any work is begun."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from flatout import UserError
from flatout.distributed.engine import _run_work, connect, on_ray, versions_here


def give(value: int) -> int:
    return value


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UserError, match=r"^on: Ray is not installed. pip install 'flatout\[ray\]'.$"
    ):
        connect()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", ray := ModuleType("ray"))
    ray.is_initialized = lambda: False  # and nothing else of it is asked
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        UserError, match=r"^on: no Ray cluster \(.*refused.*\). Set RAY_ADDRESS to a cluster"
    ):
        connect()


def test_no_part_is_a_mistake_before_ray_is_asked(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="--parts: 0 "):
        on_ray(give, 0, tmp_path / "place")
    assert not (tmp_path / "place").exists()


def test_a_machine_does_its_part_only_with_this_version_and_with_the_disk_in_sight(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (mark := tmp_path / "place" / ".ray-mark").mkdir(parents=True)
    assert (
        _run_work(lambda: Path.cwd(), versions_here(), tmp_path / "place", mark)
        == tmp_path / "place"
    )
    with pytest.raises(
        UserError,
        match=rf"has flatout {version('flatout')}, not 9.9. Every machine of the cluster needs",
    ):
        _run_work(lambda: 1, versions_here() | {"flatout": "9.9"}, tmp_path, mark)
    with pytest.raises(UserError, match=rf"has pyarrow {version('pyarrow')}, not 9.9. Every"):
        _run_work(lambda: 1, versions_here() | {"pyarrow": "9.9"}, tmp_path, mark)
    mark.rmdir()
    with pytest.raises(
        UserError,
        match=f"not all machines of the cluster see {tmp_path}/place. Name a folder of a disk",
    ):
        _run_work(lambda: 1, versions_here(), tmp_path, mark)

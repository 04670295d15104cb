"""Parts of builds and answers by Ray, which survive the loss of a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout import (
    fit,
)
from flatout.data.texts import encoded_units
from flatout.data.texts.data import TextData
from tests.soak.ray_clusters import CLUSTER, SETTINGS, running

pytestmark = pytest.mark.soak(seconds=60)

MISTAKE = """
import sys, types
from functools import partial
from pathlib import Path

from flatout.__main__ import main
from flatout.cli import build
from flatout.distributed import engine


def mine(config, number, count):
    return 0, 0


if __name__ == "__main__":
    if sys.argv[1] == "version":
        engine.version = lambda name: "9.9"
    else:
        here = sys.modules["only_here"] = types.ModuleType("only_here")
        here.mine, mine.__module__ = mine, "only_here"
        import flatout.data.texts.parts

        flatout.data.texts.parts.encode_part = mine
    words = ["data.sample.rows=100", "data.sample.eval_rows=20", "data.cache=cache"]
    main(["build", *words, "--on", "ray", "--parts", "1"])
"""
PREDICT = """
import os, sys, threading, time
from pathlib import Path

from ray.cluster_utils import Cluster

from flatout.__main__ import main


def lose(cluster, node, folder):
    while not list(folder.glob("*.csv")):
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)
    print("removed", flush=True)


if __name__ == "__main__":
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    threading.Thread(target=lose, args=(cluster, node, Path(sys.argv[-1]))).start()
    main(sys.argv[1:-1])
"""


def test_parts_of_a_build_survive_the_loss_of_a_machine(ray_folder, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "rows").mkdir()
    for number in range(8):
        rows = [
            f"w{number * row} of {row} and {'x' * (row % 9)},{'ab'[row % 2]}" for row in range(50)
        ]
        text = "\n".join(["text,label", *rows, ""])
        (tmp_path / "rows" / f"part-{number}.csv").write_text(text, encoding="utf-8")
    (tmp_path / "driver.py").write_text(CLUSTER, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    with running([sys.executable, "driver.py", str(tmp_path)], tmp_path, **own) as process:
        told, _ = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert "parts: [(1, 0), (1, 0), (1, 0), (1, 0)]" in told
    begun = [path.name.split("-")[1] for path in tmp_path.glob("begun-*")]
    assert len(begun) > len(set(begun)) == 4
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 200)
    stores = []
    for cache in ("cache", "fresh"):
        data = TextData(source=str(tmp_path / "rows"), cache=str(tmp_path / cache))
        data.prepare_data()
        folder = tmp_path / cache
        found = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*.bin"))
        }
        stores.append({path: content for path, content in found.items() if ".surveys" not in path})
    assert stores[0] == stores[1]
    assert sum(".units" in path for path in stores[0]) == 4 * 15


def test_answers_by_ray_are_those_of_one_process(ray_folder, tmp_path):
    pytest.importorskip("ray")
    run = fit(**{**SETTINGS, "epochs": 1}, folder=tmp_path / "run")
    (tmp_path / "rows").mkdir()
    for number in range(4):
        text = "\n".join(["text", *(f"w{number * row} of {row}" for row in range(30)), ""])
        (tmp_path / "rows" / f"{number}.csv").write_text(text, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    words = [
        sys.executable,
        "-m",
        "flatout",
        "predict",
        str(run.folder),
        str(tmp_path / "rows"),
        "--out",
    ]
    for out, more in {"alone/": [], "ray/": ["--on", "ray", "--parts", "2"]}.items():
        with running([*words, out, *more], tmp_path, **own) as process:
            told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, told
        assert f"written to {out}: 120 rows" in told
    alone = bytes_of_files(tmp_path / "alone")
    by_ray = bytes_of_files(tmp_path / "ray")
    assert len(alone) == 5  # and what they answer
    assert alone == by_ray


def bytes_of_files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def test_answers_survive_the_loss_of_a_machine(ray_folder, tmp_path):
    pytest.importorskip("ray")
    run = fit(**{**SETTINGS, "epochs": 1}, folder=tmp_path / "run")
    (tmp_path / "rows").mkdir()
    for number in range(12):
        text = "\n".join(["text", *(f"w{number * row} of {row}" for row in range(2000)), ""])
        (tmp_path / "rows" / f"{number}.csv").write_text(text, encoding="utf-8")
    (tmp_path / "driver.py").write_text(PREDICT, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    words = ["predict", str(run.folder), str(tmp_path / "rows"), "--out"]
    by_ray = [*words, f"{tmp_path}/ray/", "--on", "ray", "--parts", "2", f"{tmp_path}/ray"]
    for command in (
        [sys.executable, "driver.py", *by_ray],
        [sys.executable, "-m", "flatout", *words, f"{tmp_path}/alone/"],
    ):
        with running(command, tmp_path, **own) as process:
            told, _ = process.communicate(timeout=300)
        assert process.returncode == 0, told
        assert "removed" in told or "driver.py" not in command
    alone = bytes_of_files(tmp_path / "alone", "*.csv")
    assert len(alone) == 12
    assert alone == bytes_of_files(tmp_path / "ray", "*.csv")
    assert (tmp_path / "ray" / "answers.json").read_bytes() == (
        tmp_path / "alone" / "answers.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("version", ", not 9.9."),
        ("package", "lacks a package (No module named 'only_here')"),
    ],
)
def test_a_machine_of_another_version_or_without_a_package_is_one_sentence(
    ray_folder, tmp_path, mistake, said
):
    pytest.importorskip("ray")
    (tmp_path / "driver.py").write_text(MISTAKE, encoding="utf-8")
    own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    with running([sys.executable, "driver.py", mistake], tmp_path, **own) as process:
        told, _ = process.communicate(timeout=200)
    assert process.returncode == 2, told
    assert f"on: a machine of the cluster {'has flatout' if mistake == 'version' else ''}" in told
    assert said in told
    assert "Every machine of the cluster needs this package" in told
    assert "Traceback" not in told

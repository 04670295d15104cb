"""What tests of Ray share: the script of the page, and commands that leave no process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from flatout import (
    HeadlinesConfig,
    MonitorConfig,
    TextDataConfig,
    TransformerConfig,
)

PAGE = Path(__file__).parents[2] / "docs" / "many_devices.md"
SETTINGS: dict[str, Any] = {
    "data": TextDataConfig(
        sample=HeadlinesConfig(rows=503, eval_rows=101, classes=4), batch_size=16
    ),
    "model": TransformerConfig(hidden=32, layers=2, heads=4, dropout=0.0, attention_dropout=0.0),
    "precision": "fp32",
    "epochs": 2,
    "monitor": MonitorConfig(flush_every=1, progress=False),
    "trainer": {"accelerator": "cpu"},
}

CLUSTER = """
import os, sys, threading, time
from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from flatout.data.texts import encoded_units
from flatout.data.texts.settings import TextDataConfig
from flatout.data.texts.parts import encode_part
from flatout.distributed.engine import on_ray


def do(folder, number, count):
    (folder / f"begun-{number}-{os.getpid()}").touch()
    time.sleep(3)
    encoded_units.UNIT_ROWS = 200
    config = TextDataConfig(source=str(folder / "rows"), cache=str(folder / "cache"))
    return encode_part(config, number, count)


def lose(cluster, node, folder):
    while len(list(folder.glob("begun-*"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    threading.Thread(target=lose, args=(cluster, node, folder)).start()
    print("parts:", on_ray(partial(do, folder), 4, folder / "cache"))
    cluster.shutdown()
"""


def script_of_the_page() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return script


def of_session(session: int) -> list[psutil.Process]:
    """Processes of a session: Ray puts its workers into groups of their own, but not into other
    sessions.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def running(
    command: list[str], folder: Path, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A command with a session of its own, of which no process stays."""
    everything = {**os.environ, **environment}
    streams: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    process = subprocess.Popen(
        command, cwd=folder, env=everything, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        left = of_session(process.pid)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
        psutil.wait_procs(left, timeout=30)

"""A function in a process of its own: its answer, its failure, its end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from flatout.distributed.processes import OUTPUT
from flatout.perf.measure.apart import Apart, Failed, run
from tests.perf.tune.planted import alive, mistaken, within


def environment_of(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def say(text: str) -> int:
    print(text, flush=True)
    os.write(2, b"native\n")
    return os.getpid()


def leave(code: int) -> None:
    print("last words", flush=True)
    sys.exit(code)


def with_worker(note: str) -> None:
    """Starts a process that does not look whether its parent lives, and hangs."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(note).write_text(str(worker.pid), encoding="utf-8")
    worker.wait()


def keep_list() -> list[int]:
    return []


def append(kept: list[int]) -> int:
    kept.append(0)
    return len(kept)


def test_a_function_answers_from_another_process_and_prints_into_a_file(tmp_path, capfd):
    output = tmp_path / "output.txt"
    assert run(partial(say, "hello"), environment={OUTPUT: str(output)}) != os.getpid()
    assert output.read_text(encoding="utf-8").splitlines() == ["hello", "native"]
    run(partial(say, "unheard"))
    assert capfd.readouterr() == ("", "")


def test_workers_of_a_loader_start_there_as_they_do_here():
    assert run(multiprocessing.get_start_method) == multiprocessing.get_start_method()


def test_it_is_no_rank_whoever_asks(monkeypatch):
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID",
    )
    for name in (*names, "OF_A_PERSON"):
        monkeypatch.setenv(name, "1")
    found = run(
        partial(environment_of, *names, "OF_A_PERSON", "PATH", "MORE"), environment={"MORE": "2"}
    )
    assert found == dict.fromkeys(names) | {
        "OF_A_PERSON": "1",
        "PATH": os.environ["PATH"],
        "MORE": "2",
    }


def test_an_exit_is_told_by_its_code_and_where_its_output_is(tmp_path):
    with pytest.raises(
        Failed, match=r"ended with exit code 3; .*output.txt has its output"
    ) as failed:
        run(partial(leave, 3), environment={OUTPUT: str(tmp_path / "output.txt")})
    assert failed.value.code == 3
    assert not failed.value.is_memory
    assert (tmp_path / "output.txt").read_text(encoding="utf-8") == "last words\n"


def test_a_mistake_is_told_in_its_own_words():
    with pytest.raises(Failed, match=r"^data: is not there$"):
        run(mistaken)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes as Linux shows them")
def test_one_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    apart = Apart(partial(with_worker, str(note)))
    try:
        assert within(60, lambda: note.exists() and note.read_text())
        with pytest.raises(Failed, match="the time was over"):
            apart.ask(append, time.time())
    finally:
        apart.close()
    assert within(10, lambda: not alive(int(note.read_text())))


def test_several_questions_are_about_the_same_thing():
    apart = Apart(keep_list)
    try:
        assert [apart.ask(append, time.time() + 60) for _ in range(3)] == [1, 2, 3]
    finally:
        apart.close()
        apart.close()

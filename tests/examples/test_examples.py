"""Every example runs, on a few rows."""

from __future__ import annotations

import importlib.util
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    HeadlinesConfig,
    MonitorConfig,
    PeopleConfig,
    TextDataConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.bits.encodings import EncodingConfig
from flatout.bits.task import GramsConfig
from tests.params import at_once

EXAMPLES = Path(__file__).parents[2] / "examples"
LEAST = {
    "plain_lightning": (400, 0.0),
    "own_model": (400, 0.0),
    "own_data": (600, 0.5),
    "bit_strings": (300, 0.2),
    "sequences": (2, 0.0),
    "windows": (2000, 0.0),
}
"""The size that an example runs with here, and what its result is at least."""

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*TensorBoard support.*",
    "ignore:.*number of training batches.*",
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", at_once(*list(LEAST)[::2], of=LEAST, seconds=3))
def test_an_example_runs_and_learns(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size, least = LEAST[name]
    assert load(name).main(size) > least


def test_the_verdict_of_a_script_names_what_limits_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # whatever else runs here
    monkeypatch.setattr("flatout.callbacks.hardware_monitor.hardware_of", lambda device: [])
    assert load("verdict_anywhere").main(200) == "data"
    assert (tmp_path / "verdict.json").stat().st_size > 1000


@pytest.mark.soak(seconds=3)
def test_a_sweep_from_python_finds_its_best_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("sweep").main(200, 2) > 0
    assert len(list((tmp_path / "outputs" / "sweep").iterdir())) == 2


@pytest.mark.soak(seconds=3)
def test_a_finished_run_answers_over_http(tmp_path):
    testclient = pytest.importorskip(
        "fastapi.testclient", reason="the extra `serve` is not installed"
    )
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40, classes=3))
    quiet = MonitorConfig(verdict=False, progress=False)
    run = fit(
        data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, folder=tmp_path / "run", monitor=quiet
    )
    client = testclient.TestClient(load("serve").make_app(run.folder))
    texts = [
        ["senate votes", "a goal"],
        ["comet"],
        [],
        *([f"goal {number}"] for number in range(40)),
    ]
    with ThreadPoolExecutor(8) as pool:  # many at a time, each of which gets its own answers
        answers = list(pool.map(lambda each: client.post("/predict", json={"texts": each}), texts))
    assert {answer.status_code for answer in answers} == {200}
    expected = [list(map(asdict, run.predict(each))) for each in texts]
    for answer, own in zip(answers, expected, strict=True):
        assert [each["label"] for each in answer.json()] == [each["label"] for each in own]
        assert [each["probability"] for each in answer.json()] == pytest.approx(
            [each["probability"] for each in own]
        )
    exact = testclient.TestClient(load("serve").make_app(run.folder, exact=True))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: exact.post("/predict", json={"texts": each}), texts))
    alone = load_predictor(run.folder, exact=True)
    expected = [list(map(asdict, alone.predict(each))) for each in texts]
    assert [each.json() for each in answers] == expected
    answered = exact.get("/counts").json()
    assert answered["texts"] == sum(map(len, texts))
    assert 0 <= answered["unlike"] <= answered["texts"]
    odd = {"texts": ["zzz " * 80] * 30}
    assert exact.post("/predict", json=odd).status_code == 200
    assert exact.get("/counts").json()["unlike"] == answered["unlike"] + 30
    refused = [{"texts": "not a list"}, {"texts": ["x" * 100_001]}, {"texts": ["x"] * 513}]
    assert {client.post("/predict", json=each).status_code for each in refused} == {422}
    assert client.post("/predict", json={"texts": ["x" * 90_000] * 50}).status_code == 413
    assert client.post("/predict", content=iter([b"{}"])).status_code == 413


def test_the_server_gives_up_on_a_body_that_does_not_come_and_refuses_half_a_character(
    tmp_path, monkeypatch
):
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    data = TextDataConfig(sample=HeadlinesConfig(rows=60, eval_rows=20, classes=2))
    quiet = MonitorConfig(verdict=False, progress=False)
    model = BiLSTMConfig(embedding=8, hidden=8)
    run = fit(data, model, folder=tmp_path / "run", monitor=quiet, trainer={"max_steps": 1})
    serve = load("serve")
    monkeypatch.setattr(serve, "MOST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        config = uvicorn.Config(serve.make_app(run.folder), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert post(address, b'{"texts": [', length=100) == 408
            assert post(address, b'{"texts": ["\\ud800"]}') == 422
            assert post(address, b'{"texts": ["' + b"\\ud800" * 100_001 + b'"]}') == 422
            assert post(address, b'{"texts": ["\\ud83d\\ude00 smiles"]}') == 200
            assert post(address, b"5\r\nhello\r\n", length=5, more=CHUNKS) == 413
            assert post(address, b"5\r\nhello\r\n", length=0, more=CHUNKS, verb="GET") == 413
            assert post(address, b"hello", length=10**9, verb="GET") == 413
        finally:
            server.should_exit = True
            thread.join()


CHUNKS = "transfer-encoding: chunked\r\n"


def post(
    address: tuple[str, int],
    body: bytes,
    *,
    length: int | None = None,
    more: str = "",
    verb: str = "POST",
) -> int:
    """The status of an answer; a `length` beyond the body's leaves the server waiting."""
    head = f"{verb} /predict HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n{more}"
    head += f"content-length: {len(body) if length is None else length}\r\n\r\n"
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(head.encode() + body)
        return int(client.recv(4096).split()[1])


def test_the_server_s_command_refuses_a_run_in_one_sentence(tmp_path, capsys):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    with pytest.raises(SystemExit) as left:
        load("serve").main([str(tmp_path)])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}: no finished run")
    assert said.count("\n") == 1


@pytest.mark.soak(seconds=2)
def test_a_run_that_answers_no_texts_is_not_served(tmp_path):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    data = BitsDataConfig(
        sample=PeopleConfig(rows=150), encoding=EncodingConfig(size=256, hashes=4)
    )
    settings = {
        "task": GramsConfig(exposure=False),
        "monitor": MonitorConfig(verdict=False, progress=False),
    }
    run = fit(data, BitMLPConfig(widths=[13]), epochs=1, folder=tmp_path / "run", **settings)
    with pytest.raises(UserError, match="no run on texts"):
        load("serve").make_app(run.folder)


@pytest.mark.soak(seconds=2)
def test_many_clients_get_the_answers_of_predict(tmp_path, capsys):
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40, classes=3))
    quiet = MonitorConfig(verdict=False, progress=False)
    run = fit(
        data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, folder=tmp_path / "run", monitor=quiet
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            load("serve").make_app(run.folder), log_level="error", lifespan="off"
        )
        server = uvicorn.Server(config)
        port = listening.getsockname()[1]
        thread = Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            capsys.readouterr()
            load("serve_load").main(run.folder, port, 20)
        finally:
            server.should_exit = True
            thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 at once", "4 at once", "16 at once"]
    assert all(line.endswith("as predict answers: 60 of 60") for line in lines)


def test_every_example_is_short_and_on_the_page_of_examples():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    printed = (EXAMPLES.parent / "docs" / "verdict_anywhere.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "verdict_anywhere.py").read_text(encoding="utf-8") in printed
    for path in sorted(EXAMPLES.glob("*.*")):
        assert f"examples/{path.name}" in page
        assert path.suffix == ".ipynb" or len(path.read_text(encoding="utf-8").splitlines()) < 120

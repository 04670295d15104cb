"""The loggers of a run: the same curves and final metrics in each, and none that ends a run."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, TextDataConfig, UserError, fit
from flatout.callbacks.loggers import (
    CSVConfig,
    MLflowConfig,
    RunLoggers,
    RunPlace,
    TensorBoardConfig,
    WandbConfig,
    build_loggers,
    chosen_loggers,
)
from flatout.report.summary import read_summary
from tests.composed import compose_run, run_train
from tests.fitting import own_cache
from tests.run_files import curve

ALL = ["tensorboard", "csv", "wandb", "mlflow"]
STEPS = 10


class Keeps(Logger):
    """A logger of one's own: keeps what it gets, and fails from a call on."""

    def __init__(self, fails_at: int = 10**9) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.calls = 0
        self.points: list[tuple[int, dict[str, float]]] = []
        self.ended: list[str] = []
        self.settings: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "keeps"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls += 1
        if self.calls >= self.fails_at:
            raise ConnectionError("the network is down")
        self.points.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, object], *args: Any, **kwargs: Any) -> None:
        self.settings |= dict(params)

    def finalize(self, status: str) -> None:
        self.ended.append(status)

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.points if name in values]


class Logs(L.Callback):
    """Logs a number of its own."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        pl_module.log("mine/batch", float(batch_idx))


def train_with_loggers(output: Path, **settings: Any):
    data = TextDataConfig(sample=HeadlinesConfig(rows=80, eval_rows=20), batch_size=16)
    monitor = MonitorConfig(flush_every=4, progress=False, verdict=False)
    model = BiLSTMConfig(embedding=4, hidden=4)
    settings = {
        "epochs": 2,
        "precision": "fp32",
        "threads": 1,
        "monitor": monitor,
    } | settings
    return fit(data, model, output=str(output), **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    # a name that a library may take for a variable
    folder = tmp_path_factory.mktemp("finished") / "a$HOME"
    folder.mkdir()
    with own_cache(folder) as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        own = Keeps()
        chosen = chosen_loggers(ALL) | {"own": own}
        return train_with_loggers(folder, logger=chosen, callbacks={"logs": Logs()}), own


def points_in_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def points_in_mlflow(folder: Path, name: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SQLAlchemy about MLflow
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        run = (folder / "mlflow_run_id").read_text(encoding="utf-8").strip()
        return [(point.step, point.value) for point in client.get_metric_history(run, name)]


def records_of_wandb(path: Path) -> Iterator[bytes]:
    """Records of an offline run: a log in blocks of 32 KiB, each piece with checksum, length and
    kind before it.
    """
    # the file's own header has 7 bytes, too
    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def points_in_wandb(folder: Path, name: str) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for data in records_of_wandb(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        if name in items:
            found.append(
                (
                    int(float(json.loads(items["trainer/global_step"]))),
                    float(json.loads(items[name])),
                )
            )
    return found


READERS = {
    "tensorboard": points_in_tensorboard,
    "csv": lambda folder, name: curve(folder / "csv", name),
    "wandb": points_in_wandb,
    "mlflow": points_in_mlflow,
}


@pytest.mark.parametrize("logger", ALL)
@pytest.mark.parametrize(
    "name",
    ["train/loss", "train/lr", "speed/rows_per_s", "time/forward_ms", "val/loss", "val/accuracy"],
)
def test_every_logger_has_the_points_of_the_run(finished, logger, name):
    folder = finished[0].folder
    expected = curve(folder, name)
    found = READERS[logger](folder, name)
    assert len(expected) >= 2
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx(
        [value for _, value in expected], rel=1e-5
    )


@pytest.mark.parametrize("logger", ALL)
def test_every_logger_has_the_final_metrics(finished, logger):
    result, _ = finished
    for name, value in result.metrics.items():
        [(step, found)] = READERS[logger](result.folder, f"final/{name.replace('/', '_')}")
        assert (step, found) == (STEPS, pytest.approx(value, rel=1e-5))
    [(_, found)] = READERS[logger](result.folder, "test/accuracy")
    assert found == pytest.approx(result.metrics["test/accuracy"], rel=1e-5)


def test_what_a_callback_logs_reaches_the_loggers_and_validations_come_once(finished):
    result, own = finished
    assert [value for _, value in own.curve("mine/batch")]
    assert points_in_tensorboard(result.folder, "mine/batch") == own.curve("mine/batch")
    assert [step for step, _ in own.curve("val/accuracy")] == [STEPS // 2, STEPS]
    assert own.settings["model.hidden"] == 4
    assert own.ended == ["success"]
    assert "log_metrics" not in vars(own)


def test_the_summary_names_the_loggers_and_everything_lies_in_the_run_folder(finished):
    result, _ = finished
    assert read_summary(result.folder)["loggers"] == [*ALL, "own"]
    assert not (result.folder / "hparams.yaml").exists()
    place = result.folder.parent.parent
    assert {path.name for path in place.iterdir()} == {"default", "cache"}
    assert [path.name for path in place.parent.iterdir()] == ["a$HOME"]


def test_mlflow_keeps_no_database_behind_a_question_mark(tmp_path):
    with pytest.raises(UserError, match=r"a name without %, [?] and #"):
        MLflowConfig().build(RunPlace(tmp_path / "mydb?x", "news"))
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_its_database_to_no_later_run_of_the_process(finished, tmp_path):
    assert "MLFLOW_TRACKING_URI" not in os.environ
    logger = MLflowConfig().build(RunPlace(tmp_path, "news"))
    assert logger.run_id
    assert (tmp_path / "mlflow.db").exists()
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_mlflow_reports_nothing_to_its_makers(finished):
    telemetry = importlib.import_module("mlflow.environment_variables")
    assert telemetry.MLFLOW_DISABLE_TELEMETRY.get()


def test_a_logger_that_fails_in_mid_run_is_dropped_with_one_warning(tmp_path):
    failing = Keeps(fails_at=3)
    whole = Keeps()
    with pytest.warns(
        RuntimeWarning, match=r"^logger failing ends here: the network is down$"
    ) as found:
        result = train_with_loggers(
            tmp_path, logger={"failing": failing, "whole": whole}, callbacks={"logs": Logs()}
        )
    assert sum("ends here" in str(each.message) for each in found) == 1
    assert (failing.calls, failing.ended) == (3, [])
    assert read_summary(result.folder)["status"] == "finished"
    assert [step for step, _ in whole.curve("train/loss")] == [
        step for step, _ in curve(result.folder, "train/loss")
    ]


def test_an_interrupted_run_ends_its_loggers_as_failed(tmp_path):
    class Breaks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("broken")

    own = Keeps()
    with pytest.raises(RuntimeError, match="broken"):
        train_with_loggers(tmp_path, logger={"own": own}, callbacks={"breaks": Breaks()})
    assert own.ended == ["failed"]


def test_without_a_logger_the_run_keeps_its_table_and_writes_no_events(tmp_path, capsys):
    result = train_with_loggers(tmp_path, logger="none", epochs=1)
    assert curve(result.folder, "train/loss")
    assert not list(result.folder.glob("events.*"))
    assert read_summary(result.folder)["loggers"] == []
    assert "tensorboard --logdir" not in capsys.readouterr().out


def test_a_resumed_run_replaces_no_table_of_its_first_part(tmp_path):
    first = train_with_loggers(tmp_path, logger="csv", epochs=1)
    again = train_with_loggers(tmp_path, logger="csv", epochs=2, resume=str(first.folder))
    assert again.folder == first.folder
    assert curve(first.folder / "csv", "val/loss")[0][0] == STEPS // 2
    resumed = curve(again.folder / "csv" / f"from-step-{STEPS // 2}", "train/loss")
    assert resumed
    assert min(step for step, _ in resumed) > STEPS // 2


def test_names_and_settings_choose_loggers():
    assert (
        chosen_loggers(None)
        == {"tensorboard": TensorBoardConfig()}
        == chosen_loggers("tensorboard")
    )
    assert chosen_loggers(["csv", "tensorboard"]) == {
        "csv": CSVConfig(),
        "tensorboard": TensorBoardConfig(),
    }
    assert chosen_loggers("none") == chosen_loggers([]) == {}
    own = Keeps()
    assert chosen_loggers({"own": own, "csv": CSVConfig()}) == {"own": own, "csv": CSVConfig()}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "tensorbord",
            r"logger: 'tensorbord' \(tensorboard, csv, .*none\)\. Did you mean 'tensorboard'\?",
        ),
        ({"x": 3}, r"logger\.x: int is no logger"),
    ],
)
def test_a_logger_that_does_not_exist_is_named(value, sentence):
    with pytest.raises(UserError, match=sentence):
        chosen_loggers(value)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_names_its_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    words = (
        rf"logger={name}: the package {name} is not installed \(tensorboard, csv need no extra\)\."
    )
    with pytest.raises(UserError, match=rf"^{words} pip install 'flatout\[{name}\]'\.$"):
        chosen_loggers(name)


def test_a_logger_that_cannot_start_is_refused_before_training(tmp_path):
    (tmp_path / "csv").write_text("in the way")
    place = RunPlace(tmp_path, "made up")
    with (
        pytest.raises(UserError, match=r"^logger=csv: cannot start: .*Set logger=none"),
        RunLoggers(build_loggers({"csv": CSVConfig()}, place)),
    ):
        pass


class CannotStart(Keeps):
    def log_hyperparams(self, params: Mapping[str, object], *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the network is down")


def test_a_logger_that_cannot_start_leaves_threads_and_the_other_loggers_as_they_were():
    before = threading.excepthook
    started = Keeps()
    with (
        pytest.raises(UserError, match=r"^logger=late: cannot start"),
        RunLoggers({"own": started, "late": CannotStart()}),
    ):
        pass
    assert threading.excepthook is before
    assert started.ended == ["failed"]


def test_ranks_after_the_first_have_a_logger_that_writes_nothing():
    [logger] = RunLoggers({}).for_trainer(is_first=False)
    assert isinstance(logger, DummyLogger)
    assert RunLoggers({}).for_trainer() is False


def test_loggers_of_trainer_settings_are_kept(tmp_path):
    own = CSVLogger(str(tmp_path))
    assert build_loggers({}, RunPlace(tmp_path, "made up"), own) == {"trainer.logger 1": own}
    assert build_loggers({}, RunPlace(tmp_path, "made up"), True) == {}


def test_the_command_line_chooses_one_several_or_no_loggers():
    assert compose_run([]).logger == {"tensorboard": TensorBoardConfig()}
    assert compose_run(["logger=csv"]).logger == {"csv": CSVConfig()}
    assert compose_run(["logger=[csv,tensorboard]"]).logger == {
        "csv": CSVConfig(),
        "tensorboard": TensorBoardConfig(),
    }
    assert compose_run(["logger=none"]).logger == {}
    assert compose_run(["logger=[tensorboard,csv]", "logger.csv.folder=table"]).logger[
        "csv"
    ] == CSVConfig(folder="table")


def test_settings_of_wandb_are_checked(monkeypatch, capsys):
    words = ["logger=wandb", "logger.wandb.project=news", "logger.wandb.tags=[a,b]"]
    assert compose_run(words).logger == {"wandb": WandbConfig(project="news", tags=["a", "b"])}
    assert run_train(["logger=wandb", "logger.wandb.projct=news"], monkeypatch) == 2
    assert "logger.wandb.projct: no such key" in capsys.readouterr().err


def test_settings_of_mlflow_are_read():
    assert compose_run(["logger=mlflow", "logger.mlflow.name=x"]).logger == {
        "mlflow": MLflowConfig(name="x")
    }


@pytest.mark.soak(seconds=2)
def test_a_logger_of_ones_own_package_is_used_beside_ours(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_logging.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\nclass Mine(CSVLogger):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "data.sample.rows=80",
        "data.sample.eval_rows=20",
        "data.batch_size=16",
        "trainer.max_epochs=1",
    ]
    words += [
        "model.embedding=4",
        "model.hidden=4",
        "precision=fp32",
        "monitor.progress=false",
        f"output={tmp_path}/runs",
    ]
    words += [
        "+logger.mine._target_=my_logging.Mine",
        f"+logger.mine.save_dir={tmp_path}/runs/mine",
    ]
    assert run_train(words, monkeypatch) == 2
    assert (
        "Trust a package of yours on the command line: +allow_targets=[my_logging]"
        in capsys.readouterr().err
    )
    assert run_train([*words, "allow_targets=[my_logging]"], monkeypatch) == 0
    [folder] = (tmp_path / "runs" / "default").iterdir()
    assert list(folder.glob("events.*"))
    [table] = (tmp_path / "runs" / "mine").rglob("metrics.csv")
    assert "val/accuracy" in table.read_text(encoding="utf-8").splitlines()[0]


STAND_IN = '''
"""Has the three functions of trackio that a logger needs, and keeps what they are given."""
CALLS = []

class Run:
    def log(self, metrics, step=None):
        CALLS.append(("log", step, metrics))

    def finish(self):
        CALLS.append(("finish",))

def init(project, name, config, resume):
    CALLS.append(("init", project, name, config, resume))
    return Run()
'''


def test_trackio_is_imported_when_it_is_chosen_and_gets_settings_and_points(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text(STAND_IN)
    chosen = chosen_loggers("trackio")
    place = RunPlace(tmp_path / "monday", "news")
    if importlib.util.find_spec("trackio") is None:
        with pytest.raises(UserError, match=r"trackio is not installed\. pip install 'flatout\[tr"):
            build_loggers(chosen, place)
    monkeypatch.syspath_prepend(str(tmp_path))
    loggers = build_loggers(chosen, place)
    assert "trackio" not in sys.modules
    with RunLoggers(loggers, settings={"seed": 3}) as opened:
        opened.on_flush(5, 0.1, {"train/loss": 0.5})
    calls = sys.modules.pop("trackio").CALLS
    assert calls == [
        ("init", "news", "monday", {"seed": "3"}, "allow"),
        ("log", 5, {"train/loss": 0.5}),
        ("finish",),
    ]

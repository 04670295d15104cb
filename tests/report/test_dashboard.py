"""TensorBoard's pages of a run, read back from its event files, and once in a real browser."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics import precision_recall_fscore_support
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray
from tests.fitting import own_cache
from torch.utils.tensorboard._utils import figure_to_image

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, OptimConfig, TextDataConfig, fit
from flatout.data.problem import Problem
from flatout.report.closing import closing_markdown
from flatout.report.dashboard import (
    confusion_figure,
    event_file,
    layout,
    precision_over_recall,
    time_figure,
    write_hyperparameters,
)
from flatout.report.figures import COLOURS
from flatout.report.summary import empty_summary, read_summary
from flatout.tasks.metrics import TaskMetrics

JSON = {"Content-Type": "application/json"}
EVERYTHING = {"tensors": 0, "images": 0, "scalars": 0}


def train_headlines(folder: Path, epochs: int = 2, resume: str | None = None):
    return fit(
        TextDataConfig(sample=HeadlinesConfig(rows=300, eval_rows=60, classes=3), batch_size=32),
        BiLSTMConfig(embedding=16, hidden=16),
        epochs=epochs,
        output=str(folder),
        optim=OptimConfig(lr=0.01),
        monitor=MonitorConfig(flush_every=2),
        resume=resume,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run, and what it has counted of its validation rows."""
    from flatout.run import our_parts

    folder = tmp_path_factory.mktemp("finished")
    kept = []
    write = our_parts.write_dashboard
    with own_cache(folder) as patch:
        patch.setattr(
            our_parts, "write_dashboard", lambda *given: (kept.append(given[-1]), write(*given))
        )
        result = train_headlines(folder)
    return result, kept[0]


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance=EVERYTHING)
    return found.Reload()


def text(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors(f"{tag}/text_summary")
    ]


def pixels(events: EventAccumulator, tag: str) -> np.ndarray:
    [event] = events.Images(tag)
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))


@pytest.mark.soak(seconds=2)
def test_charts_are_laid_out_over_curves_that_exist(finished):
    events = read(finished[0].folder)
    [event] = events.Tensors("custom_scalars__config__")
    found = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in found.category] == [
        "speed",
        "time",
        "memory",
        "loss",
        "quality",
    ]
    tags = [
        tag
        for category in found.category
        for chart in category.chart
        for tag in chart.multiline.tag
    ]
    written = events.Tags()["scalars"]
    for tag in tags:
        is_sampled = tag.startswith("host/")  # once a second, which this run may not have lasted
        assert is_sampled or any(re.match(tag, name) for name in written), tag


def test_a_card_has_charts_of_its_own():
    found = layout(["accuracy"], has_card=True)
    assert "gpu/memory_gb$" in found["memory"]["memory, GB"][1]
    assert {"gpu/power_w$", "gpu/temperature_c$"} <= {
        tag for _, tags in found["gpu"].values() for tag in tags
    }


def test_the_page_of_settings_has_those_of_the_run_and_its_final_metrics(finished):
    result, _ = finished
    events = read(result.folder)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["optim.lr"].number_value == 0.01
    assert settings["model.hidden"].number_value == 16
    assert settings["data.batch_size"].number_value == 32
    assert settings["optim.schedule"].string_value == "linear"
    for name, value in result.metrics.items():
        [point] = events.Scalars(f"final/{name.replace('/', '_')}")
        assert point.value == pytest.approx(value, rel=1e-6)
    validations = read_summary(result.folder)["training"]["epochs"]
    # the best one's is no point of this curve
    assert len(events.Scalars("val/accuracy")) == validations


def test_pictures_show_the_validation_rows_and_the_time_of_a_step(finished):
    result, counted = finished
    events = read(result.folder)
    assert counted.confusion.sum() == 60
    assert counted.confusion.trace() / 60 == pytest.approx(result.metrics["val/accuracy"])
    expected = confusion_figure(counted.classes, counted.confusion)
    assert np.array_equal(
        pixels(events, "validation/confusion"), figure_to_image(expected).transpose(1, 2, 0)
    )
    step_ms = read_summary(result.folder)["speed"]["step_ms"]
    assert np.array_equal(
        pixels(events, "time/each_step"), figure_to_image(time_figure(step_ms)).transpose(1, 2, 0)
    )


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_confusion_figure_has_the_count_of_each_cell_and_the_commonest_classes_first():
    counts = np.array([[3, 0, 1], [0, 20, 5], [2, 0, 0]])
    figure = confusion_figure(["a", "<b> $x$", "日本"], counts)
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["<b> $x$", "a", "日本"]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "20",
        (2, 0): "5",
        (1, 1): "3",
        (2, 1): "1",
        (1, 2): "2",
    }
    assert np.asarray(axes.images[0].get_array())[0] == pytest.approx([0.8, 0, 0.2])
    confusion = confusion_figure([f"class {i}" for i in range(60)], np.eye(60, dtype=int))
    assert len(confusion.axes[0].get_yticklabels()) == 40
    assert "the 40 commonest of 60" in confusion.texts[0].get_text()


def test_the_figure_of_a_step_names_each_part_with_its_time_and_share():
    figure = time_figure({"wait": 1.0, "transfer": None, "forward": 3.0})
    assert texts(figure) == ["wait", "1.000 ms", "25.0%", "forward", "3.000 ms", "75.0%"]
    bars = figure.axes[0].patches[::2]
    assert [bar.get_width() for bar in bars] == [0.25, 0.75]
    assert time_figure({"wait": 1.0, "transfer": None}) is None


def test_precision_over_recall_is_that_of_the_validation_rows(finished):
    result, counted = finished
    events = read(result.folder)
    for place, name in enumerate(counted.classes):
        [event] = events.Tensors(f"validation/{name}")
        right, wrong, left, missed, precision, recall = make_ndarray(event.tensor_proto)
        support = counted.confusion[place].sum()
        assert set(right + wrong + left + missed) == {60.0}
        # everything is answered
        assert (recall[0], precision[0]) == pytest.approx((1, support / 60))
        assert (np.diff(recall) <= 0).all()
        assert precision == pytest.approx(
            np.where(right + wrong > 0, right / np.maximum(right + wrong, 1), 1)
        )


@pytest.mark.parametrize(
    ("problem", "count"),
    [
        (Problem.single, 2),
        (Problem.single, 5),
        (Problem.multi, 4),
    ],
)
def test_points_of_the_curves_are_those_of_sklearn(problem, count):
    metrics = TaskMetrics.build(problem, [f"c{i}" for i in range(count)])
    outputs = torch.randn(200, count) * 2
    targets = torch.randint(0, count, (200,))
    probabilities = outputs.softmax(-1)
    wanted = torch.nn.functional.one_hot(targets, count)
    if problem is Problem.multi:
        targets = torch.randint(0, 2, (200, count))
        wanted = targets
        probabilities = outputs.sigmoid()
    for part in range(0, 200, 50):
        metrics.update(outputs[part : part + 50], targets[part : part + 50])
    curves = precision_over_recall(metrics.counted())
    assert len(curves) == count
    for place in range(count):
        points = curves[f"c{place}"]
        for point in (20, 63, 90):
            # Its threshold is not said, but how many rows reach it is: those with the highest
            # probability.
            answered = int(points[0, point] + points[1, point])
            yes = np.zeros(200, bool)
            yes[np.argsort(-probabilities[:, place].numpy(), kind="stable")[:answered]] = True
            precision, recall, _, _ = precision_recall_fscore_support(
                wanted[:, place], yes, average="binary", zero_division=1.0
            )
            assert points[4:, point] == pytest.approx([precision, recall])


def test_only_the_commonest_of_many_classes_have_curves():
    metrics = TaskMetrics.build(Problem.single, [f"c{i}" for i in range(30)])
    targets = torch.arange(30).repeat_interleave(torch.arange(30))
    metrics.update(torch.randn(len(targets), 30), targets)
    assert list(precision_over_recall(metrics.counted())) == [f"c{i}" for i in range(29, 9, -1)]


def test_the_closing_text_tells_every_choice_with_its_evidence(finished):
    result, _ = finished
    [(step, told)] = text(read(result.folder), "verdict")
    summary = read_summary(result.folder)
    assert step == summary["training"]["steps"]
    assert told == closing_markdown(summary)
    rows = [line for line in told.splitlines() if line.startswith("|")]
    for choice in summary["choices"]:
        assert any(choice["name"] in row and choice["why"].split()[0] in row for row in rows), (
            choice
        )
    assert "rows/s" in told
    assert "each batch" in told
    assert "test/accuracy" in told.replace("\\", "")


def test_what_stands_in_a_cell_cannot_leave_it():
    summary = empty_summary()
    summary["verdict"] = {
        "limit": "waiting for data",
        "share": 0.43,
        "fix": "data.feed=resident",
        "predicted_gain": 1.7,
    }
    summary["choices"] = [
        {
            "name": "a|b",
            "value": "<script>",
            "why": "x\n| y |",
            "evidence": "*[z](u)*",
        }
    ]
    told = closing_markdown(summary)
    assert "**Verdict:** waiting for data 43.0%: data.feed=resident" in told
    assert told.splitlines()[-1] == r"| a\|b | &lt;script&gt; | x\\n\| y \| | \*\[z](u)\* |"


@pytest.mark.soak(seconds=3)
def test_a_run_that_is_gone_on_with_stands_there_once(tmp_path):
    first = train_headlines(tmp_path, epochs=1)
    time.sleep(1.1)  # TensorBoard reads files in the order of the seconds they were begun in
    again = train_headlines(tmp_path, epochs=2, resume=str(first.folder))
    assert again.folder == first.folder
    assert [
        len(list(again.folder.glob(f"events.*{suffix}"))) for suffix in (".closing", ".hparams")
    ] == [1, 1]
    events = read(again.folder)
    steps = read_summary(again.folder)["training"]["steps"]
    assert [step for step, _ in text(events, "verdict")] == [steps]
    assert [point.step for point in events.Scalars("final/test_accuracy")] == [steps]
    told = [point.step for point in events.Scalars("train/loss")]
    assert told == sorted(set(told))
    assert (
        len(
            {
                event.tensor_proto.string_val[0]
                for event in events.Tensors("custom_scalars__config__")
            }
        )
        == 1
    )


def test_closing_points_stay_where_a_file_of_curves_was_begun_in_the_same_second_under_a_later_name(
    tmp_path,
):
    # a second that lies after that of any other file
    curves = tmp_path / "events.out.tfevents.9999999990.host.1.9"
    with (tmp_path / "curves").open("wb") as file:
        writer = RecordWriter(file)
        for event in (
            Event(step=11, wall_time=1.0, session_log=SessionLog(status=SessionLog.START)),
            Event(
                step=20,
                wall_time=2.0,
                summary=Summary(value=[Summary.Value(tag="train/loss", simple_value=0.5)]),
            ),
        ):
            writer.write(event.SerializeToString())
    (tmp_path / "curves").rename(curves)
    for accuracy in (0.25, 0.75):  # the second one replaces the first
        write_hyperparameters(tmp_path, {"lr": 0.1}, {"accuracy": accuracy}, step=20)
    events = read(tmp_path)
    assert [(point.step, point.value) for point in events.Scalars("final/accuracy")] == [(20, 0.75)]
    assert [point.value for point in events.Scalars("train/loss")] == [0.5]
    assert len(list(tmp_path.iterdir())) == 2


def asked(url: str, patience_s: float = 40.0, **given) -> bytes:
    """An answer of TensorBoard, which may still be starting or reading."""
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, **given), timeout=10) as answer:
                if (told := answer.read()) not in (b"{}", b"[]"):
                    return told
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.3)
        assert time.monotonic() < until, url


def shot(browser: str, url: str, folder: Path) -> np.ndarray:
    """What a page of TensorBoard shows, without the bars above and beside it."""
    picture = folder / "shot.png"
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'chromium'}",
            "--window-size=1200,900",
            "--virtual-time-budget=20000",
            f"--screenshot={picture}",
            url,
        ],
        check=True,
        capture_output=True,
        timeout=90,
    )
    return np.asarray(Image.open(picture).convert("RGB"))[100:, 350:]


@pytest.mark.browser
def test_tensorboard_shows_the_pages_in_a_browser(finished, tmp_path):
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:  # only the pictures need one; what the pages are made of is tested without
        pytest.skip("no chromium is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result, counted = finished
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(result.folder),
        "--port",
        str(port),
    ]
    home = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        charts = json.loads(asked(f"{home}/data/plugin/custom_scalars/layout"))
        assert [each["title"] for each in charts["category"]] == [
            "speed",
            "time",
            "memory",
            "loss",
            "quality",
        ]
        curves = json.loads(
            asked(
                f"{home}/data/plugin/pr_curves/pr_curves?run=.&tag=validation/{counted.classes[0]}"
            )
        )
        assert max(curves["."][0]["recall"]) == 1
        [told] = json.loads(asked(f"{home}/data/plugin/text/text?run=.&tag=verdict/text_summary"))
        assert "<table>" in told["text"]
        assert "rows/s" in told["text"]
        page = json.loads(asked(f"{home}/data/plugin/hparams/experiment", data=b"{}", headers=JSON))
        assert {"optim.lr", "model.hidden"} <= {each["name"] for each in page["hparamInfos"]}
        assert "final/test_accuracy" in {each["name"]["tag"] for each in page["metricInfos"]}
        # An empty page has one colour where the charts are, and words in grey where the pictures
        # are.
        charts_shown = shot(browser, f"{home}/#custom_scalars", tmp_path)
        assert len(np.unique(charts_shown.reshape(-1, 3), axis=0)) > 300
        pictures_shown = shot(browser, f"{home}/#images", tmp_path)
        backward = tuple(bytes.fromhex(COLOURS[2].removeprefix("#")))
        assert (pictures_shown == backward).all(-1).sum() > 300  # its part of the bar
    finally:
        server.terminate()
        server.wait(20)


def test_an_event_file_needs_no_room_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    with event_file(tmp_path, ".end") as writer:
        writer.add_scalar("loss", 1.0, 1)
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("events.out")

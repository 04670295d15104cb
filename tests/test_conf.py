"""Every file of `conf/` composes; every experiment, trainer and debug option trains a batch."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hydra import compose, initialize_config_dir

from flatout.bits.people import PeopleConfig
from flatout.checkpoints.same_run import require_same_run
from flatout.cli import words as words_of
from flatout.cli.composing import known_keys
from flatout.cli.train import register_schemas
from flatout.config import RunConfig
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig
from flatout.data.samples.tweets import TweetsConfig
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.errors import UserError
from flatout.models.encoder.transformer import TransformerConfig
from flatout.report.summary import read_summary
from tests.composed import CONF, compose_run, only_folder, options_of, run_train
from tests.params import at_once
from tests.run_files import losses

GLOBAL = ("experiment", "sweep", "debug", "ladder")
"""Groups whose options set keys of several groups, and ladders, which are no settings of a run."""
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in GLOBAL
)
BITS = ["model=bitmlp", "task=grams"]
TAGS = ["model=transformer", "task=tagging"]
SEQUENCES = ["data.features=[voltage]", "data.target=soc"]
COMPANIONS = {
    "task=mlm": ["model=transformer"],
    "optim=muon": ["model=transformer"],
    **{"data=bits": BITS, "data=people": BITS, "data=tagged_tweets": TAGS},
    **{
        "model=bitmlp": ["data=people", "task=grams"],
        "task=grams": ["data=people", "model=bitmlp"],
    },
    "task=tagging": ["data=tagged_tweets", "model=transformer"],
    **{
        name: ["model=rnn", "task=sequence", *SEQUENCES] for name in ("data=sequence", "data=cells")
    },
    **{name: ["data=cells", "task=sequence"] for name in ("model=rnn", "model=window_mlp")},
    "task=sequence": ["data=cells", "model=rnn"],
}
"""The other options that an option needs."""
OF_ENCODERS = [
    name for name in options_of("experiment") if name.startswith("bert_") or "tweets" in name
]
OF_ENCODERS = [name for name in OF_ENCODERS if not name.endswith("_scratch")]
OF_FILES = {
    name: ("data.train", "train.csv")
    for name in options_of("experiment")
    if name.endswith("_scratch")
}
OF_FILES |= {
    "huffpost41": ("data.train", "train.csv"),
    "etth1_forecast": ("data.source", "ETTh1.csv"),
}
"""Experiments that read a file of yours: the key that names it, and its usual name."""
UNLIKE = ("bloom_bigrams",)
"""A network on bit strings; the others take their turn in slices."""
SOAK = pytest.mark.soak(seconds=5)
ROWS = ["data.sample.rows=200", "data.sample.eval_rows=40"]
SMALL = [
    "data.batch_size=16",
    "data.accumulate=1",
    "monitor.progress=false",
    "logger=none",
    "threads=1",
]
TINY = [*ROWS, *SMALL, "model.embedding=8", "model.hidden=8"]


def tiny_words(experiment: str) -> list[str]:
    """Sizes that make one batch of an experiment cheap."""
    config = compose_run([f"experiment={experiment}"])
    if isinstance(config.data, SequenceDataConfig):
        cells = ["data.sample.cells=2", "data.sample.cycles=2", "data.sample.samples=130"]
        is_theirs = config.data.time == "date"
        ours = [
            "data.target=[voltage,soc]",
            "data.time=time_s",
            "data.split_by=auto",
            "data.split_at=null",
        ]
        return [*SMALL, *cells, *(["data.source=null", *ours] if is_theirs else [])]
    if isinstance(config.data.sample, PeopleConfig):
        # A two-step hash solves its exposure report in 25 s; the other encodings write theirs.
        without_report = ["task.exposure=false"] if experiment == "twostep_bigrams" else []
        return [*SMALL, "data.sample.rows=400", "data.encoding.size=128", *without_report]
    if isinstance(config.model, TransformerConfig):
        return [*SMALL, *ROWS, "model.hidden=16", "model.layers=1", "model.heads=2"]
    classes = ["data.sample.classes=2"] if isinstance(config.data.sample, HeadlinesConfig) else []
    built_in = ["data.train=null"] if config.data.train else []
    return [*SMALL, *ROWS, *classes, *built_in, "model.embedding=8"]


@pytest.mark.parametrize("option", at_once(*OPTIONS[::4], of=OPTIONS, seconds=1))
def test_every_option_composes_to_dataclasses(option):
    config = compose_run([option, *COMPANIONS.get(option, [])])
    assert type(config) is RunConfig
    assert getattr(config, option.partition("=")[0]) is not None


def test_the_groups_that_users_of_hydra_templates_expect_have_their_options():
    assert {"default", "cpu", "gpu", "ddp", "fsdp"} <= set(options_of("trainer"))
    assert {"default", "none"} <= set(options_of("callbacks"))
    assert {"overfit", "one_batch", "profile"} <= set(options_of("debug"))
    assert {"text", "headlines", "tweets", "tagged_tweets", "bits", "people"} <= set(
        options_of("data")
    )


@pytest.mark.parametrize("name", options_of("sweep"))
def test_every_sweep_opens_with_its_command_and_searches_settings_that_exist(name):
    head, command = (CONF / "sweep" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:2]
    assert head == "# @package _global_"
    assert command.startswith("# python -m flatout sweep ")
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", [f"+sweep={name}"], return_hydra_config=True)
    assert composed.hydra.sweeper.space.keys() <= set(known_keys())


@pytest.mark.parametrize(
    "name", at_once(*options_of("experiment")[::4], of=options_of("experiment"), seconds=1)
)
def test_every_experiment_opens_with_its_command_and_names_its_runs(name):
    assert compose_run([f"+experiment={name}"]).name == name
    head = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:2]
    assert head[0] == "# @package _global_"
    assert head[1].startswith(f"# python -m train +experiment={name}")


@pytest.mark.parametrize("name", OF_ENCODERS)
def test_an_experiment_with_an_encoder_opens_with_hardware_time_and_score(name):
    lines = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(
        line.removeprefix("# ")
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    )
    assert re.search(r"\d CPU cores?\b", head), "hardware"
    assert re.search(r"\d (s|seconds|minutes?)\b", head), "time"
    assert re.search(r"(accuracy|recall|F1)( of \w+ \w+| of \w+)? \d+\.\d", head), "score"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in UNLIKE else SOAK) for name in options_of("experiment")],
)
def test_every_experiment_trains_one_batch(name, tmp_path, monkeypatch):
    words = [
        f"+experiment={name}",
        *tiny_words(name),
        "trainer.devices=1",
        f"output={tmp_path}",
        "+debug=one_batch",
    ]
    assert run_train([*words, "hydra.mode=RUN"], monkeypatch) == 0
    folder = only_folder(tmp_path / name)
    summary = read_summary(folder)
    assert summary["status"] == "finished"
    assert summary["training"]["steps"] == 1
    assert summary["command"].startswith(f"python -m train +experiment={name}")
    assert (folder / "overrides.txt").read_text().splitlines() == words


@pytest.mark.parametrize("name", at_once(*list(OF_FILES)[::4], of=OF_FILES, seconds=1))
def test_an_experiment_on_files_of_yours_asks_for_them(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_train([f"+experiment={name}"], monkeypatch) == 2
    key, file = OF_FILES[name]
    assert capsys.readouterr().err.startswith(f"{key}: no such file: {file}.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", at_once("default", of=["default", "cpu", "ddp"], seconds=2))
def test_a_trainer_option_trains_one_batch(option, tmp_path, monkeypatch):
    words = [f"trainer={option}", *TINY, "debug=one_batch", f"output={tmp_path}"]
    assert run_train(words, monkeypatch) == 0
    summary = read_summary(only_folder(tmp_path / "default"))
    assert (summary["status"], summary["training"]["steps"]) == ("finished", 1)


@pytest.mark.soak(seconds=4)
@pytest.mark.parametrize("option", [pytest.param("ddp", marks=SOAK), "fsdp"])
def test_a_trainer_option_trains_one_batch_on_two_cpu_processes(option, tmp_path, monkeypatch):
    devices = ["trainer.accelerator=cpu", "trainer.devices=2"]
    words = [f"trainer={option}", *devices, *TINY, "debug=one_batch", f"output={tmp_path}"]
    assert run_train(words, monkeypatch) == 0
    assert read_summary(only_folder(tmp_path / "default"))["training"]["rows_per_step"] == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_gpu_option_refuses_a_machine_without_one(tmp_path, monkeypatch, capsys):
    assert run_train(["trainer=gpu", *TINY, f"output={tmp_path}"], monkeypatch) == 2
    refused = (
        "trainer.accelerator: gpu, but this machine has no GPU. Set trainer=cpu, or leave it out."
    )
    assert capsys.readouterr().err.splitlines() == [refused]


def test_the_fsdp_option_asks_for_slices_on_all_gpus():
    trainer = compose_run(["trainer=fsdp"]).trainer
    assert (trainer["strategy"], trainer["devices"], trainer["max_epochs"]) == (
        "fsdp",
        "auto",
        None,
    )


def test_overfitting_repeats_the_same_batches_in_every_epoch(tmp_path, monkeypatch):
    frozen = ["optim.lr=1e-12", "optim.schedule=constant", "model.dropout=0", "precision=fp32"]
    words = ["debug=overfit", "trainer.max_epochs=3", *frozen, *TINY, f"output={tmp_path}"]
    assert run_train(words, monkeypatch) == 0
    found = losses(only_folder(tmp_path / "default"))
    assert len(found) == 9
    assert found[3:6] == pytest.approx(found[:3])
    assert found[6:] == pytest.approx(found[:3])
    assert len({round(loss, 4) for loss in found[:3]}) == 3, "three different batches"


@pytest.mark.soak(seconds=3)
def test_overfitting_drives_the_training_loss_down(tmp_path, monkeypatch):
    words = [
        "debug=overfit",
        "trainer.max_epochs=20",
        "optim.lr=0.03",
        "data.sample.classes=2",
        *TINY,
        f"output={tmp_path}",
    ]
    assert run_train(words, monkeypatch) == 0
    found = losses(only_folder(tmp_path / "default"))
    assert max(found[-3:]) < 0.5 * min(found[:3])


@pytest.mark.soak(seconds=3)
def test_a_profile_to_debug_with_leaves_a_trace_of_a_short_run(tmp_path, monkeypatch):
    words = ["debug=profile", "monitor.profile.wait=2", "trainer.limit_train_batches=10"]
    words = [*words, *TINY, f"output={tmp_path}"]
    assert run_train(words, monkeypatch) == 0
    folder = only_folder(tmp_path / "default")
    assert (folder / "trace.json.gz").is_file()
    assert (folder / "operators.csv").is_file()
    assert read_summary(folder)["training"]["steps"] == 10


def test_debug_overrides_an_experiment_in_whatever_order_they_are_typed():
    for words in (
        ["debug=one_batch", "experiment=headlines_cnn"],
        ["experiment=headlines_cnn", "+debug=one_batch"],
    ):
        config = compose_run(words)
        assert (config.trainer["max_epochs"], config.name) == (1, "headlines_cnn")


def test_a_group_is_chosen_with_or_without_a_plus_sign():
    typed = {
        "experiment=headlines_cnn": "+experiment=headlines_cnn",
        "+experiment=headlines_cnn": "+experiment=headlines_cnn",
        "sweep=bloom": "+sweep=bloom",
        "debug=overfit": "+debug=overfit",
        "+monitor=profile": "monitor=profile",
        "+trainer=cpu": "trainer=cpu",
        "trainer=cpu": "trainer=cpu",
        "launcher.parallel=2": "hydra.launcher.parallel=2",
        "+trainer.foo=1": "+trainer.foo=1",
        "name=mine": "name=mine",
    }
    assert {word: words_of.translate_word(word) for word in typed} == typed


def test_no_callbacks_leaves_out_the_progress_line_and_the_verdict():
    config = compose_run(["callbacks=none"])
    assert (config.callbacks, config.monitor.progress, config.monitor.verdict) == ({}, False, False)
    assert compose_run(["callbacks=default"]) == compose_run([])


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("text", HeadlinesConfig),
        ("headlines", HeadlinesConfig),
        ("tweets", TweetsConfig),
    ],
)
def test_a_sample_is_an_option_of_data(option, kind):
    sample = compose_run([f"data={option}", "data.sample.rows=77"]).data.sample
    assert sample == kind(rows=77)


def test_tagged_tweets_and_people_are_options_of_data():
    tagged = compose_run(["data=tagged_tweets", *TAGS]).data
    assert (tagged.problem, tagged.sample) == (Problem.tags, TaggedTweetsConfig())
    assert compose_run(["data=people", *BITS, "data.sample.typos=0.5"]).data.sample == PeopleConfig(
        typos=0.5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data.tweets.rows=5", "data.tweets: no such key."),
        (
            "data.sample.row=5",
            "data.sample.row: no such key (rows, eval_rows, classes, noise, seed). Did you mean",
        ),
        ("+trainer.strategy=auto", "Leave out the plus sign: trainer.strategy=auto."),
        *at_once(
            of=[
                ("experiment=mine", "To name a run, set name=mine."),
                (
                    "data=tweets data.sample.classes=3",
                    "data.sample.classes: no such key (rows, eval_rows, noise, seed).",
                ),
                ("data.sample.rows=x", "data.sample.rows: 'x' does not fit (a whole number)"),
                ("task=tagging model=transformer data.problem=tags", "Set data=tagged_tweets."),
                (
                    "data=tweets data.problem=tags",
                    "data.problem: tags does not fit the built-in sample.",
                ),
                (
                    "debug=one_bach",
                    "debug: no option 'one_bach' (one_batch, overfit, profile). Did you mean 'one",
                ),
                ("name=a/b", "name: 'a/b'"),
            ],
            seconds=1,
        ),
    ],
)
def test_a_key_that_is_not_there_or_does_not_fit_is_one_message(
    words, message, tmp_path, monkeypatch, capsys
):
    assert run_train([f"output={tmp_path / 'runs'}", *words.split()], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_key_that_is_not_there_is_refused_in_a_file_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "old.yaml").write_text("# @package _global_\nexperiment: old\n")
    words = ["+experiment=old", "--config-dir", str(tmp_path), f"output={tmp_path / 'runs'}"]
    assert run_train(words, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "experiment: no such key" in line


def test_a_run_lies_in_the_folder_of_its_name(tmp_path, monkeypatch):
    assert (
        run_train(["name=mine", "debug=one_batch", *TINY, f"output={tmp_path}"], monkeypatch) == 0
    )
    assert read_summary(only_folder(tmp_path / "mine"))["experiment"] == "mine"


@pytest.mark.parametrize(
    "group", ["data", "model", "task", "trainer", "callbacks", "logger", "debug"]
)
def test_the_start_page_lists_every_option_of_a_group(group):
    start = (CONF.parent / "docs" / "start.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{group}` \| (.+) \|$", start, re.MULTILINE)
    assert set(options_of(group)) <= set(re.findall(r"`(\w+)`", row))


def test_a_run_resumes_on_the_same_data_whatever_the_settings_of_an_unused_sample():
    then = {
        "data": "key",
        "model": "m",
        "torch": "t",
        "precision": "p",
        "plan": {},
    }
    then |= {"settings": {"data.sample.rows": 6, "optim.name": "adamw"}}
    now = {**then, "settings": {"data.sample.rows": 4, "optim.name": "adamw"}}
    assert require_same_run(then, now, anyway=False) == []
    with pytest.raises(UserError, match=r"optim\.name was adamw and is muon"):
        require_same_run(then, {**now, "settings": {"optim.name": "muon"}}, anyway=False)
    with pytest.raises(
        UserError, match=r"data\.sample\.rows was 6 and is 4; the data or its encoding has changed"
    ):
        require_same_run(then, {**now, "data": "other"}, anyway=False)

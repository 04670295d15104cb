"""The command line of training: mistakes end it with one message before anything starts."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from flatout.cli import words as words_of
from flatout.cli.kept_help import read_help
from flatout.cli.settings import HELP
from flatout.cli.words import conf_folder
from flatout.config import RunConfig
from flatout.errors import UserError
from flatout.report.summary import read_summary
from flatout.run_log import LogFile
from tests.cli.renew_help import make_help
from tests.composed import CONF, compose_run, only_folder, run_train
from tests.params import at_once
from tests.run_files import read_log

TINY_ROWS = ["data.sample.rows=200", "data.sample.eval_rows=40"]
TINY_RUN = [
    *TINY_ROWS,
    "trainer.max_epochs=1",
    "data.batch_size=64",
    "monitor.progress=false",
    "logger=none",
]
TINY_ENCODER = ["model.hidden=16", "model.layers=1", "model.heads=2"]
TINY = [*TINY_RUN, "model.embedding=8"]


def test_several_values_give_a_run_each(tmp_path, monkeypatch):
    assert run_train(["-m", *TINY, f"output={tmp_path}", "model.hidden=4,8"], monkeypatch) == 0
    summaries = sorted(tmp_path.glob("default/*/*/summary.json"))
    assert [path.parent.name for path in summaries] == ["0", "1"]
    assert len({read_summary(path.parent)["model"]["parameters"] for path in summaries}) == 2


def test_a_reader_may_close_the_pipe_before_the_end(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with LogFile(tmp_path / "log.txt") as log:
            log.say("a line " * 10_000)
            log.say("another")
        closed.flush()
    assert "another" in read_log(tmp_path)


def test_a_file_alone_leads_to_the_word_that_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("news.csv").write_text("text,label\n")
    assert run_train(["news.csv"], monkeypatch) == 2
    message = (
        "command line: cannot read 'news.csv'. To train on that file, write data.source=news.csv.\n"
    )
    assert capsys.readouterr().err == message
    Path("run").mkdir()
    Path("run/overrides.txt").write_text("model=bilstm\n")
    assert run_train(["./run"], monkeypatch) == 2
    message = "To resume that run, write resume=./run; its settings stand in its overrides.txt.\n"
    assert capsys.readouterr().err == f"command line: cannot read './run'. {message}"


MISTAKES = {
    "modle=bilstm": "modle: no such key (data, model, task, optim, checkpoint,",
    "model=bilstn": (
        "(bilstm, bitmlp, rnn, textcnn, transformer, window_mlp). Did you mean 'bilstm'?"
    ),
    "model.hiden=3": "Did you mean 'model.hidden'?",
    "model.hidden=x": "model.hidden: 'x' does not fit (a whole number)",
    "data.pair=text_b": "data.pair: 'text_b' does not fit (true or false)",
    "model.hidden=0": "model.hidden: 0 (1 or more)",
    "+experiment=headlines_bilstn": "experiment: no option 'headlines_bilstn'",
    "experiment=headlines_bilstn": "Did you mean 'headlines_bilstm'?",
    "optim.schedule=linar": "(linear, cosine, constant). Did you mean 'linear'?",
    "data.vocabulary.kin=bpe": "Did you mean 'data.vocabulary.kind'?",
    "model.hidden": "command line: cannot read 'model.hidden'.",
    "model.hidden=64,128": (
        "model.hidden: several values (64,128) for one run. Add -m to python -m train"
    ),
    "model=bilstm,textcnn": (
        "model: several values (bilstm,textcnn) for one run. Add -m to python -m train"
    ),
    "seed=range(1,4)": (
        "seed: several values (range(1,4)) for one run. Add -m to python -m train for a run with"
        " each."
    ),
    "data.text=title,body": (
        "for a run with each, or write 'data.text=[title,body]' for one run with all of"
    ),
    "logger=csv,tensorboard": (
        "for one run. Write 'logger=[csv,tensorboard]' for one run with all of them."
    ),
    "--config-dir=nowhere": (
        "--config-dir: no such folder: nowhere. Name the folder that holds your experiment/"
    ),
    "trainer.foo=3": "trainer.foo: no such key. python -m flatout settings trainer lists all.",
    "+trainer.max_epoch=3": (
        "trainer.max_epoch: no argument of Lightning's Trainer. Did you mean 'max_epochs'?"
    ),
    "trainer.strategy=dpp": (
        "(auto, ddp, ddp_bf16, ddp_find_unused_parameters_true, fsdp). Did you mean 'ddp'?"
    ),
    "trainer.strategy=fsdp": (
        "fsdp: a single device has no other to share weights with. Set trainer.devices=N"
    ),
    "trainer.devices=512": "trainer.devices: 512 (at most",
    "+trainer.gradient_clip_val=1": (
        "trainer.gradient_clip_val: flatout passes this argument. Set optim.clip instead."
    ),
    "+trainer.precision=32": (
        "trainer.precision: flatout passes this argument. Set precision instead."
    ),
    "optim.eps=-1": "optim.eps: -1.0 (0 or more)",
    "model=transformer model.intermediate=0": "model.intermediate: 0 (1 or more, or null)",
    "trainer.max_epochs=0": "trainer.max_epochs: 0 (a whole number, 1 or more)",
    "task.weights=balanced": (
        "'balanced' does not fit. python -m flatout settings task.weights shows an example."
    ),
    "+trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch: 0 (1 or more, or null)",
    "+trainer.val_check_interval=999": (
        "trainer.val_check_interval: 999 of 2 batches an epoch (1 to 2, or a share)."
    ),
    "threads=999": "threads: 999 (at most ",
    "data.train=nowhere.csv": "data.train: no such file: nowhere.csv",
    "data.test=some.csv": (
        "data.test: is set without training rows. Set data.train=FILE or data.source=FILE."
    ),
    "+callbacks.x._target_=torch.load": "is no class of a kind a run is made of",
    "+callbacks.x._target_=os.system": "os.system is from a package not trusted",
    "+callbacks.x._target_=lightning.pytorch.callbacks.Nothing": "there is no such class",
    "model=transformer model.pretrained=bert-base-uncased": (
        "data.tokenizer: no folder bert-base-uncased, and nothing"
    ),
    "model=transformer model.lora.rank=2": (
        "needs the package peft. Install it with pip install 'flatout[lora]'."
    ),
}


def nothing_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is out of reach and its cache is empty, whatever this machine holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("mistake", at_once(*list(MISTAKES)[::8], of=MISTAKES, seconds=1))
def test_a_mistake_is_one_message_and_exit_code_2(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    nothing_fetched(tmp_path, monkeypatch)
    assert (
        run_train([f"output={tmp_path / 'runs'}", *TINY_ROWS, *mistake.split()], monkeypatch) == 2
    )
    said = capsys.readouterr()
    assert MISTAKES[mistake] in said.err
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not list((tmp_path / "runs").rglob("*.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "launcher.paralel=2",
            (
                "launcher.paralel: no such key (parallel, place, workers, limit). Did you mean"
                " 'launcher.parallel'?"
            ),
        ),
        (
            "+sweep=one",
            (
                "sweep/one.yaml: hydra.sweeper.trails: no such key (space, trials, sampler, pruner,"
                " metric,"
            ),
        ),
        *at_once(
            of=[
                ("launcher.parallel=two", "launcher.parallel: 'two' does not fit (a whole number)"),
                ("+sweep=one", "Did you mean 'hydra.sweeper.trials'?"),
                ("data.lr=1", "data.lr: no such key. Did you mean 'optim.lr'?"),
            ],
            seconds=1,
        ),
    ],
)
def test_a_misspelt_key_is_compared_with_those_beside_it(
    words, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "sweep").mkdir()
    file = (
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: flatout\nhydra:\n  sweeper:\n"
        "    trails: 3\n"
    )
    (tmp_path / "sweep" / "one.yaml").write_text(file)
    # in pieces, as people type them
    options = ["--config-dir", str(tmp_path), f"output={tmp_path / 'runs'}", "-m"]
    assert run_train([*options, *words.split()], monkeypatch) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cfg job --package optm", "--package: no settings 'optm'. Did you mean 'optim'?"),
        ("--cfg job -p hydra.run", "--package: no settings 'hydra.run'."),
        ("--cfg job -p resume", "--package: 'resume' is null."),
        (
            "-m seed=1 hydra/launcher=joblib hydra.launcher.prefer=x",
            "hydra.launcher: does not fit (prefer=x is not a valid",
        ),
        ("-m seed=1 hydra/launcher=basic +hydra.launcher.x=1", "hydra.launcher: does not fit."),
        (
            "~model +model._target_=torch.nn.Linear +model.in_features=4 +model.out_features=2",
            "model: Linear takes tensors, and a network gets the rows of a batch as one object.",
        ),
    ],
)
def test_what_hydra_and_its_launchers_refuse_is_one_sentence(
    words, message, tmp_path, monkeypatch, capsys
):
    assert run_train([f"output={tmp_path}", *words.split()], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(message)


def test_torchrun_is_told_a_mistake_so_that_its_last_page_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run_train(["model.hidden=0", f"output={tmp_path / 'runs'}"], monkeypatch) == 2
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json")
    )
    assert "traceback : model.hidden: 0 (1 or more)" in str(ChildFailedError("train", {0: failure}))


def test_options_of_hydra_may_stand_anywhere():
    words = [
        "--config-dir",
        "here",
        "+sweep=one",
        "-m",
        "a=1",
        "--config-name=x",
        "-cd",
        "there",
        "--info",
        "b=2",
    ]
    assert words_of.options_last(words) == [
        *("+sweep=one", "a=1", "b=2"),
        *("--config-dir", "here", "-m", "--config-name=x", "-cd", "there", "--info"),
    ]
    assert words_of.options_last(["--info", "config", "a=1"]) == ["a=1", "--info", "config"]
    assert words_of.options_last(["--config-d", "here", "a=1"]) == ["a=1", "--config-d", "here"]


def test_letters_beyond_ascii_need_no_quotes():
    for typed, quoted in (
        ("data.text=Überschrift", 'data.text="Überschrift"'),
        ("data.text=[Titel,Rubrik über alles]", 'data.text=[Titel,"Rubrik über alles"]'),
        ("data.source=Müller/news-1.csv", 'data.source="Müller/news-1.csv"'),
        ("data.read.delimiter=;", "data.read.delimiter=';'"),
        ("model.hidden=8,16", "model.hidden=8,16"),
        ("data.text='Ü'", "data.text='Ü'"),
        ("+model=bilstm", "model=bilstm"),
    ):
        assert words_of.translate_word(typed) == quoted
    config = compose_run(
        words_of.translate_command(["data.source=Müller/news.csv", "data.text=[Überschrift,Text]"])
    )
    assert (config.data.source, config.data.text) == ("Müller/news.csv", ["Überschrift", "Text"])


def test_a_model_that_cannot_be_fetched_is_told_with_the_three_ways_out(
    tmp_path, monkeypatch, capsys
):
    nothing_fetched(tmp_path, monkeypatch)
    words = [
        "+experiment=bert_a16",
        "model.pretrained=bert-base-uncased",
        f"output={tmp_path / 'runs'}",
    ]
    assert run_train([*words, *TINY_ROWS], monkeypatch) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    for way in (
        "Name a local folder",
        "set HF_HOME to that cache",
        "random weights: model.pretrained=null",
    ):
        assert way in said


def test_a_family_that_cannot_be_flat_is_padded_and_the_run_says_so(tmp_path, monkeypatch, capsys):
    words = ["model=transformer", "model.family=deberta", "data=tweets", *TINY_RUN, *TINY_ENCODER]
    assert run_train([*words, f"output={tmp_path}"], monkeypatch) == 0
    told = "batches: padded (deberta has no flat attention; rows of like length go together)"
    assert told in capsys.readouterr().out.splitlines()
    folder = only_folder(tmp_path / "default")
    assert told in read_log(folder)


@pytest.mark.parametrize(
    "mistake",
    ["model.hidden=0", *at_once(of=["modle=bilstm", "+callbacks.x._target_=os.system"], seconds=1)],
)
def test_a_mistake_in_the_settings_leaves_no_run_folder(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_train([mistake], monkeypatch)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    "several",
    [
        [],
        pytest.param(["-m"], marks=pytest.mark.soak(seconds=1)),
    ],
    ids=["run", "several"],
)
@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("/proc/nope", "cannot make /proc/nope"),
        ("file/below", "file is no folder"),
        *at_once(
            of=[
                ("/dev/full", "/dev/full is no folder"),
                ("file", "file is no folder"),
                ("loop", "loop is no folder"),
            ],
            seconds=1,
        ),
    ],
)
def test_an_output_that_cannot_be_a_folder_is_one_sentence(
    several, output, problem, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    assert run_train([*several, *TINY, f"output={output}"], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("output: ")
    assert problem in line
    assert line.endswith("Set output=FOLDER to a writable folder.")


@pytest.mark.parametrize("several", at_once([], of=[[], ["-m"]], seconds=1))
def test_an_output_whose_name_is_too_long_is_one_sentence(several, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_train([*several, *TINY, f"output={'n' * 300}"], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("output: cannot write in nnnn")
    assert line.endswith("File name too long. Choose shorter names.")


@pytest.mark.parametrize(("words", "place"), [(["output=runs"], "runs"), ([], "outputs")])
def test_a_full_disk_is_named_where_a_write_of_hydra_names_no_file(
    words, place, tmp_path, monkeypatch, capsys
):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("omegaconf.OmegaConf.save", refuse)
    monkeypatch.setattr("flatout.errors.disk_free", lambda place: 0)
    assert run_train(["-m", "seed=1,2", *TINY, *words], monkeypatch) == 2
    expected = (
        f"output: no space left in {place}: 0 MB free. Set output=FOLDER to a writable folder."
    )
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_an_output_folder_without_permission_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "closed").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        assert run_train([*TINY, f"output={tmp_path / 'closed'}"], monkeypatch) == 2
    finally:
        os.seteuid(user)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("output: no permission to write in ")
    assert line.endswith("to a writable folder.")


@pytest.mark.soak(seconds=3)
def test_a_package_of_ones_own_is_trusted_on_the_command_line_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("import lightning as L\nclass Quiet(L.Callback):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = "+callbacks.quiet._target_=mine.Quiet"
    assert run_train([*TINY, f"output={tmp_path}", target], monkeypatch) == 2
    assert (
        "Trust a package of yours on the command line: +allow_targets=[mine]"
        in capsys.readouterr().err
    )
    assert (
        run_train([*TINY, f"output={tmp_path}", target, "allow_targets=[mine]"], monkeypatch) == 0
    )


def test_help_groups_the_keys_that_people_set_first(monkeypatch, capsys):
    assert run_train(["--help"], monkeypatch) == 0
    said = capsys.readouterr().out
    assert "model: bilstm, bitmlp, rnn, textcnn" in said
    titles = [title.partition(":")[0] for title, _ in map(dict.values, HELP["sections"])]
    places = [said.index(f"\n{title}: ") for title in titles if title != "The built-in sample"]
    assert places == sorted(places)
    assert "data.batch_size=" in said
    assert "Rows one device computes at once" in said
    assert "optim.schedule=linear" in said
    assert "(linear, cosine, constant)" in said


def test_the_kept_help_is_what_would_be_made_now():
    kept = read_help(["--help"], CONF)
    assert kept is not None, "conf/ has changed: python -m tests.cli.renew_help"
    # how many arguments the Trainer has depends on the release of Lightning
    count = r"\d+ more settings"
    assert re.sub(count, "", kept) == re.sub(count, "", make_help())


def test_help_comes_without_torch_and_no_train_py_of_the_user_is_in_its_way(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('mine')")
    line = [sys.executable, "-X", "importtime", "-m", "flatout", "train", "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "data.batch_size=" in done.stdout
    assert not re.search(r"\| +(torch|lightning|numpy|hydra)\b", done.stderr)


def test_flatout_is_imported_without_torch():
    line = [sys.executable, "-X", "importtime", "-c", "import flatout"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\| +(torch|lightning|numpy|hydra|pyarrow)\b", done.stderr)


def test_help_shows_the_values_of_the_given_words(monkeypatch, capsys):
    assert run_train(["+experiment=battery_soc", "data.chunk=7", "-h"], monkeypatch) == 0
    said = capsys.readouterr().out
    assert "model.cell=lstm" in said
    assert "data.target=" in said
    assert "model.embedding" not in said
    assert run_train(["optim.lrr=1", "--help"], monkeypatch) == 2
    assert "optim.lrr" in capsys.readouterr().err


def test_help_reads_a_folder_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel: {hidden: 7}\n")
    assert run_train(["--help", "--config-dir", str(tmp_path), "experiment=mine"], monkeypatch) == 0
    assert "model.hidden=7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "word", at_once("+monitor=profile", of=["monitor=profile", "+monitor=profile"], seconds=2)
)
def test_a_profile_is_asked_for_with_or_without_a_plus_sign(word, tmp_path, monkeypatch, capsys):
    assert run_train([*TINY, f"output={tmp_path}", word], monkeypatch) == 0
    assert "trace.json.gz" in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.glob("default/*/operators.csv")]


def test_conf_can_be_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CONF", str(CONF))
    assert conf_folder() == CONF
    monkeypatch.setenv("FLATOUT_CONF", str(tmp_path))
    with pytest.raises(UserError, match=r"FLATOUT_CONF: no train.yaml in"):
        conf_folder()


def test_the_default_settings_on_the_command_line_are_those_of_python():
    config = compose_run([])
    python = RunConfig()
    assert (config.data, config.model, config.optim) == (python.data, python.model, python.optim)


def test_a_run_from_another_folder_writes_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_train([*TINY], monkeypatch) == 0
    assert len(list(Path("outputs/default").iterdir())) == 1

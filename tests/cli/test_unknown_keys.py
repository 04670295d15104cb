"""Misspelt keys, options and verbs: the message names the nearest right word and where
the list is.
"""

from __future__ import annotations

import pytest

from flatout.__main__ import main
from flatout.cli.composing import find_key, unknown_key, where_listed
from tests.composed import run_train
from tests.params import at_once

TRAIN = {
    "trainer.max_epoch=3": (
        "trainer.max_epoch: no such key. Did you mean 'trainer.max_epochs'? "
        "python -m flatout settings trainer lists all."
    ),
    "trainer.val_chek_interval=3": "no such key. Did you mean '+trainer.val_check_interval'?",
    "trainer.val_check_interval=3": (
        "are added with a plus sign: +trainer.val_check_interval=VALUE."
    ),
    "trainer.precision=bf16": (
        "trainer.precision: flatout passes this argument. Set precision instead."
    ),
    "model.hiden=3": "Did you mean 'model.hidden'? python -m flatout settings model lists all.",
    "+model.hiden=3": (
        "model.hiden: no such key (embedding, vectors, freeze_vectors, ngrams, hidden,"
    ),
    "optim.lr=log(1e-4,1e-2)": "In a sweep write 'optim.lr=tag(log,interval(1e-4,1e-2))'.",
    "optim.lr=uniform(1,2)": "In a sweep write 'optim.lr=interval(1,2)'.",
    "data.text=f(x)": "data.text: f(x): unknown function 'f'. Sweeps know choice(…), range(…)",
    "optim.learning_rate=1e-3": "Did you mean 'optim.lr'?",
    "checkpoint.monitor=val_loss": "Did you mean 'checkpoint.metric'?",
    "modle=textcnn": "Did you mean 'model'?",
    "++data.zzz=3": "data.zzz: no such key. python -m flatout settings data lists all.",
    "~model.hiden": "model.hiden: no such key",
    "data=cells data.noise.voltage=1": (
        "data.noise.voltage: no such key. Keys of data.noise are added with a plus "
        "sign: +data.noise.voltage=VALUE."
    ),
    "data=cells data.features=voltage": (
        "data.features: 'voltage' does not fit (a list). Write data.features=[voltage]."
    ),
    "data.bach_size=3": (
        "no such key. Did you mean 'data.batch_size'? python -m flatout settings data lists all."
    ),
    "bach_size=3": "output). Did you mean 'data.batch_size'? python -m flatout settings lists all.",
    "epochs=3": "Did you mean 'trainer.max_epochs'?",
    "modl.hidden=3": "Did you mean 'model.hidden'?",
    "+experimnt=bert_a16": "experimnt: no such key (data, model,",
    "experimnt=bert_a16": "Did you mean 'experiment'?",
    "experiment=headlines_cn": (
        "Did you mean 'headlines_cnn'? To name a run, set name=headlines_cn."
    ),
    "model.widths=3": "It is a setting of model=textcnn, model=bitmlp, model=window_mlp. python -m",
    "max_epoch": "command line: cannot read 'max_epoch'. Write trainer.max_epochs=VALUE.",
    "--epochs=3": (
        "--epochs: no such option. Settings are key=value. Did you mean trainer.max_epochs=3?"
    ),
    "--data.source a.csv": (
        "--data.source: no such option. Settings are key=value. Did you mean data.source=a.csv?"
    ),
    "--data no.csv": (
        "--data: no such option. Settings are key=value. Did you mean data.source=no.csv?"
    ),
    "data=no.csv": "tweets). To train on a file, write data.source=no.csv.",
    "logger.wandb.offline=true": (
        "logger.wandb.offline: wandb is not chosen. Add logger=wandb, or logger=[tensorboard,wandb]"
    ),
    "name=../../x": "name: '../../x' (letters, digits, '_', '-', '+' and '.')",
    "check": "cannot read 'check'. That is a verb of another command: python -m flatout check.",
    "help": "cannot read 'help'. Write python -m train --help.",
    "--zzz 3": (
        "--zzz: no such option. Settings are key=value. python -m train --help lists the settings."
    ),
}


@pytest.mark.parametrize("words", at_once(*list(TRAIN)[::8], of=TRAIN, seconds=1))
def test_training_names_the_nearest_key_and_the_list(words, tmp_path, monkeypatch, capsys):
    assert run_train([*words.split(), f"output={tmp_path}"], monkeypatch) == 2
    message = capsys.readouterr().err.strip()
    assert TRAIN[words] in message
    assert len(message.splitlines()) == 1


VERBS = {
    "chek news.csv": "python -m flatout: no verb 'chek' (check, build, predict, tune,",
    "chekc news.csv": "Did you mean 'check'?",
    "": "python -m flatout: no verb is named (check, build, predict, tune,",
    "bench headline": "Did you mean 'headlines'?",
    "ladder +ladder=headline": "+ladder: no ladder 'headline' (battery, bloom,",
    "ladder headline": (
        "ladder headline: sets nothing (ladders: battery, bloom, headlines, lyrics, tweets). "
        "Did you mean +ladder=headlines?"
    ),
    "ladder zzz": "Write key=value, as for training.",
    "sweep resum outputs/x": "sweep resum: no such word. Did you mean sweep resume FOLDER?",
    "cache verfy": (
        "cache: ACTION: no choice 'verfy' (list, size, verify, clear). Did you mean 'verify'?"
    ),
    "export RUN --onx": "python -m flatout export: --onx: no such option. Did you mean '--onnx'?",
    "build --data no.csv": (
        "build: --data: no such option. Settings are key=value. Did you mean data.source=no.csv?"
    ),
    "tune --max-epochs=3": "Did you mean trainer.max_epochs=3?",
    "sweep --lr 0.1": "Settings are key=value. Did you mean optim.lr=0.1?",
    "build --prat 1/2": "build: --prat: no such option. Did you mean '--part'?",
    "export RUN more": (
        "python -m flatout export: more: one argument too many. Write python -m flatout export"
    ),
    "predict": "required: RUN, FILE. Write python -m flatout predict",
    "settings optim.learning_rate": "no such key. Did you mean optim.lr?",
    "settings checkpoint.monitor": "no such key. Did you mean checkpoint.metric?",
    "settings modle": "no such key. Did you mean model?",
    "settings trainer.max_epoch": (
        "settings trainer.max_epoch: no such key. Did you mean trainer.max_epochs"
    ),
}


@pytest.mark.parametrize("words", VERBS)
def test_a_verb_names_the_nearest_word_and_the_list(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    message = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert VERBS[words] in message
    assert len(message.splitlines()) == 1


def test_a_word_without_its_group_is_found():
    words = ("lr", "batch_size", "bach_size", "max_epochs", "model", "experimnt", "zzz")
    keys = [
        "optim.lr",
        "data.batch_size",
        "data.batch_size",
        "trainer.max_epochs",
        "model",
        "experiment",
        None,
    ]
    assert [find_key(word) for word in words] == keys


def test_a_key_of_hydra_names_no_list_that_does_not_exist():
    assert where_listed("hydra.sweeper") == ""
    assert str(unknown_key("hydra.sweeper.trails", ["trials"])).endswith(
        "Did you mean 'hydra.sweeper.trials'?"
    )


def test_a_key_of_a_file_is_named_with_its_file():
    assert str(unknown_key("model.hiden", ["hidden"], file="experiment/mine")).startswith(
        "experiment/mine.yaml: model.hiden: no such key (hidden). Did you mean 'model.hidden'?"
    )

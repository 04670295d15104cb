"""`python -m flatout ladder`: a tiny ladder from its rows to its page, and mistakes in one message
each.
"""

from __future__ import annotations

import json

import pytest
import yaml

from tests.composed import CONF, only_folder
from tests.verbs import verb

OWN = """\
title: three rungs
kind: text
program: headlines
settings:
  - data=headlines
  - data.sample.rows=120
  - data.sample.eval_rows=40
  - data.sample.classes=3
  - data.batch_size=16
  - data.max_length=16
  - model.embedding=8
  - model.hidden=8
  - trainer.max_epochs=1
rungs:
  - name: foot
  - name: no such package
    needs: [no_such_package]
    change: {tokenise: keras}
  - name: flatout
    run: []
"""


@pytest.fixture
def conf(tmp_path):
    (tmp_path / "conf" / "ladder").mkdir(parents=True)
    (tmp_path / "conf" / "ladder" / "own.yaml").write_text(OWN)
    wrong = OWN.replace("tokenise: keras", "fusd: true").replace("no such package\n", "faster\n")
    (tmp_path / "conf" / "ladder" / "mistyped.yaml").write_text(wrong)
    return tmp_path / "conf"


@pytest.mark.soak(seconds=7)
def test_a_tiny_ladder_is_climbed_to_its_page(conf, tmp_path, capsys):
    words = ["+ladder=own", "for=5s", "seeds=1", f"output={tmp_path / 'out'}"]
    assert verb("ladder", "--config-dir", conf, *words) == 0
    printed = capsys.readouterr().out
    folder = only_folder(tmp_path / "out" / "ladder_own")
    found = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
    foot, missing, top = found["rungs"]
    assert foot["rows_per_s"] > 0
    assert top["rows_per_s"] > 0
    assert missing["skipped"] == "the package no_such_package is not installed"
    assert "1 of 3 rungs were not measured:" in printed
    assert "speed-up:" in printed
    assert "foot and flatout train to their end: some 0 min with all seeds" in printed
    assert found["quality"]["metric"] == "accuracy"
    assert {group["name"] for group in found["quality"]["groups"]} == {"foot", "flatout"}
    assert all(
        0 <= value <= 100 for group in found["quality"]["groups"] for value in group["values"]
    )
    assert (folder / "ladder.html").is_file()
    assert list(folder.glob("events.*"))


@pytest.mark.soak(seconds=30)
def test_a_rung_that_learns_something_else_has_its_speed_and_its_quality(conf, tmp_path):
    sizes = ["data.sample.rows=120", "data.sample.eval_rows=40", "model.hidden=16", "model.heads=2"]
    text = (CONF / "ladder" / "tweets.yaml").read_text(encoding="utf-8")
    rungs = yaml.safe_load(text)["rungs"]
    own = {**yaml.safe_load(text), "rungs": [rungs[0], *rungs[-2:]]}
    (conf / "ladder" / "few.yaml").write_text(yaml.safe_dump(own))
    assert (
        verb(
            "ladder",
            "--config-dir",
            conf,
            "+ladder=few",
            "for=1s",
            "seeds=1",
            f"output={tmp_path}",
            *sizes,
        )
        == 0
    )
    folder = only_folder(tmp_path / "ladder_few")
    found = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
    assert found["rungs"][-1]["change"][-2:] == ["model.freeze_layers=1", "model.reuse=true"]
    assert found["whole"]["top"] == "flatout"
    names = ["as usually written", "flatout", "frozen layers read"]
    assert [group["name"] for group in found["quality"]["groups"]] == names
    assert "; frozen layers read against flatout: " in found["quality"]["sentence"]


BAD = {
    ("+ladder=mistyped",): "mistyped: faster: the usual program headlines has no keyword fusd",
    ("+ladder=tweet",): "no ladder 'tweet'",
    (
        "+ladder=headlines",
        "data=cells",
        "model=rnn",
        "task=sequence",
    ): "headlines needs text data, and data=cells is sequence data",
    ("+ladder=bloom", "data=headlines"): "bloom needs bits data, and data=headlines is text data",
    ("+ladder=headlines", "model=textcnn"): "headlines has no rungs for model=textcnn",
    (
        "+ladder=own",
        "model.pooling=attention",
    ): "model.pooling: attention is not in the usual program",
    ("+ladder=own", "for=soon"): "'soon' is no duration",
    ("+ladder=own", "seeds=many"): "seeds: 'many'",
    (
        "+ladder=own",
        "optim.scale_lr=sqrt",
        "optim.base_batch=32",
    ): "optim.scale_lr: is a rung's own",
    ("model=textcnn",): "model: there is no ladder for textcnn (bilstm, transformer, bitmlp, rnn)",
    ("model=bilstm", "data.problem=multi", "data.source=rows.csv"): "there is no ladder for multi",
    ("data=cells", "model=rnn", "task=sequence"): "the usual program reads windows with one answer",
    ("data=people", "model=bitmlp", "task=grams"): "Set model.detectors=false",
}


LATER = [pytest.param(words, marks=pytest.mark.soak(seconds=1)) for words in list(BAD)[3:]]


@pytest.mark.parametrize("words", [*list(BAD)[:3], *LATER])
def test_a_mistake_ends_with_one_message(words, conf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"word{n} cat,x\n" for n in range(40))
    )
    assert verb("ladder", "--config-dir", conf, *words, f"output={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert BAD[words] in error


@pytest.mark.soak(seconds=5)
def test_a_ladder_for_a_file_of_yours_says_which_rungs_it_chose(conf, tmp_path, capsys):
    path = tmp_path / "news.csv"
    rows = [f"{('dog', 'cat')[n % 2]} number {n},{'yx'[n % 2]}" for n in range(200)]
    path.write_text("title,topic\n" + "\n".join(rows))
    words = [
        "model=bilstm",
        "model.hidden=8",
        "model.embedding=8",
        "data.batch_size=16",
        "trainer.max_epochs=1",
    ]
    names = [
        f"data.source={path}",
        "data.text=title",
        "data.label=topic",
        "for=1s",
        f"output={tmp_path / 'out'}",
    ]
    assert verb("ladder", *names, *words) == 0
    printed = capsys.readouterr().out
    assert "as usually written, with Keras, as usually written, tokenise once" in printed
    assert "left out: the budget was over" in printed

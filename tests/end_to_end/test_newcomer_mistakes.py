"""What newcomers of other fields get wrong at first, told by one line of a command each.

Users of sensors, of tags, of record linkage, of sweeps, of several machines, of somebody else's
files. Each walk is a table: the command, its exit code, and words that it must print.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.composed import run_train
from tests.verbs import verb

SENSORS = "data=sequence data.features=[temp,bar] data.target=wear data.time=t"
EUROPE = "data=sequence data.features=[temp] data.target=wear data.time=zeit"


def write_pumps() -> None:
    """Eight recordings: 3 has a gap, 5 another rate, 6 another unit from its half on, 7 °F."""
    rng = np.random.default_rng(0)
    Path("pumps").mkdir()
    for number in range(8):
        seconds = np.arange(60) * (10 if number == 5 else 5)
        temp = 50 + 10 * rng.random(60)
        bar = 3 + rng.random(60)
        wear = temp / 100 + bar / 10
        if number == 3:
            seconds[30:] += 1_005
        if number == 6:
            bar[30:] *= 100
        if number == 7:
            temp = temp * 1.8 + 32
        lines = ["t,temp,bar,wear"]
        for row in zip(seconds, temp, bar, wear, strict=True):
            lines.append("{},{:.2f},{:.3f},{:.4f}".format(*row))
        Path(f"pumps/P{number}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [f"28.03.2026 07:{minute:02d}:00;{50 + minute},5;0,{minute}" for minute in range(60)]
    Path("euro.csv").write_text("\n".join(["zeit;temp;wear", *lines]) + "\n", encoding="utf-8")


def write_sentences() -> None:
    plain = [f"the DET\ncat{number} NOUN\nsees VERB" for number in range(60)]
    Path("noun.conll").write_text("\n\n".join(plain) + "\n", encoding="utf-8")
    equal = ["Anna B-PER\nsaw O\nOslo B-LOC"] * 40
    Path("equal.conll").write_text("\n\n".join(equal) + "\n", encoding="utf-8")


def write_people() -> None:
    rng = np.random.default_rng(0)
    clear = ["first,last,id"]
    encoded = ["first,last,clk,id"]
    for number in range(80):
        first = "" if number % 4 == 0 else f"ann{number % 7}"
        bits = "".join(map(str, rng.integers(0, 2, 64)))
        clear.append(f"{first},smith{number % 11},{number}")
        encoded.append(f"ann{number % 7},smith{number % 11},{bits},{number}")
    Path("people.csv").write_text("\n".join(clear) + "\n", encoding="utf-8")
    Path("encoded.csv").write_text("\n".join(encoded) + "\n", encoding="utf-8")


def write_texts() -> None:
    lines = [f"words of row {row},{'ab'[row % 2]}" for row in range(60)]
    Path("rows.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    for name, words in {
        "secret": "data: {source: 'https://there/${oc.env:HOME}'}",
        "code": "callbacks: {mine: {_target_: os.system, command: 'touch harm'}}",
        "paths": "hydra: {searchpath: ['file:///']}",
    }.items():
        path = Path("given/experiment", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{words}\n", encoding="utf-8")


WALKS = {
    "sensors": (
        write_pumps,
        [
            ("flatout check pumps", 2, "Are they recordings? Set data.target=COLUMN"),
            (f"flatout check pumps {SENSORS}", 0, "pumps/P3.csv: longest gap 1,010 s"),
            (f"flatout check pumps {SENSORS}", 0, "a sample every 5 to 10 s"),
            (f"flatout check pumps {SENSORS}", 0, "pumps/P6.csv (second half: "),
            (f"flatout check pumps {SENSORS}", 0, "pumps/P7.csv ("),
            (f"flatout check euro.csv {EUROPE}", 2, "data.read.decimal=','"),
            (f"flatout check euro.csv {EUROPE} data.read.decimal=','", 2, "data.read.dates="),
            (
                f"flatout check euro.csv {EUROPE} data.read.decimal=',' data.read.dates=day",
                2,
                "letters of strftime",
            ),
        ],
    ),
    "tags": (
        write_sentences,
        [
            ("flatout check noun.conll data.problem=tags", 0, "plain tags, 3 types"),
            ("flatout check equal.conll data.problem=tags", 2, "no rows are left for the test"),
        ],
    ),
    "record linkage": (
        write_people,
        [
            ("flatout encode people.csv --uid id --out bits.csv", 0, "empty fields"),
            ("flatout encode people.csv --form list", 2, "binary, hex, base64, packed"),
            ("train data=bits model=bitmlp task=grams data.source=encoded.csv", 2, "data.bits=clk"),
        ],
    ),
    "sweeps": (
        write_texts,
        [
            (
                "flatout sweep data.source=rows.csv optim.lr=log(1e-4,1e-2) trials=2",
                2,
                "tag(log,interval(1e-4,1e-2))",
            ),
            ("train -m data.source=rows.csv optim.lr=log(1e-4,1e-2)", 2, "no function 'log'"),
            ("train data.source=rows.csv optim.lr=log(1e-4,1e-2)", 2, "no function 'log'"),
        ],
    ),
    "several machines": (
        write_texts,
        [
            ("train data.source=rows.csv hydra.run.dir=X resume=nowhere", 2, "no summary.json"),
            ("train data.source=rows.csv trainer.devices=0", 2, "trainer.devices"),
            ("train data.source=rows.csv trainer.num_nodes=0", 2, "trainer.num_nodes"),
        ],
    ),
    "files of others": (
        write_texts,
        [
            ("train --config-dir given +experiment=secret", 2, "Type it on the command line"),
            ("train --config-dir given +experiment=code", 2, "os.system"),
            ("train --config-dir given +experiment=paths", 2, "hydra.searchpath"),
        ],
    ),
}


@pytest.mark.parametrize("kind", WALKS)
def test_what_a_newcomer_gets_wrong_is_told_in_words_that_help(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files, steps = WALKS[kind]
    write_files()
    wrong = []
    for line, code, words in steps:
        command, *rest = line.split()
        ended = run_train(rest, monkeypatch) if command == "train" else verb(*rest)
        said = capsys.readouterr()
        if ended != code or words not in said.out + said.err or "Traceback" in said.err:
            wrong.append(f"{line}: {ended}, {said}")
    assert not wrong, "\n".join(wrong)
    assert not Path("harm").exists()

"""Nine newcomers with data of their own, each a script of commands: no traceback, and no result is
lost. Every command that is printed on the way can be typed.

A Lightning user, one of transformers, of Hydra, of texts, of tags, of sensors, of record linkage, a
careless one, and one who only looks.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.composed import only_folder, run_train
from tests.docs.test_blocks import compose, parse, words_of_flatout, words_of_train
from tests.fitting import own_cache
from tests.params import at_once
from tests.run_files import read_csv, write_jsonl
from tests.verbs import verb

from flatout.report.summary import read_summary

TINY = (
    "trainer.max_epochs=1 data.batch_size=32 precision=fp32 compile=false trainer.accelerator=cpu"
    " monitor.progress=false monitor.verdict=false logger=none"
)
ENCODER = "model=transformer model.hidden=16 model.layers=1 model.heads=2"
Walk = Callable[..., str]


@pytest.fixture
def walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Walk:
    """Runs a command in a folder of its own and gives what it prints; `code`: the exit code that it
    must have.
    """
    monkeypatch.chdir(tmp_path)
    write_table(Path("rows.csv"))

    def command(line: str, code: int = 0) -> str:
        words = shlex.split(line)
        ended = run_train(words[1:], monkeypatch) if words[0] == "train" else verb(*words)
        said = capsys.readouterr()
        text = said.err if code else said.out + said.err
        assert ended == code, f"{line}: {said}"
        assert "Traceback" not in said.out + said.err, line
        follow(said.out + said.err)
        return text

    return command


def follow(said: str) -> None:
    """Whatever command was printed can be typed: its settings compose, and its verb reads its
    arguments.
    """
    for printed in set(re.findall(r"python -m (?:train|flatout)\b[^\n]*", said)):
        if re.match(r"python -m \w+( \w+)?: ", printed) or re.search(r"\b[A-Z]{4,}\b", printed):
            continue  # who says it, and a place to fill in
        command = re.split(r" \(|\. |, |; | lists |  ", printed)[0].rstrip(".")
        if (words := words_of_train(command)) is not None:
            compose(command, [word for word in words if "=" in word])
        elif words := words_of_flatout(command):
            parse(command, words)


def write_table(path: Path, rows: int = 90) -> None:
    lines = [
        f"{('calm', 'loud', 'odd')[i % 3]} words of row {i},{('sea', 'air', 'land')[i % 3]}"
        for i in range(rows)
    ]
    path.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")


def runs() -> list[Path]:
    """The folders of finished runs, oldest first; a run that began and did not finish is a lost
    result.
    """
    found = sorted(Path("outputs").rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [read_summary(path.parent)["status"] for path in found] == ["finished"] * len(found)
    return [path.parent for path in found]


def printed_command(said: str) -> str:
    """The command of `train` at the end of a check."""
    return "train " + said.rpartition("python -m train ")[2].strip()


MINE = """
import lightning as L
import torch

class Rows(L.LightningDataModule):
    def train_dataloader(self):
        rows = [(torch.randn(4), torch.tensor(i % 2)) for i in range(160)]
        return torch.utils.data.DataLoader(rows, batch_size=8)

    def val_dataloader(self):
        return self.train_dataloader()

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*number of training batches.*"
)
def test_a_lightning_user_trains_a_module_of_their_own(walk, tmp_path, monkeypatch):
    Path("mine_of_newcomer.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_newcomer", raising=False)
    own = "task._target_=mine_of_newcomer.Net data._target_=mine_of_newcomer.Rows"
    quick = (
        "trainer.max_epochs=2 precision=fp32 trainer.accelerator=cpu monitor.progress=false"
        " logger=none"
    )
    assert "allow_targets=[mine_of_newcomer]" in walk(f"train {own} {quick}", code=2)
    walk(f"train {own} {quick} allow_targets=[mine_of_newcomer]")
    (run,) = runs()
    assert read_summary(run)["metrics"]["val/loss"] > 0
    walk(f"doctor {run}")
    assert "unless it trained a module of your own" in walk(f"predict {run} rows.csv", code=2)


@pytest.mark.soak(seconds=2)
def test_a_user_of_transformers_reads_the_exported_folder_without_us(walk):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    walk(f"train data.source=rows.csv {ENCODER} {TINY}")
    (run,) = runs()
    walk(f"export {run} --out folder")
    walk("verify folder rows.csv")
    walk(f"predict {run} rows.csv --out answers.csv")
    model = AutoModelForSequenceClassification.from_pretrained("folder").eval()
    tokenizer = AutoTokenizer.from_pretrained("folder")
    answers = read_csv(Path("answers.csv"))
    with torch.no_grad():
        logits = model(
            **tokenizer([row["text"] for row in answers], padding=True, return_tensors="pt")
        ).logits
    theirs = [model.config.id2label[int(number)] for number in logits.argmax(1)]
    assert theirs == [row["prediction"] for row in answers]
    assert len(answers) == 90


@pytest.mark.soak(seconds=30)
def test_a_user_of_hydra_gets_a_result_for_each_value(walk):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\nname: mine\nmodel: {hidden: 4, embedding: 4}\n"
    )
    said = walk(f"train --config-dir conf -m experiment=mine data.source=rows.csv seed=1,2 {TINY}")
    found = runs()
    assert sorted(read_summary(run)["seed"] for run in found) == [1, 2]
    assert all("--config-dir" in read_summary(run)["command"] for run in found)
    (table,) = Path("outputs").rglob("sweep.csv")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 3
    assert table.with_suffix(".html").is_file()
    assert str(table.parent) in said.replace("\n", "")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The runs of two models on questions, most of which are of one kind."""
    folder = tmp_path_factory.mktemp("questions")
    begins = {"HUM": "Who was", "LOC": "Where is", "DESC": "What does"}
    lines = ["question,kind"]
    for number in range(240):
        kind = ("HUM", "LOC", *6 * ["DESC"])[number % 8]
        lines.append(f"{begins[kind]} thing {number} ?,{kind}")
    with own_cache(folder) as patch:
        patch.chdir(folder)
        Path("q.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # so many steps that the first one has a verdict
        for name, rows in (("bilstm", 4), ("textcnn", 32)):
            words = f"data.source=q.csv data.label=kind model={name} name={name} {TINY}"
            words = words.replace("data.batch_size=32", f"data.batch_size={rows}")
            with redirect_stdout(StringIO()) as said:
                assert run_train(words.split(), patch) == 0
            Path(f"{name}.txt").write_text(said.getvalue(), encoding="utf-8")
        yield [only_folder(folder / "outputs" / name) for name in ("bilstm", "textcnn")]


def test_a_user_of_texts_finds_on_the_page_what_a_run_said(questions):
    bilstm, _ = questions
    page = (bilstm / "report.html").read_text(encoding="utf-8")
    for shown in (
        " train, ",
        "by always answering &#39;DESC&#39;",
        "<th>labelled as</th>",
        "texts from question, labels from kind",
    ):
        assert shown in page
    said = (bilstm / "log.txt").read_text(encoding="utf-8").splitlines()
    assert f"run: BiLSTM, seed 0, in {bilstm}" in said[0]
    (epoch,) = [line for line in said if "epoch " in line]
    assert len(epoch[epoch.index("epoch ") :]) <= 80
    printed = (bilstm.parents[2] / "bilstm.txt").read_text(encoding="utf-8")
    assert "best epoch" in printed
    assert "verdict" not in printed, "monitor.verdict=false"
    assert "What limited the run" in page


def test_a_user_of_texts_compares_two_models_and_sees_which_is_better(questions, walk):
    first, second = questions
    scores = [read_summary(run)["metrics"]["test/accuracy"] for run in questions]
    said = walk(f"compare {first} {second}")
    better = "textcnn" if scores[1] > scores[0] else "bilstm"
    expected = "both are equal" if scores[0] == scores[1] else f"{better}/"
    assert said.strip().splitlines()[-1].startswith(expected)
    assert "two folders of runs, or one folder of a sweep" in walk(f"compare {first}", code=2)


def test_a_user_of_texts_asks_with_a_bare_line_and_follows_the_hint(questions, walk):
    bilstm, _ = questions
    Path("asked.csv").write_text("Who was Caesar ?\n", encoding="utf-8")
    (hint,) = re.findall(r"--read \S+\]", walk(f"predict {bilstm} asked.csv", code=2))
    assert hint == "--read columns=[question]"
    said = walk(f"predict {bilstm} asked.csv --out answers.csv {hint}")
    assert "written to answers.csv: 1 row\n" in said
    (answer,) = read_csv(Path("answers.csv"))
    assert answer["question"] == "Who was Caesar ?"
    assert answer["prediction"] in ("DESC", "HUM", "LOC")


def test_a_user_of_tags_follows_the_command_of_the_check(walk):
    rows = [
        {"tokens": ["Anna", f"saw{i}", "Oslo"], "tags": ["B-PER", "O", "B-LOC"]} for i in range(60)
    ]
    write_jsonl(Path("tags.jsonl"), rows)
    command = printed_command(walk("check tags.jsonl"))
    walk(f"{command} model.hidden=16 model.layers=1 model.heads=2 {TINY}")
    (run,) = runs()
    walk(f"predict {run} tags.jsonl --out answers.jsonl")
    answers = [
        json.loads(line) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(answers) == 60
    assert all("entities" in answer for answer in answers)
    assert "f1" in walk(f"evaluate {run} tags.jsonl")


@pytest.mark.soak(seconds=2)
def test_a_user_of_sensors_follows_the_command_of_the_check(walk):
    Path("cells").mkdir()
    for number in range(8):
        volts = np.random.default_rng(number).random(40)
        lines = [f"{second},{volt:.4f},{1 - volt:.4f}" for second, volt in enumerate(volts)]
        Path(f"cells/{number}.csv").write_text(
            "\n".join(["t,volt,soc", *lines]) + "\n", encoding="utf-8"
        )
    assert "data=sequence to train" in walk("check cells/", code=2)
    command = printed_command(walk("check cells/ data.features=[volt] data.target=soc data.time=t"))
    walk(f"{command} model.hidden=4 {TINY}")
    (run,) = runs()
    walk(f"predict {run} cells/ --out answers.csv")
    assert len(Path("answers.csv").read_text(encoding="utf-8").splitlines()) == 1 + 8 * 40
    assert "rmse" in walk(f"evaluate {run} cells/")


def test_a_user_of_record_linkage_trains_on_what_encode_wrote(walk):
    people = [f"{i},ann{i % 7},smith{i % 11}" for i in range(80)]
    Path("people.csv").write_text("\n".join(["id,first,last", *people]) + "\n", encoding="utf-8")
    assert "encoded: first, last; id names each record" in walk(
        "encode people.csv --uid id --size 64 --out bits.csv"
    )
    walk(
        "train data=bits model=bitmlp task=grams task.exposure=false model.widths=[8]"
        f" data.source=bits.csv {TINY}"
    )
    (run,) = runs()
    assert "dice" in walk(f"evaluate {run} bits.csv")
    walk(f"predict {run} bits.csv --out answers.csv")
    assert len(Path("answers.csv").read_text(encoding="utf-8").splitlines()) == 81


CARELESS = {
    "train data.source=numbers.csv": "data.text: column 'text' of numbers.csv holds numbers only",
    "train data.source=empty.csv": "empty.csv is empty",
    "train data.source=book.xlsx": "book.xlsx is no format we read",
    "train data.source=row.csv": "Did you mean 'rows.csv'?",
    "train data.source=one.csv": "only one class",
    "train data.source=rows.csv data.text=txet": "Did you mean 'text'?",
    "train data.source=rows.csv data.label=labl": "Did you mean 'label'?",
    "train data.source=rows.csv data.read.encoding=klingon": "data.read.encoding",
    "train data.source=rows.csv checkpoint.metric=acuracy": "Did you mean 'accuracy'?",
    "train data.source=rows.csv model=rnn": "model",
    "train data.source=rows.csv task=tagging": "task",
    "train data.train=rows.csv data.validation=rows.csv": "data.validation",
    "train data.source=rows.csv data.problem=regression": "is no number",
    "train data=sequence data.source=rows.csv": "data.target: is not set",
    "train rows.csv": "write data.source=rows.csv",
    "train data=rows.csv": "write data.source=rows.csv",
    "train --data rows.csv": "Did you mean data.source=rows.csv?",
    "train check rows.csv": "python -m flatout check",
    "train data.source=rows.csv logger.csv.flush_seconds=3": "Add logger=csv",
    "train data.source=rows.csv data.text=label data.label=text": "Are the columns swapped?",
    "train data.source=rows.csv monitor.rival=maybe": "true, false, always",
    "train optim.lr=0": "optim.lr",
    "train optim.lr=nan": "optim.lr",
    "train seed=one": "seed: 'one' does not fit",
    "train precision=fp8": "precision",
    "train data.batch_size=0": "data.batch_size: 0",
    "train data.max_length=0": "data.max_length: 0",
    "train threads=0": "threads: 0",
    "train resume=nowhere": "nowhere",
    "train resume=rows.csv": "rows.csv",
    "train model=transformer model.pretrained=nowhere": "nowhere",
    "train +experiment=mine": "no option 'mine'",
    "chek rows.csv": "Did you mean 'check'?",
    "check": "check: no SOURCE",
    "check numbers.csv": "holds numbers only (columns: text, label)",
    "check rows.csv data.lable=x": "Did you mean 'data.label'?",
    "build data.source=nowhere.csv": "no such file: nowhere.csv",
    "tune data.source=nowhere.csv": "no such file: nowhere.csv",
    "sweep +sweep=mine": "no option 'mine'",
    "predict nowhere rows.csv": "no such run",
    "predict rows.csv rows.csv": "rows.csv",
    "evaluate nowhere rows.csv": "no such run",
    "export nowhere": "nowhere",
    "verify nowhere rows.csv": "nowhere",
    "audit nowhere": "nowhere",
    "audit data.source=numbers.csv": "holds numbers only",
    "probe nowhere": "nowhere",
    "doctor .": "no summary.json there",
    "compare nowhere elsewhere": "nowhere",
    "encode nowhere.csv": "nowhere.csv",
    "encode rows.csv --uid idd": "--uid: no column 'idd'",
    "encode rows.csv --encoding blom": "Did you mean 'bloom'?",
    "settings data.batchsize": "Did you mean data.batch_size",
    "settings flushh": "settings lists all",
    "cache lst": "list",
    "bench headline": "Did you mean 'headlines'?",
    "ladder nowhere": "nowhere",
}
"""Commands of a careless person, and part of the one sentence that each gets."""


VERBS = [line for line in CARELESS if not line.startswith("train")]
TRAINED = [line for line in CARELESS if line.startswith("train")]


@pytest.mark.parametrize(
    "lines",
    [VERBS, *at_once(of=[TRAINED[:6], TRAINED[6:]], seconds=20)],
    ids=["verbs", "a few runs", "other runs"],
)
def test_a_careless_person_gets_one_sentence_and_no_folder(lines, walk):
    Path("one.csv").write_text(
        "text,label\n" + "".join(f"words {i},a\n" for i in range(40)), encoding="utf-8"
    )
    Path("numbers.csv").write_text(
        "text,label\n" + "".join(f"{i},{i % 2}\n" for i in range(40)), encoding="utf-8"
    )
    Path("empty.csv").touch()
    Path("book.xlsx").write_bytes(b"PK\3\4")
    before = sorted(Path().rglob("*"))
    wrong = []
    for line in lines:
        said = walk(line, code=2)
        if CARELESS[line] not in said or len(said.strip().splitlines()) != 1:
            wrong.append(f"{line}: {said}")
    assert not wrong, "\n".join(wrong)
    assert [
        path
        for path in sorted(Path().rglob("*"))
        if path not in before and path.parts[0] != "cache"
    ] == []


@pytest.mark.soak(seconds=2)
def test_a_person_who_only_looks_finds_words_and_leaves_nothing(walk):
    for line, says in {
        "train --help": "data.batch_size=",
        "--help": "doctor",
        "doctor --help": "the run's folder",
        "settings": "data.batch_size",
        "settings data.batch_size": "data.batch_size",
        "cache list": "",
        "bench --list": "headlines",
    }.items():
        assert says in walk(line), line
    assert [path.name for path in Path().iterdir() if path.name != "cache"] == ["rows.csv"]

"""Answers are kept whole, found again, and measured anew where they are not."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from flatout.perf.notes import Limit, MicroBatches, known_rows, micro_batch_key
from flatout.perf.tune.answers import Answers, AnswerStore, Attempt, TuneAnswer

ANSWERS = Answers(
    values={"data.feed": "resident", "compile": False},
    choices=[TuneAnswer(name="feed", value="resident", why="measured", evidence="so")],
    tried=[Attempt(what="feed", value="resident", rows_per_s=1.5)],
    seconds=1.0,
    allowed_s=2.0,
    step_s=0.1,
    planned_steps=7,
)


def test_answers_come_back_as_they_were(tmp_path):
    store = AnswerStore(tmp_path)
    assert store.read("a") is None
    store.write("a", ANSWERS)
    assert store.read("a") == ANSWERS
    assert [path.name for path in store.folder.iterdir()] == ["a.json"]


DAMAGED = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1]",
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 2'),
    "a key gone": lambda text: text.replace('"tried"', '"tired"'),
    "other types": lambda text: json.dumps({**json.loads(text), "values": 3}),
    "nested without end": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_and_counts_as_not_there(name, tmp_path):
    store = AnswerStore(tmp_path)
    store.write("a", ANSWERS)
    path = store.path("a")
    path.write_text(DAMAGED[name](path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.warns(UserWarning, match="a.json is damaged: measured again"):
        assert store.read("a") is None


def test_a_folder_that_cannot_be_written_costs_only_measuring_again(tmp_path):
    (tmp_path / "tune").write_text("a file where the folder should be")
    store = AnswerStore(tmp_path)
    with store.measuring("a", 1.0):
        pass
    with pytest.warns(UserWarning, match="cannot be written"):
        store.write("a", ANSWERS)


def test_the_most_rows_that_fit_are_remembered_by_what_decides_them(tmp_path):
    def key(width: int = 4, longest: int = 8, precision: str = "bf16") -> str:
        model = nn.Linear(3, width)
        return micro_batch_key(
            model, longest=longest, device=torch.device("cpu"), precision=precision
        )

    assert key() == key()
    assert len({key(), key(width=5), key(longest=9), key(precision="fp32")}) == 4
    known = partial(known_rows, tmp_path)
    assert known(key()) is None
    run = MicroBatches(tmp_path, {"layout": "flat"})
    like_it = MicroBatches(tmp_path, {"layout": "padded"})
    run.note("training rows", Limit(16), key())
    run.note("training rows", Limit(8), key())
    run.note("evaluation rows", Limit(4), key())
    like_it.note("training rows", Limit(12), key())
    assert known(key()) == 8
    assert known(key(width=5)) is None
    run.path.write_text('{"limits": {"training rows": {"most": "many", "has_ended": false}}}')
    with pytest.warns(UserWarning, match="is damaged"):
        assert known(key()) == 12


def test_who_waits_for_another_says_so_and_goes_on(tmp_path):
    store = AnswerStore(tmp_path)
    said = []
    with store.measuring("a", 0.0), AnswerStore(tmp_path).measuring("a", 0.05, said.append):
        pass
    assert said == ["tune: another process is measuring the same; waiting for its answers"]
    with store.measuring("a", 0.0, said.append):
        assert len(said) == 1

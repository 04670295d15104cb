"""The table of kinds: every choice of data has one kind, and every part of a kind is named where it
is looked for.
"""

from __future__ import annotations

from collections import Counter

import pytest

from flatout import BitsDataConfig, SequenceDataConfig, TextDataConfig
from flatout.cli.composing import COMPONENTS
from flatout.config import RunConfig
from flatout.data.problem import Problem
from flatout.data.sequences.settings import SequenceProblem
from flatout.run.kinds import BITS, KINDS, MASKED_WORDS, TEXTS, kind_of, kind_of_run
from tests.composed import CONF
from tests.refusals import refused


def test_each_problem_of_each_data_has_one_kind():
    named = Counter((kind.settings, problem) for kind in KINDS for problem in kind.problems)
    assert set(named) == {(TextDataConfig, each) for each in Problem} | {
        (SequenceDataConfig, each) for each in SequenceProblem
    }
    assert set(named.values()) == {1}
    assert kind_of(BitsDataConfig()) is BITS


@pytest.mark.parametrize("group", ["data", "model", "task"])
def test_each_kind_and_each_model_has_its_option_in_conf(group):
    schemas = {
        line.rpartition(": ")[2]
        for file in (CONF / group).glob("*.yaml")
        for line in file.read_text().splitlines()
    }
    assert set(COMPONENTS[group]) <= schemas


def test_a_model_folder_names_one_predictor():
    found = {(problem, kind.predictor) for kind in KINDS for problem in kind.predictor.problems}
    assert len({problem for problem, _ in found}) == len(found)
    assert kind_of_run({"problem": "none"}) is MASKED_WORDS
    assert kind_of_run({}) is TEXTS


@pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: f"{kind.task_option} {'/'.join(kind.problems)}"
)
def test_the_usual_metric_is_among_those_of_the_kind(kind):
    known = {"source": "rows.csv"} | ({"problem": kind.problems[0]} if kind.problems else {})
    known |= (
        {"features": ["a"], "target": "b", "lookback": None}
        if kind.settings is SequenceDataConfig
        else {}
    )
    config = kind.settings(**known)
    assert kind.usual_metric(config) in kind.metrics(config)


def test_a_task_of_masked_words_makes_texts_of_them():
    config = RunConfig(model=COMPONENTS["model"]["transformer"](), task=COMPONENTS["task"]["mlm"]())
    assert kind_of(config.data) is MASKED_WORDS


def test_a_task_of_another_value_of_the_problem_says_how_it_is_chosen():
    with refused("task", "tagging", "data.problem=single", fix="data.problem=tags"):
        RunConfig(task=COMPONENTS["task"]["tagging"]())
    with refused("task", "mlm", "data.problem=multi", fix="data.problem"):
        RunConfig(data=TextDataConfig(problem=Problem.multi), task=COMPONENTS["task"]["mlm"]())


@pytest.mark.parametrize(
    ("task", "problem", "fix"),
    [
        ("classification", Problem.tags, "Set task=tagging. Tags need model=transformer, too."),
        ("classification", Problem.none, "task=mlm. Masked words need model=transformer, too."),
        ("tagging", Problem.single, "Tags need model=transformer, too."),
    ],
)
def test_one_message_names_the_task_and_the_model_that_rows_need(task, problem, fix):
    data = TextDataConfig(problem=problem)
    with refused("task", fix=fix):
        RunConfig(data=data, task=COMPONENTS["task"][task]())
    with refused("task") as caught:
        encoder = COMPONENTS["model"]["transformer"]()
        RunConfig(data=data, model=encoder, task=COMPONENTS["task"][task]())
    assert "model=transformer" not in caught.value.hint

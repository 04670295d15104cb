"""Ladders as files: those of `conf/ladder/` read, compose and name keywords that exist; wrong ones
are refused.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import fields, replace

import pytest
import yaml

from flatout.errors import UserError
from flatout.ladder.case import choose_ladder, program_of
from flatout.ladder.climb import top_of
from flatout.ladder.rows import way_of
from flatout.ladder.run_ladder import with_cut
from flatout.ladder.rungs import OF_ENCODERS, ladder_of, read_ladder
from flatout.models import BiLSTMConfig
from flatout.models.encoder.transformer import TransformerConfig
from tests.composed import CONF, compose_run
from tests.ladder.tiny import parts_of

FOLDER = CONF / "ladder"
NAMES = ("headlines", "tweets", "bloom", "lyrics", "battery")
FOOT = {"name": "foot"}
TOP = {"name": "top", "run": []}
OTHER = {
    "name": "frozen",
    "measures": "other learning",
    "run": ["model.freeze_layers={cut}"],
}
SMALL = {
    "title": "t",
    "kind": "text",
    "program": "headlines",
    "rungs": [FOOT, TOP],
}


def test_there_are_five_ladders():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_ladder_climbs_from_a_usual_program_to_a_run_of_ours(name):
    ladder = read_ladder(FOLDER / f"{name}.yaml")
    assert not ladder.rungs[0].is_ours
    assert ladder.rungs[-1].is_ours
    how = importlib.import_module(f"flatout.ladder.usual.{ladder.program}").OPTIONS
    for rung in ladder.rungs:
        if rung.keywords is not None:
            how(**rung.keywords)
    known = {each.name for each in fields(how)}
    changed = {key for rung in ladder.rungs for key in rung.keywords or {}}
    assert changed <= known


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_of_ours_composes_and_fits_the_ladder(name):
    ladder = with_cut(read_ladder(FOLDER / f"{name}.yaml"), TransformerConfig(layers=6))
    for rung in ladder.rungs:
        if rung.is_ours:
            config = compose_run([*ladder.settings, *rung.words])
            assert way_of(config.data).kind == ladder.kind
            assert program_of(config.model) == ladder.program


@pytest.mark.parametrize("name", NAMES)
def test_every_ladder_opens_with_its_command(name):
    assert (
        (FOLDER / f"{name}.yaml")
        .read_text(encoding="utf-8")
        .startswith(f"# python -m flatout ladder +ladder={name}\n")
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_change_is_one_keyword_that_differs_from_the_rung_below(name):
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    rungs = read_ladder(FOLDER / f"{name}.yaml").rungs
    how = importlib.import_module(f"flatout.ladder.usual.{values['program']}").OPTIONS
    usual = [how(**rung.keywords) for rung in rungs if rung.keywords is not None]
    for below, above in itertools.pairwise(usual):
        differing = [
            each.name
            for each in fields(how)
            if getattr(below, each.name) != getattr(above, each.name)
        ]
        assert len(differing) == 1, differing


def test_changes_add_up_from_rung_to_rung():
    rungs = [
        FOOT,
        {"name": "a", "change": {"feed": "gather"}},
        {"name": "b", "change": {"fused": True}},
        TOP,
    ]
    found = ladder_of(
        "own", {**SMALL, "start": {"tokenise": "once"}, "rungs": rungs}, "own.yaml"
    ).rungs
    assert found[0].keywords == {"tokenise": "once"}
    assert found[2].keywords == {"tokenise": "once", "feed": "gather", "fused": True}
    assert found[3].keywords is None


def test_a_rung_may_learn_something_else_and_the_top_lies_below_it():
    ladder = ladder_of("own", {**SMALL, "rungs": [FOOT, TOP, OTHER]}, "own.yaml")
    assert ladder.rungs[top_of(ladder.rungs)].name == "top"
    assert with_cut(ladder, BiLSTMConfig()) is ladder
    for layers, cut in {
        1: 1,
        2: 1,
        6: 4,
        12: 8,
    }.items():
        own = with_cut(replace(ladder, program=OF_ENCODERS), TransformerConfig(layers=layers))
        assert own.rungs[2].words == (f"model.freeze_layers={cut}",)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rungs": [FOOT]}, "fewer than two"),
        ({"rungs": [TOP, FOOT]}, "is a usual program above a run of ours"),
        (
            {"rungs": [TOP, {"name": "b", "run": []}]},
            "is a run of ours. Begin with the usual program.",
        ),
        ({"rungs": [FOOT, FOOT]}, "changes 0 keywords"),
        ({"rungs": [FOOT, {"name": "a", "change": {"a": 1, "b": 2}}]}, "changes 2 keywords"),
        ({"rungs": [FOOT, {**TOP, "change": {"a": 1}}]}, "has both run and change"),
        ({"rungs": [FOOT, {"name": "foot", "run": []}]}, "two have the same name"),
        (
            {"rungs": [FOOT, {**TOP, "run": ["model.hidden=512"]}]},
            "model.hidden=512 changes what is learned",
        ),
        ({"rungs": [FOOT, {**TOP, "run": ["seed=3"]}]}, "seed=3 changes what is learned"),
        ({"rungs": [FOOT, {**TOP, "factor": [2]}]}, "both above 0"),
        ({"rungs": [FOOT, {**TOP, "factor": [3, 2]}]}, "both above 0"),
        (
            {"rungs": [FOOT, {**TOP, "measures": "memory"}]},
            "'memory' (training, startup, learning, other learning)",
        ),
        (
            {"rungs": [FOOT, {**OTHER, "name": "b"}, TOP]},
            "a rung stands above one of other learning. Put it below.",
        ),
        ({"rungs": [FOOT, {**TOP, "promise": "2x"}]}, "Did you mean 'promised'?"),
        ({"kind": "pictures"}, "'pictures' (text, bits, sequence)"),
        ({"settings": ["allow_targets=[mine]"]}, "'allow_targets=[mine]'"),
        ({"settings": ["model._target_=os.system"]}, "'model._target_=os.system'"),
        ({"settings": ["data.source=${oc.env:HOME}"]}, "${oc.env:HOME}"),
        ({"settings": ["data.source=s3://theirs/x"]}, "'data.source=s3://theirs/x'"),
        (
            {"rungs": [FOOT, {**TOP, "run": ["optim.lr=${oc.env:HOME}"]}]},
            "${oc.env:HOME}",
        ),
        (
            {"rungs": [FOOT, {**OTHER, "run": ["data.source=https:\\/\\/theirs/x"]}]},
            "https",
        ),
        ({"settings": ["hydra.run.dir=/"]}, "'hydra.run.dir=/'"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_refused(changed, message):
    with pytest.raises(UserError) as refused:
        ladder_of("own", {**SMALL, **changed}, "own.yaml")
    assert message in str(refused.value)
    assert str(refused.value).startswith("own.yaml")


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("rungs: [")
    with pytest.raises(UserError, match=r"broken\.yaml: is not valid YAML"):
        read_ladder(path)


@pytest.mark.parametrize("program", ["headlines", "tweets", "bloom", "battery"])
def test_rungs_for_your_own_data_promise_nothing_and_keep_your_learning_rate(program):
    data, model = parts_of(program)
    ladder = choose_ladder(data, model, [FOLDER])
    assert (ladder.program, ladder.settings, ladder.in_all) == (program, (), "")
    assert not any(rung.promised or rung.factor for rung in ladder.rungs)
    assert ladder.rungs[top_of(ladder.rungs)].words == ()
    batches = {
        rung.keywords["batch"]
        for rung in ladder.rungs
        if rung.keywords and "batch" in rung.keywords
    }
    assert batches <= {data.batch_size}

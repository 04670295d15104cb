"""`python -m flatout probe`: scores of layers that know something, the cut, and what is refused."""

from __future__ import annotations

import re

import pytest

from flatout import RunConfig
from flatout.cli.probe import print_layers
from flatout.tasks.layer_scores import LayerScore, choose_cut
from tests.callbacks.plain import Small
from tests.refusals import refused
from tests.run_files import write_jsonl
from tests.verbs import verb

ENCODER = [
    "model.hidden=32",
    "model.layers=3",
    "model.heads=4",
    "trainer.accelerator=cpu",
    "precision=fp32",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts whose class a word tells."""
    path = tmp_path_factory.mktemp("probe") / "rows.jsonl"
    words = ["cat", "rose"]
    rows = [
        {"text": f"w{n % 7} {words[n % 2]} w{n % 5} {n}", "label": f"k{n % 2}"} for n in range(300)
    ]
    write_jsonl(path, rows)
    return path


def test_each_layer_has_a_score_and_the_cut_is_named(rows, capfd):
    assert verb("probe", f"data.source={rows}", *ENCODER) == 0
    said = capfd.readouterr().out
    scores = {
        int(n): float(score)
        for n, score in re.findall(r"^ +(\d)  +([\d.]+)  +[\d.]+", said, re.MULTILINE)
    }
    assert scores.keys() == {0, 1, 2, 3}
    assert min(scores.values()) > 0.9  # a word tells: even random layers keep it
    assert said.count("<- the cut") == 1
    assert re.search(
        r"^model\.freeze_layers=[12] \(the first layer within one standard error",
        said,
        re.MULTILINE,
    )


def test_the_first_layer_near_the_best_is_chosen_never_the_embeddings_and_never_all():
    def scores(*values: float) -> list[LayerScore]:
        return [LayerScore(layers, value, 0.02) for layers, value in enumerate(values)]

    assert choose_cut(scores(0.5, 0.6, 0.79, 0.8, 0.7)).layers == 2
    assert choose_cut(scores(0.9, 0.6, 0.8, 0.7, 0.7)).layers == 2
    assert choose_cut(scores(0.5, 0.6, 0.7, 0.8)).layers == 2
    assert choose_cut(scores(0.5, 0.6)).layers == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.problem=regression"],
            "probe: scores one class a row alone. Set data.problem=single.",
        ),
        (
            ["model=bilstm"],
            "model: has no flat layers to look at. Name an encoder with model.pretrained=FOLDER.",
        ),
    ],
)
def test_what_has_no_layers_or_no_classes_is_refused(words, message, rows, capfd):
    assert verb("probe", f"data.source={rows}", *words) == 2
    assert message in capfd.readouterr().err


def test_a_module_of_ones_own_has_no_layers_to_score():
    with refused("probe", "scores no module of your own", fix="Leave task out"):
        print_layers(RunConfig(task=Small()), [])

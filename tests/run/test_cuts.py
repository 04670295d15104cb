"""`tune=cut` scores cuts of an encoder, prints them, and the run takes one; what has no cut is
refused.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from flatout import BiLSTMConfig, UserError
from flatout.models.encoder.lora import LoraConfig
from flatout.tasks.layer_scores import LayerScore
from tests.params import at_once
from tests.run.test_reuse import CLASSES, ENCODER, TAGS, train
from tests.run_files import model_weights, read_log

OPEN = replace(ENCODER, freeze_layers=0)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A run whose cut was measured, and its folder."""
    folder = tmp_path_factory.mktemp("cut")
    return folder, train(CLASSES, OPEN, folder, tune="cut")


def test_the_cuts_are_a_table_and_the_run_takes_one(chosen):
    _, result = chosen
    rows = re.findall(
        r"tune: +(\d)  +([\d.]+)  +([\d.]+)  +([\d.]+)(  <- taken)?$",
        read_log(result.folder),
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [1, 2]
    (taken,) = (int(row[0]) for row in rows if row[4])
    assert f"model.freeze_layers: {taken} (the deepest cut within one standard error" in read_log(
        result.folder
    )
    assert f"reuse: True (layer{'s 1 to 2' if taken == 2 else ' 1'} and the embeddings" in read_log(
        result.folder
    )
    assert result.summary["tune"]["values"] == {"model.freeze_layers": taken}


def test_the_run_equals_one_whose_cut_was_typed(chosen, tmp_path):
    _, result = chosen
    typed = train(
        CLASSES,
        replace(OPEN, freeze_layers=result.summary["tune"]["values"]["model.freeze_layers"]),
        tmp_path,
    )
    found = model_weights(result.folder)
    wanted = model_weights(typed.folder)
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_the_next_run_of_these_settings_knows_its_cut(chosen):
    folder, result = chosen
    again = train(CLASSES, OPEN, folder, tune="cut", epochs=1)
    assert again.summary["tune"]["values"] == result.summary["tune"]["values"]
    assert again.summary["tune"]["tried"] == result.summary["tune"]["tried"]  # their seconds, too


def test_the_deepest_cut_near_the_best_is_taken():
    from flatout.run.cut import _choose_cut

    def taken(*accuracies: float) -> int:
        scores = [
            LayerScore(cut, value, 0.02, 1.0)
            for cut, value in zip((2, 4, 5), accuracies, strict=True)
        ]
        return int(_choose_cut(scores).values["model.freeze_layers"])

    assert [taken(0.8, 0.79, 0.7), taken(0.8, 0.7, 0.6), taken(0.6, 0.7, 0.8)] == [4, 2, 5]


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (
            CLASSES,
            ENCODER,
            r"^tune: cut, but model\.freeze_layers or model\.lora\.rank is asked for\. Leave one",
        ),
        (
            CLASSES,
            BiLSTMConfig(hidden=8, embedding=8),
            r"^tune: cut scores encoders that give a row one class",
        ),
        *at_once(
            of=[
                (
                    CLASSES,
                    replace(OPEN, lora=LoraConfig(rank=2)),
                    r"^tune: cut, but model\.freeze_layers or model\.lora\.rank",
                ),
                (CLASSES, replace(OPEN, layers=1), r"^tune: cut, but the encoder has one layer"),
                (
                    CLASSES,
                    replace(OPEN, compute="padded"),
                    r"^tune: cut reads flat layers of an encoder that classifies",
                ),
                (TAGS, OPEN, r"^tune: cut scores encoders that give a row one class"),
            ],
            seconds=1,
        ),
    ],
)
def test_what_has_no_cut_is_refused(data, model, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(data, model, tmp_path, tune="cut")

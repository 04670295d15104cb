"""The names under which a module of yours logs a metric, and the one that flatout knows it by."""

from __future__ import annotations

import pytest

from flatout import CheckpointConfig
from flatout.run.own_parts import plain_name


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *(
            (name, "loss")
            for name in ("val_loss", "val/loss", "valid_loss", "validation/loss", "loss")
        ),
        ("Val/F1", "F1"),
        ("value_loss", "value_loss"),
        ("val", "val"),
    ],
)
def test_a_metric_of_validation_is_known_by_its_plain_name(name, plain):
    assert plain_name(name, "val") == plain


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (
            "min",
            (
                "val_loss mape val/smape nll test_wer cer cross_entropy rmsle brier ppl bpc rmse"
                " mae_speed fid"
            ),
        ),
        ("max", "accuracy val_f1 auroc bleu power super_score acc_per_class transfer r2 psnr"),
    ],
)
def test_errors_are_known_by_their_names(mode, names):
    assert {name: CheckpointConfig().mode_of(name) for name in names.split()} == dict.fromkeys(
        names.split(), mode
    )
    assert CheckpointConfig(mode="max").mode_of("loss") == "max"

"""The audit of recordings and bit strings: out-of-fold answers, what is answered worst, the
forecast, refusals.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from tests.composed import compose_run, only_folder, run_train
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb

from flatout.audit.number_report import describe_forecast, describe_numbers
from flatout.audit.number_rows import NumberRows, _mean_squares, read_number_rows
from flatout.audit.numbers import measure_numbers
from flatout.audit.ridge_folds import RidgeFolds
from flatout.data import SequenceData

SMALL = ["data=cells", "data.sample.cells=10", "data.sample.cycles=2", "data.sample.samples=40"]
BITS = ["data=people", "data.sample.rows=600", "data.encoding.size=256"]


def made_up(num_rows: int, samples: int, noise: float, wrong: int | None = None) -> NumberRows:
    """Recordings whose answer is linear in three inputs; the answers of one of them may
    be shifted.
    """
    random = torch.Generator().manual_seed(0)
    inputs_ND = torch.randn(num_rows * samples, 3, generator=random)
    answers_NO = inputs_ND @ torch.tensor([[1.0], [-2.0], [0.5]]) + 4
    answers_NO += noise * torch.randn(answers_NO.shape, generator=random)
    row_N = torch.arange(num_rows).repeat_interleave(samples)
    if wrong is not None:
        answers_NO[row_N == wrong] += 3
    names = [f"r{number}" for number in range(num_rows)]
    splits = ["train"] * num_rows
    return NumberRows(
        "recordings",
        "rmse of y",
        "ridge",
        names,
        splits,
        inputs_ND,
        answers_NO,
        row_N,
        _mean_squares,
        2.0,
    )


@pytest.mark.parametrize("part", [0, 3])
def test_sums_of_folds_and_parts_answer_as_ridge_regression_on_their_rows_does(part):
    rows = made_up(20, 7, noise=0.3)
    folds = RidgeFolds(rows, 4)
    rank_R = np.random.default_rng(0).permutation(20)
    found, _ = folds.losses(0.5, part)
    expected = np.empty(20)
    for fold in range(4):
        taught_R = (rank_R % 4 != fold) & (rank_R < 20 * [1 / 8, 1 / 4, 1 / 2, 1][part])
        taught_N = torch.from_numpy(taught_R)[rows.row_N].numpy()
        model = Ridge(alpha=0.5).fit(
            rows.inputs_ND[taught_N].numpy(), rows.answers_NO[taught_N].numpy()
        )
        for number in np.flatnonzero(rank_R % 4 == fold):
            own = (rows.row_N == number).numpy()
            answers = model.predict(rows.inputs_ND[own].numpy()).reshape(-1, 1)
            expected[number] = ((answers - rows.answers_NO[own].numpy()) ** 2).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_recording_whose_answers_are_shifted_is_the_worst_and_its_error_has_the_targets_unit():
    measured = measure_numbers(made_up(30, 20, noise=0.1, wrong=11), 5)
    assert measured.rows.names[measured.order[0]] == "r11"
    assert measured.rows.score_of(measured.loss_R[11]) == pytest.approx(2 * 3, rel=0.1)
    _, _, worst, share, alone, _ = describe_numbers(measured)
    assert worst.startswith("rows:   the worst are r11 5.9")
    assert "makes 9" in share
    others = (np.delete(measured.loss_R, 11).mean()) ** 0.5 * 2
    assert alone == f"        r11 alone makes most of it: {others:.4g} without it"


@pytest.mark.soak(seconds=3)
def test_more_rows_of_what_is_known_to_its_noise_will_not_help():
    measured = measure_numbers(made_up(40, 30, noise=0.2), 5)
    low, high = map(float, measured.interval.split(" to "))
    assert low < measured.score < high
    assert measured.score == pytest.approx(2 * 0.2, rel=0.05)
    assert describe_forecast(measured).startswith(
        "rows of this kind will not help: rmse of y better by 0.0"
    )


@pytest.mark.soak(seconds=6)
def test_twice_as_many_recordings_gain_no_more_than_was_said():
    gains = []
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        inputs_ND = torch.randn(3_000, 60, generator=random)
        answers_NO = (
            inputs_ND @ torch.randn(60, 1, generator=random) / 8
            + torch.randn(3_000, 1, generator=random) / 3
        )
        about = ("recordings", "rmse of y", "ridge")
        halves = (inputs_ND, answers_NO, torch.arange(600).repeat_interleave(5))
        few = NumberRows(
            *about, ["r"] * 60, ["train"] * 60, *(each[:300] for each in halves), _mean_squares, 1.0
        )
        said = measure_numbers(few, 5).forecast
        assert said is not None
        assert said.more == 20
        others = (inputs_ND[1_000:], answers_NO[1_000:])
        error_of_few = error_on_others(inputs_ND[:300], answers_NO[:300], *others)
        error_of_more = error_on_others(inputs_ND[:400], answers_NO[:400], *others)
        gains.append(error_of_few - error_of_more)
        assert gains[-1] <= said.high
    assert min(gains) > 0.003  # they do help


def error_on_others(inputs_ND, answers_NO, others_MD, answers_MO) -> float:
    """Root mean square error on other samples, by the penalty that suits them best."""
    models = (
        Ridge(alpha=penalty).fit(inputs_ND.numpy(), answers_NO.numpy())
        for penalty in (0.1, 1, 10, 100)
    )
    return min(
        float(
            ((model.predict(others_MD.numpy()).reshape(-1, 1) - answers_MO.numpy()) ** 2).mean()
            ** 0.5
        )
        for model in models
    )


def test_few_rows_have_no_forecast_and_fewer_than_folds_are_refused(capfd):
    assert "12 recordings are too few for a forecast: 16 or more" in describe_forecast(
        measure_numbers(made_up(12, 9, 0.1), 3)
    )
    assert verb("audit", *SMALL, "data.sample.cells=1", "data.sample.cycles=1", "folds=9") == 2
    require_printed(capfd.readouterr().err, "folds: ", "5 recordings", "9 folds")


def test_recordings_of_a_group_are_answered_by_models_that_saw_none_of_it(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    lines = ["unit,round,x,y"]
    for unit in range(8):  # what a unit adds is known once a round of it was seen
        mark = random.normal(size=2)
        for value in range(6):
            rows = random.normal(size=(30, 1)) * 0.01 + mark[0] + 9 * unit
            lines += [f"{unit},{value},{row[0]},{mark[1] * 10 + row[0] / 100}" for row in rows]
    Path("units.csv").write_text("\n".join(lines), encoding="utf-8")
    words = ["data=sequence", "data.source=units.csv", "data.features=[x]", "data.target=y"]
    config = compose_run(
        [*words, "data.group=[unit,round]", "data.split_by=group", "task=sequence", "model=rnn"]
    ).data
    data = SequenceData.of(config)
    data.setup()
    folds = RidgeFolds(read_number_rows(data, 100), 4)
    assert {name.split("unit=")[1][0] for name in folds.rows.names} == set("01234567")
    folds_of_unit: dict[str, set[int]] = {}
    for name, fold in zip(folds.rows.names, folds.fold_R.tolist(), strict=True):
        folds_of_unit.setdefault(name.split("unit=")[1][0], set()).add(fold)
    assert len(folds_of_unit) == 8
    assert all(len(numbers) == 1 for numbers in folds_of_unit.values())
    assert set.union(*folds_of_unit.values()) == {0, 1, 2, 3}
    Path("one.csv").write_text(
        "\n".join(line for line in lines if line[0] in "u0"), encoding="utf-8"
    )
    words[1] = "data.source=one.csv"  # a single unit leaves its rounds to be parted
    assert verb("audit", *words, "data.group=[unit,round]", "folds=7") == 2
    require_printed(capfd.readouterr().err, "folds: ", "6 recordings", "7 folds")


@pytest.mark.parametrize(
    ("words", "heads", "score"),
    [
        (SMALL, ["recording", "split", "rmse of soc"], "score:  rmse of soc 0.0"),
        *at_once(of=[(BITS, ["bit string", "split", "Dice"], "score:  Dice 0.")], seconds=3),
        *at_once(
            of=[
                (
                    [*SMALL, "data.problem=forecast", "data.target=voltage", "data.lookback=8"],
                    ["recording", "split"],
                    "voltage",
                ),
                (
                    [
                        "data=bits",
                        "data.sample.rows=300",
                        "data.encoding.kind=twostep",
                        "data.vocabulary=256",
                    ],
                    ["bit string", "split"],
                    "Dice",
                ),
            ],
            seconds=3,
        ),
    ],
)
def test_recordings_and_bit_strings_get_a_table_of_all_rows_the_worst_first_and_a_page(
    words, heads, score, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert verb("audit", *words) == 0
    printed = capfd.readouterr().out
    assert score in printed
    assert "more:   " in printed
    assert "audit/worst.csv, audit/audit.html:" in printed
    first, *rows = table(tmp_path / "audit" / "worst.csv")
    assert first[: len(heads)] == heads
    values = [float(row[2]) for row in rows]
    assert values == sorted(values, reverse=heads[0] == "recording")
    assert len(values) > 15
    page = (tmp_path / "audit" / "audit.html").read_text("utf-8")
    assert "Answered worst, out of fold" in page
    assert "<svg" in page
    assert "Labels that look wrong" not in page


@pytest.mark.soak(seconds=4)
def test_an_audit_does_not_depend_on_how_columns_are_scaled(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for number in range(16):
        value = random.normal(size=40) * 1e7 + 3e9
        rows = zip(value, 2 * value + 1, value * 1e-7 + random.normal(size=40) / 10, strict=True)
        lines = "\n".join(["a,b,y", *(",".join(map(str, row)) for row in rows)])
        Path(f"r{number}.csv").write_text(lines, encoding="utf-8")
    words = [
        "data=sequence",
        f"data.source={tmp_path}/*.csv",
        "data.features=[a,b]",
        "data.target=y",
        "folds=4",
    ]
    printed = {}
    for scale in ("none", "standard"):
        assert verb("audit", *words, f"data.scale={scale}", f"out=of/{scale}") == 0
        printed[scale] = [
            line for line in capfd.readouterr().out.splitlines() if line.startswith("score")
        ]
    assert printed["none"][0] == printed["standard"][0]
    assert "score:  rmse of y 0.1" in printed["none"][0]


@pytest.mark.soak(seconds=2)
@pytest.mark.parametrize("scale", at_once("standard", of=["standard", "minmax"], seconds=2))
def test_a_recording_in_another_unit_stands_on_top(scale, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for number in range(30):
        value, other = random.normal(size=(2, 40))
        unit = 1000 if number == 4 else 1
        lines = [
            f"{v * unit},{w},{v - w + e / 10}"
            for v, w, e in zip(value, other, random.normal(size=40), strict=True)
        ]
        Path(f"r{number}.csv").write_text("\n".join(["v,w,y", *lines]), encoding="utf-8")
    words = [
        "data=sequence",
        f"data.source={tmp_path}/*.csv",
        "data.features=[v,w]",
        "data.target=y",
        "out=of",
    ]
    assert verb("audit", *words, f"data.scale={scale}") == 0
    assert (
        "/r4.csv "
        in next(
            line for line in capfd.readouterr().out.splitlines() if line.startswith("rows:")
        ).split(",")[0]
    )


@pytest.mark.soak(seconds=3)
def test_recordings_with_labels_are_audited_by_the_share_that_is_right(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    folder = tmp_path / "waves"
    folder.mkdir()
    for number in range(24):
        wave = np.sin(np.arange(30) * (0.2 if number % 2 else 0.9)) * (
            1 + number % 2
        ) + 0.1 * random.normal(size=30)
        label = "slow" if number % 2 else "fast"
        text = "\n".join(["x,kind", *(f"{value:.4f},{label}" for value in wave)])
        (folder / f"w{number:02}.csv").write_text(text, encoding="utf-8")
    words = [f"data.source={folder}", "data.features=[x]", "data.target=kind", "data.problem=label"]
    assert verb("audit", "data=sequence", *words, "folds=3") == 0
    assert "score:  accuracy 1, ridge on means and ends, out of fold" in (
        printed := capfd.readouterr().out
    )
    assert "all are answered rightly" in printed
    one = folder / "w05.csv"
    one.write_text(one.read_text("utf-8").replace("slow", "fast"), encoding="utf-8")
    flat = "\n".join(
        ["x,kind", *(f"{value:.4f},slow" for value in 1.2 * np.sin(np.arange(30) * 0.8))]
    )
    # even more like the others, and read later
    (folder / "w09.csv").write_text(flat, encoding="utf-8")
    assert verb("audit", "data=sequence", *words, "folds=3") == 2
    assert "out: audit/worst.csv is there already. Name another" in capfd.readouterr().err
    assert verb("audit", "data=sequence", *words, "folds=3", "out=again") == 0
    heads, first, second, third, *_ = table(tmp_path / "again" / "worst.csv")
    assert heads[3:] == ["given", "likely"]
    assert first[0].endswith("w09.csv")
    assert first[2:] == ["0", "slow", "fast"]
    assert second[0].endswith("w05.csv")
    assert second[2:] == ["0", "fast", "slow"]
    assert third[2] == "1"
    printed = capfd.readouterr().out
    assert "w09.csv (given slow, likely fast), " in printed
    assert "w05.csv (given fast, likely slow)" in printed
    assert "2 of the 24 recordings are answered otherwise" in printed
    assert verb("audit", "data=sequence", *words, "unlabelled=x.csv", "out=more") == 2
    require_printed(capfd.readouterr().err, "unlabelled: ", "texts with one class")
    assert verb("audit", "data=sequence", *words, "for=2m", "out=more") == 2
    require_printed(capfd.readouterr().err, "for: ", "texts with one class")
    assert verb("audit", "data=sequence", *words, "rows=90", "out=more") == 2
    require_printed(capfd.readouterr().err, "rows: ", "all recordings")


@pytest.mark.parametrize(
    ("sizes", "num_folds"),
    [
        ([15, 1], 2),
        *at_once(
            of=[
                ([2, 14], 2),
                ([9, 4, 3], 3),
                ([2] * 40, 5),
                ([1, 30, 1, 1], 4),
            ],
            seconds=2,
        ),
    ],
)
def test_every_part_of_the_curve_has_rows_for_each_fold_however_groups_are_cut(sizes, num_folds):
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    measured = measure_numbers(
        replace(made_up(len(groups), 5, noise=0.1), groups=groups), num_folds
    )
    assert np.isfinite(measured.curve).all()
    assert measured.curve.shape == (num_folds, 4)
    assert measured.score < 1


@pytest.mark.soak(seconds=4)
def test_rows_of_a_group_that_are_alike_do_not_narrow_the_interval():
    rows = made_up(12, 5, noise=0.0)
    answers_NO = (
        rows.answers_NO + torch.randn(12, 1, generator=torch.Generator().manual_seed(1))[rows.row_N]
    )
    once = replace(rows, answers_NO=answers_NO)
    five = {name: torch.cat([getattr(once, name)] * 5) for name in ("inputs_ND", "answers_NO")}
    row_N = torch.cat([rows.row_N + 12 * copy for copy in range(5)])
    names = {
        "names": rows.names * 5,
        "splits": rows.splits * 5,
        "groups": [f"g{number}" for number in range(12)] * 5,
    }
    often = replace(once, **five, **names, row_N=row_N)
    widths = []
    for each in (once, often, replace(often, groups=[])):
        low, high = map(float, measure_numbers(each, 4).interval.split(" to "))
        widths.append(high - low)
    # groups are dealt to other folds than single rows
    assert widths[1] == pytest.approx(widths[0], rel=0.25)
    assert widths[2] < 0.7 * widths[0]


def test_a_forecast_gains_no_more_than_there_is_to_gain():
    random = torch.Generator().manual_seed(0)
    rows = made_up(20, 4, noise=1e-6)
    few = replace(
        rows, inputs_ND=torch.cat([rows.inputs_ND, torch.randn(80, 9, generator=random)], 1)
    )
    measured = measure_numbers(few, 5)
    assert measured.forecast is not None
    assert 0 <= measured.forecast.high <= np.sqrt(measured.loss_R.mean()) * 1.2


@pytest.mark.soak(seconds=5)
def test_a_run_on_recordings_is_audited_as_its_settings_are(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = [
        "+experiment=battery_soc",
        *SMALL[1:],
        "debug=one_batch",
        f"output={tmp_path}/runs",
        "logger=none",
    ]
    assert run_train(words, monkeypatch) == 0
    capfd.readouterr()
    printed = []
    for named in ([str(only_folder(tmp_path / "runs" / "battery_soc"))], words[:-3]):
        assert verb("audit", *named, f"out={tmp_path}/of{len(printed)}") == 0
        printed.append(
            [
                line
                for line in capfd.readouterr().out.splitlines()
                if line.startswith(("score", "rows"))
            ]
        )
    assert printed[0] == printed[1]
    assert printed[0][0].startswith("score:  rmse of soc")


def table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))

"""`python -m flatout price`: what a run takes, before it begins."""

from __future__ import annotations

import pytest

from flatout.cli.price import read_choices
from tests.verbs import verb

SMALL = (
    "model=textcnn",
    "data.sample.rows=300",
    "data.sample.eval_rows=100",
    "trainer.max_epochs=2",
    "logger=none",
)


def test_several_values_are_runs_and_a_list_is_one_value():
    words = ["model=bilstm,textcnn", "logger=[csv,tensorboard]", "+experiment=a", "seed=1,2"]
    assert read_choices(words) == [
        ["model=bilstm", "model=textcnn"],
        ["logger=[csv,tensorboard]"],
        ["+experiment=a"],
        ["seed=1", "seed=2"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "h10"), "--on: no card 'h10' (h100, a100, 4090, a16, l4, t4). Did you mean"),
        (("--devices", "0", "optim.lr=interval(1,2)"), "--devices: 0 (1 to 100,000)"),
        (("--devices", "8"), "--devices: 8 without a card that is not here. Add --on CARD (h100, "),
        (("optim.lr=interval(1,2)",), "optim.lr: interval(1,2) has no end of values."),
    ],
)
def test_what_cannot_be_priced_is_refused_before_anything_is_tried(words, message, capsys):
    assert verb("price", *words) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.soak(seconds=40)
def test_one_run_is_priced_in_lines(capsys):
    assert verb("price", *SMALL, "price.watts=50", "price.per_hour=2") == 0
    printed = capsys.readouterr().out
    assert "for nothing: the linear model on words and n-grams has test/accuracy" in printed
    for name in ("steps", "time", "parts", "memory", "energy", "money"):
        assert f"\n{name} " in printed
    assert "90 % interval" in printed


@pytest.mark.soak(seconds=60)
def test_several_runs_are_a_table_with_their_sum_and_a_card_is_marked(capsys):
    assert verb("price", *SMALL, "data.batch_size=8,64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cheapest first") for line in lines)
    assert lines[-1].startswith("all 2 ")
    assert verb("price", *SMALL, "data.batch_size=16", "--on", "l4") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("on l4: by arithmetic from data sheets, not measured there")
    assert "(data sheet)" in printed


@pytest.mark.soak(seconds=60)
def test_the_trials_of_a_sweep_are_priced_with_and_without_pruning(capsys):
    words = ("model.filters=choice(8,16)", "optim.lr=tag(log,interval(1e-3,1e-2))", "trials=10")
    assert verb("price", *SMALL, "trainer.max_epochs=9", *words, "confirm=1") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    tried = [line for line in lines if line.startswith("model.filters=")]
    assert 1 <= len(tried) <= 3
    assert any(line.startswith("all 10 trials, trained to their end") for line in lines)
    assert "pruned by asha, which leaves some" in "".join(lines)


@pytest.mark.soak(seconds=60)
def test_a_ladder_is_priced_by_its_time_and_the_runs_of_its_top(capsys):
    small = ("data.sample.rows=300", "data.sample.eval_rows=100", "trainer.max_epochs=1")
    words = (
        "+ladder=headlines",
        "for=2m",
        "seeds=2",
        *small,
        "data.batch_size=16",
        "price.watts=60",
    )
    assert verb("price", *words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    climb = next(line for line in lines if line.startswith("the climb, at most"))
    assert "2.0 min (2.0–2.0)" in climb
    assert "0.002" in climb  # 60 W for two minutes
    assert any(line.startswith("2 runs of the top, to their end") for line in lines)
    assert any(line.startswith("all 2 ") for line in lines)
    assert lines[-1].startswith("The foot is trained 2 times, too.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("+ladder=tweet",), "+ladder: no ladder 'tweet'"),
        (("+ladder=bloom", "data=headlines"), "+ladder: bloom needs bits data"),
        (("+ladder=bloom", "for=soon"), "for: 'soon'"),
    ],
)
def test_a_ladder_with_a_mistake_is_refused_before_anything_is_tried(words, message, capsys):
    assert verb("price", *words) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.soak(seconds=60)
def test_the_ridge_of_recordings_is_what_can_be_had_for_nothing(capsys):
    words = ("experiment=battery_soc", "data.sample.cells=4", "data.sample.cycles=2")
    assert verb("price", *words, "trainer.max_epochs=1") == 0
    assert "for nothing: the ridge" in capsys.readouterr().out


def test_a_sweep_that_searches_nothing_has_no_price(capsys):
    assert verb("price", *SMALL, "trials=10") == 2
    assert capsys.readouterr().err.startswith("sweep: searches nothing.")

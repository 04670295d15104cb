"""What is known of a sweep before it begins: its metric, its validations, and its mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import nn

from flatout.bits.scores import NAMES
from flatout.bits.settings import BitsDataConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.cli.words import expand_sweep_word, quoted
from flatout.config import RunConfig
from flatout.data.problem import Problem
from flatout.data.texts.settings import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.engine.run_length import validations
from flatout.run.job import RunJob
from flatout.run.kinds import kind_of
from flatout.sweep.searched import Searched
from flatout.sweep.settings import Pruner, SweeperSettings
from flatout.sweep.space import Part, SettingValues
from flatout.sweep.sweep import confirm
from flatout.sweep.trial import Ending, Status, Trial
from flatout.tasks.tagging import Tagger, TaggingConfig, TagLabels
from tests.params import at_once
from tests.sweep.commands import verbally
from tests.sweep.studies import study


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        ({}, 8),
        ({"max_epochs": 3}, 3),
        ({"max_epochs": 3, "val_check_interval": 0.25}, 12),
        ({"max_epochs": 1, "val_check_interval": 50}, None),
        ({"max_epochs": -1}, None),
        ({"max_steps": 8}, None),
        ({"max_epochs": 3, "max_steps": -1}, 3),
    ],
)
def test_the_last_validation_of_a_run_is_known_where_its_batches_do_not_decide(trainer, count):
    assert validations(trainer) == count


@pytest.mark.parametrize("pruner", [Pruner.asha, Pruner.hyperband])
def test_trials_are_pruned_where_nobody_knows_how_often_they_validate(tmp_path, pruner):
    memory = study(tmp_path, pruner=pruner, trials=12, validations=None)
    ended = 0
    for quality in [0.9] * 4 + [0.1] * 8:
        number, _ = memory.ask()
        place = next(
            (count for count in range(1, 31) if memory.should_end(number, count, quality)), None
        )
        ended += place is not None
        status = Status.complete if place is None else Status.pruned
        memory.tell(number, Ending(status, 1.0, quality))
    assert ended >= 4


def metrics_of(data):
    return kind_of(data).metrics(data)


def test_the_metric_of_a_run_is_known_before_there_is_data():
    assert kind_of(data := RunConfig().data).usual_metric(data) == "accuracy"
    assert metrics_of(TextDataConfig(problem=Problem.regression)) == [
        "mae",
        "rmse",
        "r2",
        "pearson",
        "loss",
    ]
    assert set(metrics_of(BitsDataConfig())) - {"loss"} == set(NAMES)


def test_a_metric_may_be_named_with_its_split_and_an_own_module_gets_the_name_as_it_was_typed(
    tmp_path,
):
    assert (
        RunConfig(checkpoint=CheckpointConfig(metric="val/macro_f1")).checkpoint.metric
        == "macro_f1"
    )
    searched = Searched(SweeperSettings(metric="val/acc"), {}, [], lambda *_: None, tmp_path)
    assert searched.typed({}) == ["checkpoint.metric=val/acc"]
    assert searched.settings.of_the_search() == SweeperSettings(metric="acc").of_the_search()


def test_what_a_tagger_is_judged_by_is_known_before_there_is_one():
    labels = TagLabels(["O", "B-a", "I-a"], 1.0, {})
    task = Tagger(nn.Linear(1, 3), TaggingConfig(), OptimConfig(), labels=labels, total_steps=1)
    assert metrics_of(TextDataConfig(problem=Problem.tags)) == [*task.metric_names, "loss"]


def test_short_words_stand_for_hydra_s_and_any_folder_can_be_named():
    assert expand_sweep_word("for=30m") == "hydra.sweeper.time=30m"
    assert expand_sweep_word("optim.lr=1e-3") == "optim.lr=1e-3"
    assert quoted("a b's=1") == r"'a b\'s=1'"


def test_what_kept_a_seed_from_confirming_is_said_and_known_seeds_are_not_run_again(tmp_path):
    space: dict[str, Part] = {"model.hidden": SettingValues(("8",))}
    searched = Searched(
        SweeperSettings(confirm=3), space, [], lambda words, number: RunJob(RunConfig()), tmp_path
    )
    given = [
        Ending(Status.complete, 1.0, 0.9, {"val/accuracy": 0.9}),
        Ending(Status.failed, 1.0, note="no memory"),
    ]
    given.append(Ending(Status.complete, 1.0, 0.8, {"val/accuracy": 0.8}))
    asked: list[str] = []

    def run(ask: Callable[[], Trial | None], total: int) -> Iterator[tuple[Trial, Ending]]:
        assert total == len(given)
        for ending in given:
            trial = ask()
            assert trial is not None
            asked.append(trial.name)
            yield trial, ending

    first = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=False)
    assert asked == ["confirm-0", "confirm-1", "confirm-2"]
    assert list(first.done) == [1, 3]
    assert first.lines("accuracy") == [
        "confirmed by 2 of 3 seeds: val/accuracy 0.8500 ± 0.0707",
        "not confirmed by 1 of 3 seeds: confirm-1: no memory",
    ]
    over = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=True)
    assert over.done == first.done
    assert over.lines("accuracy")[1].endswith("of 3 seeds: the time was over")
    given[:] = [Ending(Status.complete, 1.0, 0.7, {"val/accuracy": 0.7})]
    again = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=False)
    assert asked[3:] == ["confirm-1"]
    assert again.lines("accuracy") == ["confirmed by 3 of 3 seeds: val/accuracy 0.8000 ± 0.1000"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("resume",),
            "sweep resume: no folder is named. Name its folder: python -m flatout sweep resume",
        ),
        (("model.hiden=choice(8,16)",), "model.hiden: no such key"),
        (
            ("model.hidden=choice(8,16)", "resume=auto"),
            "resume: is of runs, and this is a sweep. Resume it by: ",
        ),
        (("model.hidden=choice(8,16)", "trials=0"), "trials: 0 (1 or more)"),
        ((), "sweep: nothing to search"),
        (
            ("+sweep=blom",),
            "sweep: no option 'blom' (battery, bloom, headlines). Did you mean 'bloom'?",
        ),
        *at_once(
            of=[
                (("resume", "nowhere"), "no sweep.json there"),
                (("model.hidden=choice(8,16)", "for=soon"), "for: 'soon' is no duration"),
                (
                    ("model.hidden=choice(8,16)", "sampler=bayes"),
                    "sampler: 'bayes' (tpe, random, grid)",
                ),
                (
                    ("optim.lr=interval(1e-1,1e-3)",),
                    "(the least number first). Write interval(0.001,0.1).",
                ),
                (
                    ("optim.lr=tag(log,interval(0,1e-3))",),
                    "by factors (numbers above 0). Raise the least number above 0",
                ),
                (
                    ("optim.lr=interval(1e-3,1e-1)", "sampler=grid"),
                    "an interval has too many values for a grid",
                ),
                (("model.hidden=interval(8,16)",), "model.hidden: '10.5"),
                (
                    ("data.batch_size=range(3,1)",),
                    "sweep: data.batch_size: a range without numbers",
                ),
            ],
            seconds=1,
        ),
        *at_once(
            of=[
                (
                    ("model.hidden=choice(8,16,frog)",),
                    "model.hidden: 'frog' does not fit (a whole number)",
                ),
                (
                    ("model.hidden=choice(8,16)", "metric=acuracy", "trials=3"),
                    "metric: no metric 'acuracy' (accuracy, ",
                ),
                (
                    ("model.hidden=choice(frog,8,16)",),
                    "model.hidden: 'frog' does not fit (a whole number)",
                ),
                (("model.dropout=choice(0.1,1.5)",), "model.dropout: 1.5"),
                (
                    (
                        "+experiment=bert_tiny",
                        "model.hidden=choice(32,64)",
                        "model.heads=choice(4,3)",
                    ),
                    "a multiple of 3 heads",
                ),
                (
                    ("model.hidden=choice(8,16)", "metric=rmse"),
                    "metric: no metric 'rmse' (accuracy, macro_f1, ",
                ),
                (("model.hidden=choice(8,16)", "parallel=99"), "launcher.parallel: 99 (1 to"),
            ],
            seconds=3,
        ),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said_before_it_begins(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, said = verbally(capsys, *words, "data.sample.rows=200")
    assert code == 2, said
    assert message in said, said
    assert not list(tmp_path.iterdir())

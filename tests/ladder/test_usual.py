"""The usual programs: each rung changes how they compute, none what they learn."""

from __future__ import annotations

import importlib
import logging
import re

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from flatout.bits.grams import LABELS
from flatout.ladder.climb import find_missing, measure_usual
from flatout.ladder.rungs import read_ladder
from flatout.ladder.usual import bloom, headlines
from flatout.ladder.usual.program import Stopwatch
from tests.composed import CONF
from tests.ladder.tiny import tiny_case
from tests.params import at_once

LADDERS = ("headlines", "tweets", "bloom", "lyrics", "battery")
NOT_TRIED = ("compile", "CUDA graphs", "8 workers", "prefetch 4", "persistent workers")
"""Compiling takes 20 s and more; of the rungs with workers one is tried, as each starts
processes."""
PROGRAMS = ("headlines", "tweets", "bloom", "battery")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {name: tiny_case(name, tmp_path_factory.mktemp(name)) for name in PROGRAMS}


def learn(
    program: str, case, *, drops: bool = True, **keywords
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of one epoch."""
    module = importlib.import_module(f"flatout.ladder.usual.{program}")
    losses: list[float] = []
    handler = logging.Handler()
    handler.emit = lambda record: losses.append(
        float(re.search(r"loss ([\d.]+)", record.getMessage())[1])
    )
    log = logging.getLogger(f"usual.{program}")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        built = module.PROGRAM(case, module.OPTIONS(**keywords))
        network = getattr(built, "network", None) or built.model
        for dropout in (
            each for each in network.modules() if isinstance(each, nn.Dropout) and not drops
        ):
            dropout.p = 0.0
        built.train_epoch(Stopwatch())
    finally:
        log.removeHandler(handler)
    return losses, {name: weight.detach().clone() for name, weight in network.named_parameters()}


BF16_LSTM = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def usual_rungs() -> list[tuple[str, dict]]:
    """Every set of keywords that a ladder names, once."""
    found = []
    for name in LADDERS:
        ladder = read_ladder(CONF / "ladder" / f"{name}.yaml")
        for rung in ladder.rungs:
            can_be = "keras" not in rung.needs or not find_missing(rung.needs)
            # torch has no LSTM in bf16 for processors without AVX512.
            can_be &= (
                name != "headlines" or (rung.keywords or {}).get("precision") != "bf16" or BF16_LSTM
            )
            if rung.keywords is not None and rung.name not in NOT_TRIED and can_be:
                keywords = {
                    key: value
                    for key, value in rung.keywords.items()
                    if key not in ("compiled", "graphs")
                }
                keywords |= {"workers": 0} if keywords.get("workers", 0) > 2 else {}
                marks = () if len(found) % 4 == 0 else pytest.mark.soak(seconds=1)
                found.append(
                    pytest.param(ladder.program, keywords, id=f"{name}: {rung.name}", marks=marks)
                )
    return found


@pytest.mark.filterwarnings(
    "ignore:This process.*is multi-threaded, use of fork:DeprecationWarning"
)
@pytest.mark.parametrize(("program", "keywords"), usual_rungs())
def test_every_rung_of_a_usual_program_trains(program, keywords, cases):
    small = {"batch": 8} if "batch" in keywords else {}
    losses, weights = learn(program, cases[program], **{**keywords, **small})
    assert losses or keywords.get("log_every", 1) > 1
    assert all(torch.isfinite(weight).all() for weight in weights.values())


SAME = [
    ("headlines", {}, {"tokenise": "once"}),
    ("headlines", {"tokenise": "once"}, {"tokenise": "once", "fused": True}),
    ("tweets", {"workers": 0}, {"workers": 0, "tokenise": "up front"}),
    ("tweets", {"workers": 0}, {"workers": 0, "tokenise": "in parallel"}),
    ("bloom", {"workers": 0}, {"workers": 0, "labels": "vectorised"}),
    ("bloom", {"workers": 0}, {"workers": 0, "bits": "tensors"}),
    ("battery", {}, {"state": "kept"}),
    ("battery", {}, {"reads": 1}),
]


@pytest.mark.parametrize(("program", "before", "after"), at_once(*SAME[::3], of=SAME, seconds=1))
def test_a_rung_that_only_saves_time_learns_the_same(program, before, after, cases):
    first, second = (learn(program, cases[program], **keywords) for keywords in (before, after))
    assert first[0] == pytest.approx(second[0], abs=2e-4)
    for name, weight in first[1].items():
        torch.testing.assert_close(second[1][name], weight, atol=2e-3, rtol=0)


def test_two_batches_of_four_learn_as_one_of_eight(cases):
    case = cases["tweets"]
    halves, after_halves = learn("tweets", case, drops=False, workers=0, batch=4, accumulate=2)
    wholes, after_wholes = learn("tweets", case, drops=False, workers=0, batch=8, accumulate=1)
    assert len(halves) == 2 * len(wholes) > 4
    pairs = [(first + second) / 2 for first, second in zip(halves[::2], halves[1::2], strict=True)]
    assert pairs == pytest.approx(wholes, abs=2e-4)  # the log has four digits
    for name, weight in after_wholes.items():
        torch.testing.assert_close(after_halves[name], weight, atol=2e-3, rtol=0)


def test_the_grams_of_the_usual_program_are_those_that_a_run_of_ours_answers():
    assert tuple(bloom.GRAMS) == LABELS


def test_both_ways_to_labels_give_the_same_rows():
    texts = pd.Series(["anna smith251994", "jo", "x", "bob  99"])
    assert bloom.labels_by_apply(texts) == bloom.labels_at_once(texts)


def test_a_vocabulary_keeps_common_words_and_numbers_the_rest_as_unknown():
    vocabulary = headlines.WordVocabulary(["a cat", "a dog", "a cat!"], size=4)
    assert len(vocabulary) == 4
    assert vocabulary.encode("A cat ran") == [2, 3, 1]
    assert vocabulary.padded(["cat", ""], 2).tolist() == [[3, 0], [1, 0]]


def test_the_usual_bilstm_drops_what_the_settings_say():
    sizes = {
        "embedding": 4,
        "hidden": 4,
        "layers": 2,
        "dropout": 0.3,
        "embedding_dropout": None,
    }
    model = headlines.UsualBiLSTM(10, 2, sizes)
    assert (model.embedding_dropout.p, model.lstm.dropout, model.dropout.p) == (0.3, 0.3, 0.3)
    model = headlines.UsualBiLSTM(10, 2, {**sizes, "layers": 1, "embedding_dropout": 0.1})
    assert (model.embedding_dropout.p, model.lstm.dropout, model.dropout.p) == (0.1, 0.0, 0.3)


def test_a_clock_leaves_the_first_steps_out_and_ends_a_loop():
    clock = Stopwatch(seconds=0.0)
    seen = []
    for batch in clock.batches(range(10)):
        seen.append(batch)
        clock.step(rows=4, tokens=8, computed=16)
    assert seen == [0, 1, 2, 3], "three to warm up, one that is counted"
    assert (clock.spent.rows, clock.spent.tokens, clock.spent.computed) == (4, 8, 16)


def test_a_clock_without_a_limit_lets_the_loop_end_by_itself():
    clock = Stopwatch()
    assert list(clock.batches("abc")) == ["a", "b", "c"]
    assert not clock.is_over


@pytest.mark.parametrize("program", ["headlines", "battery"])
def test_a_program_trained_to_its_end_answers_the_test_rows(program, cases, tmp_path):
    found = measure_usual(program, cases[program], {}, None, tmp_path)
    assert found.metrics is not None
    (value,) = found.metrics.values()
    assert value <= 1.0
    assert found.rows_per_s > 0
    assert 0 <= found.wait_share <= 1
    assert (tmp_path / "usual.log").read_text().count("loss") > 1

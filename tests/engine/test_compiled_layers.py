"""Layers compiled by torch compute what they compute eagerly; whether they are is measured, and a
failure is no end.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout import HeadlinesConfig, MonitorConfig, TextDataConfig, VocabularyConfig, fit
from flatout.data import TextData
from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.data.batches.shapes import Shapes
from flatout.engine import compile as compiling
from flatout.engine.captures import CAPTURES, GraphUse
from flatout.engine.compile import compile_layers, is_compiled
from flatout.engine.graph_choice import planned_token_counts
from flatout.engine.precision import Precision
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig
from flatout.perf import compile_choice
from flatout.perf.compile_choice import Passes, choose_compile, choose_static_shapes
from flatout.run import resolve
from flatout.run_log import Choice
from flatout.tasks import Classifier
from tests.faults.plants import Planted, RaiseAt
from tests.faults.runs import write_rows
from tests.params import at_once
from tests.run_files import choices_of, model_weights

CPU = torch.device("cpu")
OF_TORCH = ("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*not a leaf Tensor")
pytestmark = pytest.mark.filterwarnings(*OF_TORCH)


def encoder(family: str = "bert", dropout: float = 0.1, **settings) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        family=family, hidden=32, layers=3, heads=4, dropout=dropout, **settings
    )
    return config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=90, padding_id=1, separator_id=None
    )


def batch_of(*lengths: int) -> FlatBatch:
    ids = [5 + place % 80 for place in range(max(lengths))]
    return flat_batch([ids[:length] for length in lengths])


def train_pass(model: Transformer, batch: FlatBatch) -> list[Tensor]:
    """The answers and the gradients of a training pass with random numbers that are always the
    same.
    """
    torch.manual_seed(1)
    model.zero_grad()
    answers = model.train()(batch)
    (answers * torch.linspace(-1, 1, answers.numel()).view(answers.shape)).sum().backward()
    return [
        answers.detach(),
        *(weight.grad for weight in model.parameters() if weight.grad is not None),
    ]


def traced(monkeypatch) -> list[int]:
    """Traced as always, but not translated, which takes half a minute; the number of operations of
    each graph.
    """
    graphs: list[int] = []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    return graphs


@pytest.mark.parametrize(
    "family",
    at_once("bert", "modernbert", of=["bert", "distilbert", "albert", "modernbert"], seconds=1),
)
def test_compiled_layers_train_as_eager_ones_dropout_and_all(monkeypatch, family):
    graphs = traced(monkeypatch)
    dropout = 0.1 if family != "modernbert" else 0.0  # its dropout draws inside, in another order
    eager = encoder(family, dropout)
    compiled = encoder(family, dropout)
    compile_layers(compiled)
    for lengths in ([3, 9, 9], [4, 17, 30, 31], [2, 5]):
        for expected, found in zip(
            train_pass(eager, batch_of(*lengths)),
            train_pass(compiled, batch_of(*lengths)),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # One graph serves all layers and lengths; another the first layer of ModernBERT's kind, or a
    # last one of few rows.
    assert 1 <= len(graphs) <= 2


@pytest.mark.soak(seconds=2)
def test_layers_beside_small_matrices_are_compiled_too(monkeypatch):
    traced(monkeypatch)
    eager, compiled = (encoder(lora=LoraConfig(rank=2)) for _ in range(2))
    compile_layers(compiled)
    for expected, found in zip(
        train_pass(eager, batch_of(3, 9)), train_pass(compiled, batch_of(3, 9)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_only_training_is_compiled(monkeypatch):
    graphs = traced(monkeypatch)
    model = encoder()
    compile_layers(model)
    model.eval()(batch_of(3, 9))
    assert graphs == []


def test_a_compiler_that_fails_is_reported_once_and_the_layers_run_eagerly(monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("the compiler is gone")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    torch._dynamo.reset()
    model = encoder()
    plain = encoder()
    compile_layers(model)
    with pytest.warns(
        UserWarning, match="compile: torch could not compile a layer .*Layers run eagerly"
    ):
        found = train_pass(model, batch_of(3, 9))
    for expected, got in zip(train_pass(plain, batch_of(3, 9)), found, strict=True):
        torch.testing.assert_close(got, expected)
    train_pass(model, batch_of(4, 5))  # a second warning would be an error


@pytest.mark.soak(seconds=4)
def test_planned_numbers_of_tokens_have_functions_of_their_own(monkeypatch):
    graphs = traced(monkeypatch)
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 2)
    monkeypatch.setattr(compiling, "_USUAL_FUNCTIONS", 2)
    eager = encoder()
    compiled = encoder()
    planned = (20, 28, 36)
    compile_layers(compiled, planned)
    for tokens in (*planned, 7):
        batch = batch_of(3, tokens - 3)
        for expected, found in zip(
            train_pass(eager, batch), train_pass(compiled, batch), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Two more for all other numbers, one of them for the rows of the last layer.
    assert len(graphs) == len(planned) + 2
    assert is_compiled(compiled)


def test_more_functions_than_torch_keeps_leave_the_layers_eager(monkeypatch):
    traced(monkeypatch)
    model = encoder()
    compile_layers(model, [8, 9])
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 1)
    with pytest.warns(UserWarning, match="could not compile a layer .*Layers run eagerly"):
        for tokens in (8, 9):
            train_pass(model, batch_of(3, tokens - 3))
    assert not is_compiled(model)


def chosen(model: Any, *, passes: int, say: Any = print) -> Choice[bool]:
    return choose_compile(model, CPU, Precision.fp32, Passes(passes, tokens=12), say)


def take_times(monkeypatch: pytest.MonkeyPatch, times: Iterator[float]) -> None:
    """Let trials measure these seconds, one after the other."""
    monkeypatch.setattr(
        compile_choice._Trial, "time", lambda trial, *ways: [next(times) for _ in ways]
    )


def test_two_ways_of_a_layer_are_timed_in_turns(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(compile_choice._Trial, "run", lambda trial, finish: order.append(finish))
    trial = compile_choice._Trial(encoder(), CPU, Precision.fp32, 12)
    assert len(trial.time("eager", "compiled")) == 2
    warmed = order[:2]
    timed = order[2:]
    assert warmed == ["eager", "compiled"]
    assert timed == ["eager", "compiled", "compiled", "eager"] * 2 + ["eager", "compiled"]


def test_a_short_run_compiles_nothing():
    choice = chosen(encoder(), passes=10)
    assert (choice.value, choice.why) == (False, "the run is too short for it")
    assert "s saved at most; a trial may take half of it" in choice.evidence


def test_a_machine_without_a_compiler_compiles_nothing(monkeypatch):
    monkeypatch.setattr(compile_choice, "why_not", lambda device: "no C++ compiler is here")
    assert chosen(encoder(), passes=10**9).why == "no C++ compiler is here"


@pytest.mark.parametrize(("factor", "value"), [(0.5, True), (2.0, False)])
def test_layers_are_compiled_where_the_gain_that_was_measured_pays(monkeypatch, factor, value):
    graphs = traced(monkeypatch)
    model = encoder()
    take_times(monkeypatch, iter([1.0, 1.0, factor]))
    before = torch.random.get_rng_state()
    choice = chosen(model, passes=10**6)
    assert choice.value is value
    assert (model.flat_layers()[0].compiled is not None) is value
    assert len(graphs) == 1
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.soak(seconds=2)
@pytest.mark.parametrize(
    ("factor", "value"), [(0.5, compiling.STATIC), (0.99999, compiling.DYNAMIC)]
)
def test_a_function_for_each_number_of_tokens_is_made_where_that_pays(monkeypatch, factor, value):
    graphs = traced(monkeypatch)
    model = encoder()
    compile_layers(model)
    take_times(monkeypatch, iter([1.0, factor]))
    passes = Passes(1_000, tokens=12, token_counts=[8, 16, 24])
    said: list[str] = []
    choice = choose_static_shapes(model, CPU, Precision.fp32, passes, said.append)
    assert choice.value == value
    assert said[0].startswith("compile: compiles a layer for one number of tokens, for 150 s at")
    assert "compiling 3 takes" in choice.evidence
    assert len(graphs) == 1  # for 16 tokens, the next above the mean
    layers_compiled = model.flat_layers()[0].compiled
    graphs.clear()
    for tokens in (24, 20):
        compile_choice._Trial(model, CPU, Precision.fp32, tokens).run(
            partial(layers_compiled, model.flat_layers()[0])
        )
    # With static shapes the planned 24 tokens have another function than 20.
    assert len(graphs) == (2 if value == compiling.STATIC else 1)


@pytest.fixture(scope="module")
def headlines(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    data = TextData(
        sample=HeadlinesConfig(rows=600, eval_rows=20, classes=4),
        batch_size=8,
        vocabulary=VocabularyConfig(kind="wordpiece"),
        cache=str(tmp_path_factory.mktemp("cache")),
    )
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("graph", "steps", "most"),
    [
        (GraphUse.auto, 1_000, 8),
        (GraphUse.auto, 100, 0),
        (GraphUse.on, 100, 8),
        (GraphUse.off, 1_000, 0),
    ],
)
def test_the_numbers_of_tokens_are_those_of_steps_that_are_captured(
    monkeypatch, headlines, graph, steps, most
):
    feed = headlines.feeds.train
    task = Classifier(TransformerConfig(hidden=16, layers=1, heads=2))
    task.build(headlines.info)
    assert planned_token_counts(graph, task, feed, steps) == []  # a CPU captures none
    monkeypatch.setitem(CAPTURES, "cpu", CAPTURES["cuda"])
    counts = planned_token_counts(graph, task, feed, steps)
    assert bool(counts) == bool(most)
    assert len(counts) <= most
    shapes = Shapes.planned(feed, is_padded=False)
    for batch in feed if most else []:
        shape = shapes.shape_of(batch)
        assert shape == "of other rows" or shape.tokens in counts


def test_a_run_too_short_for_more_functions_keeps_one(monkeypatch):
    traced(monkeypatch)
    take_times(monkeypatch, itertools.repeat(1e-3))
    model = encoder()
    compile_layers(model)
    passes = Passes(100, tokens=12, token_counts=[8, 16])
    choice = choose_static_shapes(model, CPU, Precision.fp32, passes, print)
    assert (choice.value, choice.why) == (compiling.DYNAMIC, "the run is too short for more")
    assert is_compiled(model)


def test_a_trial_that_does_not_fit_into_the_memory_leaves_the_run_eager(monkeypatch):
    run = compile_choice._Trial.run
    model = encoder()

    def fail(trial, finish):
        if is_compiled(model):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 216.00 MiB.")
        run(trial, finish)

    monkeypatch.setattr(compile_choice._Trial, "run", fail)
    choice = chosen(model, passes=10**9)
    assert (choice.value, choice.why) == (False, "a trial did not fit into memory")
    assert not is_compiled(model)


def test_a_compiler_that_fails_in_the_trial_leaves_the_run_eager(monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("the compiler is gone")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    torch._dynamo.reset()
    choice = chosen(encoder(), passes=10**9)
    assert (choice.value, choice.why) == (False, "torch could not compile a layer")
    assert "the compiler is gone" in choice.evidence


def test_a_trial_says_that_it_begins_and_is_ended_when_it_takes_too_long(monkeypatch):
    # a layer takes 1 µs, so the run can save 0.5 µs a layer and pass: half of it is the limit
    take_times(monkeypatch, itertools.repeat(1e-6))
    monkeypatch.setattr(compile_choice, "_USUAL_COMPILE_S", 0.1)
    run = compile_choice._Trial.run
    model = encoder()

    def hang(trial, finish):
        while is_compiled(model):
            time.sleep(0.01)
        run(trial, finish)

    monkeypatch.setattr(compile_choice._Trial, "run", hang)
    said: list[str] = []
    passes = round(0.4 / 0.25e-6 / len(model.flat_layers()))
    began = time.perf_counter()
    choice = chosen(model, passes=passes, say=said.append)
    assert time.perf_counter() - began < 5
    assert (choice.value, choice.why) == (False, "a trial took too long")
    assert choice.evidence == "0 s, and compiling can save 1 s at most"
    assert said[0].startswith("compile: compiles one layer to see whether it pays, for 0 s at most")
    assert not is_compiled(model)


@pytest.mark.soak(seconds=90)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
@pytest.mark.parametrize("token_counts", [(), (12,)], ids=["any number", "one number"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_translated_to_machine_code_train_as_eager_ones(precision, token_counts):
    torch._dynamo.reset()
    eager = encoder()
    compiled = encoder()
    compile_layers(compiled, token_counts)
    most = 1e-5 if precision == "fp32" else 2e-2
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for expected, found in zip(
            train_pass(eager, batch_of(3, 9)), train_pass(compiled, batch_of(3, 9)), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=most, atol=most)


def run_of(folder: Path, **settings: Any) -> Any:
    """A small run whose rows and settings are always the same."""
    folder.mkdir(exist_ok=True)
    write_rows(folder / "rows.csv")
    data = TextDataConfig(
        train=str(folder / "rows.csv"), max_length=16, batch_size=12, cache=str(folder / "cache")
    )
    given: dict[str, Any] = {
        "epochs": 3,
        "output": str(folder / "runs"),
        "logger": "none",
        "precision": "fp32",
    }
    monitor = MonitorConfig(verdict=False, progress=False)
    return fit(
        data, TransformerConfig(hidden=16, layers=2, heads=2), monitor=monitor, **(given | settings)
    )


def require_same_bits_after_a_resume(
    folder: Path, choices: dict[str, str] | None = None, **settings: Any
) -> None:
    whole = run_of(folder / "whole", **settings)
    with pytest.raises(Planted):
        plant = RaiseAt(place="on_train_batch_end", step=14)
        run_of(folder / "cut", resume="auto", callbacks={"plant": plant}, **settings)
    resumed = run_of(folder / "cut", resume="auto", callbacks={}, **settings)
    assert resumed.summary["training"]["resumed_from"] == 14
    for each in (whole, resumed):
        made = choices_of(each.summary)
        for name, value in {"compile": True, **(choices or {})}.items():
            assert made[name] == value
    expected = model_weights(whole.folder)
    found = model_weights(resumed.folder)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.soak(seconds=3)
def test_a_run_that_chose_to_compile_resumes_to_the_same_bits(monkeypatch, tmp_path):
    graphs = traced(monkeypatch)
    monkeypatch.setattr(compile_choice, "_USUAL_COMPILE_S", 0.0)
    times = itertools.cycle([1e6, 1e6, 1.0])  # a gain that pays in so short a run
    take_times(monkeypatch, times)
    require_same_bits_after_a_resume(tmp_path)
    assert graphs
    assert next(times) == 1e6, "the resumed run measures nothing again"


@pytest.mark.soak(seconds=3)
def test_a_run_that_chose_static_shapes_resumes_to_the_same_bits(monkeypatch, tmp_path):
    graphs = traced(monkeypatch)
    monkeypatch.setattr(compile_choice, "_USUAL_COMPILE_S", 0.0)
    monkeypatch.setattr(resolve, "planned_token_counts", lambda *unused: [40, 45, 50])
    times = itertools.cycle([1e6, 1e6, 1e5, 1e5, 1.0])  # eager, both, compiled, for one number
    take_times(monkeypatch, times)
    require_same_bits_after_a_resume(tmp_path, {"compiled shapes": compiling.STATIC})
    assert graphs
    assert next(times) == 1e6, "the resumed run measures nothing again"


@pytest.mark.soak(seconds=200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
def test_a_run_translated_to_machine_code_resumes_to_the_same_bits(tmp_path):
    torch._dynamo.reset()
    require_same_bits_after_a_resume(tmp_path, compile=True)

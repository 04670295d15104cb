"""Whether compiling pays in a run: one layer of a flat encoder is timed both ways before training.

`compile=auto` compiles if the run saves more seconds than compiling takes. A trial that takes too
long is ended: it may spend half of what compiling can save at most. Where steps are captured, a
second trial asks whether a function for each planned number of tokens pays as well
(`choose_static_shapes`). What is compiled, and how, is in `engine/compile.py`.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flatout.engine.compile import DYNAMIC, STATIC, compile_layers, why_not
from flatout.engine.pieces import CatchOutOfMemory, give_back_memory
from flatout.engine.precision import Precision, arithmetic, product_type
from flatout.engine.time_limit import NoAlarmError, TooLong, limit_seconds
from flatout.models.encoder.network import Transformer
from flatout.perf.measure.intervals import take_turns
from flatout.run_log import Choice, Say

_USUAL_COMPILE_S = 25.0  # compiling takes at least so long; measured with 2 cores
_MOST_SAVED = 0.5  # fraction of the time after attention that compiling saves at most
_TRIAL_SHARE = 0.5  # of the seconds that compiling can save: a trial may take so long
_LONGEST_TRIAL_S = 180.0  # a compiler that takes longer hangs; a guess
_ROUNDS = 5  # of timing a layer
_MOST_SAVED_BY_STATIC = 0.3
"""Fraction of a compiled layer's time that a fixed number of tokens saves at most; a guess."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes of a run: how many, and about how many tokens each has."""

    count: int
    tokens: int
    token_counts: Sequence[int] = ()
    """The numbers of tokens that captured steps have, ascending; empty where any may occur."""


def choose_compile(
    model: Transformer, device: torch.device, precision: Precision, passes: Passes, say: Say
) -> Choice[bool]:
    """Compile the layers of a flat encoder if that saves time in the passes of this run.

    `say` prints a line before the trial begins, which takes half a minute and more.
    """
    if why := why_not(device):
        return Choice(False, why, "compile=auto")
    tokens = passes.tokens
    choice = Choice(False, "a trial did not fit into memory", f"a layer with {tokens:,} tokens")
    with _trying(device, precision):
        trial = _Trial(model, device, precision, tokens)
        choice = _measure(model, trial, passes.count, say)
    if not choice.value:
        for layer in model.flat_layers():
            layer.compiled = None
    return choice


def choose_static_shapes(
    model: Transformer, device: torch.device, precision: Precision, passes: Passes, say: Say
) -> Choice[str]:
    """Whether compiled layers get a function for each number of tokens that captured steps have.

    The model's layers are compiled already. They stay compiled, in the way that is chosen.
    """
    counts = passes.token_counts
    tokens = next((count for count in counts if count >= passes.tokens), counts[-1])
    choice = Choice(DYNAMIC, "a trial did not fit into memory", f"a layer with {tokens:,} tokens")
    with _trying(device, precision):
        trial = _Trial(model, device, precision, tokens)
        choice = _measure_static(model, trial, passes, say)
    if choice.value == DYNAMIC:
        compile_layers(model)
    return choice


@contextmanager
def _trying(device: torch.device, precision: Precision) -> Iterator[None]:
    """Context manager around a trial: out-of-memory ends it, and random numbers stay as before."""
    random_devices = [device] if device.type == "cuda" else []
    with (
        CatchOutOfMemory() as caught,
        torch.random.fork_rng(random_devices),
        arithmetic(precision, device),
    ):
        yield
    if caught.message:
        give_back_memory()


def _measure(model: Transformer, trial: _Trial, passes: int, say: Say) -> Choice[bool]:
    """Time a layer eagerly and compiled, and choose; the model's layers stay compiled."""
    (eager_s,) = trial.time(trial.layer.finish)
    layer_passes = passes * model.described.num_hidden_layers
    most_s = eager_s * layer_passes * _MOST_SAVED
    limit_s = min(most_s * _TRIAL_SHARE, _LONGEST_TRIAL_S)
    if limit_s < _USUAL_COMPILE_S:
        evidence = (
            f"{most_s:.1f} s saved at most; a trial may take half of it, and takes"
            f" {_USUAL_COMPILE_S:.0f} s and more"
        )
        return Choice(False, "the run is too short for it", evidence)
    say(
        f"compile: compiles one layer to see whether it pays, for {limit_s:,.0f} s at most"
        " (compile=false leaves it out)"
    )
    began = time.perf_counter()
    try:
        why_none = _compile_within(limit_s, model, trial)
    except NoAlarmError:
        return Choice(False, "a trial could not be ended in time here", "compile=true compiles")
    except TooLong:
        # half a compile may lie in the compiler's tables
        importlib.import_module("torch._dynamo").reset()
        evidence = f"{limit_s:.0f} s, and compiling can save {most_s:.0f} s at most"
        return Choice(False, "a trial took too long", evidence)
    compile_s = time.perf_counter() - began
    if why_none:
        return Choice(False, "torch could not compile a layer", why_none)
    eager_s, compiled_s = trial.time(trial.layer.finish, _compiled(model, trial))
    saved_s = (eager_s - compiled_s) * layer_passes
    times = f"{1e3 * eager_s:.1f} ms, compiled {1e3 * compiled_s:.1f} ms"
    evidence = (
        f"a layer without attention takes {times}: saves {saved_s:.0f} s, compiling took"
        f" {compile_s:.0f} s"
    )
    if saved_s > compile_s:
        return Choice(True, "it saves more time than it takes", evidence)
    return Choice(False, "it would save less time than it takes", evidence)


def _measure_static(model: Transformer, trial: _Trial, passes: Passes, say: Say) -> Choice[str]:
    """Time a layer compiled for any number of tokens and for one alone, and choose."""
    counts = passes.token_counts
    (dynamic_s,) = trial.time(_compiled(model, trial))
    layer_passes = passes.count * model.described.num_hidden_layers
    most_s = dynamic_s * layer_passes * _MOST_SAVED_BY_STATIC
    limit_s = min(most_s * _TRIAL_SHARE / len(counts), _LONGEST_TRIAL_S)
    if limit_s < _USUAL_COMPILE_S:
        evidence = f"{most_s:.1f} s saved at most by {len(counts)} more compilations"
        return Choice(DYNAMIC, "the run is too short for more", evidence)
    say(f"compile: compiles a layer for one number of tokens, for {limit_s:,.0f} s at most")
    began = time.perf_counter()
    try:
        why_none = _compile_within(limit_s, model, trial, counts)
    except NoAlarmError:
        return Choice(DYNAMIC, "a trial could not be ended in time here", f"{limit_s:.0f} s")
    except TooLong:
        importlib.import_module("torch._dynamo").reset()
        return Choice(DYNAMIC, "a trial took too long", f"{limit_s:.0f} s")
    compile_s = (time.perf_counter() - began) * len(counts)
    if why_none:
        return Choice(DYNAMIC, "torch could not compile a layer", why_none)
    # Not in turns with the other: torch keeps both for one method, and would call this one only.
    (static_s,) = trial.time(_compiled(model, trial))
    saved_s = (dynamic_s - static_s) * layer_passes
    evidence = (
        f"a layer takes {1e3 * dynamic_s:.1f} ms compiled for any number of tokens,"
        f" {1e3 * static_s:.1f} ms for one: saves {saved_s:.0f} s, compiling {len(counts)} takes"
        f" {compile_s:.0f} s"
    )
    if saved_s > compile_s:
        return Choice(STATIC, "they save more time than they take", evidence)
    return Choice(DYNAMIC, "static shapes would save less time than they take", evidence)


def _compiled(model: Transformer, trial: _Trial) -> Callable[..., Tensor]:
    """The compiled function of the layer that is timed."""
    compiled = model.flat_layers()[0].compiled
    assert compiled is not None
    return partial(compiled, trial.layer)


def _compile_within(
    seconds: float, model: Transformer, trial: _Trial, token_counts: Sequence[int] = ()
) -> str:
    """Compile the layers and train one; why that failed, empty where it did not."""
    with warnings.catch_warnings(record=True) as caught, limit_seconds(seconds):
        warnings.simplefilter("always")
        compile_layers(model, token_counts)
        trial.run(_compiled(model, trial))
    if model.flat_layers()[0].compiled is None:
        return str(caught[-1].message)
    return ""


class _Trial:
    """Times the part of a layer after attention, forward and backward, on random numbers.

    It works on a copy of the layer and leaves no gradients.
    """

    def __init__(
        self, model: Transformer, device: torch.device, precision: Precision, tokens: int
    ) -> None:
        self.layer = copy.deepcopy(model.flat_layers()[0]).to(device).train()
        self.device = device
        hidden = model.described.hidden_size
        # The layer's input, and what attention returned in the format that it computes in.
        states = torch.randn(tokens, hidden, device=device, requires_grad=True)
        attended = torch.randn_like(states, dtype=product_type(precision), requires_grad=True)
        self.states = (states, attended)
        trained = [weight for weight in self.layer.parameters() if weight.requires_grad]
        self.inputs = [states, attended, *trained]  # whose gradients are computed

    def run(self, finish: Callable[..., Tensor]) -> None:
        output = finish(*self.states, *self.layer.prepare(self.states[0]))
        torch.autograd.grad(output.sum(), self.inputs, allow_unused=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, *ways: Callable[..., Tensor]) -> list[float]:
        """Median seconds of `run` in each of some ways, which take turns; each is warm by then."""
        for finish in ways:
            self.run(finish)
        rates = take_turns([partial(self._rate, finish) for finish in ways], least=_ROUNDS)
        return [1 / statistics.median(of_way) for of_way in rates]

    def _rate(self, finish: Callable[..., Tensor]) -> float:
        """Runs a second, by one of them."""
        began = time.perf_counter()
        self.run(finish)
        return 1 / (time.perf_counter() - began)

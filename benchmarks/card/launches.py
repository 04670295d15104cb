"""What captured steps are worth on a card: busy time, launches and memory of a step, and speed
against plain steps and against transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bert import BertBench
from benchmarks.card.place import Place
from benchmarks.card.rates import (
    ROWS_OF_TOKENS,
    STEPS,
    WARM,
    WORKLOADS,
    HearsEachBatch,
    Workload,
    base_shape,
    base_source,
    profile_steps,
    train,
)
from benchmarks.claim import Claim, at_least, at_most, bounded, not_here, reaching
from flatout.engine.captures import GraphUse

# How many times as fast as plain steps: the goals that were set before any card was there.
_GOALS = {
    "BERT-base, 750 tokens a step": 5.0,
    "BERT-base, 4,096 tokens a step": 3.0,
    "BERT-base, 16,384 tokens a step": 1.5,
    "LSTM, 32 windows a step": 10.0,
}
_BUSY = 80
_MOST_LAUNCHES = 5
_MORE_MEMORY = 1.2
_PARTS = (
    "stretches against plain steps",
    "one launch a step against plain steps",
    "time in which the card computes",
    "launches a step",
    "memory with graphs against without",
)
LAUNCH_ROWS = tuple(f"{name}: {part}" for name in WORKLOADS for part in _PARTS)
TRAINER_ROWS = tuple(
    f"BERT-base, {tokens:,} tokens a step: stretches, Trainer's best" for tokens in ROWS_OF_TOKENS
)


def launch_claims(place: Place) -> Iterator[Claim]:
    """Five rows a model. Where nothing is captured, all steps are plain, and the rows say so."""
    for name, workload in WORKLOADS.items():
        yield from _claims_of(place, name, workload)


def _claims_of(place: Place, name: str, workload: Workload) -> Iterator[Claim]:
    plain = train(place, workload, GraphUse.off)
    stretches = train(place, workload)
    one_each = train(place, workload, GraphUse.auto, HearsEachBatch())
    on_card, steps = profile_steps(place, workload, GraphUse.auto)
    rows = [f"{name}: {part}" for part in _PARTS]
    ways = [(stretches, _GOALS.get(name, 1.0)), (one_each, 1.0)]
    for row, (way, goal) in zip(rows[:2], ways, strict=True):
        note = f"{1e3 * way.step_s:.2f} ms a step, plain {1e3 * plain.step_s:.2f}; {way.replayed}"
        yield at_least(row, 1 / way.step_s, 1 / plain.step_s, "steps/s", goal, note)
    if not place.is_gpu:
        yield from (not_here(row, "no card") for row in rows[2:])
        return
    # the profiler slows the host, and not the kernels
    busy = 100 * on_card.busy_s / steps / stretches.step_s
    yield reaching(rows[2], busy, "%", least=_BUSY, note=f"{steps} steps in the profile")
    yield bounded(rows[3], on_card.launches / steps, "", most=_MOST_LAUNCHES)
    memory = (stretches.memory_bytes / 1e6, plain.memory_bytes / 1e6)
    note = f"graphs alone {stretches.graphs.get('memory_mb', 0.0):.0f} MB"
    yield at_most(rows[4], *memory, "MB", _MORE_MEMORY, note)


def trainer_claims(place: Place) -> Iterator[Claim]:
    """BERT-base against transformers' Trainer, each over a hundred steps behind thirty."""
    options = place.options
    warm = options.choose(WARM, WARM, 1)
    steps = options.choose(STEPS, STEPS, 2)
    for row, tokens in zip(TRAINER_ROWS, ROWS_OF_TOKENS, strict=True):
        ours = train(place, WORKLOADS[f"BERT-base, {tokens:,} tokens a step"])
        bench = BertBench(
            place.folder,
            options,
            base_source(tokens, is_tiny=options.tiny),
            max_length=512,
            shape=base_shape(place),
            device=place.device,
            batch_size=4 if options.tiny else ROWS_OF_TOKENS[tokens],
        )
        name, theirs = bench.best_of_theirs(warm, steps)
        note = f"{ours.steps} and {steps} steps; Trainer: {name}; {ours.replayed}"
        yield at_least(row, ours.tokens / ours.seconds, theirs, "tokens/s", 1.0, note)

"""What captured steps are worth on a card: busy time, launches and memory of a step, and speed
against plain steps and against transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

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
from flatout.engine.peaks import Peak, known_peak, measured_peak

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
_MFU = "MFU of real tokens"
TRAINER_ROWS = tuple(
    f"BERT-base, {tokens:,} tokens a step: {part}"
    for tokens in ROWS_OF_TOKENS
    for part in ("stretches, Trainer's best", _MFU)
)
# In percent. The fastest cards reach less of their peak: what they gained in products they did not
# gain in memory.
_LEAST_MFU = {4_096: 28.0, 16_384: 35.0}
_LEAST_MFU_OF_SLOWER_CARDS = {16_384: 45.0}
_FASTEST_CARDS = ("H100", "H200")


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
    """BERT-base against transformers' Trainer, each over a hundred steps behind thirty; its MFU."""
    options = place.options
    warm = options.choose(WARM, WARM, 1)
    steps = options.choose(STEPS, STEPS, 2)
    peak = known_peak(place.device, "bf16-mixed") or measured_peak(place.device, "bf16-mixed")
    for tokens in ROWS_OF_TOKENS:
        name = f"BERT-base, {tokens:,} tokens a step"
        ours = train(place, WORKLOADS[name])
        bench = BertBench(
            place.folder,
            options,
            base_source(tokens, is_tiny=options.tiny),
            max_length=512,
            shape=base_shape(place),
            device=place.device,
            batch_size=4 if options.tiny else ROWS_OF_TOKENS[tokens],
        )
        way, theirs = bench.best_of_theirs(warm, steps)
        rate = ours.tokens / ours.seconds
        note = f"{ours.steps} and {steps} steps; Trainer: {way}; {ours.replayed}"
        yield at_least(f"{name}: stretches, Trainer's best", rate, theirs, "tokens/s", 1.0, note)
        yield _mfu_claim(place, f"{name}: {_MFU}", rate * bench.flops_a_token(), tokens, peak)


def _mfu_claim(place: Place, row: str, flops: float, tokens: int, peak: Peak | None) -> Claim:
    """The share of the card's peak that so many operations a second are."""
    if peak is None:
        return not_here(row, "the peak of this card is not known")
    is_fastest = place.is_gpu and any(
        card in torch.cuda.get_device_name(place.device) for card in _FASTEST_CARDS
    )
    goals = _LEAST_MFU if is_fastest else _LEAST_MFU_OF_SLOWER_CARDS
    note = f"of {peak.tflops:,.1f} TFLOP/s ({peak.source})"
    share = 100 * flops / (peak.tflops * 1e12)
    return reaching(row, share, "%", least=goals.get(tokens), note=note)

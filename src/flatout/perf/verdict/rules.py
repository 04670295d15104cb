"""The verdict: what limits the speed of a run, by how much, and the override that would fix it.

Each cause of lost time has a rule: a function that reads the evidence and returns a finding, or
None if the cause does not count. A finding has the share of the time, the fix, and how many times
as fast the run would be. The finding with the greatest gain is the verdict, and others follow it.
To add a rule, write a function and put it into `RULES`; a way that it tries is added in `ways.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean as mean
from typing import Any

from flatout.data.checks.findings import counted
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.evidence import (
    LEAST_COMPILING,
    LEAST_GAIN,
    LEAST_UNCERTAIN,
    MODEL,
    OWN_LOADER,
    Evidence,
)
from flatout.perf.verdict.findings import (
    VerdictFinding,
    best_tried,
    by_removing,
    by_trying,
    carried_over,
    gain_without,
    waiting_for_reads,
)

_NEAR_PEAK = 0.5  # MFU from which on a model is about as fast as it can be
_USUAL_MINUTES = 10  # between two checkpoints
_USUAL_FLUSH = 50  # optimizer steps
# Reasons for throttled clocks that a user can change, and how. "clocks set by hand" is intended.
_CURES = {
    "heat": "cool the card",
    "power limit": "raise the power limit (nvidia-smi -pl)",
    "power supply": "look at the card's power supply",
    "the card slowed itself": "cool the card",
}
_CARD = {"temperature_c": "°C", "power_w": "W", "sm_clock_mhz": "MHz"}
# Steps may be faster by this fraction while no checkpoint is being written in the background.
_QUICKER_WITHOUT_WRITES = 0.4
_OTHERS = 0.2  # fraction of the machine's cores in other processes that counts, if no core is idle
_ALL_IT_ASKED = 0.9  # fraction of its threads' cores with which a run lacks none


def verdict(
    evidence: Evidence,
    in_words: Callable[[str], str] = str,
    predicted: Sequence[VerdictFinding] | None = None,
) -> dict[str, Any]:
    """What limits the run, as the dict of `summary.json`.

    `in_words` rewrites overrides, such as for a script that has no command line. `predicted`: see
    `findings`.
    """
    ordered = [finding.in_words(in_words) for finding in findings(evidence, predicted)]
    if not ordered or ordered[0].comes_last:
        ordered.insert(0, _nothing_left(evidence))
    first, *others = ordered
    facts = first.as_dict()
    sentence = facts["evidence"] if first.cause == "nothing" else facts["sentence"]
    if evidence.not_tried:
        sentence += f" [{evidence.not_tried}]"
    names = ("cause", "limit", "share", "fix", "override", "gain_low", "gain_high")
    return {name: facts[name] for name in names} | {
        "mend": facts["fix"],
        "predicted_gain": facts["gain"],
        "sentence": sentence,
        "others": [finding.as_dict() for finding in others[:3]],
    }


def findings(
    evidence: Evidence, predicted: Sequence[VerdictFinding] | None = None
) -> list[VerdictFinding]:
    """All causes that count; first the one whose fix gains most.

    `predicted`: findings of another kind of training, in the place of the rules that know runs of
    flatout and Lightning only.
    """
    causes = [rule(evidence) for rule in RULES if predicted is None or rule not in _RACED]
    causes += _by_other_ways(evidence)
    causes += predicted or []
    return sorted(
        filter(None, causes),
        key=lambda finding: (not finding.comes_last, finding.weight),
        reverse=True,
    )


def plain_finding(evidence: Evidence) -> VerdictFinding | None:
    """A cause that costs so much that a run reports it early; None if there is none."""
    return next((finding for finding in findings(evidence) if finding.is_plain), None)


def waiting(evidence: Evidence) -> VerdictFinding | None:
    """The model waits for batches."""
    share = evidence.share("wait", "transfer")
    if share < 1 - 1 / LEAST_GAIN:
        return None
    model_rate = 1000 * evidence.rows_per_batch / max(evidence.model_ms, 1e-9)
    why = f"the model takes {model_rate:,.0f} rows/s"
    if evidence.feed_alone is not None:
        feed = f"the feed alone gives {evidence.feed_alone:,.0f} rows/s"
        if evidence.feed_cores is not None:
            feed += f" and keeps {evidence.feed_cores:.1f} cores busy"
        why = f"measured: {feed}, {why}"
    finding = partial(VerdictFinding, "data", "waiting for data", share, why)
    best = best_tried(evidence, "data")
    if best is not None:
        tried, gain = best
        return finding(override=tried.override, gain=gain)
    # On a CPU another feed takes cores from the model.
    is_measured_cpu = evidence.device == "cpu" and evidence.feed_cores is not None
    if is_measured_cpu and _gain_by_overlap(evidence) < LEAST_UNCERTAIN:
        return None
    if evidence.untested or any(tried.cause == "data" for tried in evidence.tried):
        return finding(override=evidence.untested or None)
    if evidence.feed == OWN_LOADER:
        return finding(advice="more num_workers in your DataLoader")
    others = {"resident": "data.feed=threaded", "threaded": "data.feed=workers"}
    return finding(override=others.get(evidence.feed), advice="try more data.workers")


def _gain_by_overlap(evidence: Evidence) -> float:
    """The largest gain on a CPU if batches are made while the model computes; both share the cores.

    Example on 2 cores: the model takes 6 ms with 2 threads, the wait 4 ms with 1 busy core. Both
    together need (12 + 4) / 2 = 8 ms instead of 10 ms.
    """
    wait = evidence.ms_of("wait")
    model = evidence.model_ms
    shared = (model * evidence.threads + wait * (evidence.feed_cores or 0.0)) / evidence.cores
    return evidence.total_ms / max(evidence.total_ms - wait - model + max(model, shared), 1e-9)


def callbacks(evidence: Evidence) -> VerdictFinding | None:
    """A callback takes time, or makes the host wait for the device."""
    if not evidence.callbacks:  # evidence that comes from curves does not name them
        ms = evidence.ms.get("callbacks", 0.0)
        why = f"{ms:.1f} ms of each batch"
        return by_removing(
            evidence, ms, "callbacks", "callbacks of your own", why, advice="leave them out"
        )
    name = max(evidence.callbacks, key=lambda name: evidence.callbacks[name])
    ms = evidence.callbacks[name]
    why = f"{ms:.1f} ms of each batch"
    limit = f"the callback {name}"
    reads = evidence.reads.get(name, 0)
    if reads:
        why += f", {reads:.0f} reads of the device's numbers a step"
        if evidence.device != "cpu":
            limit += ", which waits for the device,"
    return by_removing(evidence, ms, "callbacks", limit, why, override=f"~callbacks.{name}")


def host_reads(evidence: Evidence) -> VerdictFinding | None:
    """Numbers are read from the device in each step, so the host cannot work ahead."""
    reads = sum(evidence.reads.values())
    share = evidence.share("other", "callbacks")
    if evidence.device == "cpu" or reads < 1 or share < 0.1:
        return None
    reader = max(evidence.reads, key=lambda name: evidence.reads[name])
    why = f"{reads:.0f} reads a step; the device idles {share:.0%} of the time"
    return waiting_for_reads(share, why, override=f"~callbacks.{reader}")


def logging(evidence: Evidence) -> VerdictFinding | None:
    """Curves are written more often than usual."""
    times = evidence.counts.get("logging", 0)
    spent = evidence.ms.get("logging", 0.0)
    if evidence.flush_every >= _USUAL_FLUSH or not times:
        return None
    each_ms = spent * evidence.batches / times
    why = f"{times:,} times, {each_ms:.1f} ms each, every {evidence.flush_every} steps"
    saved = spent * (1 - evidence.flush_every / _USUAL_FLUSH)
    fix = f"monitor.flush_every={_USUAL_FLUSH}"
    return by_removing(evidence, saved, "logging", "writing curves", why, override=fix)


def validating(evidence: Evidence) -> VerdictFinding | None:
    """Validations come more often than once an epoch."""
    times = evidence.counts.get("validation", 0)
    spent = evidence.ms.get("validation", 0.0)
    needed = max(1.0, evidence.epochs)
    if times <= 1.5 * needed:
        return None
    # A checkpoint follows each validation, so that time is saved, too.
    checkpoints = max(evidence.counts.get("checkpoint", 0), times)
    saving = evidence.ms.get("checkpoint", 0.0) * times / checkpoints
    each_ms = spent * evidence.batches / times
    why = f"{times:,} validations in {evidence.epochs:.3g} epochs, {each_ms:.0f} ms each"
    saved = (spent + saving) * (1 - needed / times)
    # Both: where the epochs are null, Lightning accepts no float for the interval.
    fix = "++trainer.val_check_interval=1.0 ++trainer.check_val_every_n_epoch=1"
    return by_removing(evidence, saved, "validation", "validations", why, override=fix)


def saving(evidence: Evidence) -> VerdictFinding | None:
    """Checkpoints come more often than with each validation and every ten minutes."""
    times = evidence.counts.get("checkpoint", 0)
    spent = evidence.ms.get("checkpoint", 0.0)
    minutes = evidence.total_ms * evidence.batches / 60_000
    validations = max(evidence.counts.get("validation", 0), math.ceil(evidence.epochs))
    needed = validations + 1 + math.floor(minutes / _USUAL_MINUTES)
    if times <= 1.5 * needed:
        return None
    why = f"{times:,} checkpoints, {spent * evidence.batches / times:.0f} ms each"
    saved = spent * (1 - needed / times)
    fix = f"checkpoint.every_steps=null checkpoint.every_minutes={_USUAL_MINUTES}"
    gain = gain_without(evidence, saved, quicker=_QUICKER_WITHOUT_WRITES)
    return by_removing(evidence, saved, "checkpoint", "checkpoints", why, override=fix, gain=gain)


def precision(evidence: Evidence) -> VerdictFinding | None:
    """A 16-bit format would be faster here."""
    names = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    limit = f"arithmetic in {names.get(evidence.precision, evidence.precision)}"
    # Untried it is named for a GPU only: on a CPU small models are slower in 16-bit formats.
    is_untried_gpu = evidence.device == "cuda" and evidence.native not in ("", "fp32")
    if not is_untried_gpu or any(tried.cause == "precision" for tried in evidence.tried):
        return by_trying(evidence, "precision", limit)
    why = f"{evidence.native} is native here, and was not tried"
    share = evidence.share("forward", "backward")
    return VerdictFinding(
        "precision", limit, share, why, override=f"precision={evidence.native}", is_only_seen=True
    )


def padding(evidence: Evidence) -> VerdictFinding | None:
    """The model computes much padding."""
    also = f"{evidence.padding_share:.0%} of the computed tokens were padding"
    finding = by_trying(evidence, "padding", "padding", also)
    if finding is not None:
        return finding
    if evidence.padding_share < 0.3:
        return None
    share = evidence.padding_share * evidence.share("forward", "backward")
    return VerdictFinding("padding", "padding", share, also, advice="a model that runs flat")


def _by_other_ways(evidence: Evidence) -> Iterator[VerdictFinding | None]:
    """Causes that only a try shows: accumulation, small batches, threads, eager steps, the loop."""
    rows = counted(round(evidence.rows_per_batch), "row")
    also = f"{evidence.accumulate} batches of {rows} a step; the step stays the same"
    yield by_trying(evidence, "accumulation", "needless accumulation", also)
    if evidence.accumulate == 1:  # else batches can grow without changing the step
        also = f"{rows} a batch; it is another step: mind optim.scale_lr"
        yield by_trying(evidence, "batch", "small batches", also, changes_training=True)
    threads = f"{evidence.threads} thread{'s' if evidence.threads > 1 else ''}"
    yield by_trying(evidence, "threads", f"{threads} on {evidence.cores} cores")
    also = f"compiling took {evidence.compile_s:.0f} s, which is counted"
    yield by_trying(evidence, "eager", "a step that is not compiled", also)
    yield by_trying(evidence, "loop", "Lightning's own loop")


def optimizing(evidence: Evidence) -> VerdictFinding | None:
    """The optimizer takes most of a step."""
    share = evidence.share("optimizer")
    if share < 0.4:
        return None
    why = f"{evidence.ms['optimizer']:.1f} ms of each batch, whatever its size"
    finding = partial(VerdictFinding, "optimizer", "the optimizer", share, why)
    best = best_tried(evidence, "batch")
    if best is None:
        return finding()
    tried, gain = best
    return finding(override=tried.override, gain=gain)


def _gain_uncompiled(evidence: Evidence, ms: float) -> SpeedupInterval:
    """The gain of a run that compiles nothing; `ms` of each batch is the compiler's own time.

    The value comes from eager steps, if they were tried.
    """
    # The compiler's clock omits work of torch around a compilation: it gives the lower bound. The
    # upper bound also removes `other`, as garbage of the compiler is collected between steps.
    clocked = gain_without(evidence, ms)
    if evidence.eager_ms is None:
        return clocked
    total = max(evidence.total_ms, 1e-9)
    left = max(total - evidence.model_ms + evidence.eager_ms, 1e-3 * total)
    tried = total / left
    most = total / max(left - evidence.ms.get("other", 0.0), 1e-3 * total)
    return carried_over(tried, min(tried, clocked.value), max(most, clocked.value))


def compiling(evidence: Evidence) -> VerdictFinding | None:
    """torch.compile compiles again and again."""
    share = evidence.compiling_share
    if share < LEAST_COMPILING:
        return None
    why = f"{evidence.compiled['graphs']:.0f} graphs in {evidence.compiled['seconds']:.0f} s"
    gain = _gain_uncompiled(evidence, min(share, 0.9) * evidence.total_ms)
    if evidence.eager_ms is not None:
        eager = f"{evidence.eager_ms:.1f} ms a batch uncompiled"
        why += f"; tried here: {eager}, {evidence.model_ms:.1f} as it was"
    return VerdictFinding(
        "compile", "compiling again and again", share, why, override="compile=false", gain=gain
    )


def framework(evidence: Evidence) -> VerdictFinding | None:
    """Much of a step is outside the model: launches of small kernels, and the loop itself."""
    share = evidence.share("other")
    if share < 0.3 or any(tried.cause in ("batch", "accumulation") for tried in evidence.tried):
        return None
    batch = f"each batch of {evidence.rows_per_batch:.0f} rows"
    why = f"{evidence.ms['other']:.1f} ms of {batch} are no work of the model"
    advice = "try a larger data.batch_size"
    if evidence.feed == OWN_LOADER:
        advice = "try larger batches in your DataLoader"
    return VerdictFinding(
        "batch", "small batches", share, why, advice=advice, changes_training=True
    )


def tuning_whole(evidence: Evidence) -> VerdictFinding | None:
    """All layers of a pretrained encoder are trained; most could be frozen and computed once."""
    layers = evidence.tuned_layers
    epochs = evidence.epochs
    cut = 2 * layers // 3
    if not cut or epochs < 2:
        return None
    # Frozen layers need one forward pass in the whole run, and no backward pass.
    forward_ms = evidence.ms.get("forward", 0.0) * (1 - 1 / epochs)
    saved_ms = (forward_ms + evidence.ms.get("backward", 0.0)) * cut / layers
    limit = f"training all {layers} layers (to freeze {cut} saves this, and learns something else)"
    share = saved_ms / max(evidence.total_ms, 1e-9)
    gain = gain_without(evidence, saved_ms, quicker=0.0)
    why = "by arithmetic, not tried; python -m flatout probe scores each layer first"
    fix = f"model.freeze_layers={cut} model.reuse=true"
    return VerdictFinding(
        "layers", limit, share, why, override=fix, gain=gain, changes_training=True, comes_last=True
    )


def _nothing_left(evidence: Evidence) -> VerdictFinding:
    """The verdict of a run in which no cause counts."""
    share = evidence.share("forward", "backward")
    limit = "the model's own arithmetic"
    why = f"{share:.0%} of the time in {limit}"
    if evidence.mfu is not None:
        why += f", {evidence.mfu:.0%} of the device's peak"
    if evidence.mfu is not None and evidence.mfu >= _NEAR_PEAK:
        why = f"nothing left to gain: near the roof, {why}"
    else:
        why = f"nothing found that would make it faster: {why}"
    return VerdictFinding("nothing", limit, share, why)


# The machine around a run: memory, the card, other processes, and the other ranks.


def swapping(evidence: Evidence) -> VerdictFinding | None:
    """The machine moves memory to disk and back."""
    moved = sum(evidence.host.get(f"swap_{way}_mb_per_s") or 0.0 for way in ("in", "out"))
    if moved < 10.0:  # MB/s
        return None
    why = f"{moved:.0f} MB/s to swap and back"
    left = evidence.host.get("available_memory_gb")
    if left is not None:
        why += f", {left:.1f} GB of memory left"
    share = evidence.share("wait", *MODEL)
    advice = "a smaller data.batch_size or data.eval_batch_size, or data.feed=threaded"
    if evidence.feed == OWN_LOADER:
        advice = "smaller batches in your DataLoader"
    return VerdictFinding(
        "memory", "memory that is swapped", share, why, advice=advice, is_only_seen=True
    )


def cut_batches(evidence: Evidence) -> VerdictFinding | None:
    """Whole batches do not fit into memory."""
    if evidence.pieces <= 1:
        return None
    why = f"each batch goes through in {evidence.pieces} pieces, as it ran out of memory whole"
    is_wide = evidence.precision == "32-true" and evidence.native not in ("", "fp32")
    override = f"precision={evidence.native}" if is_wide else None
    share = evidence.share("forward", "backward")
    advice = "for encoders try model.gradient_checkpointing=true"
    return VerdictFinding(
        "memory", "memory", share, why, override=override, advice=advice, is_only_seen=True
    )


def throttling(evidence: Evidence) -> VerdictFinding | None:
    """Something keeps the card's clocks down."""
    throttled = evidence.gpu.get("throttled") or {}
    reasons = {reason: share for reason, share in throttled.items() if reason in _CURES}
    share = max(reasons.values(), default=0.0)
    now = evidence.gpu.get("sm_clock_mhz")
    most = evidence.gpu.get("most_sm_clock_mhz")
    # A card that works hard is at its power limit most of the time, and may lose little by it.
    if now and most:
        share = min(share, max(0.0, 1 - now / most))
    if share < (0.2 if most is None else 1 - 1 / LEAST_GAIN):
        return None
    reason = max(reasons, key=lambda reason: reasons[reason])
    facts = [f"held down by {reason} in {reasons[reason]:.0%} of the samples"]
    for name, unit in _CARD.items():
        if evidence.gpu.get(name) is not None:
            facts.append(f"{evidence.gpu[name]:.0f} {unit}")
    why = ", ".join(facts)
    why += f" of {most:.0f}" if most else ""
    limit = "the card's clocks being held down"
    return VerdictFinding("throttling", limit, share, why, advice=_CURES[reason], is_only_seen=True)


def shared_card(evidence: Evidence) -> VerdictFinding | None:
    """Another process computes on the card."""
    others = evidence.gpu.get("others") or {}
    share = others.get("share", 0.0)
    if share < 0.3:
        return None
    why = f"{others['processes']} other processes in {share:.0%} of the samples"
    fix = "another card by CUDA_VISIBLE_DEVICES"
    return VerdictFinding(
        "shared", "a card that others use too", share, why, advice=fix, is_only_seen=True
    )


def starved(evidence: Evidence) -> VerdictFinding | None:
    """A container's limit, or other processes, keep this run from the cores."""
    finding = partial(VerdictFinding, "cpu", is_only_seen=True, takes_cores=True)
    throttled = evidence.host.get("cpu_held_back_share") or 0.0
    if throttled >= 0.2:
        why = f"throttled in {throttled:.0%} of its periods"
        limit = "the container's limit of cores"
        return finding(limit, throttled, why, advice="allow it more cores")
    busy_share = evidence.host.get("machine_cpu_share")
    own_cores = evidence.host.get("process_cpu_cores")
    # Other ranks would count as other processes.
    if busy_share is None or own_cores is None or busy_share < 0.9 or evidence.world > 1:
        return None
    cores = evidence.machine_cores
    others = busy_share * cores - own_cores
    lost = 1.0
    if evidence.device == "cpu":
        # If it has the cores of its threads, others only use the cores that it leaves.
        if own_cores >= _ALL_IT_ASKED * evidence.threads:
            return None
        lost = 1 - own_cores / evidence.threads
    share = min(others / cores, lost)
    if share < _OTHERS:
        return None
    why = f"{busy_share:.0%} of {cores} cores are busy, {own_cores:.1f} of them for this run"
    advice = "end the other programs, or run elsewhere"
    left = max(1, round(cores - others))
    # Threads of a matrix product wait for the slowest of them: fewer threads may be faster.
    if evidence.device == "cpu" and left < evidence.threads:
        advice += f"; until then threads={left}"
    return finding("other processes on these cores", share, why, advice=advice)


def uneven_ranks(evidence: Evidence) -> VerdictFinding | None:
    """Ranks wait for the slowest of them."""
    own_ms = evidence.own_ms_of_ranks
    if len(own_ms) < 2:
        return None
    most_ms = max(own_ms)
    slowest = own_ms.index(most_ms)
    usual_ms = mean(ms for rank, ms in enumerate(own_ms) if rank != slowest)
    why = f"rank {slowest} takes {most_ms:.1f} ms of its own for each batch, the others"
    why += f" {usual_ms:.1f}"
    advice = f"look at rank {slowest}'s machine, or leave it out"
    lost_ms = most_ms - usual_ms
    gain = gain_without(evidence, lost_ms, quicker=0.0)
    return by_removing(
        evidence, lost_ms, "ranks", "the slowest rank", why, advice=advice, gain=gain
    )


def _sum_of(parts_ms: Mapping[str, float], *parts: str) -> float:
    return sum(parts_ms.get(part, 0.0) for part in parts)


def communicating(evidence: Evidence) -> VerdictFinding | None:
    """Exchanging gradients takes longer than the computing that it overlaps with."""
    alone_ms = [parts["alone"] for parts in evidence.ranks if parts.get("alone")]
    together_ms = [_sum_of(parts, *MODEL) for parts in evidence.ranks]
    if not alone_ms or len(together_ms) < 2:
        return None
    spent_ms = mean(together_ms) - mean(alone_ms)
    saved_ms = spent_ms / 2  # with twice the rows in a step there are half as many exchanges
    if evidence.total_ms < LEAST_GAIN * (evidence.total_ms - saved_ms):
        return None
    why = f"forward, backward and optimizer take {mean(together_ms):.1f} ms a batch, without the"
    why += f" other ranks {mean(alone_ms):.1f}; it is another step: mind optim.scale_lr"
    if evidence.effective_batch is None:
        fix = f"data.accumulate={2 * evidence.accumulate}"
    else:
        fix = f"data.effective_batch={2 * evidence.effective_batch}"
    return VerdictFinding(
        "communication",
        "exchanging gradients",
        spent_ms / evidence.total_ms,
        why,
        override=fix,
        gain=gain_without(evidence, saved_ms, quicker=0.0),
        changes_training=True,
    )


# All rules that look at the evidence alone.
RULES = [
    waiting,
    padding,
    callbacks,
    host_reads,
    logging,
    validating,
    saving,
    precision,
    optimizing,
    compiling,
    swapping,
    cut_batches,
    throttling,
    shared_card,
    starved,
    uneven_ranks,
    communicating,
    framework,
    tuning_whole,
]
# Rules whose causes `predicted.py` judges in trainings by transformers' Trainer.
_RACED = (waiting, padding, host_reads)

"""The verdict: what held a run back, by how much, and the override that would fix it.

Each cause is a small rule over what was measured: the share of the time its cause takes, the
evidence, the fix, and how many times as fast the run would be. The cause with the greatest gain is
the verdict; others that count follow. A new rule is a function here and its name in `RULES`; what
it tries, if it tries something, is a way in `ways.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean as mean
from typing import Any

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
)

_NEAR_ROOF = 0.5  # share of the peak from which on a run is as fast as such a model gets
_USUAL_FLUSH = 50
_HOLDING = {
    "heat": "cool the card",
    "power limit": "raise the power limit (nvidia-smi -pl)",
    "power supply": "look at the card's power supply",
    "the card slowed itself": "cool the card",
}  # limits of the clocks that you can change, such as clocks set by hand
_CARD = {"temperature_c": "°C", "power_w": "W", "sm_clock_mhz": "MHz"}
# by how much steps may be quicker where no checkpoint is still being written behind them
_WRITES_ON = 0.4
# share of the machine that other processes take, from which on they count where no core is idle
_OTHERS = 0.2
_ALL_IT_ASKED = 0.9  # share of its threads' cores from which on a run has what it asked for


def verdict(evidence: Evidence, in_words: Callable[[str], str] = str) -> dict[str, Any]:
    """What limits the run, in the words of `summary.json`; `in_words`: what stands in place of an
    override.
    """
    found = [each.in_words(in_words) for each in findings(evidence)]
    if not found or found[0].comes_last:
        found.insert(0, _nothing_left(evidence))
    first, *others = found
    words = first.as_dict()
    sentence = words["evidence"] if first.cause == "nothing" else words["sentence"]
    return {
        **{
            name: words[name]
            for name in ("cause", "limit", "share", "fix", "override", "gain_low", "gain_high")
        },
        "mend": words["fix"],
        "predicted_gain": words["gain"],
        "sentence": sentence + (f" [{evidence.not_tried}]" if evidence.not_tried else ""),
        "others": [each.as_dict() for each in others[:3]],
    }


def findings(evidence: Evidence) -> list[VerdictFinding]:
    """Every cause that counts, the one whose fix gains most first."""
    found = [*(rule(evidence) for rule in RULES), *_by_other_ways(evidence)]
    return sorted(
        filter(None, found), key=lambda each: (not each.comes_last, each.weight), reverse=True
    )


def waiting(evidence: Evidence) -> VerdictFinding | None:
    """The model waits for batches."""
    if (share := evidence.share("wait", "transfer")) < 1 - 1 / LEAST_GAIN:
        return None
    why = (
        f"the model takes {1000 * evidence.rows_per_batch / max(evidence.model_ms, 1e-9):,.0f}"
        " rows/s"
    )
    if evidence.feed_alone is not None:
        busy = (
            ""
            if evidence.feed_cores is None
            else f" and keeps {evidence.feed_cores:.1f} cores busy"
        )
        why = f"measured: the feed alone gives {evidence.feed_alone:,.0f} rows/s{busy}, {why}"
    finding = partial(VerdictFinding, "data", "waiting for data", share, why)
    if (found := best_tried(evidence, "data")) is not None:
        return finding(override=found[0].override, gain=found[1])
    if (
        evidence.device == "cpu"
        and evidence.feed_cores is not None
        and _gain_by_hiding(evidence) < LEAST_UNCERTAIN
    ):
        return None
    if evidence.untested or any(tried.cause == "data" for tried in evidence.tried):
        return finding(override=evidence.untested or None)
    if evidence.feed == OWN_LOADER:
        return finding(advice="more num_workers in your DataLoader")
    others = {"resident": "data.feed=threaded", "threaded": "data.feed=workers"}
    return finding(override=others.get(evidence.feed), advice="try more data.workers")


def _gain_by_hiding(evidence: Evidence) -> float:
    """The most that batches made beside the model can gain on a processor, whose cores both then
    share.
    """
    wait = evidence.ms_of("wait")
    model = evidence.model_ms
    shared = (model * evidence.threads + wait * (evidence.feed_cores or 0.0)) / evidence.cores
    return evidence.total_ms / max(evidence.total_ms - wait - model + max(model, shared), 1e-9)


def callbacks(evidence: Evidence) -> VerdictFinding | None:
    """A callback takes time, or makes the host wait for the device."""
    if not evidence.callbacks:  # curves do not name them
        ms = evidence.ms.get("callbacks", 0.0)
        why = f"{ms:.1f} ms of each batch"
        return by_removing(
            evidence, ms, "callbacks", "callbacks of your own", why, advice="leave them out"
        )
    name, ms = max(evidence.callbacks.items(), key=lambda each: each[1])
    reads = evidence.reads.get(name, 0)
    why = f"{ms:.1f} ms of each batch" + (
        f", {reads:.0f} reads of the device's numbers a step" if reads else ""
    )
    limit = f"the callback {name}" + (
        ", which waits for the device," if reads and evidence.device != "cpu" else ""
    )
    return by_removing(evidence, ms, "callbacks", limit, why, override=f"~callbacks.{name}")


def host_reads(evidence: Evidence) -> VerdictFinding | None:
    """Numbers of the device asked for in every step keep the host from working ahead."""
    reads = sum(evidence.reads.values())
    share = evidence.share("other", "callbacks")
    if evidence.device == "cpu" or reads < 1 or share < 0.1:
        return None
    override = f"~callbacks.{max(evidence.reads, key=lambda each: evidence.reads[each])}"
    why = f"{reads:.0f} reads a step; the device idles {share:.0%} of the time"
    # The host may need some of that time itself: nothing is sure to be gained.
    most = 1 / max(1 - share, 1e-3)
    gain = carried_over(most, 1.0, most)
    return VerdictFinding(
        "reads", "waiting for numbers of the device", share, why, override=override, gain=gain
    )


def logging(evidence: Evidence) -> VerdictFinding | None:
    """Curves are written more often than anyone reads them."""
    times = evidence.counts.get("logging", 0)
    spent = evidence.ms.get("logging", 0.0)
    if evidence.flush_every >= _USUAL_FLUSH or not times:
        return None
    why = (
        f"{times:,} times, {spent * evidence.batches / times:.1f} ms each, every"
        f" {evidence.flush_every} steps"
    )
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
    # Each validation is followed by a checkpoint.
    saving = evidence.ms.get("checkpoint", 0.0) * (
        times / max(evidence.counts.get("checkpoint", 0), times)
    )
    why = (
        f"{times:,} validations in {evidence.epochs:.3g} epochs,"
        f" {spent * evidence.batches / times:.0f} ms each"
    )
    saved = (spent + saving) * (1 - needed / times)
    # null takes no share
    fix = "++trainer.val_check_interval=1.0 ++trainer.check_val_every_n_epoch=1"
    return by_removing(evidence, saved, "validation", "validations", why, override=fix)


def saving(evidence: Evidence) -> VerdictFinding | None:
    """Checkpoints come more often than validations and every ten minutes."""
    times = evidence.counts.get("checkpoint", 0)
    spent = evidence.ms.get("checkpoint", 0.0)
    needed = max(evidence.counts.get("validation", 0), math.ceil(evidence.epochs)) + 1
    if times <= 1.5 * needed:
        return None
    why = f"{times:,} checkpoints, {spent * evidence.batches / times:.0f} ms each"
    saved = spent * (1 - needed / times)
    fix = "checkpoint.every_steps=null checkpoint.every_minutes=10"
    return by_removing(
        evidence, saved, "checkpoint", "checkpoints", why, override=fix, quicker=_WRITES_ON
    )


def precision(evidence: Evidence) -> VerdictFinding | None:
    """Sixteen bits would be faster here."""
    names = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    limit = f"arithmetic in {names.get(evidence.precision, evidence.precision)}"
    is_card = evidence.device == "cuda"  # on a processor small models are slower in sixteen bits
    if (
        not is_card
        or evidence.native in ("", "fp32")
        or any(each.cause == "precision" for each in evidence.tried)
    ):
        return by_trying(evidence, "precision", limit)
    why = f"{evidence.native} is native here, and was not tried"
    share = evidence.share("forward", "backward")
    return VerdictFinding(
        "precision", limit, share, why, override=f"precision={evidence.native}", is_only_seen=True
    )


def padding(evidence: Evidence) -> VerdictFinding | None:
    """Padding is computed."""
    also = f"{evidence.padding_share:.0%} of the computed tokens were padding"
    if (found := by_trying(evidence, "padding", "padding", also)) is not None:
        return found
    if evidence.padding_share < 0.3:
        return None
    share = evidence.padding_share * evidence.share("forward", "backward")
    return VerdictFinding("padding", "padding", share, also, advice="a model that runs flat")


def _by_other_ways(evidence: Evidence) -> Iterator[VerdictFinding | None]:
    """Causes that only trying shows: needlessly many or small batches, threads, a step not
    compiled, the loop.
    """
    rows = f"{evidence.rows_per_batch:.0f} rows"
    also = f"{evidence.accumulate} batches of {rows} a step; the step stays the same"
    yield by_trying(evidence, "accumulation", "needless accumulation", also)
    if evidence.accumulate == 1:  # else batches can grow while the step stays
        also = f"{rows} a batch; it is another step: mind optim.scale_lr"
        yield by_trying(evidence, "batch", "small batches", also, changes_training=True)
    limit = (
        f"{evidence.threads} thread{'s' if evidence.threads > 1 else ''} on {evidence.cores} cores"
    )
    yield by_trying(evidence, "threads", limit)
    also = f"compiling took {evidence.compile_s:.0f} s, which is counted"
    yield by_trying(evidence, "eager", "a step that is not compiled", also)
    yield by_trying(evidence, "loop", "Lightning's own loop")


def optimizing(evidence: Evidence) -> VerdictFinding | None:
    """Steps are mostly the optimizer's."""
    if (share := evidence.share("optimizer")) < 0.4:
        return None
    why = f"{evidence.ms['optimizer']:.1f} ms of each batch, whatever its size"
    found = best_tried(evidence, "batch")
    fix: dict[str, Any] = {} if found is None else {"override": found[0].override, "gain": found[1]}
    return VerdictFinding("optimizer", "the optimizer", share, why, **fix)


def _gain_uncompiled(evidence: Evidence, ms: float) -> SpeedupInterval:
    """The gain when nothing is compiled: by the compiler's own clock, `ms` of each batch, and by
    steps without it.
    """
    # That clock leaves out what torch does around a compilation, so it is the lower bound. The
    # upper one leaves out what else stands between steps, too: garbage of the compiler is cleared
    # away there.
    clocked = gain_without(evidence, ms)
    if evidence.eager_ms is None:
        return clocked
    total = max(evidence.total_ms, 1e-9)
    left = max(total - evidence.model_ms + evidence.eager_ms, 1e-3 * total)
    tried, most = total / left, total / max(left - evidence.ms.get("other", 0.0), 1e-3 * total)
    return carried_over(tried, min(tried, clocked.value), max(most, clocked.value))


def compiling(evidence: Evidence) -> VerdictFinding | None:
    """torch.compile makes graph after graph."""
    if (share := evidence.compiling_share) < LEAST_COMPILING:
        return None
    why = f"{evidence.compiled['graphs']:.0f} graphs in {evidence.compiled['seconds']:.0f} s"
    gain = _gain_uncompiled(evidence, min(share, 0.9) * evidence.total_ms)
    if evidence.eager_ms is not None:
        why += (
            f"; tried here: {evidence.eager_ms:.1f} ms a batch uncompiled, {evidence.model_ms:.1f}"
            " as it was"
        )
    return VerdictFinding(
        "compile", "compiling again and again", share, why, override="compile=false", gain=gain
    )


def framework(evidence: Evidence) -> VerdictFinding | None:
    """What is left of a step besides the model: launches of small kernels, the loop itself."""
    share = evidence.share("other")
    if share < 0.3 or any(tried.cause in ("batch", "accumulation") for tried in evidence.tried):
        return None
    why = (
        f"{evidence.ms['other']:.1f} ms of each batch of {evidence.rows_per_batch:.0f} rows are no"
        " work of the model"
    )
    advice = (
        "try larger batches in your DataLoader"
        if evidence.feed == OWN_LOADER
        else "try a larger data.batch_size"
    )
    return VerdictFinding(
        "batch", "small batches", share, why, advice=advice, changes_training=True
    )


def tuning_whole(evidence: Evidence) -> VerdictFinding | None:
    """All layers of a pretrained encoder are trained, where most could be frozen and
    computed once.
    """
    layers, epochs = evidence.tuned_layers, evidence.epochs
    cut = 2 * layers // 3
    if not cut or epochs < 2:
        return None
    forward_ms, backward_ms = (
        evidence.ms.get(part, 0.0) * cut / layers for part in ("forward", "backward")
    )
    # They are computed once, forwards, where they were computed both ways in each epoch.
    saved_ms = forward_ms * (1 - 1 / epochs) + backward_ms
    limit = f"tuning all {layers} layers, and freezing {cut} changes what is learned"
    share = saved_ms / max(evidence.total_ms, 1e-9)
    gain = gain_without(evidence, saved_ms, quicker=0.0)
    why = "by arithmetic, not tried; python -m flatout probe scores each layer first"
    fix = f"model.freeze_layers={cut} model.reuse=true"
    return VerdictFinding(
        "layers", limit, share, why, override=fix, gain=gain, changes_training=True, comes_last=True
    )


def _nothing_left(evidence: Evidence) -> VerdictFinding:
    share = evidence.share("forward", "backward")
    limit = "the model's own arithmetic"
    is_near = evidence.mfu is not None and evidence.mfu >= _NEAR_ROOF
    begin = (
        "nothing left to gain: near the roof,"
        if is_near
        else "nothing found that would make it faster:"
    )
    mfu = "" if evidence.mfu is None else f", {evidence.mfu:.0%} of the device's peak"
    return VerdictFinding(
        "nothing", limit, share, f"{begin} {share:.0%} of the time in {limit}{mfu}"
    )


# The machine around a run: memory, the card, other processes, and the other ranks.


def swapping(evidence: Evidence) -> VerdictFinding | None:
    """The machine moves memory to disk and back."""
    moved = sum(evidence.host.get(f"swap_{way}_mb_per_s") or 0.0 for way in ("in", "out"))
    if moved < 10.0:  # MB/s
        return None
    left = evidence.host.get("available_memory_gb")
    why = f"{moved:.0f} MB/s to swap and back" + (
        "" if left is None else f", {left:.1f} GB of memory left"
    )
    share = evidence.share("wait", *MODEL)
    fix = "a smaller data.batch_size or data.eval_batch_size, or data.feed=threaded"
    fix = "smaller batches in your DataLoader" if evidence.feed == OWN_LOADER else fix
    return VerdictFinding(
        "memory", "memory that is swapped", share, why, advice=fix, is_only_seen=True
    )


def cut_batches(evidence: Evidence) -> VerdictFinding | None:
    """Memory does not suffice for whole batches."""
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
    """The card holds its clocks down."""
    reasons = {
        reason: share
        for reason, share in (evidence.gpu.get("throttled") or {}).items()
        if reason in _HOLDING
    }
    share = max(reasons.values(), default=0.0)
    now, most = (evidence.gpu.get(name) for name in ("sm_clock_mhz", "most_sm_clock_mhz"))
    if now and most:  # a card that is well used sits at its power limit, and may lose little by it
        share = min(share, max(0.0, 1 - now / most))
    if share < (0.2 if most is None else 1 - 1 / LEAST_GAIN):
        return None
    reason = max(reasons, key=lambda each: reasons[each])
    facts = [
        f"{evidence.gpu[name]:.0f} {unit}"
        for name, unit in _CARD.items()
        if evidence.gpu.get(name) is not None
    ]
    why = ", ".join([f"held down by {reason} in {reasons[reason]:.0%} of the looks", *facts])
    why += f" of {most:.0f}" if most else ""
    limit = "the card's clocks being held down"
    return VerdictFinding(
        "throttling", limit, share, why, advice=_HOLDING[reason], is_only_seen=True
    )


def shared_card(evidence: Evidence) -> VerdictFinding | None:
    """Another process computes on the card."""
    others = evidence.gpu.get("others") or {}
    if (share := others.get("share", 0.0)) < 0.3:
        return None
    why = f"{others['processes']} other processes in {share:.0%} of the looks"
    fix = "another card by CUDA_VISIBLE_DEVICES"
    return VerdictFinding(
        "shared", "a card that others use too", share, why, advice=fix, is_only_seen=True
    )


def starved(evidence: Evidence) -> VerdictFinding | None:
    """A container's limit, or other processes, keep this one from the cores."""
    starving: dict[str, Any] = {"is_only_seen": True, "takes_cores": True}
    if (held := evidence.host.get("cpu_held_back_share") or 0.0) >= 0.2:
        why = f"throttled in {held:.0%} of its periods"
        limit = "the container's limit of cores"
        return VerdictFinding("cpu", limit, held, why, advice="allow it more cores", **starving)
    machine, own = evidence.host.get("machine_cpu_share"), evidence.host.get("process_cpu_cores")
    # ranks are other processes too
    if machine is None or own is None or machine < 0.9 or evidence.world > 1:
        return None
    # others have what this run leaves them
    if evidence.device == "cpu" and own >= _ALL_IT_ASKED * evidence.threads:
        return None
    others = machine * evidence.machine_cores - own
    # it has the rest of what it asked for
    lost = 1 - own / evidence.threads if evidence.device == "cpu" else 1.0
    if (share := min(others / evidence.machine_cores, lost)) < _OTHERS:
        return None
    why = (
        f"{machine:.0%} of {evidence.machine_cores} cores are busy, {own:.1f} of them for this run"
    )
    advice = "end or move what else runs"
    left = max(1, round(evidence.machine_cores - others))
    # threads of one product wait for the slowest of them
    if evidence.device == "cpu" and left < evidence.threads:
        advice += f"; until then threads={left}"
    return VerdictFinding(
        "cpu", "other processes on these cores", share, why, advice=advice, **starving
    )


def uneven_ranks(evidence: Evidence) -> VerdictFinding | None:
    """Ranks wait for the slowest of them."""
    own = [
        sum(each.get(part, 0.0) for part in ("wait", "forward", "callbacks", "other"))
        for each in evidence.ranks
    ]
    if len(own) < 2:
        return None
    slowest = own.index(max(own))
    usual = mean(ms for rank, ms in enumerate(own) if rank != slowest)
    why = (
        f"rank {slowest} takes {own[slowest]:.1f} ms of its own for each batch, the others"
        f" {usual:.1f}"
    )
    fix = f"look at rank {slowest}'s machine, or leave it out"
    return by_removing(
        evidence, own[slowest] - usual, "ranks", "the slowest rank", why, advice=fix, quicker=0.0
    )


def communicating(evidence: Evidence) -> VerdictFinding | None:
    """Ranks exchange gradients for longer than that can hide behind computing."""
    alone = [each["alone"] for each in evidence.ranks if each.get("alone")]
    together = [sum(each.get(part, 0.0) for part in MODEL) for each in evidence.ranks]
    if not alone or len(together) < 2:
        return None
    spent = mean(together) - mean(alone)
    saved, share = spent / 2, spent / evidence.total_ms  # twice the rows a step halve it
    if evidence.total_ms < LEAST_GAIN * (evidence.total_ms - saved):
        return None
    why = (
        f"forward, backward and optimizer take {mean(together):.1f} ms a batch, without the other"
        " ranks"
    )
    why += f" {mean(alone):.1f}; it is another step: mind optim.scale_lr"
    whole = evidence.effective_batch
    name, now = ("accumulate", evidence.accumulate) if whole is None else ("effective_batch", whole)
    fix = f"data.{name}={2 * now}"
    gain = gain_without(evidence, saved, quicker=0.0)
    return VerdictFinding(
        "communication",
        "exchanging gradients",
        share,
        why,
        override=fix,
        gain=gain,
        changes_training=True,
    )


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
]
RULES += [
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

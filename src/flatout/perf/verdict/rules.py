"""The verdict: what held a run back, by how much, and the override that would fix it.

Each cause is a small rule over what was measured: the share of the time its cause takes, the evidence, the fix, and
how much faster the run would be. Gains are worked out from measured parts, or tried; else the verdict gives none. The
cause with the greatest gain is the verdict; others that count come after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flatout.perf.verdict.evidence import LEAST_GAIN, OWN_LOADER, Evidence, Tried

_LEAST_OF_DROPOUT = 1.25
_NEAR_ROOF = 0.5
"""Share of the peak from which on a run is as fast as such a model gets."""
_MOST_OTHERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause of lost time."""

    cause: str
    limit: str
    """In words, as they stand after "limited by"."""
    share: float
    """Of the time, what it takes."""
    evidence: str
    fix: str | None = None
    """The override, or what to do where no override does it."""
    gain: float | None = None
    """How many times as fast the run would be."""

    def sentence(self) -> str:
        text = f"limited by {self.limit}: {self.share:.0%} of the time"
        if self.fix and self.gain:
            text += f"; {self.fix} would make this run ≈ {self.gain:.1f}× faster"
        elif self.fix:
            text += f"; {self.fix}"
        return f"{text} ({self.evidence})"


def verdict(evidence: Evidence) -> dict[str, Any]:
    """In the words of `summary.json`: what limits the run, its share, the fix and the gain, and what else counts."""
    found = findings(evidence)
    first, *others = found or [_nothing_left(evidence)]
    return {
        "cause": first.cause,
        "limit": first.limit,
        "share": round(first.share, 4),
        "mend": first.fix,
        "fix": first.fix,
        "predicted_gain": None if first.gain is None else round(first.gain, 3),
        "sentence": _sentence(first) + (f" [{evidence.not_tried}]" if evidence.not_tried else ""),
        "others": [asdict(each) | {"sentence": each.sentence()} for each in others[:_MOST_OTHERS]],
    }


def findings(evidence: Evidence) -> list[Finding]:
    """Every cause that counts, the one whose fix gains most first."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(found, key=_weight, reverse=True)


_ONLY_SEEN = ("throttling", "shared", "memory", "cpu", "precision")
"""Causes that were seen for a share of the time, which is not what they cost: after all whose gain is known."""
_PLAIN_GAIN, _PLAIN_SHARE = 1.25, 0.5
"""From where on a run that has just begun says so."""
_OTHER_TRAINING = ("batch", "dropout", "communication")
"""Causes whose fix changes what is learned, so that it takes more to name them first."""


def is_plain(finding: Finding) -> bool:
    """Whether it costs so much that the run reports it at once: you can still end and fix it."""
    if finding.gain is None and finding.cause in _ONLY_SEEN:
        return finding.share >= _PLAIN_SHARE
    return (finding.gain or 1 / max(1e-3, 1 - finding.share)) >= _PLAIN_GAIN


def _weight(finding: Finding) -> float:
    if finding.gain is None and finding.cause in _ONLY_SEEN:
        return LEAST_GAIN
    gain = finding.gain or 1 / max(1e-3, 1 - finding.share)
    return math.sqrt(gain) if finding.cause in _OTHER_TRAINING else gain


def _sentence(finding: Finding) -> str:
    return finding.evidence if finding.cause == "nothing" else finding.sentence()


def _without(evidence: Evidence, ms: float) -> float:
    """How much faster it is when so many milliseconds of each batch are not spent."""
    return evidence.total_ms / max(evidence.total_ms - ms, 1e-9)


def gain_of(evidence: Evidence, tried: Tried) -> float:
    """How much faster the run would be in the way that was tried; what is not of the model costs what it did."""
    computed = evidence.computed_ms / evidence.rows_per_batch
    each_batch = sum(evidence.ms.get(part, 0.0) for part in ("other", "callbacks")) / tried.rows_per_batch
    # Logging comes with optimizer steps, checkpoints and validations with epochs.
    rows_a_step = evidence.rows_per_batch * evidence.accumulate
    steps_change = rows_a_step / (tried.rows_per_batch * tried.batches_per_step)
    logging = evidence.ms.get("logging", 0.0) / evidence.rows_per_batch * steps_change
    seldom = sum(evidence.ms.get(part, 0.0) for part in ("checkpoint", "validation")) / evidence.rows_per_batch
    now = evidence.total_ms / evidence.rows_per_batch
    return now / max(computed * tried.ratio + each_batch + logging + seldom, 1e-9)


def _best(evidence: Evidence, cause: str) -> tuple[Tried, float] | None:
    """What was tried against a cause and gains most, where that is worth naming; of nearly equals the first."""
    gains = [(tried, gain_of(evidence, tried)) for tried in evidence.tried if tried.cause == cause]
    most = max((gain for _, gain in gains), default=0.0)
    return next((each for each in gains if each[1] >= 0.95 * most), None) if most >= LEAST_GAIN else None


def _told(tried: Tried) -> str:
    return f"tried here: {tried.rows_per_s:,.0f} rows/s of it against {tried.as_was:,.0f} as it was"


def _by_trying(evidence: Evidence, cause: str, limit: str, also: str = "") -> Finding | None:
    found = _best(evidence, cause)
    if found is None:
        return None
    tried, gain = found
    why = f"{also}; {_told(tried)}" if also else _told(tried)
    return Finding(cause=cause, limit=limit, share=1 - 1 / gain, evidence=why, fix=tried.override, gain=gain)


def waiting(evidence: Evidence) -> Finding | None:
    """The model waits for batches."""
    share = evidence.share("wait", "transfer")
    if share < 1 - 1 / LEAST_GAIN:
        return None
    model_ms = sum(evidence.ms.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
    takes = f"the model takes {1000 * evidence.rows_per_batch / max(model_ms, 1e-9):,.0f}"
    alone = "" if evidence.feed_alone is None else f"measured: the feed alone gives {evidence.feed_alone:,.0f} rows/s, "
    limit, why = "waiting for data", f"{alone}{takes} rows/s"
    if (found := _best(evidence, "data")) is not None:
        tried, gain = found
        return Finding(cause="data", limit=limit, share=share, evidence=why, fix=tried.override, gain=gain)
    fix = None
    if not any(tried.cause == "data" for tried in evidence.tried):
        if evidence.feed == OWN_LOADER:
            fix = "more num_workers in your DataLoader"
            return Finding(cause="data", limit=limit, share=share, evidence=why, fix=fix)
        fix = {"resident": "data.feed=threaded", "threaded": "data.feed=workers"}.get(evidence.feed, "data.workers")
        fix = f"try {fix}" if fix != "data.workers" else "try more data.workers"
    return Finding(cause="data", limit=limit, share=share, evidence=why, fix=fix)


def callbacks(evidence: Evidence) -> Finding | None:
    """Your own callback takes time, or makes the host wait for the device."""
    if not evidence.callbacks:  # curves do not name them
        return _unnamed_callbacks(evidence)
    name, ms = max(evidence.callbacks.items(), key=lambda each: each[1])
    gain = _without(evidence, ms)
    if gain < LEAST_GAIN:
        return None
    reads = evidence.reads.get(name, 0)
    why = f"{ms:.1f} ms of each batch" + (f", {reads:.0f} reads of the device's numbers a step" if reads else "")
    limit = f"the callback {name}" + (", which waits for the device," if reads and evidence.device != "cpu" else "")
    share = ms / evidence.total_ms
    return Finding(cause="callbacks", limit=limit, share=share, evidence=why, fix=f"~callbacks.{name}", gain=gain)


def _unnamed_callbacks(evidence: Evidence) -> Finding | None:
    ms = evidence.ms.get("callbacks", 0.0)
    gain = _without(evidence, ms)
    if gain < LEAST_GAIN:
        return None
    why, share = f"{ms:.1f} ms of each batch", evidence.share("callbacks")
    return Finding(
        cause="callbacks", limit="callbacks of your own", share=share, evidence=why, fix="leaving them out", gain=gain
    )


def host_reads(evidence: Evidence) -> Finding | None:
    """Numbers of the device asked for in every step keep the host from working ahead."""
    reads = sum(evidence.reads.values())
    if evidence.device == "cpu" or reads < 1 or evidence.share("other", "callbacks") < 0.1:
        return None
    name = max(evidence.reads, key=lambda each: evidence.reads[each])
    share = evidence.share("other", "callbacks")
    why = f"{reads:.0f} reads a step; the device idles {share:.0%} of the time"
    fix = f"~callbacks.{name}"
    return Finding(
        cause="reads", limit="waiting for numbers of the device", share=share, evidence=why, fix=fix,
        gain=1 / max(1 - share, 1e-3),
    )  # fmt: skip


def logging(evidence: Evidence) -> Finding | None:
    """Curves are written more often than anybody reads them."""
    times = evidence.counts.get("logging", 0)
    spent = evidence.ms.get("logging", 0.0)
    usual = 50
    if evidence.flush_every >= usual or not times:
        return None
    saved = spent * (1 - evidence.flush_every / usual)
    gain = _without(evidence, saved)
    if gain < LEAST_GAIN:
        return None
    each = spent * evidence.batches / times
    why = f"{times:,} times, {each:.1f} ms each, every {evidence.flush_every} steps"
    return Finding(
        cause="logging", limit="writing curves", share=evidence.share("logging"), evidence=why,
        fix=f"monitor.flush_every={usual}", gain=gain,
    )  # fmt: skip


def validating(evidence: Evidence) -> Finding | None:
    """Validations come more often than once an epoch."""
    times, spent = evidence.counts.get("validation", 0), evidence.ms.get("validation", 0.0)
    needed = max(1.0, evidence.epochs)
    if times <= 1.5 * needed:
        return None
    # Each validation is followed by a checkpoint.
    saves = evidence.counts.get("checkpoint", 0)
    saving = evidence.ms.get("checkpoint", 0.0) * (times / max(saves, times))
    gain = _without(evidence, (spent + saving) * (1 - needed / times))
    if gain < LEAST_GAIN:
        return None
    why = f"{times:,} validations in {evidence.epochs:.3g} epochs, {spent * evidence.batches / times:.0f} ms each"
    share = (spent + saving) / evidence.total_ms
    fix = "++trainer.val_check_interval=1.0"
    return Finding(cause="validation", limit="validations", share=share, evidence=why, fix=fix, gain=gain)


def saving(evidence: Evidence) -> Finding | None:
    """Checkpoints come more often than validations and every ten minutes."""
    times, spent = evidence.counts.get("checkpoint", 0), evidence.ms.get("checkpoint", 0.0)
    needed = evidence.counts.get("validation", 0) + 1
    if times <= 1.5 * needed:
        return None
    gain = _without(evidence, spent * (1 - needed / times))
    if gain < LEAST_GAIN:
        return None
    why = f"{times:,} checkpoints, {spent * evidence.batches / times:.0f} ms each"
    share = evidence.share("checkpoint")
    fix = "checkpoint.every_steps=null checkpoint.every_minutes=10"
    return Finding(cause="checkpoint", limit="checkpoints", share=share, evidence=why, fix=fix, gain=gain)


def precision(evidence: Evidence) -> Finding | None:
    """Sixteen bits would be faster here."""
    limit = f"arithmetic in {_spoken(evidence.precision)}"
    if evidence.native in ("", "fp32") or any(tried.cause == "precision" for tried in evidence.tried):
        return _by_trying(evidence, "precision", limit)
    why, share = f"{evidence.native} is native here, and was not tried", evidence.share("forward", "backward")
    fix = f"precision={evidence.native}"
    return Finding(cause="precision", limit=limit, share=share, evidence=why, fix=fix)


def padding(evidence: Evidence) -> Finding | None:
    """Padding is computed."""
    also = f"{evidence.padding_share:.0%} of the computed tokens were padding"
    if (found := _by_trying(evidence, "padding", "padding", also)) is not None:
        return found
    if evidence.padding_share < 0.3:
        return None
    share = evidence.padding_share * evidence.share("forward", "backward")
    return Finding(cause="padding", limit="padding", share=share, evidence=also, fix="a model that runs flat")


def small_batches(evidence: Evidence) -> Finding | None:
    """Batches are so small that fixed costs rule."""
    if evidence.accumulate > 1:
        return None  # then they can grow while the step stays
    also = f"{evidence.rows_per_batch:.0f} rows a batch; it is another step: mind optim.scale_lr"
    return _by_trying(evidence, "batch", "small batches", also)


def accumulation(evidence: Evidence) -> Finding | None:
    """A step is made of more batches than memory asks for."""
    also = f"{evidence.accumulate} batches of {evidence.rows_per_batch:.0f} rows a step; the step stays the same"
    return _by_trying(evidence, "accumulation", "needless accumulation", also)


def threads(evidence: Evidence) -> Finding | None:
    """Cores stand idle because too few threads were asked for."""
    return _by_trying(evidence, "threads", f"{_threads(evidence.threads)} on {evidence.cores} cores")


def dropout(evidence: Evidence) -> Finding | None:
    """Drawing what is dropped takes its time."""
    also = "another model: it may overfit more"
    found = _by_trying(evidence, "dropout", "dropout", also)
    return None if found is None or (found.gain or 0) < _LEAST_OF_DROPOUT else found


def optimizing(evidence: Evidence) -> Finding | None:
    """Steps are mostly the optimizer's."""
    share = evidence.share("optimizer")
    if share < 0.4:
        return None
    why = f"{evidence.ms['optimizer']:.1f} ms of each batch, whatever its size"
    found = _best(evidence, "batch")
    tried, gain = found if found else (None, None)
    fix = None if tried is None else tried.override
    return Finding(cause="optimizer", limit="the optimizer", share=share, evidence=why, fix=fix, gain=gain)


def compiling(evidence: Evidence) -> Finding | None:
    """torch.compile makes graph after graph."""
    graphs, seconds = evidence.compiled.get("graphs", 0), evidence.compiled.get("seconds", 0.0)
    share = seconds / max(evidence.total_ms * evidence.batches / 1000, 1e-9)
    if graphs < 3 or share < 0.1:
        return None
    why = f"{graphs:.0f} graphs in {seconds:.0f} s"
    return Finding(
        cause="compile", limit="compiling again and again", share=min(share, 1.0), evidence=why,
        fix="compile=false", gain=1 / max(1 - share, 0.1),
    )  # fmt: skip


_MUCH_SWAPPED = 10.0


def swapping(evidence: Evidence) -> Finding | None:
    """The machine moves memory to disk and back."""
    moved = sum(evidence.host.get(f"swap_{way}_mb_per_s") or 0.0 for way in ("in", "out"))
    if moved < _MUCH_SWAPPED:
        return None
    left = evidence.host.get("available_memory_gb")
    why = f"{moved:.0f} MB/s to swap and back" + ("" if left is None else f", {left:.1f} GB of memory left")
    share = evidence.share("wait", "forward", "backward", "optimizer")
    fix = "a smaller data.batch_size or data.eval_batch_size, or data.feed=threaded"
    return Finding(cause="memory", limit="memory that is swapped", share=share, evidence=why, fix=fix)


def cut_batches(evidence: Evidence) -> Finding | None:
    """Memory does not suffice for whole batches."""
    if evidence.pieces <= 1:
        return None
    why = f"each batch goes through in {evidence.pieces} pieces, as it ran out of memory whole"
    is_wide = evidence.native not in ("", "fp32")
    fix = f"precision={evidence.native}" if is_wide else "for encoders try model.gradient_checkpointing=true"
    share = evidence.share("forward", "backward")
    return Finding(cause="memory", limit="memory", share=share, evidence=why, fix=fix)


def throttling(evidence: Evidence) -> Finding | None:
    """The card holds its clocks down."""
    held: dict[str, float] = evidence.gpu.get("throttled") or {}
    reasons = {reason: share for reason, share in held.items() if reason in _HOLDING}
    share = max(reasons.values(), default=0.0)
    now, most = (evidence.gpu.get(name) for name in ("sm_clock_mhz", "most_sm_clock_mhz"))
    if now and most:  # a card that is well used sits at its power limit, and may lose little by it
        share = min(share, max(0.0, 1 - now / most))
    if share < (0.2 if most is None else 1 - 1 / LEAST_GAIN):
        return None
    reason = max(reasons, key=lambda each: reasons[each])
    facts = [f"{evidence.gpu[name]:.0f} {unit}" for name, unit in _CARD.items() if evidence.gpu.get(name) is not None]
    fix = _HOLDING[reason]
    why = ", ".join([f"held down by {reason} in {reasons[reason]:.0%} of the looks", *facts])
    if most:
        why += f" of {most:.0f}"
    return Finding(cause="throttling", limit="the card's clocks being held down", share=share, evidence=why, fix=fix)


_HOLDING = {
    "heat": "cool the card",
    "power limit": "raise the power limit (nvidia-smi -pl)",
    "power supply": "look at the card's power supply",
    "the card slowed itself": "cool the card",
}
"""Limits of the clocks that you can change, such as clocks set by hand."""
_CARD = {"temperature_c": "°C", "power_w": "W", "sm_clock_mhz": "MHz"}


def shared_card(evidence: Evidence) -> Finding | None:
    """Another process computes on the card."""
    others = evidence.gpu.get("others") or {}
    share = others.get("share", 0.0)
    if share < 0.3:
        return None
    why = f"{others['processes']} other processes in {share:.0%} of the looks"
    fix = "another card by CUDA_VISIBLE_DEVICES"
    return Finding(cause="shared", limit="a card that others use too", share=share, evidence=why, fix=fix)


def starved(evidence: Evidence) -> Finding | None:
    """A container's limit, or other processes, keep this one from the cores."""
    held = evidence.host.get("cpu_held_back_share") or 0.0
    if held >= 0.2:
        why = f"throttled in {held:.0%} of its periods"
        return Finding(
            cause="cpu", limit="the container's limit of cores", share=held, evidence=why, fix="allow it more cores"
        )
    machine, own = evidence.host.get("machine_cpu_share"), evidence.host.get("process_cpu_cores")
    if machine is None or own is None or machine < 0.9 or evidence.world > 1:  # ranks are other processes too
        return None
    others = machine * evidence.machine_cores - own
    share = others / evidence.machine_cores
    if share < 0.3:
        return None
    why = f"{machine:.0%} of {evidence.machine_cores} cores are busy, {own:.1f} of them for this run"
    return Finding(
        cause="cpu",
        limit="other processes on these cores",
        share=share,
        evidence=why,
        fix="end or move what else runs",
    )


def uneven_ranks(evidence: Evidence) -> Finding | None:
    """Ranks wait for the slowest of them."""
    own = [sum(each.get(part, 0.0) for part in ("wait", "forward", "callbacks", "other")) for each in evidence.ranks]
    if len(own) < 2:
        return None
    behind = max(own) - sum(own) / len(own)
    gain = _without(evidence, behind)
    if gain < LEAST_GAIN:
        return None
    slowest = own.index(max(own))
    why = f"rank {slowest} takes {max(own):.1f} ms of its own for each batch, all together {sum(own) / len(own):.1f}"
    fix = f"look at rank {slowest}'s machine, or leave it out"
    share = behind / evidence.total_ms
    return Finding(cause="ranks", limit="the slowest rank", share=share, evidence=why, fix=fix, gain=gain)


def communicating(evidence: Evidence) -> Finding | None:
    """Ranks exchange gradients for longer than that can hide behind computing."""
    alone = [each["alone"] for each in evidence.ranks if each.get("alone")]
    together = [sum(each.get(part, 0.0) for part in ("forward", "backward", "optimizer")) for each in evidence.ranks]
    if not alone or len(together) < 2:
        return None
    spent = sum(together) / len(together) - sum(alone) / len(alone)
    gain = _without(evidence, spent / 2)  # twice the rows a step halve it
    share = spent / evidence.total_ms
    if gain < LEAST_GAIN:
        return None
    means = sum(together) / len(together), sum(alone) / len(alone)
    why = f"forward, backward and optimizer take {means[0]:.1f} ms a batch, without the other ranks {means[1]:.1f}"
    fix = f"data.accumulate={2 * evidence.accumulate}"
    if evidence.effective_batch is not None:
        fix = f"data.effective_batch={2 * evidence.effective_batch}"
    why += "; it is another step: mind optim.scale_lr"
    return Finding(cause="communication", limit="exchanging gradients", share=share, evidence=why, fix=fix, gain=gain)


def framework(evidence: Evidence) -> Finding | None:
    """What is left of a step besides the model: launches of small kernels, the loop itself."""
    share = evidence.share("other")
    if share < 0.3 or any(tried.cause in ("batch", "accumulation") for tried in evidence.tried):
        return None
    why = f"{evidence.ms['other']:.1f} ms of each batch of {evidence.rows_per_batch:.0f} rows are no work of the model"
    is_own = evidence.feed == OWN_LOADER
    fix = "try larger batches in your DataLoader" if is_own else "try a larger data.batch_size"
    return Finding(cause="batch", limit="small batches", share=share, evidence=why, fix=fix)


def _nothing_left(evidence: Evidence) -> Finding:
    share = evidence.share("forward", "backward")
    mfu = "" if evidence.mfu is None else f", {evidence.mfu:.0%} of the device's peak"
    if evidence.mfu is not None and evidence.mfu >= _NEAR_ROOF:
        text = f"nothing left to gain: near the roof, {share:.0%} of the time in the model's own arithmetic{mfu}"
    else:
        text = f"nothing found that would make it faster: {share:.0%} of the time in the model's own arithmetic{mfu}"
    return Finding(cause="nothing", limit="the model's own arithmetic", share=share, evidence=text)


def _spoken(precision: str) -> str:
    return {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}.get(precision, precision)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


RULES: list[Callable[[Evidence], Finding | None]] = [
    waiting,
    padding,
    accumulation,
    small_batches,
    callbacks,
    host_reads,
    logging,
    validating,
    saving,
    precision,
    threads,
    optimizing,
    dropout,
    compiling,
    swapping,
    cut_batches,
    throttling,
    shared_card,
    starved,
    uneven_ranks,
    communicating,
    framework,
]

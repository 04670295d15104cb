"""Rules about the machine around a run: memory, the card, other processes, and the other ranks."""

from __future__ import annotations

from collections.abc import Callable

from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence
from flatout.perf.verdict.findings import Finding
from flatout.perf.verdict.gains import gain_without

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
    return Finding(cause="memory", limit="memory that is swapped", share=share, evidence=why, advice=fix)


def cut_batches(evidence: Evidence) -> Finding | None:
    """Memory does not suffice for whole batches."""
    if evidence.pieces <= 1:
        return None
    why = f"each batch goes through in {evidence.pieces} pieces, as it ran out of memory whole"
    is_wide = evidence.precision == "32-true" and evidence.native not in ("", "fp32")
    override = f"precision={evidence.native}" if is_wide else None
    share, advice = evidence.share("forward", "backward"), "for encoders try model.gradient_checkpointing=true"
    return Finding(cause="memory", limit="memory", share=share, evidence=why, override=override, advice=advice)


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
    return Finding(cause="throttling", limit="the card's clocks being held down", share=share, evidence=why, advice=fix)


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
    return Finding(cause="shared", limit="a card that others use too", share=share, evidence=why, advice=fix)


_OTHERS = 0.2
"""Share of the machine that other processes take, from which on they count where no core is idle."""

_ALL_IT_ASKED = 0.9
"""Share of its threads' cores from which on a run has what it asked for."""


def starved(evidence: Evidence) -> Finding | None:
    """A container's limit, or other processes, keep this one from the cores."""
    held = evidence.host.get("cpu_held_back_share") or 0.0
    if held >= 0.2:
        why = f"throttled in {held:.0%} of its periods"
        return Finding(
            cause="cpu", limit="the container's limit of cores", share=held, evidence=why, advice="allow it more cores"
        )
    machine, own = evidence.host.get("machine_cpu_share"), evidence.host.get("process_cpu_cores")
    if machine is None or own is None or machine < 0.9 or evidence.world > 1:  # ranks are other processes too
        return None
    if evidence.device == "cpu" and own >= _ALL_IT_ASKED * evidence.threads:  # others have what this run leaves them
        return None
    others = machine * evidence.machine_cores - own
    share = others / evidence.machine_cores
    if share < _OTHERS:
        return None
    why = f"{machine:.0%} of {evidence.machine_cores} cores are busy, {own:.1f} of them for this run"
    advice, left = "end or move what else runs", max(1, round(evidence.machine_cores - others))
    if evidence.device == "cpu" and left < evidence.threads:  # threads of one product wait for the slowest of them
        advice += f"; until then threads={left}"
    return Finding(cause="cpu", limit="other processes on these cores", share=share, evidence=why, advice=advice)


def uneven_ranks(evidence: Evidence) -> Finding | None:
    """Ranks wait for the slowest of them."""
    own = [sum(each.get(part, 0.0) for part in ("wait", "forward", "callbacks", "other")) for each in evidence.ranks]
    if len(own) < 2:
        return None
    slowest = own.index(max(own))
    others = [ms for rank, ms in enumerate(own) if rank != slowest]
    usual = sum(others) / len(others)
    behind = max(own) - usual
    if evidence.total_ms < LEAST_GAIN * (evidence.total_ms - behind):
        return None
    why = f"rank {slowest} takes {max(own):.1f} ms of its own for each batch, the others {usual:.1f}"
    fix = f"look at rank {slowest}'s machine, or leave it out"
    share, gain = behind / evidence.total_ms, gain_without(evidence, behind)
    return Finding(cause="ranks", limit="the slowest rank", share=share, evidence=why, advice=fix, gain=gain)


def communicating(evidence: Evidence) -> Finding | None:
    """Ranks exchange gradients for longer than that can hide behind computing."""
    alone = [each["alone"] for each in evidence.ranks if each.get("alone")]
    together = [sum(each.get(part, 0.0) for part in ("forward", "backward", "optimizer")) for each in evidence.ranks]
    if not alone or len(together) < 2:
        return None
    spent = sum(together) / len(together) - sum(alone) / len(alone)
    saved, share = spent / 2, spent / evidence.total_ms  # twice the rows a step halve it
    if evidence.total_ms < LEAST_GAIN * (evidence.total_ms - saved):
        return None
    means = sum(together) / len(together), sum(alone) / len(alone)
    why = f"forward, backward and optimizer take {means[0]:.1f} ms a batch, without the other ranks {means[1]:.1f}"
    fix = f"data.accumulate={2 * evidence.accumulate}"
    if evidence.effective_batch is not None:
        fix = f"data.effective_batch={2 * evidence.effective_batch}"
    why += "; it is another step: mind optim.scale_lr"
    limit, gain = "exchanging gradients", gain_without(evidence, saved)
    return Finding(cause="communication", limit=limit, share=share, evidence=why, override=fix, gain=gain)


MACHINE_RULES: list[Callable[[Evidence], Finding | None]] = [
    swapping,
    cut_batches,
    throttling,
    shared_card,
    starved,
    uneven_ranks,
    communicating,
]

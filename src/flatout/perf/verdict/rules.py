"""The verdict: what held a run back, by how much, and the override that would fix it.

Each cause is a small rule over what was measured: the share of the time its cause takes, the evidence, the fix, and
how many times as fast the run would be. The cause with the greatest gain is the verdict; others that count follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.perf.measure.intervals import Interval
from flatout.perf.verdict.evidence import LEAST_COMPILING, LEAST_GAIN, OWN_LOADER, Evidence, Tried
from flatout.perf.verdict.findings import RECOMMENDED, Finding
from flatout.perf.verdict.gains import best_tried, carried_over, gain_uncompiled, gain_without
from flatout.perf.verdict.machine_rules import MACHINE_RULES

_LEAST_UNCERTAIN = 1.25
"""A gain whose lower bound is too small is named only where it may be as large as this."""
_NEAR_ROOF = 0.5
"""Share of the peak from which on a run is as fast as such a model gets."""
_MOST_OTHERS = 3
_USUAL_FLUSH = 50


def verdict(evidence: Evidence) -> dict[str, Any]:
    """In the words of `summary.json`: what limits the run, its share, the fix and the gain, and what else counts."""
    found = findings(evidence)
    first, *others = found or [_nothing_left(evidence)]
    words = first.as_dict()
    sentence = words["evidence"] if first.cause == "nothing" else words["sentence"]
    return {
        **{name: words[name] for name in ("cause", "limit", "share")},
        "mend": words["fix"],
        "fix": words["fix"],
        "override": words["override"],
        "predicted_gain": words["gain"],
        "gain_low": words["gain_low"],
        "gain_high": words["gain_high"],
        "sentence": sentence + (f" [{evidence.not_tried}]" if evidence.not_tried else ""),
        "others": [each.as_dict() for each in others[:_MOST_OTHERS]],
    }


def findings(evidence: Evidence) -> list[Finding]:
    """Every cause that counts, the one whose fix gains most first."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda each: each.weight, reverse=True)


def _describe(tried: Tried) -> str:
    return f"tried here: {tried.rows_per_s:,.0f} rows/s of it against {tried.as_was:,.0f} as it was"


def _by_trying(evidence: Evidence, cause: str, limit: str, also: str = "", least: float = LEAST_GAIN) -> Finding | None:
    """The best that was tried against a cause; silent where it may be noise."""
    found = best_tried(evidence, cause)
    if found is None or found[1].value < (least if found[1].low > RECOMMENDED else max(least, _LEAST_UNCERTAIN)):
        return None
    tried, gain = found
    why = f"{also}; {_describe(tried)}" if also else _describe(tried)
    return Finding(cause=cause, limit=limit, share=1 - 1 / gain.value, evidence=why, override=tried.override, gain=gain)


def _by_removing(
    evidence: Evidence, ms: float, *, cause: str, limit: str, why: str, override: str | None, advice: str | None = None
) -> Finding | None:
    """A part that its fix takes away, where that is worth naming."""
    if ms <= 0 or evidence.total_ms < LEAST_GAIN * (evidence.total_ms - ms):
        return None
    gain, share = gain_without(evidence, ms, interrupts=True), ms / evidence.total_ms
    return Finding(cause=cause, limit=limit, share=share, evidence=why, override=override, advice=advice, gain=gain)


def waiting(evidence: Evidence) -> Finding | None:
    """The model waits for batches."""
    share = evidence.share("wait", "transfer")
    if share < 1 - 1 / LEAST_GAIN:
        return None
    why = f"the model takes {1000 * evidence.rows_per_batch / max(evidence.model_ms, 1e-9):,.0f} rows/s"
    if evidence.feed_alone is not None:
        why = f"measured: the feed alone gives {evidence.feed_alone:,.0f} rows/s{_busy(evidence)}, {why}"
    finding: dict[str, Any] = {"cause": "data", "limit": "waiting for data", "share": share, "evidence": why}
    if (found := best_tried(evidence, "data")) is not None:
        return Finding(**finding, override=found[0].override, gain=found[1])
    if evidence.untested:
        return Finding(**finding, override=evidence.untested)
    if any(tried.cause == "data" for tried in evidence.tried):
        return Finding(**finding)
    if evidence.feed == OWN_LOADER:
        return Finding(**finding, advice="more num_workers in your DataLoader")
    others = {"resident": "data.feed=threaded", "threaded": "data.feed=workers"}
    return Finding(**finding, override=others.get(evidence.feed), advice="try more data.workers")


def _busy(evidence: Evidence) -> str:
    return "" if evidence.feed_cores is None else f" and keeps {evidence.feed_cores:.1f} cores busy"


def callbacks(evidence: Evidence) -> Finding | None:
    """Your own callback takes time, or makes the host wait for the device."""
    if not evidence.callbacks:  # curves do not name them
        ms = evidence.ms.get("callbacks", 0.0)
        why, limit = f"{ms:.1f} ms of each batch", "callbacks of your own"
        return _by_removing(
            evidence, ms, cause="callbacks", limit=limit, why=why, override=None, advice="leave them out"
        )
    name, ms = max(evidence.callbacks.items(), key=lambda each: each[1])
    reads = evidence.reads.get(name, 0)
    why = f"{ms:.1f} ms of each batch" + (f", {reads:.0f} reads of the device's numbers a step" if reads else "")
    limit = f"the callback {name}" + (", which waits for the device," if reads and evidence.device != "cpu" else "")
    return _by_removing(evidence, ms, cause="callbacks", limit=limit, why=why, override=f"~callbacks.{name}")


def host_reads(evidence: Evidence) -> Finding | None:
    """Numbers of the device asked for in every step keep the host from working ahead."""
    reads, share = sum(evidence.reads.values()), evidence.share("other", "callbacks")
    if evidence.device == "cpu" or reads < 1 or share < 0.1:
        return None
    name = max(evidence.reads, key=lambda each: evidence.reads[each])
    why, limit = f"{reads:.0f} reads a step; the device idles {share:.0%} of the time", "waiting for numbers"
    limit += " of the device"
    # The host may need some of that time itself: nothing is sure to be gained.
    gain = carried_over(Interval(1 / max(1 - share, 1e-3), 1.0, 1 / max(1 - share, 1e-3)))
    override = f"~callbacks.{name}"
    return Finding(cause="reads", limit=limit, share=share, evidence=why, override=override, gain=gain)


def logging(evidence: Evidence) -> Finding | None:
    """Curves are written more often than anyone reads them."""
    times, spent = evidence.counts.get("logging", 0), evidence.ms.get("logging", 0.0)
    if evidence.flush_every >= _USUAL_FLUSH or not times:
        return None
    each = spent * evidence.batches / times
    why = f"{times:,} times, {each:.1f} ms each, every {evidence.flush_every} steps"
    saved, fix = spent * (1 - evidence.flush_every / _USUAL_FLUSH), f"monitor.flush_every={_USUAL_FLUSH}"
    return _by_removing(evidence, saved, cause="logging", limit="writing curves", why=why, override=fix)


def validating(evidence: Evidence) -> Finding | None:
    """Validations come more often than once an epoch."""
    times, spent = evidence.counts.get("validation", 0), evidence.ms.get("validation", 0.0)
    needed = max(1.0, evidence.epochs)
    if times <= 1.5 * needed:
        return None
    # Each validation is followed by a checkpoint.
    saves = evidence.counts.get("checkpoint", 0)
    saving = evidence.ms.get("checkpoint", 0.0) * (times / max(saves, times))
    why = f"{times:,} validations in {evidence.epochs:.3g} epochs, {spent * evidence.batches / times:.0f} ms each"
    saved, fix = (spent + saving) * (1 - needed / times), "++trainer.val_check_interval=1.0"
    return _by_removing(evidence, saved, cause="validation", limit="validations", why=why, override=fix)


def saving(evidence: Evidence) -> Finding | None:
    """Checkpoints come more often than validations and every ten minutes."""
    times, spent = evidence.counts.get("checkpoint", 0), evidence.ms.get("checkpoint", 0.0)
    needed = evidence.counts.get("validation", 0) + 1
    if times <= 1.5 * needed:
        return None
    why = f"{times:,} checkpoints, {spent * evidence.batches / times:.0f} ms each"
    saved, fix = spent * (1 - needed / times), "checkpoint.every_steps=null checkpoint.every_minutes=10"
    return _by_removing(evidence, saved, cause="checkpoint", limit="checkpoints", why=why, override=fix)


def precision(evidence: Evidence) -> Finding | None:
    """Sixteen bits would be faster here."""
    names = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    limit = f"arithmetic in {names.get(evidence.precision, evidence.precision)}"
    is_card = evidence.device == "cuda"  # on a processor small models are slower in sixteen bits
    if not is_card or evidence.native in ("", "fp32") or any(each.cause == "precision" for each in evidence.tried):
        return _by_trying(evidence, "precision", limit)
    why, share = f"{evidence.native} is native here, and was not tried", evidence.share("forward", "backward")
    override = f"precision={evidence.native}"
    return Finding(cause="precision", limit=limit, share=share, evidence=why, override=override)


def padding(evidence: Evidence) -> Finding | None:
    """Padding is computed."""
    also = f"{evidence.padding_share:.0%} of the computed tokens were padding"
    if (found := _by_trying(evidence, "padding", "padding", also)) is not None:
        return found
    if evidence.padding_share < 0.3:
        return None
    share = evidence.padding_share * evidence.share("forward", "backward")
    return Finding(cause="padding", limit="padding", share=share, evidence=also, advice="a model that runs flat")


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
    limit = f"{evidence.threads} thread{'s' if evidence.threads > 1 else ''} on {evidence.cores} cores"
    return _by_trying(evidence, "threads", limit)


def optimizing(evidence: Evidence) -> Finding | None:
    """Steps are mostly the optimizer's."""
    share = evidence.share("optimizer")
    if share < 0.4:
        return None
    why = f"{evidence.ms['optimizer']:.1f} ms of each batch, whatever its size"
    found = best_tried(evidence, "batch")
    override, gain = (None, None) if found is None else (found[0].override, found[1])
    return Finding(cause="optimizer", limit="the optimizer", share=share, evidence=why, override=override, gain=gain)


def compiling(evidence: Evidence) -> Finding | None:
    """torch.compile makes graph after graph."""
    if (share := evidence.compiling_share) < LEAST_COMPILING:
        return None
    why = f"{evidence.compiled['graphs']:.0f} graphs in {evidence.compiled['seconds']:.0f} s"
    gain = gain_uncompiled(evidence, min(share, 0.9) * evidence.total_ms)
    if evidence.eager_ms is not None:
        why += f"; tried here: {evidence.eager_ms:.1f} ms a batch uncompiled, {evidence.model_ms:.1f} as it was"
    limit = "compiling again and again"
    return Finding(cause="compile", limit=limit, share=share, evidence=why, override="compile=false", gain=gain)


def framework(evidence: Evidence) -> Finding | None:
    """What is left of a step besides the model: launches of small kernels, the loop itself."""
    share = evidence.share("other")
    if share < 0.3 or any(tried.cause in ("batch", "accumulation") for tried in evidence.tried):
        return None
    why = f"{evidence.ms['other']:.1f} ms of each batch of {evidence.rows_per_batch:.0f} rows are no work of the model"
    is_own = evidence.feed == OWN_LOADER
    advice = "try larger batches in your DataLoader" if is_own else "try a larger data.batch_size"
    return Finding(cause="batch", limit="small batches", share=share, evidence=why, advice=advice)


def _nothing_left(evidence: Evidence) -> Finding:
    share = evidence.share("forward", "backward")
    is_near = evidence.mfu is not None and evidence.mfu >= _NEAR_ROOF
    begin = "nothing left to gain: near the roof" if is_near else "nothing found that would make it faster"
    mfu = "" if evidence.mfu is None else f", {evidence.mfu:.0%} of the device's peak"
    separator = "," if is_near else ":"
    text = f"{begin}{separator} {share:.0%} of the time in the model's own arithmetic{mfu}"
    return Finding(cause="nothing", limit="the model's own arithmetic", share=share, evidence=text)


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
    compiling,
    *MACHINE_RULES,
    framework,
]

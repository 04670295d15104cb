"""Findings on trainings by transformers' Trainer that are predicted from its clock.

Where a way was raced on copies, its result is taken instead. Each prediction has bounds, which say
how much of the lost time a fix may leave. `rules.py` has the findings that need no prediction of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence
from flatout.perf.verdict.findings import VerdictFinding, by_trying, carried_over, waiting_for_reads
from flatout.perf.verdict.rules import waiting

PREDICTED = "predicted from the clock, nothing was raced"
UNPADDED = "DataCollatorWithPadding in place of padding='max_length'"
LEAST_PADDING = 0.1  # fraction of the computed tokens
_MOST_WORKERS = 8
_BUSY = 0.5  # cores; readers that keep less of one busy wait for something else
# Of the time of padding a fix saves at least this fraction: some of a step does not depend on it.
_SAVED_BY_PADDING = (0.5, 0.85)
_SAVED_BY_GROUPS = (0.3, 0.6)  # of rows of like length: a batch still has some padding
_LEFT_BY_GROUPS = 0.2  # fraction of the computed tokens


@dataclass(kw_only=True, slots=True)
class TransformersFacts:
    """What a training by transformers' Trainer was like, besides its evidence."""

    workers: int = 0
    keeps_workers: bool = False
    start_ms: float = 0.0  # of the wait of a batch: for the first batches of epochs
    fixed_padding: float = 0.0  # fraction of the computed tokens beyond the longest row of a batch
    recomputes: bool = False  # activations, by gradient checkpointing
    groups_lengths: bool = False
    reading_cores: float = 1.0  # that are busy while the model waits for a batch
    reads: dict[str, float] | None = None  # reads of numbers in a step, by file and line


def predict_findings(evidence: Evidence, facts: TransformersFacts) -> list[VerdictFinding]:
    """All predicted findings; each stands for the rule of the same cause in `rules.py`."""
    findings = [
        _waiting(evidence, facts),
        _padding(evidence, facts),
        _recomputing(evidence, facts),
        _reading(evidence, facts),
    ]
    return [finding for finding in findings if finding is not None]


def _gain(evidence: Evidence, saved_ms: Sequence[float]) -> SpeedupInterval:
    """The gain if about the second of `saved_ms` is saved, at least the first, at most the third.

    A batch of 10 ms that saves 2 (1–4) ms becomes 1.25 (1.11–1.67) times as fast; both bounds are
    widened by the error of earlier predictions.
    """
    total = max(evidence.total_ms, 1e-9)
    gains = [total / max(total - saved, 0.02 * total) for saved in saved_ms]
    low, value, high = gains
    return carried_over(value, low, high)


def _waiting(evidence: Evidence, facts: TransformersFacts) -> VerdictFinding | None:
    """The model waits for batches."""
    wait_ms = evidence.ms_of("wait")
    if any(tried.cause == "data" for tried in evidence.tried):
        return waiting(evidence)
    share = evidence.share("wait")
    if share < 1 - 1 / LEAST_GAIN:
        return None
    limit = "waiting for data"
    if facts.workers and not facts.keeps_workers and facts.start_ms >= 0.5 * wait_ms:
        start_ms = facts.start_ms
        why = f"{start_ms:.1f} ms of each batch start the workers in each epoch again"
        fix = "TrainingArguments(dataloader_persistent_workers=True)"
        gain = _gain(evidence, (0.6 * start_ms, 0.9 * start_ms, start_ms))
        return VerdictFinding("data", limit, share, why, override=fix, gain=gain, is_predicted=True)
    workers = _workers(evidence, facts)
    fix = f"TrainingArguments(dataloader_num_workers={workers})"
    why = f"{wait_ms:.1f} ms of each batch with {facts.workers} workers"
    saved_ms = evidence.total_ms - _ms_with_workers(evidence, facts, workers)
    gain = _gain(evidence, (0.5 * saved_ms, 0.85 * saved_ms, min(wait_ms, 1.1 * saved_ms)))
    return VerdictFinding("data", limit, share, why, override=fix, gain=gain, is_predicted=True)


def _workers(evidence: Evidence, facts: TransformersFacts) -> int:
    """So many workers that a batch is ready when the model needs it.

    Readers that compute need a core each; those that wait for a disk or a network do not.
    """
    most = _MOST_WORKERS if facts.reading_cores < _BUSY else min(_MOST_WORKERS, evidence.cores)
    return max(facts.workers + 1, min(most, evidence.readers_to_keep_up))


def _ms_with_workers(evidence: Evidence, facts: TransformersFacts, workers: int) -> float:
    """Milliseconds of a batch if so many workers read.

    A batch of 30 ms waits 20 ms for its rows. Two workers give a batch each 10 ms, as fast as the
    model takes them. On a CPU of 2 cores, where reading keeps one core busy and the model two, all
    work takes (20 + 2 * 10) / 2 = 20 ms.
    """
    wait_ms = evidence.ms_of("wait")
    rest_ms = evidence.total_ms - wait_ms
    read_ms = wait_ms * max(1, facts.workers) / workers
    busy_ms = wait_ms * facts.reading_cores
    if evidence.device == "cpu":
        busy_ms += evidence.model_ms * evidence.threads
    return max(rest_ms, read_ms, busy_ms / evidence.cores)


def _padding(evidence: Evidence, facts: TransformersFacts) -> VerdictFinding | None:
    """The model computes padding: up to a fixed length, or up to the longest row of a batch."""
    passes_ms = evidence.ms_of("forward", "backward")
    why = f"{evidence.padding_share:.0%} of the computed tokens were padding"
    if any(tried.cause == "padding" for tried in evidence.tried):
        return by_trying(evidence, "padding", "padding", why)
    if facts.fixed_padding >= LEAST_PADDING:
        # What lies beyond the longest row of each batch can go without grouping any rows.
        removable = facts.fixed_padding
        removed_ms = removable * passes_ms
        low, value = (part * removed_ms for part in _SAVED_BY_PADDING)
        fix = UNPADDED
    else:
        removable = evidence.padding_share - _LEFT_BY_GROUPS
        if facts.groups_lengths or removable < LEAST_PADDING:
            return None
        removed_ms = evidence.padding_share * passes_ms
        low, value = (part * removed_ms for part in _SAVED_BY_GROUPS)
        fix = "TrainingArguments(train_sampling_strategy='group_by_length')"
    share = removable * evidence.share("forward", "backward")
    # Attention over a shorter row saves more than its share of the tokens.
    gain = _gain(evidence, (low, value, min(1.3 * removed_ms, 0.95 * passes_ms)))
    return VerdictFinding(
        "padding", "padding", share, why, override=fix, gain=gain, is_predicted=True
    )


def _recomputing(evidence: Evidence, facts: TransformersFacts) -> VerdictFinding | None:
    """Gradient checkpointing computes each layer's forward pass a second time."""
    if not facts.recomputes:
        return None
    forward_ms = evidence.ms_of("forward")
    share = evidence.share("forward")
    why = f"each forward pass of {forward_ms:.1f} ms runs twice; mind the memory"
    gain = _gain(evidence, (0.5 * forward_ms, 0.9 * forward_ms, 1.2 * forward_ms))
    fix = "leaving out gradient_checkpointing"
    return VerdictFinding(
        "recomputing", "computing activations again", share, why, override=fix, gain=gain
    )


def _reading(evidence: Evidence, facts: TransformersFacts) -> VerdictFinding | None:
    """Lines of Python read numbers from the device in each step, so the host cannot work ahead."""
    reads = facts.reads or {}
    share = evidence.share("other", "callbacks")
    if evidence.device == "cpu" or not reads or share < 0.1:
        return None
    line = max(reads, key=lambda name: reads[name])
    advice = f"read it every logging_steps steps: {line}"
    if line.startswith("transformers/trainer.py"):
        advice = "TrainingArguments(logging_nan_inf_filter=False)"
    why = f"{sum(reads.values()):.0f} reads a step, {reads[line]:.0f} of them at {line}"
    return waiting_for_reads(share, why, advice=advice, is_predicted=True)

"""Evidence of a run that nothing holds back, and of runs in which one thing does."""

from __future__ import annotations

from dataclasses import replace

from flatout.perf.verdict.evidence import Evidence, Tried

QUIET = Evidence(
    device="cpu",
    steps=400,
    batches=400,
    rows_per_batch=128.0,
    batch_size=128,
    ms={
        "wait": 0.1,
        "forward": 8.0,
        "backward": 16.0,
        "optimizer": 2.0,
        "validation": 0.5,
        "other": 0.5,
    },
    mfu=0.3,
    threads=2,
    cores=2,
    machine_cores=2,
    alone_ms=26.0,
    counts={"logging": 8, "checkpoint": 3, "validation": 2},
    epochs=2,
)


CARD = replace(
    QUIET,
    device="cuda",
    gpu={
        "utilisation": 0.95,
        "temperature_c": 61.0,
        "power_w": 280.0,
    },
)


def spending(evidence: Evidence = QUIET, **ms: float) -> Evidence:
    return replace(evidence, ms=evidence.ms | ms)


def trying(
    cause: str, override: str, ratio: float, evidence: Evidence = QUIET, **changed
) -> Evidence:
    settings = {
        "rows_per_batch": evidence.rows_per_batch,
        "batches_per_step": evidence.accumulate,
    } | changed
    tried = Tried(
        cause=cause, override=override, as_was=1000.0, rows_per_s=1000.0 * ratio, **settings
    )
    return replace(evidence, tried=[*evidence.tried, tried])

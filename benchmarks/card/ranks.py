"""Two cards: copies of a model, gradients in bf16, slices of weights, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import lightning as L

from benchmarks.card.place import Place, losses_of, side_by_side
from benchmarks.claim import Claim, bounded, not_here, quiet
from flatout.config import MonitorConfig
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.ranks import Ranks
from flatout.engine.optimizer import OptimConfig
from flatout.errors import RunBroke
from flatout.models.encoder.transformer import TransformerConfig
from flatout.run.closing import Result
from flatout.run.launch import fit

_ALLOWED = {"ddp": 0.02, "ddp_bf16": 0.05, "fsdp": 0.02}
RANK_ROWS = (
    *(f"two cards, {name}: largest difference of a loss" for name in _ALLOWED),
    "two cards: a killed rank, seconds",
)
_DIES_AT = 3


def rank_claims(place: Place) -> Iterator[Claim]:
    """Losses of two ranks against those of one with twice the rows, then how soon a run ends that
    loses a rank.
    """
    alone = train(place, "alone", 2)
    for row, (name, allowed) in zip(RANK_ROWS, _ALLOWED.items(), strict=False):
        if name == "ddp_bf16" and not place.is_gpu:
            yield not_here(row, "gradients are sent in bf16 between GPUs alone")
            continue
        both = train(place, name, 1, devices=2, strategy=name)
        ours, theirs = (losses_of(each.folder) for each in (both, alone))
        most = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs, strict=True))
        yield bounded(row, most, "", most=allowed, note=side_by_side(two=ours, one=theirs))
    yield killed(place)


def killed(place: Place) -> Claim:
    started = time.perf_counter()
    note = "the run ended as if nothing had happened"
    try:
        train(place, "killed", 1, devices=2, callbacks={"dies": Dies()})
    except RunBroke as broken:
        note = str(broken).strip().splitlines()[-1]
    seconds = time.perf_counter() - started
    is_named = "rank 1 of 2 was ended by SIGKILL" in note
    return Claim(
        RANK_ROWS[-1], seconds, None, "s", None, "≤ 90 s", is_named and seconds <= 90, note
    )


class Dies(L.Callback):
    """The second rank kills itself in a step."""

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        if Ranks.here().rank == 1 and trainer.global_step == _DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    place: Place,
    name: str,
    times: int,
    callbacks: dict[str, L.Callback] | None = None,
    **trainer: Any,
) -> Result:
    """A small encoder in fp32, on batches of so many times as many rows."""
    exact: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    rows, width = place.options.choose(2000, 2000, 128), place.options.choose(128, 128, 16)
    with quiet():
        return fit(
            TextDataConfig(
                sample=HeadlinesConfig(rows=rows, eval_rows=50, classes=4),
                batch_size=16 * times,
                max_length=32,
            ),
            TransformerConfig(hidden=width, layers=2, heads=4, **exact),
            optim=OptimConfig(lr=1e-3, eps=1e-3),
            precision="fp32",
            epochs=1,
            folder=place.folder / name,
            callbacks=callbacks or {},
            logger="none",
            monitor=MonitorConfig(flush_every=1, progress=False, verdict=False, rival=False),
            trainer={"accelerator": place.accelerator, **trainer},
        )

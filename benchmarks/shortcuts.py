"""What each shortcut through Lightning saves: a step with all of them, against a step with one
turned off.

All variants run in turn on one thread, with a network so small that a step is nothing but the
framework around it. The saving is given in microseconds, and as a fraction of a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import spine
from benchmarks.claim import Claim, Options, quiet
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.distributed.limits import keep_freed_memory
from flatout.engine import fast_loop


def claims(options: Options) -> Iterator[Claim]:
    """A row for each shortcut."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield from _savings(Path(folder), options)
    finally:
        torch.set_num_threads(threads)


def _savings(folder: Path, options: Options) -> Iterator[Claim]:
    steps = options.choose(3000, 500, 20)
    feed = Feed(
        spine.random_split(folder / "tiny", 8 * steps),
        PlanSettings(rows_per_batch=8),
        kind=FeedKind.resident,
    )

    def ours(without: Callable[[], AbstractContextManager[Any]]) -> Callable[[], float]:
        def step() -> float:
            with without(), quiet():
                return spine.our_step(spine.tiny_task(feed), feed, folder)

        return step

    sides = [
        lambda: spine.bare_step(spine.tiny_task(feed), feed),
        ours(nullcontext),
        *map(ours, SHORTCUTS.values()),
    ]
    for side in sides:
        side()
    bare, whole, *others = _fastest_in_turn(sides, options.choose(15, 4, 1))
    for name, without in zip(SHORTCUTS, others, strict=True):
        saved = without - whole
        note = (
            f"{saved / whole:.0%} of a step of {whole:.0f} µs; in a bare loop it takes"
            f" {bare:.0f} µs"
        )
        yield Claim(f"saved a step: {name}", saved, None, "µs", saved / whole, "", True, note)


def _fastest_in_turn(sides: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Each side's fastest round: whatever else runs on a machine only ever slows a step down."""
    return [
        min(values)
        for values in zip(*([side() for side in sides] for _ in range(rounds)), strict=True)
    ]


SHORTCUTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plug_optimization (the fast loop)": lambda: mock.patch.object(
        fast_loop, "_reason_against_module", lambda trainer, module: "turned off by the bench"
    ),
}
"""How to turn each one off; those that change behaviour (signals, positions, DDP) are not here."""

"""Steps that are captured and replayed: of every task and model that a graph takes, whether replays
have the bits of plain steps, and how long each takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L

from benchmarks.card.every_model import CASES
from benchmarks.card.place import Place
from benchmarks.claim import Claim, not_here, quiet, reaching
from flatout.engine import FastLoop
from flatout.engine.captures import CAPTURES, GraphUse
from flatout.errors import UserError

ROWS = 128
_TIMES = 20
"""Times the smallest data: some hundred steps of most cases."""
_STEPS = 100
_LEAST = 90
"""Of a hundred steps, the first are plain, and the last batch of an epoch has other rows."""
_NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
REFUSED = {"an optimizer that is not fused", "deberta"}
"""Cases that train plainly: `docs/gpu.md` says why."""
_TAKEN = [name for name in CASES if name not in REFUSED]
GRAPH_ROWS = tuple(f"of {_STEPS} steps replayed: {name}" for name in _TAKEN)


def graph_claims(place: Place) -> Iterator[Claim]:
    """A row a model; the note has the proof, with both times of a step."""
    for row, name in zip(GRAPH_ROWS, _TAKEN, strict=True):
        if place.device.type not in CAPTURES:
            yield not_here(row, f"a {place.device.type.upper()} captures no steps")
            continue
        replayed, note = replay(place, name)
        yield reaching(row, replayed, "steps", least=_LEAST, note=note)


def replay(place: Place, name: str) -> tuple[int, str]:
    """How many steps of a training were replayed, and what it says of them."""
    case = CASES[name]
    loop = FastLoop(graph=GraphUse.on)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    data, task = case.make(_TIMES, ROWS)
    trainer = L.Trainer(
        accelerator=place.accelerator,
        devices=1,
        precision=_NAMES[case.precision],
        max_steps=_STEPS,
        max_epochs=_STEPS,
        limit_val_batches=0,
        gradient_clip_val=0.5,
        callbacks=[loop],
        default_root_dir=place.folder,
        **off,
    )
    try:
        with quiet():
            trainer.fit(task, datamodule=data)
    except UserError as error:
        return 0, str(error)
    except Exception as error:
        # of any class: a card's minutes are rare, so the models after it have their rows, too
        return 0, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    facts = loop.graph_facts
    note = f"{facts['evidence']}; {facts['graphs']} graphs, {facts['memory_mb']:.0f} MB"
    return facts["replayed_steps"], note

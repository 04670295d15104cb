"""Rows of a batch where no setting names them, by the number of training rows.

`run/length.py` sets them, and `run/tuning.py` compares with them: a batch of another size was asked
for. It knows no kind of data, so that both may import it.
"""

from __future__ import annotations

from flatout.config import RunConfig
from flatout.engine.run_length import choose_batch, choose_batch_of_recordings
from flatout.models.contract import is_pretrained


def usual_rows(config: RunConfig, rows: int, world: int) -> int:
    """Rows of a batch on each of `world` devices, of so many training rows."""
    data = config.data
    if not data.are_recordings:
        chosen = choose_batch(rows, pretrained=is_pretrained(config.model))
    elif data.is_sample or data.has_windows:
        chosen = data.usual_rows
    else:
        chosen = choose_batch_of_recordings(rows)
    return max(1, chosen // world)

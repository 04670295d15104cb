"""What a result says against itself: one line each, printed below the scores.

A finished run may have answered one class only, may have been best in its last epoch, or may have
taken too few steps to learn. Each finding is a name and a sentence that ends in the settings to try
next. They are read off `summary.json` and the scores of each class. To add one, write a function
and name it in `find_in_result`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.tasks.metrics import BEST_MODE

# Below so many steps a network had no time to learn. Measured on eight samples of up to 2,000 texts
# of seven sets, a BiLSTM each: smaller batches and more epochs gained up to 15 points of accuracy,
# and lost 0.3 on one.
_FEW_STEPS = 300
_LEAST_ROWS_PER_STEP = 16  # that are advised
_LEAST_OF_A_CLASS = 3  # test rows; where every class has fewer, scores of classes say nothing


def find_in_result(
    summary: Mapping[str, Any],
    per_class: Sequence[Mapping[str, Any]],
    max_epochs: int,
    *,
    batch_size_sets_steps: bool,
) -> list[dict[str, str]]:
    """The findings of a finished run as `{"name": …, "text": …}`, the gravest first.

    `batch_size_sets_steps`: whether `data.batch_size` alone decides how many steps an epoch has.
    """
    few_steps = _few_steps_text(summary) if batch_size_sets_steps else ""
    texts = {
        "one class": _one_class_text(per_class),
        "nothing right": _nothing_right_text(per_class, max_epochs),
        "few steps": few_steps,
        "still rising": _still_rising_text(summary, max_epochs),
    }
    return [{"name": name, "text": text} for name, text in texts.items() if text]


def _one_class_text(per_class: Sequence[Mapping[str, Any]]) -> str:
    """A finding if only one class is ever answered rightly although others have rows."""
    with_rows = [row for row in per_class if row["support"] > 0]
    right = [row for row in with_rows if row["recall"] > 0]
    largest_other = max((row["support"] for row in with_rows if row not in right), default=0)
    if len(with_rows) < 2 or len(right) != 1 or largest_other < _LEAST_OF_A_CLASS:
        return ""
    share = right[0]["support"] / sum(row["support"] for row in with_rows)
    return (
        f"right for {right[0]['class']!r} alone, which {share:.1%} of the rows have;"
        " try checkpoint.metric=macro_f1 task.class_weights=auto"
    )


def _nothing_right_text(per_class: Sequence[Mapping[str, Any]], max_epochs: int) -> str:
    """A finding if no class is ever answered rightly: a tagger then calls every word `O`."""
    largest = max((row["support"] for row in per_class), default=0)
    if largest < _LEAST_OF_A_CLASS or any(row["recall"] > 0 for row in per_class):
        return ""
    longer = f" trainer.max_epochs={4 * max_epochs}" if max_epochs > 0 else ""
    return (
        "no class is ever answered rightly (of tags: perhaps every word is called O); try"
        f" task.class_weights=auto{longer}"
    )


def _few_steps_text(summary: Mapping[str, Any]) -> str:
    """A finding if a run took few steps although smaller batches of its rows would give more."""
    steps = summary["training"]["steps"]
    rows = summary["data"]["rows"]["train"]
    # a batch that is larger than the file has the rows of the file
    rows_per_step = min(summary["training"]["rows_per_step"] or 0, rows or 0)
    if not (steps and rows_per_step):
        return ""
    wanted = max(_LEAST_ROWS_PER_STEP, rows_per_step * steps / _FEW_STEPS)
    smaller = 2 ** math.floor(math.log2(wanted))
    if steps >= _FEW_STEPS or smaller > rows_per_step / 2:
        return ""
    return (
        f"{steps:,} in all is little for a network to learn from;"
        f" try data.batch_size={smaller}, about {steps * rows_per_step // smaller:,} steps"
    )


def _still_rising_text(summary: Mapping[str, Any], max_epochs: int) -> str:
    """A finding if the last of several epochs is the best one, and a better one can be."""
    best_epoch = summary["training"]["best_epoch"]
    deciding = str(summary.get("metric"))
    score = (summary.get("metrics") or {}).get(f"val/{deciding}")
    is_perfect = score == 1.0 and BEST_MODE.get(deciding) == "max"
    if max_epochs < 2 or best_epoch != max_epochs or is_perfect:
        return ""
    return f"the last epoch is the best; try trainer.max_epochs={2 * max_epochs}"

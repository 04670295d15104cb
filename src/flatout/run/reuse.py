"""Whether a run computes the frozen layers of its encoder once, and the store that it then reads.

Decided before the first step, by what can be known: whether outputs can stay the same, how many
epochs read them, and whether the disk holds them. A run that goes on from a checkpoint keeps the
answer that the checkpoint was trained with: frozen layers that are read drop nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.checkpoints.kept import Start
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.store.cache import Cache, Recipe, recipe_key
from flatout.data.store.store import StoreSplit
from flatout.distributed.limits import give_back_freed_memory
from flatout.distributed.ranks import Ranks
from flatout.errors import disk_free, require
from flatout.models.encoder.transformer import ReuseFormat, Transformer
from flatout.run.resolve import Settings
from flatout.run.run_folder import RunFolder
from flatout.tasks.frozen_outputs import FrozenPart, StoredStates, rows_between

REUSE = "reuse"  # the name of the choice
_SAMPLE_TOKENS = 1024


def reuse_layers(
    settings: Settings,
    data: Any,
    task: Any,
    feeds: Feeds | None,
    ranks: Ranks,
    place: RunFolder,
    start: Start | None,
) -> None:
    """Let batches bring outputs of frozen layers, where that is asked for or pays.

    A run that goes on from a checkpoint does as it did before.
    """
    model = settings.asked.model
    network = None if feeds is None else task.model
    if feeds is None or task.model_config is None or not isinstance(network, Transformer):
        return
    # A run that was killed before its first checkpoint may have been killed before it noted a
    # choice.
    asked = model.reuse if start is None else place.before.get(REUSE, {}).get("value", False)
    is_asked = asked is True
    layers = network.frozen_layers()
    if asked is False or not (is_asked or layers):
        return
    why, hint = _why_not(settings.asked, network, layers)
    epochs = (
        (settings.total_steps or 1) * feeds.train.plan.accumulate / max(1, settings.batches or 1)
    )
    epochs = min(epochs, network.epochs_frozen())
    if not why and not is_asked and epochs < 2:
        why = f"{epochs:.3g} epochs read them, and computing them once costs as much as one"
    require(not why or not is_asked, "model.reuse", f"true, but {why}", hint=hint)
    if why:
        place.decision(REUSE, False, why, "model.reuse=true asks for it")
        return
    kind = torch.bfloat16 if model.reuse_format is ReuseFormat.bf16 else None
    part = FrozenPart(network, layers, feeds.train.device, settings.precision.value, kind)
    cache = Cache(settings.asked.data.cache)
    splits = [feeds.train.split, feeds.validation.split]
    recipe = _recipe(part, data.info.key)
    is_known = cache.opened(recipe_key(recipe)) is not None
    if not ranks.agreed(
        REUSE, lambda: _decide(part, cache.folder, splits, place, is_asked, is_known)
    ):
        return
    network.keep_layers_still(layers)
    name = f"{data.info.source}: outputs of {layers} layers"
    store, report = cache.open_or_build(name, recipe, lambda writer: part.write(writer, splits))
    give_back_freed_memory()
    place.say(report.line())
    for split, feed in zip(splits, (feeds.train, feeds.validation), strict=True):
        if split.num_rows:
            feed.complete = StoredStates(store, split.name, network, feed.device)


def _why_not(config: RunConfig, network: Transformer, layers: int) -> tuple[str, str]:
    """Why outputs of frozen layers cannot be read from a store, and what helps; empty where they
    can.
    """
    model = config.model
    dropped = next(
        (name for name in ("dropout", "attention_dropout") if getattr(model, name)), None
    )
    if not network.is_flat:
        return f"{network.why_padded}, and only flat layers are stored", "Leave it out."
    if network.window:
        return "rows are read in windows, whose outputs are not stored", "Leave it out."
    if network.predicts_words:
        return "the texts change: other words are masked in each epoch", "Leave it out."
    if not layers:
        return "nothing is frozen from the embeddings on", "Set model.freeze_layers=N or all."
    if config.is_sharded:
        return "trainer.strategy=fsdp computes all layers on all ranks", "Set trainer.strategy=ddp."
    if dropped is not None:
        what = (
            f"model.{dropped}={getattr(model, dropped):g} is asked for below the cut, where nothing"
            " is dropped"
        )
        return what, f"Leave model.{dropped} out, or set it to 0: model.head_dropout may stay."
    return "", ""


def _recipe(part: FrozenPart, data_key: str) -> Recipe:
    found: Recipe = {
        "kind": "outputs of frozen layers",
        "texts": data_key,
        "weights": part.network.frozen_digest(),
    }
    found |= {"layers": part.layers, "rows": "first tokens" if part.are_first else "all tokens"}
    return found | {
        "products": part.precision.value,
        "format": str(part.kind),
        "device": part.device.type,
    }


def _decide(
    part: FrozenPart,
    place: Path,
    splits: list[StoreSplit],
    log: RunFolder,
    is_asked: bool,
    is_known: bool,
) -> str:
    """Print the decision with its figures; empty where the disk is too small."""
    of_layers = f"layers 1 to {part.layers}" if part.layers > 1 else "layer 1"
    why = f"{of_layers} and the embeddings never change and are computed once; they drop nothing"
    if is_known:
        log.decision(REUSE, True, why, "their outputs are stored already")
        return "stored"
    tokens = sum(int(split.lengths(TOKENS).sum(dtype=np.int64)) for split in splits)
    bytes_a_token, seconds_a_token = _measure(part, splits)
    needed = int(tokens * bytes_a_token)
    free = disk_free(place) or 0
    room = (
        f"{bytes_a_token:,.0f} bytes a token, {needed / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free"
    )
    built = (
        f"{tokens * seconds_a_token:.1f} s to build, and as much less in each epoch that reads them"
    )
    evidence = f"{room}; about {built}"
    fits = needed <= 0.9 * free
    require(
        fits or not is_asked,
        "model.reuse",
        f"true, but the disk is short: {evidence}",
        hint=(
            "Make room (python -m flatout cache clear), set data.cache=FOLDER, or"
            " model.reuse_format=bf16."
        ),
    )
    log.decision(REUSE, fits, why if fits else "the disk of the cache is too small", evidence)
    return "fits" if fits else ""


def _measure(part: FrozenPart, splits: list[StoreSplit]) -> tuple[float, float]:
    """Bytes and seconds a token, by a few rows of the first split; the first pass warms up."""
    rows = rows_between(
        splits[0], 0, max(1, int(np.searchsorted(splits[0].ragged(TOKENS).offsets, _SAMPLE_TOKENS)))
    )
    tokens = int(rows.lengths(TOKENS).sum())
    part.outputs(rows)
    began = time.perf_counter()
    found = part.outputs(rows)
    return found.nbytes / tokens, (time.perf_counter() - began) / tokens

"""Decide whether an encoder's frozen layers are computed once; batches then bring their outputs.

The decision is made before the first step. It depends on whether the outputs stay the same, how
many epochs read them, and whether the disk holds them (`tasks/frozen_outputs.py` writes the store).
A run that resumes from a checkpoint keeps the answer with which the checkpoint was trained,
as frozen layers that are read drop nothing. Open this file to change when it pays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flatout.checkpoints.kept import Start
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.store.cache import Cache, Recipe, recipe_key
from flatout.data.store.store import StoreSplit
from flatout.distributed.limits import give_back_freed_memory
from flatout.errors import disk_free, require
from flatout.models.encoder.transformer import ReuseFormat, Transformer
from flatout.run.context import OurParts, Run, Settings
from flatout.run.run_folder import RunFolder
from flatout.tasks.frozen_outputs import FrozenPart, StoredStates, rows_between

REUSE = "reuse"  # the name of the choice
_SAMPLE_TOKENS = 1024  # that are timed, to tell how long all take
_MOST_OF_DISK = 0.9  # share of the free disk that the outputs may take


@dataclass(frozen=True, slots=True)
class _Reuse:
    """The layers whose outputs a run may read, and the rows that it reads them for."""

    part: FrozenPart
    splits: list[StoreSplit]
    cache: Path
    is_asked: bool  # by model.reuse=true: then a disk that is short is an error
    is_stored: bool  # whether an earlier run has computed them


def reuse_layers(run: Run, ours: OurParts, start: Start | None) -> None:
    """Let batches bring outputs of frozen layers, where that is asked for or pays.

    A run that resumes from a checkpoint (`start`) does as it did before.
    """
    settings = run.settings
    task = ours.task
    feeds = ours.feeds
    folder = run.folder
    model = settings.asked.model
    network = task.model
    if task.model_config is None or not isinstance(network, Transformer):
        return
    asked = model.reuse
    if start is not None:
        # A run that was killed before its first checkpoint may have been killed before it noted a
        # choice.
        asked = folder.before.get(REUSE, {}).get("value", False)
    is_asked = asked is True
    layers = network.frozen_layers()
    if asked is False or not (is_asked or layers):
        return
    why_not, hint = _why_not(settings.asked, network, layers)
    if not why_not and not is_asked:
        why_not = _why_too_few_epochs(settings, feeds, network)
    require(not why_not or not is_asked, "model.reuse", f"true, but {why_not}", hint=hint)
    if why_not:
        folder.decision(REUSE, False, why_not, "model.reuse=true asks for it")
        return
    kind = torch.bfloat16 if model.reuse_format is ReuseFormat.bf16 else None
    part = FrozenPart(network, layers, feeds.train.device, settings.precision.value, kind)
    cache = Cache(settings.asked.data.cache)
    recipe = _recipe(part, ours.data.info.key)
    is_stored = cache.opened(recipe_key(recipe)) is not None
    splits = [feeds.train.split, feeds.validation.split]
    reuse = _Reuse(part, splits, cache.folder, is_asked, is_stored)
    if not run.ranks.agreed(REUSE, lambda: _decide(reuse, folder)):
        return
    network.keep_layers_still(layers)
    name = f"{ours.data.info.source}: outputs of {layers} layers"
    store, report = cache.open_or_build(name, recipe, lambda writer: part.write(writer, splits))
    give_back_freed_memory()
    folder.say(report.line())
    for split, feed in zip(splits, (feeds.train, feeds.validation), strict=True):
        if split.num_rows:
            feed.complete_by(StoredStates(store, split.name, network, feed.device))


def _why_too_few_epochs(settings: Settings, feeds: Feeds, network: Transformer) -> str:
    """Why computing the outputs once would not pay; empty where two epochs or more read them."""
    batches = (settings.total_steps or 1) * feeds.train.plan.accumulate
    epochs = batches / max(1, settings.batches or 1)
    epochs = min(epochs, network.epochs_frozen())
    if epochs >= 2:
        return ""
    return f"{epochs:.3g} epochs read them, and computing them once costs as much as one"


def _why_not(config: RunConfig, network: Transformer, layers: int) -> tuple[str, str]:
    """Why outputs of frozen layers cannot be read from a store, and a hint; empty where they can.

    `layers`: how many are frozen.
    """
    model = config.model
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
    for name in ("dropout", "attention_dropout"):
        rate = getattr(model, name)
        if rate:
            return (
                f"model.{name}={rate:g} is asked for below the cut, where nothing is dropped",
                f"Leave model.{name} out, or set it to 0: model.head_dropout may stay.",
            )
    return "", ""


def _recipe(part: FrozenPart, data_key: str) -> Recipe:
    """Everything that the outputs depend on; the store's name in the cache is its hash."""
    return {
        "kind": "outputs of frozen layers",
        "texts": data_key,
        "weights": part.network.frozen_digest(),
        "layers": part.layers,
        "rows": "first tokens" if part.are_first else "all tokens",
        "products": part.precision.value,
        "format": str(part.kind),
        "device": part.device.type,
    }


def _decide(reuse: _Reuse, folder: RunFolder) -> str:
    """Print the decision with its figures; empty where the disk is too small."""
    layers = reuse.part.layers
    named = f"layers 1 to {layers}" if layers > 1 else "layer 1"
    why = f"{named} and the embeddings never change and are computed once; they drop nothing"
    if reuse.is_stored:
        folder.decision(REUSE, True, why, "their outputs are stored already")
        return "stored"
    tokens = 0
    for split in reuse.splits:
        tokens += int(split.lengths(TOKENS).sum(dtype=np.int64))
    bytes_a_token, seconds_a_token = _measure(reuse.part, reuse.splits[0])
    needed = int(tokens * bytes_a_token)
    free = disk_free(reuse.cache) or 0
    evidence = (
        f"{bytes_a_token:,.0f} bytes a token, {needed / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free;"
        f" about {tokens * seconds_a_token:.1f} s to build, and as much less in each epoch that"
        " reads them"
    )
    fits = needed <= _MOST_OF_DISK * free
    require(
        fits or not reuse.is_asked,
        "model.reuse",
        f"true, but the disk is short: {evidence}",
        hint=(
            "Make room (python -m flatout cache clear), set data.cache=FOLDER, or"
            " model.reuse_format=bf16."
        ),
    )
    folder.decision(REUSE, fits, why if fits else "the disk of the cache is too small", evidence)
    return "fits" if fits else ""


def _measure(part: FrozenPart, split: StoreSplit) -> tuple[float, float]:
    """Bytes and seconds a token, by the first rows of a split; a first pass warms up."""
    offsets = split.ragged(TOKENS).offsets
    num_rows = max(1, int(np.searchsorted(offsets, _SAMPLE_TOKENS)))
    rows = rows_between(split, 0, num_rows)
    tokens = int(rows.lengths(TOKENS).sum())
    part.outputs(rows)
    began = time.perf_counter()
    outputs = part.outputs(rows)
    seconds = time.perf_counter() - began
    return outputs.nbytes / tokens, seconds / tokens

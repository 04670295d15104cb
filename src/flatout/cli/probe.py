"""`python -m flatout probe …`: find the layer of an encoder below which you can freeze it.

The command takes the words of `python -m train`, and reads some rows once with the frozen encoder.
On the output of each layer it trains a linear head. It prints the accuracy of each head, and ends
with the setting that freezes all layers that add nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.cli.train import add_words, start_measuring
from flatout.errors import require
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s data.source=FILE model.pretrained=FOLDER [key=value ...]"
    add_words(parser)


def run(arguments: argparse.Namespace) -> None:
    names = ("model=", "experiment=")
    names_model = any(word.lstrip("+").startswith(names) for word in arguments.words)
    usual = [] if names_model else ["model=transformer"]
    start_measuring([*usual, *arguments.words], print_layers)


def print_layers(config: RunConfig, overrides: Sequence[str]) -> None:
    """Score the layers for these settings, and print the scores and the cut."""
    import lightning as L

    from flatout.distributed.ranks import Ranks
    from flatout.engine.precision import choose_precision, fast_fp32_products
    from flatout.models.encoder.transformer import Transformer
    from flatout.run.kinds import gives_one_class
    from flatout.run.parts import build_task, open_data
    from flatout.run.run_folder import unwritten_run
    from flatout.tasks.layer_scores import choose_cut, score_layers

    began = time.perf_counter()
    config.require_ours("probe", "scores no module of your own", hint="Leave task out.")
    require(
        gives_one_class(config.data),
        "probe",
        "scores one class a row alone",
        hint="Set data.problem=single.",
    )
    ranks = Ranks()
    L.seed_everything(config.seed, verbose=False)
    with unwritten_run() as folder:
        data = open_data(config, ranks, folder)
        network = build_task(config, data, config.optim, folder).model
    is_flat = isinstance(network, Transformer) and network.is_flat and not network.window
    require(
        is_flat,
        "model",
        "has no flat layers to look at",
        hint="Name an encoder with model.pretrained=FOLDER.",
    )
    assert isinstance(network, Transformer)
    device = ranks.device(str(config.trainer.get("accelerator", "auto")))
    splits = [data.store.splits[name] for name in ("train", "validation")]
    precision = choose_precision(config.precision, device).value
    with fast_fp32_products(precision, device):
        rows = (4_000, 1_000)  # to learn from, and to judge by
        scores = score_layers(network, splits, rows, device, precision)
    cut = choose_cut(scores)
    best = max(scores[1:], key=lambda score: score.accuracy)
    print_line("layers  accuracy  ± 95 %")
    for score in scores:
        mark = "  <- the cut" if score is cut else ""
        print_line(f"{score.layers:>6}  {score.accuracy:>8.3f}  {1.96 * score.error:>6.3f}{mark}")
    print_line(
        f"a linear head on each layer (0: the embeddings), {time.perf_counter() - began:.0f} s"
    )
    near = f"within one standard error of layer {best.layers}, the best"
    print_line(
        f"model.freeze_layers={cut.layers} (the first layer {near}; freezing changes what is"
        " learned)"
    )

"""What a pretrained encoder says of the texts: the mean over the tokens of each, read once, without
padding.

The encoder has not seen the labels, so its numbers may stand beside words and n-grams in every
fold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from scipy.sparse import csr_matrix
from sklearn.preprocessing import normalize

from flatout.data.batches.feed import Feed
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tokens.subwords import Subwords
from flatout.distributed.ranks import Ranks
from flatout.engine.precision import Precision, arithmetic, choose_precision
from flatout.models.encoder.network import means_of_rows
from flatout.models.encoder.transformer import Outputs, TransformerConfig
from flatout.run_log import Say

_PASS_TOKENS = 1 << 13
_LOOK_S = 2.0
"""Tokens that are computed at once; the seconds after which it is known how long all texts take."""


def read_encoder(
    model: TransformerConfig,
    texts: Sequence[str],
    max_length: int,
    precision: Precision,
    limit_s: float,
    say: Say,
) -> csr_matrix | None:
    """A row of length 1 for each text; None where that takes longer than it may, or rows would be
    padded.
    """
    words = Subwords.load(str(model.pretrained))
    outputs = Outputs(("0", "1"), "single")
    frame = words.frame
    network = model.build(
        outputs, vocabulary_size=words.size, padding_id=frame.padding, separator_id=frame.separator
    )
    if not network.is_flat:
        say(f"encoder: left out: {network.why_padded}")
        return None
    # means want all tokens of the last layer
    device = Ranks().device("auto")
    network.is_narrow = False
    network.to(device).eval()
    chosen = choose_precision(precision, device).value
    encoded = words.encode(
        pa.array(texts, pa.large_string()), max_length=min(max_length, network.longest_row())
    )
    column = Ragged.of(encoded.tokens, encoded.lengths)
    total = len(encoded.tokens)
    plan = PlanSettings(
        tokens_per_batch=max(_PASS_TOKENS, int(encoded.lengths.max())), shuffle=False
    )
    found = np.empty((0, 0), np.float32)
    read = 0
    began = time.perf_counter()
    for batch in Feed(StoreSplit("texts", len(texts), {TOKENS: column}), plan, device=device):
        with torch.no_grad(), arithmetic(chosen, device):
            means_BH = means_of_rows(
                network.run_layers(batch), batch.offsets[1:] - batch.offsets[:-1]
            )
        found = found if len(found) else np.empty((len(texts), means_BH.shape[1]), np.float32)
        found[batch.rows] = means_BH.float().cpu()
        read, took = read + batch.num_tokens, time.perf_counter() - began
        if took > _LOOK_S and (whole := took * total / read) > limit_s:
            say(
                f"encoder: left out: {len(texts):,} texts take it {whole:.0f} s. Give it more time:"
                " for=TIME."
            )
            return None
    say(f"encoder: {model.pretrained} read {total:,} tokens in {time.perf_counter() - began:.1f} s")
    return csr_matrix(normalize(found))

"""What a pretrained encoder says of texts: the mean of each text's token vectors.

The encoder has not seen the labels, so its numbers may stand beside words and n-grams in every
fold. Texts are read once, without padding. After two seconds it is known how long all of them take;
where that is too long, the encoder is left out and a line says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa
import torch
from scipy.sparse import csr_matrix
from sklearn.preprocessing import normalize

from flatout.data.batches.feed import Feed
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import EncodedBlock
from flatout.distributed.ranks import Ranks
from flatout.engine.precision import Precision, arithmetic, choose_precision
from flatout.models.encoder.network import means_of_rows
from flatout.models.encoder.transformer import Outputs, TransformerConfig
from flatout.run_log import Say

_PASS_TOKENS = 1 << 13  # computed at once
_LOOK_S = 2.0  # after which the time of all texts is estimated


def read_encoder(
    model: TransformerConfig,
    texts: Sequence[str],
    max_length: int,
    precision: Precision,
    limit_s: float,
    say: Say,
) -> csr_matrix | None:
    """A row of length 1 for each text; None where the encoder is left out.

    It is left out where all texts would take longer than `limit_s`, or where its attention needs
    padded rows. `max_length`: tokens of a text that are read.
    """
    words = Subwords.load(str(model.pretrained))
    frame = words.frame
    network = model.build(
        Outputs(("0", "1"), "single"),  # its head is not used
        vocabulary_size=words.size,
        padding_id=frame.padding,
        separator_id=frame.separator,
    )
    if not network.is_flat:
        say(f"encoder: left out: {network.why_padded}")
        return None
    device = Ranks().device("auto")
    network.is_narrow = False  # means want all tokens of the last layer
    network.to(device).eval()
    dtype = choose_precision(precision, device).value
    encoded = words.encode(
        pa.array(texts, pa.large_string()), max_length=min(max_length, network.longest_row())
    )
    num_tokens = len(encoded.tokens)
    means = list[torch.Tensor]()
    rows = list[torch.Tensor]()
    num_read = 0
    began = time.perf_counter()
    for batch in _feed_of(encoded, device):
        with torch.no_grad(), arithmetic(dtype, device):
            lengths = batch.offsets[1:] - batch.offsets[:-1]
            means.append(means_of_rows(network.run_layers(batch), lengths).float().cpu())
        rows.append(batch.rows)
        num_read += batch.num_tokens
        spent_s = time.perf_counter() - began
        all_s = spent_s * num_tokens / num_read
        if spent_s > _LOOK_S and all_s > limit_s:
            say(
                f"encoder: left out: {len(texts):,} texts take it {all_s:.0f} s. Give it more time:"
                " for=TIME."
            )
            return None
    spent_s = time.perf_counter() - began
    say(f"encoder: {model.pretrained} read {num_tokens:,} tokens in {spent_s:.1f} s")
    in_order = torch.cat(means)[torch.cat(rows).argsort()]
    return csr_matrix(normalize(in_order.numpy()))


def _feed_of(encoded: EncodedBlock, device: torch.device) -> Feed:
    """Batches of texts of like length; a text that is longer than a batch is one by itself."""
    tokens = Ragged.of(encoded.tokens, encoded.lengths)
    tokens_per_batch = max(_PASS_TOKENS, int(encoded.lengths.max()))
    plan = PlanSettings(tokens_per_batch=tokens_per_batch, shuffle=False)
    split = StoreSplit("texts", len(encoded.lengths), {TOKENS: tokens})
    return Feed(split, plan, device=device)

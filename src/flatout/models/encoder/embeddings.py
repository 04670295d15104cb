"""What comes before the first layer of a flat encoder: positions, texts of a pair, and vectors.

Rows follow one another in a flat batch, so positions have to begin again with each row:

    lengths [3, 2]                       tokens    a b c d e
    begin of each token's row, begins_T            0 0 0 3 3
    place in its row, places_T                     0 1 2 0 1

Shapes: T tokens, H numbers a token, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flatout.models.encoder.families import FlatForm


def number_positions(
    tokens_T: Tensor, begins_T: Tensor, places_T: Tensor, first_position: int
) -> Tensor:
    """`[T]` the row in the table of positions for each token.

    `first_position` is 0, or one more than the row of padding, which is the padding token too.
    """
    if not first_position:
        return places_T
    # As RoBERTa counts: a padding token inside a row has the row of padding, and is not counted.
    # Padding is 1; tokens [7, 1, 8]: counted [1, 0, 1], up to here [1, 1, 2], positions [2, 1, 3].
    padding = first_position - 1
    is_counted_T = tokens_T.ne(padding).long()
    counted_T = is_counted_T.cumsum(0)
    return (counted_T - counted_T[begins_T] + is_counted_T[begins_T]) * is_counted_T + padding


def number_texts(tokens_T: Tensor, begins_T: Tensor, separator_id: int) -> Tensor:
    """`[T]` which text of a pair each token belongs to: 0 up to the first separator, then 1."""
    is_separator_T = torch.eq(tokens_T, separator_id).long()
    before_T = is_separator_T.cumsum(0) - is_separator_T
    return (before_T - before_T[begins_T]).clamp_max_(1)


def rotary_positions(
    backbone: nn.Module, kinds: Sequence[str], states_TH: Tensor, places_T: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Cosines and sines `[T, 1, 1, D]` for each kind of layer; empty for most families."""
    rotary = backbone._modules.get("rotary_emb")
    if rotary is None:
        return {}
    positions: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in kinds:
        named_kind = [kind] if kind else []
        cos, sin = rotary(states_TH.unsqueeze(0), places_T.unsqueeze(0), *named_kind)
        positions[kind] = (cos[0, :, None, None].float(), sin[0, :, None, None].float())
    return positions


def embed_tokens(
    backbone: PreTrainedModel,
    form: FlatForm,
    tokens_T: Tensor,
    positions_T: Tensor,
    texts_T: Tensor | None,
) -> Tensor:
    """`[T, H]` states before the first layer.

    `texts_T`: which text of a pair each token belongs to; None: all belong to the first.
    """
    if form.embed is not None:
        return form.embed(backbone, tokens_T)
    embeddings = backbone.get_submodule("embeddings")
    modules = embeddings._modules
    states_TH: Tensor = embeddings.get_submodule("word_embeddings")(tokens_T)
    text_table = modules.get("token_type_embeddings")
    if isinstance(text_table, nn.Embedding):
        vectors = text_table.weight[0] if texts_T is None else text_table(texts_T)
        states_TH = states_TH + vectors
    position_table = modules.get("position_embeddings")
    if position_table is not None:
        states_TH = states_TH + position_table(positions_T)
    project = modules.get("embed_proj")  # of DeBERTa's tables that are narrower than its layers
    if project is not None:
        states_TH = project(states_TH)
    states_TH = embeddings.get_submodule("dropout")(
        embeddings.get_submodule("LayerNorm")(states_TH)
    )
    widen = _find_widening(backbone)
    return states_TH if widen is None else widen(states_TH)


def _find_widening(backbone: nn.Module) -> nn.Module | None:
    """The linear layer from narrow tables to the width of the layers, in ELECTRA and ALBERT."""
    modules = backbone._modules
    if "embeddings_project" in modules:
        return modules["embeddings_project"]
    encoder = modules.get("encoder")
    return None if encoder is None else encoder._modules.get("embedding_hidden_mapping_in")

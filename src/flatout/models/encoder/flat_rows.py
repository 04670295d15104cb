"""The rows of a flat batch, and the attention that keeps them apart.

`FlatRows` knows where the rows of a batch begin and which kernel runs. Its `attend` sends queries,
keys and values to that kernel. Layers call it and need not know which kernel it is.

Shapes: T tokens, B rows, H heads, D numbers a head, L the longest row.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flatout.models.encoder.attention import KERNELS, Bounds, Kernel, Scores, pad_rows
from flatout.models.encoder.rectangle_attention import attend_by_rectangles
from flatout.models.encoder.rectangles import Rectangle, RectangleLayout, lay_out_rows

# The bound of row lengths is rounded up to a multiple of it, so that the same few kernels serve all
# batches.
_LENGTH_MULTIPLE = 64  # tokens


class FlatRows:
    """How the rows of a flat batch lie, and the attention that keeps them apart."""

    def __init__(self, lengths: Tensor, offsets: Tensor, kernel: Kernel) -> None:
        """`lengths` `[B]` lie on the host, `offsets` `[B+1]` on the device of the tokens."""
        # The last length need not be the longest: a transform may have changed the rows' order. On
        # the host, as a look at the device's offsets would wait for it.
        longest = int(lengths.numpy().max())
        bound = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        self.lengths = lengths
        self.bounds = Bounds(offsets.to(torch.int32), bound)
        self.kernel = kernel

    @cached_property
    def layout(self) -> RectangleLayout:
        """The rows as rectangles on a CPU; elsewhere as one rectangle, padded to the longest row.

        Made when first asked for, once for all layers.
        """
        lengths = self.lengths.numpy()
        if self.kernel is Kernel.rectangles:
            return lay_out_rows(lengths)
        return lay_out_padded(self.bounds, int(lengths.sum()))

    def attend(
        self, others_TKHD: Tensor, scores: Scores, first_BHD: Tensor | None = None
    ) -> Tensor:
        """`[T, H, D]`: each token reads the tokens of its row.

        `others_TKHD` holds queries, keys and values side by side, `[T, 3, H, D]`. Where queries of
        first tokens are given, `[B, H, D]`, they alone read, and `[T, 2, H, D]` holds keys and
        values. The answer then is `[B, H, D]`.
        """
        is_first = first_BHD is not None
        assert scores.window is None or not is_first
        if scores.by_distance is None and self.kernel is Kernel.rectangles:
            return attend_by_rectangles(others_TKHD, first_BHD, self.layout, scores)
        if scores.by_distance is not None:
            query = others_TKHD[:, 0] if first_BHD is None else first_BHD
            kv_T2HD = others_TKHD[:, -2:]
            return scores.by_distance(query, kv_T2HD, self.layout, scores, is_first=is_first)
        # Backwards `unbind` is one operator. Slices would be one each, and a sum.
        if first_BHD is None:
            query, key, value = others_TKHD.unbind(1)
        else:
            query = first_BHD
            key, value = others_TKHD.unbind(1)
        parts = (query, key, value)
        return KERNELS[self.kernel](parts, self.bounds, scores, is_first=is_first)


def lay_out_padded(rows: Bounds, tokens: int) -> RectangleLayout:
    """All rows as one rectangle, made on their device."""
    index_BL, is_token_BL, back_T = pad_rows(rows, tokens)
    zeros_BL = torch.zeros(is_token_BL.shape, device=index_BL.device)
    bias_BL = zeros_BL.masked_fill(~is_token_BL, float("-inf"))
    whole = Rectangle(len(index_BL), rows.longest, 0, 0, is_long=False, bias=bias_BL[:, None, None])
    return RectangleLayout([whole], index_BL.flatten(), back_T)

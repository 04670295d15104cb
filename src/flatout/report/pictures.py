"""Pictures for TensorBoard, which shows pixels only: who was taken for whom, and where a step's time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.report.curves import COLOURS

if TYPE_CHECKING:
    from PIL import Image, ImageFont

Pixels = NDArray[np.uint8]
"""[height, width, 3]"""
_MOST_CLASSES = 40
_INK, _GREY, _PAPER = "#1b1f23", "#57606a", "#ffffff"
_FULL = np.array([31, 111, 139])
"""The colour of a cell that holds all rows of its class."""
_DARK = 0.55
"""Share from which ink on such a cell is white."""


def confusion_picture(classes: Sequence[str], counts: NDArray[np.integer]) -> Pixels:
    """Rows by true class (down) and answered class (across), coloured by their share of the true class.

    Of many classes, the commonest.
    """
    from PIL import Image, ImageDraw

    order = np.argsort(-counts.sum(1), kind="stable")[:_MOST_CLASSES]
    shown, names = counts[np.ix_(order, order)], [_short(classes[place]) for place in order]
    shares = shown / np.maximum(counts[order].sum(1, keepdims=True), 1)
    size = int(np.clip(640 // len(names), 16, 72))
    font = _font(12 if size < 30 else 14)
    left = top = int(max(font.getlength(name) for name in names)) + 24
    edge, head = size * len(names), 34
    picture = Image.new("RGB", (left + edge + 16, head + top + edge + 16), _PAPER)
    draw = ImageDraw.Draw(picture)
    of_all = f" (the {len(names)} commonest of {len(classes)})" if len(names) < len(classes) else ""
    draw.text((12, 10), f"true class down, answered class across{of_all}", _INK, _font(15))
    for down, name in enumerate(names):
        y = head + top + down * size
        draw.text((left - 8, y + size // 2), name, _INK, font, anchor="rm")
        _upright(picture, name, (left + down * size + size // 2, head + top - 8), font)
        for across, share in enumerate(shares[down]):
            x = left + across * size
            colour = tuple(int(part) for part in 255 - share * (255 - _FULL))
            draw.rectangle((x, y, x + size, y + size), fill=colour, outline="#e6eaee")
            text = str(shown[down, across])
            if shown[down, across] and font.getlength(text) < size - 2:
                ink = _PAPER if share > _DARK else _INK
                draw.text((x + size // 2, y + size // 2), text, ink, font, anchor="mm")
    return np.asarray(picture)


def time_picture(step_ms: Mapping[str, float | None]) -> Pixels | None:
    """One bar of what each step's time went to, with times and shares; None where fewer than two parts are known."""
    from PIL import Image, ImageDraw

    parts = {name: value for name, value in step_ms.items() if value is not None}
    total = sum(parts.values())
    if len(parts) < 2 or total <= 0:
        return None
    width, line, head, bar = 460, 26, 44, 40
    picture = Image.new("RGB", (width + 24, head + bar + 20 + line * len(parts)), _PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((12, 12), f"where each step's {total:.2f} ms go", _INK, _font(16))
    x = 12.0
    for row, ((name, value), colour) in enumerate(zip(parts.items(), COLOURS, strict=False)):
        draw.rectangle((x, head, x + width * value / total, head + bar), fill=colour)
        x += width * value / total
        y = head + bar + 12 + row * line
        draw.rectangle((12, y + 4, 28, y + 20), fill=colour)
        draw.text((38, y + 12), name, _INK, _font(15), anchor="lm")
        draw.text((230, y + 12), f"{value:.3f} ms", _INK, _font(15), anchor="rm")
        draw.text((310, y + 12), f"{value / total:.1%}", _GREY, _font(15), anchor="rm")
    return np.asarray(picture)


def _upright(picture: Image.Image, text: str, foot: tuple[int, int], font: ImageFont.FreeTypeFont) -> None:
    """A text that is read from below, above a point."""
    from PIL import Image, ImageDraw

    length, height = int(font.getlength(text)) + 2, int(font.size) + 6
    strip = Image.new("RGB", (length, height), _PAPER)
    ImageDraw.Draw(strip).text((0, height // 2), text, _INK, font, anchor="lm")
    picture.paste(strip.rotate(90, expand=True), (foot[0] - height // 2, foot[1] - length))


def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"

"""Tiny encoders that draw no random numbers, so that two trainings can be compared."""

from __future__ import annotations

from typing import Any

from flatout.models.encoder.transformer import TransformerConfig


def calm_encoder(
    *, hidden: int = 16, layers: int = 1, heads: int = 2, **settings: Any
) -> TransformerConfig:
    """An encoder without dropout."""
    return TransformerConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        dropout=0.0,
        attention_dropout=0.0,
        head_dropout=0.0,
        **settings,
    )

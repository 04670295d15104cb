"""Changes of the JSON that lies beside a model."""

from __future__ import annotations


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(described):
        for key in keys:
            described = described[key]
        described[last] = value

    return change

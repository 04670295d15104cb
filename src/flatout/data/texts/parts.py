"""Encode a source of texts in parts, by processes on one machine or on several.

Each part encodes units of the source into the cache, and the build of the store finds them there.
So a source is encoded once, and more rows later add units only where `why_rows_are_encoded_again`
has no reason against it. Open this file to change what is compared between two parts.
"""

from __future__ import annotations

import json
from contextlib import suppress

from flatout.data.store.cache import Cache, Recipe, differences, recipe_key
from flatout.data.tables.prints import NOTES
from flatout.data.tables.splits import SplitBy
from flatout.data.texts.opening import open_source
from flatout.data.texts.preparation import TextPreparation
from flatout.data.texts.settings import TextDataConfig
from flatout.files import load_json, write_atomically


def encode_part(config: TextDataConfig, number: int, count: int) -> tuple[int, int]:
    """Encode the units of part `number` of `count` (see `TextPreparation.encode_part`)."""
    return TextPreparation(open_source(config)).encode_part(number, count)


def compare_with_part_before(config: TextDataConfig, count: int) -> str:
    """A line that says which settings differ from those of the part encoded before this one.

    `count`: the number of parts. Empty where none differs, or where the earlier parts were joined
    to a store.

    The settings of this part are noted for the next one.
    """
    source = open_source(config)
    recipe = TextPreparation(source).recipe()
    cache = Cache(config.cache).folder
    note = cache / NOTES / f"parts-{recipe_key(recipe['source'])}"
    asked: Recipe = json.loads(json.dumps(recipe | {"parts": count}))
    try:
        before: Recipe = dict(load_json(note))
    except (OSError, ValueError, TypeError):
        before = asked
    # A cache that cannot be written to fails later, with a message.
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps(asked))
    key_before = recipe_key({name: before[name] for name in before.keys() - {"parts"}})
    changes = "; ".join(differences(before, asked))
    if not changes or (cache / key_before).is_dir():
        return ""
    return (
        f"other parts of {source.name} were asked for with other settings ({changes}):"
        " only parts of the same settings are joined"
    )


def why_rows_are_encoded_again(config: TextDataConfig) -> str:
    """Why more rows make a source be encoded again as a whole; empty where only new rows are."""
    if config.is_sample:
        return ""
    if config.tokenizer is None:
        return "the vocabulary is made from them; data.tokenizer=FOLDER names a fixed one"
    is_dealt = config.split_by is not SplitBy.content
    return (
        "they may change the split of old rows; data.split_by=content keeps it" if is_dealt else ""
    )

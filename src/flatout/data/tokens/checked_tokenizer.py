"""A tokenizer of others: its text and its files, checked before they are used.

The text comes from a run's folder, and its author decides what it asks for: rows filled up to any
length, rules that make a long text of each letter, files under the names of a model's. What is
refused here ends in one sentence. Open this file when a tokenizer of a real model is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from tokenizers import Tokenizer

from flatout.errors import require

# Files of a tokenizer as the library writes them. All are data; a model beside them has others.
_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|entity_vocab|dict|merges"
    r"|normalizer|byte_maps|emoji|chat_template|spiece|spm|spm_char|sentencepiece(\.bpe)?)"
    r"\.(json|txt|jinja|model)"
)
_MOST_GROWTH = 1_000  # times a text may grow by the rules that replace letters
# Letters that a rule makes of one: a letter has up to four bytes, a map of SentencePiece some more.
_GROWING = {"ByteLevel": 4, "Precompiled": 8}


def require_tokenizer_files(files: Mapping[str, object]) -> None:
    """Refuse files, by name and text, that are none of a tokenizer's."""
    for name, content in files.items():
        # JSON may have half a character, and a file may not
        is_text = isinstance(content, str) and content.encode("utf-8", "ignore").decode() == content
        require(
            is_text and _FILES.fullmatch(name) is not None,
            "tokenizer.json",
            f"holds a file named {name!r}",
            allowed="files of a tokenizer, such as vocab.txt and tokenizer_config.json",
        )


def parse_tokenizer(text: str) -> Tokenizer:
    """The tokenizer in a text; one that panics at every text does so here."""
    tokenizer = Tokenizer.from_str(text)
    # a text of others may ask for rows of any length
    tokenizer.no_truncation()
    tokenizer.no_padding()
    require_modest_growth(tokenizer)
    # An error is no panic: it may be about these letters alone.
    with suppress(Exception):
        tokenizer.encode("a b")
    return tokenizer


def require_modest_growth(tokenizer: Tokenizer) -> None:
    """Refuse rules that put so many letters in the place of one that a word would fill the memory.

    34 rules of "a" by "aa", one after the other, make some 10^10 letters of one.
    """
    growth = 1.0
    chains = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    waiting = [json.loads(chain.__getstate__()) for chain in chains if chain is not None]
    while waiting:
        rule = waiting.pop()
        waiting += rule.get("normalizers", []) + rule.get("pretokenizers", [])
        if rule["type"] == "Replace":
            growth *= _growth_of(rule["pattern"], len(rule["content"]))
        elif rule["type"] in _GROWING:
            growth *= _GROWING[rule["type"]]
    require(
        growth <= _MOST_GROWTH,
        "tokenizer.json",
        f"its rules make a text up to {growth:,.0f} times as long",
        allowed=f"{_MOST_GROWTH:,} times",
    )


def _growth_of(pattern: dict[str, str], added: int) -> float:
    """How many times longer a text gets at most where letters are replaced by so many others."""
    if "String" in pattern:
        return max(1.0, added / max(1, len(pattern["String"])))
    try:
        is_met_anywhere = re.match(pattern["Regex"], "") is not None
    except re.error:  # of another kind of expression
        is_met_anywhere = True
    return 1.0 + added if is_met_anywhere else max(1.0, added)

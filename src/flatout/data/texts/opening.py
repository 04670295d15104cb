"""Open the tables of texts that settings name, and find their columns.

The result is a `TextSource`, which a build reads. Whatever settings name is checked here, before a
row is read. Open this file to let a setting name another table or column.
"""

from __future__ import annotations

from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.tables.prints import heads_noted
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table, require_columns
from flatout.data.texts.decisions import decide
from flatout.data.texts.settings import SAMPLES, TextDataConfig
from flatout.data.texts.source import TextSource
from flatout.data.tokens.subwords import PAIR


def open_tables(config: TextDataConfig) -> dict[str, Table]:
    """Open the table of each split that settings name, or those of the built-in sample."""
    if not config.is_sample:
        with heads_noted(Cache(config.cache).folder, [config.source, *config.given.values()]):
            return open_splits(config.source, config.given, config.read)
    return {split: SAMPLES[type(config.sample)](config.sample, split) for split in SPLITS}


def open_source(config: TextDataConfig) -> TextSource:
    """Open the tables of texts, find their columns, and check all that settings name."""
    tables = open_tables(config)
    join = PAIR if config.pair else config.join
    is_labelled = config.problem is not Problem.none
    roles = find_roles(
        tables["train"], text=config.text, label=config.label, join=join, is_labelled=is_labelled
    )
    for table in tables.values():
        wanted = {"data.text": roles.texts[0]}
        wanted |= {
            f"data.text[{number}]": name for number, name in enumerate(roles.texts) if number
        }
        if is_labelled:
            wanted["data.label"] = roles.label
        require_columns(table, wanted)
    if config.group is not None and any(config.taken_shares(tables)):
        require_columns(tables["train"], {"data.group": config.group})
    if config.exclude is not None or config.relabel is not None:
        tables = decide(tables, roles, (config.exclude, config.relabel), config.clean.escapes)
    return TextSource(config, tables, roles, config.group)

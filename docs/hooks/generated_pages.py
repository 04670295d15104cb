"""Pages that are made when the site is built: settings, commands, curves, measurements, and the
project's own files.

mkdocs calls `on_config` and `on_files`. Each page is a function that returns Markdown, so tests
read them too.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import importlib
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from flatout.__main__ import VERBS
from flatout.callbacks.gpu import CURVES
from flatout.cli.settings import SettingPage, all_settings

ROOT = Path(__file__).parents[2]
MEASURED = sorted((ROOT / "benchmarks").glob("*.md"))
OPTIONS = {
    "run": "Settings of every run",
    "trainer": "Arguments of Lightning's Trainer",
    "python -m train -m": "Many trials",
    "python -m flatout sweep": "Searches",
}
"""Headings of the options that are no `group=option`."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page for each table of `benchmarks/` below Benchmarks."""
    for section in config.nav or []:
        if "Benchmarks" in section:
            section["Benchmarks"].extend(
                {_title_of(path): f"measured/{path.name}"} for path in MEASURED
            )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that lie in `docs/`."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    for path in MEASURED:
        files.append(
            File.generated(
                config, f"measured/{path.name}", content=path.read_text(encoding="utf-8")
            )
        )
    return files


def settings_page() -> str:
    """Every setting: what it does, what it may be, its default, and an example."""
    lines = [
        "# Settings",
        "",
        (
            "Each word of the command line is `key=value`. `python -m flatout settings KEY` prints"
            " one of these settings"
        ),
        (
            "in a terminal. Start with [the ten that people set"
            " first](start.md#the-settings-that-people-set-first)."
        ),
        "",
    ]
    for option, settings in groupby(all_settings(), key=lambda each: each.option):
        lines += _table_of(option, list(settings))
    return "\n".join(lines)


def _table_of(option: str, settings: list[SettingPage]) -> list[str]:
    rows = [_row_of(each) for each in settings]
    head = ["| setting | does, with an example | may be | default |", "|---|---|---|---|"]
    title = OPTIONS.get(option, f"`{option}`")
    return [f"## {title}", "", *head, *rows, ""]


def _row_of(setting: SettingPage) -> str:
    does = f"{_cell(setting.does)}<br>{_code(setting.example)}"
    return f"| `{setting.key}` | {does} | {_cell(setting.allowed)} | {_code(setting.default)} |"


def _cell(text: str) -> str:
    """Text inside a table: what looks like markup stays text."""
    parts = text.split("`")
    return "`".join(
        part if number % 2 else html.escape(part, quote=False) for number, part in enumerate(parts)
    ).replace("|", "\\|")


def _code(text: str) -> str:
    shown = html.escape(text, quote=False)
    for mark in "|_*[]`":
        shown = shown.replace(mark, f"&#{ord(mark)};")  # what Markdown would read as its own
    return f"<code>{shown}</code>" if text else ""


def commands_page() -> str:
    """Each verb with its arguments, as its parser has them."""
    lines = [
        "# Commands",
        "",
        (
            "`python -m train [key=value …]` trains; `python -m train --help` lists what people set"
            " first."
        ),
        (
            "`python -m flatout VERB` does everything else. After installation `flatout-train` and"
            " `flatout` are the same."
        ),
        "",
        "| command | does |",
        "|---|---|",
        *(f"| [`{verb}`](#{verb}) | {about} |" for verb, about in VERBS.items()),
        "",
    ]
    for verb, about in VERBS.items():
        lines += _verb_section(verb, about)
    return "\n".join(lines)


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    parser = argparse.ArgumentParser(prog=f"python -m flatout {verb}", description=VERBS[verb])
    importlib.import_module(f"flatout.cli.{verb}").add_arguments(parser)
    return parser


def _verb_section(verb: str, about: str) -> list[str]:
    parser = parser_of(verb)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    arguments = [each for each in parser._actions if each.dest != "help"]
    rows = [f"| {_code(_name_of(each))} | {_cell(_help_of(parser, each))} |" for each in arguments]
    table = ["| argument | is |", "|---|---|", *rows, ""] if rows else []
    return [
        f"## {verb}",
        "",
        f"{about[:1].upper()}{about[1:]}.",
        "",
        "```text",
        usage,
        "```",
        "",
        *table,
    ]


def _name_of(action: argparse.Action) -> str:
    words = [", ".join(action.option_strings)] if action.option_strings else []
    if action.nargs != 0:
        words.append(str(action.metavar or action.dest.upper()))
    return " ".join(words)


def _help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = action.help or ""
    # a help text with a lone per cent sign
    with contextlib.suppress(KeyError, ValueError, TypeError):
        text = parser._get_formatter()._expand_help(action) if text else text
    choices = (
        ", ".join(map(str, action.choices))
        if action.choices and not isinstance(action.choices, dict)
        else ""
    )
    return f"{text} ({choices})" if choices and choices not in text else text


def curves_page() -> str:
    """Every curve of training and what it shows."""
    rows = [f"| `{name}` | {_cell(about)} |" for name, about in CURVES.items()]
    return "\n".join(
        [
            "# Curves",
            "",
            (
                "These are the columns of `metrics.csv`, and the curves of every logger. A flush is"
                " every"
            ),
            (
                "`monitor.flush_every` steps. In TensorBoard the page CUSTOM SCALARS groups them"
                " ([speed](speed.md))."
            ),
            "",
            "| curve | shows |",
            "|---|---|",
            *rows,
            "| `val/…` | loss and metrics of each validation |",
            "| `test/…` | metrics of the test, once |",
            "",
        ]
    )


def _project_file(name: str) -> Callable[[], str]:
    """A Markdown file of the checkout, its links to `docs/` made links of the site."""

    def page() -> str:
        text = (ROOT / name).read_text(encoding="utf-8")
        return re.sub(
            r"\]\(docs/([\w/]+\.md)", r"](\1", re.sub(r"`docs/(\w+)\.md`", r"[\1](\1.md)", text)
        )

    return page


def _title_of(path: Path) -> str:
    """The first heading of a page as plain text, with the date of its file name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    title = next(
        line.removeprefix("# ").replace("`", "") for line in lines if line.startswith("# ")
    )
    date = path.stem.rpartition("_")[2]
    return title if date in title else f"{title}, {date}"


PAGES: dict[str, Callable[[], Any]] = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "curves.md": curves_page,
    "changelog.md": _project_file("CHANGELOG.md"),
    "contributing.md": _project_file("CONTRIBUTING.md"),
    "security.md": _project_file("SECURITY.md"),
}

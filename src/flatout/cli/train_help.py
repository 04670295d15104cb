"""`python -m train --help`: the keys that people set first, in groups, with the values that the given words compose.

Hydra's own help prints every value without a word about it. `python -m flatout settings` lists all keys.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from flatout.cli.settings import Setting, all_settings, as_word, width

USAGE = """\
flatout trains classifiers, taggers, readers of bit strings and networks on sensor data, as fast as the hardware allows.

python -m train [key=value ...] [experiment=NAME] [debug=NAME] [name=MINE] [-m for several values]

  a file of yours    python -m train data.source=news.csv data.text=title data.label=topic
  an experiment      python -m train experiment=headlines_cnn
  a quick check      python -m train debug=one_batch
  several values     python -m train -m model.hidden=128,256 optim.lr=1e-3,3e-3
  continue a run     the same command with resume=auto
  your own conf/     python -m train --config-dir FOLDER experiment=MINE
  composed settings  python -m train --cfg job
"""
SECTIONS: list[tuple[str, str, str]] = [
    (
        "Your data",
        "Which table is read, and which columns. python -m flatout check FILE looks at it first.",
        "data.source data.train data.validation data.test data.text data.label data.features data.target data.bits "
        "data.problem data.max_length data.split_by",
    ),
    ("The model", "Its size and its dropout. Choose another with model=NAME.", "model.*"),
    (
        "How it trains",
        "How long, how many rows a step, and how fast it learns.",
        "trainer.max_epochs data.batch_size data.effective_batch optim.lr optim.schedule optim.warmup "
        "optim.weight_decay optim.clip task.* seed",
    ),
    (
        "What is best, and where it is kept",
        "Which checkpoint answers in the end, when training stops, and the run's folder.",
        "checkpoint.metric checkpoint.patience checkpoint.every_minutes resume name output",
    ),
    (
        "Speed and devices",
        "Everything here has an automatic choice; tune=auto measures it.",
        "precision compile data.feed trainer.accelerator trainer.devices trainer.strategy threads tune.enabled",
    ),
    ("Rows that are odd", "What happens to gaps, repeats, leaks and odd characters.", "data.clean.*"),
    ("The built-in sample", "It is used where no file is named.", "data.sample.*"),
    ("What a run shows", "Curves, progress, and your own callbacks.", "logger monitor.* callbacks"),
]
"""Title, what the group is for, and its keys; `group.*` stands for all keys directly below."""
OTHERS = """\
{count} more settings have defaults that seldom change:
  python -m flatout settings              all of them
  python -m flatout settings data         a group
  python -m flatout settings model=rnn    an option
  python -m flatout settings optim.lr     one, with its range and an example
Other verbs: python -m flatout --help
"""
_SHORT = {
    "data.source": "A file, a pattern, a folder, or a name of the Hub; without splits of its own its rows are split",
    "data.train": "The training rows, where each split has a file",
    "trainer.max_epochs": "Passes over the training rows",
    "trainer.accelerator": "auto, cpu or gpu",
    "trainer.devices": "How many devices, a list of them, or auto; without GPUs processes",
    "trainer.strategy": "ddp copies the model to each device, fsdp cuts it into slices",
    "tune.enabled": "Whether feed, precision and rows at once are measured first; short: tune=auto",
}
"""Words of our own where a setting's own text is long, or Lightning's."""
_GROUPS = ("data", "model", "task", "trainer", "callbacks", "logger", "monitor", "tune", "experiment", "sweep", "debug")
_KEY_WIDTH = 36


def help_text(words: Sequence[str], conf: Path) -> str:
    """The help for some words of the command line; those that only ask for it are left out."""
    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("train", _settings_among(words), return_hydra_config=True)
    known = list(all_settings())
    chosen = [f"{group}={option}" for group, option in cfg.hydra.runtime.choices.items()]
    lines = [USAGE, "Groups: choose with GROUP=OPTION"]
    for group in _GROUPS:
        names = ", ".join(sorted(path.stem for path in (conf / group).glob("*.yaml")))
        lines.append(textwrap.fill(names, width(), initial_indent=f"  {group}: ", subsequent_indent=" " * 4))
    lines.append("")
    shown = 0
    for title, about, keys in SECTIONS:
        rows = [_row(cfg, key, _setting(known, chosen, key)) for key in _expand(cfg, keys)]
        if rows:
            lines += [f"{title}: {about}", *rows, ""]
            shown += len(rows)
    return "\n".join([*lines, OTHERS.format(count=len({each.key for each in known}) - shown)])


def _settings_among(words: Sequence[str]) -> list[str]:
    """The settings among the words, and a folder of `--config-dir` as Hydra's search path."""
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or "".join(words[number + 1 : number + 2])).absolute()
            settings.append(f"hydra.searchpath=[file://{folder}]")
    return settings


def _expand(cfg: DictConfig, keys: str) -> Iterator[str]:
    """The keys that these settings have; `group.*` becomes the plain values below a group."""
    for key in keys.split():
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(section, DictConfig):
            continue
        for each in map(str, section):
            value = section._get_node(each)
            is_group = isinstance(value, DictConfig) and not value._is_none() and len(value) and each != "logger"
            if name in ("*", each) and not is_group:
                yield f"{parent}.{each}".lstrip(".")


def _setting(known: list[Setting], chosen: list[str], key: str) -> Setting | None:
    """What is known about a key: of the chosen option, or of any."""
    near = [*chosen, "data=headlines"]  # the sample of a run without a source
    found = (setting for setting in known if setting.key == key)
    return min(found, key=lambda each: near.index(each.option) if each.option in near else len(near), default=None)


def _row(cfg: DictConfig, key: str, setting: Setting | None) -> str:
    """`key=value` and what it does, in one line or more."""
    value: Any = OmegaConf.select(cfg, key)
    does = _SHORT.get(key) or (_in_short(setting.does, is_null=value is None) if setting else "")
    if setting and re.fullmatch(r"\w+(, \w+)+", setting.allowed):  # words to choose from
        does += f" ({setting.allowed})"
    shown = as_word(list(value) if key == "logger" and value else value)
    head = f"  {key}={shown}".replace("'", "").ljust(_KEY_WIDTH)
    return textwrap.fill(does, width(), initial_indent=f"{head} ", subsequent_indent=" " * (_KEY_WIDTH + 1))


def _in_short(does: str, *, is_null: bool) -> str:
    """The first part of a text; of a setting that is null, what null means too."""
    first = re.split(r"(?<=[\w`)])[.;] ", does)[0].rstrip(".")
    null = re.search(r"null: ((?:[^.;]|\.\d)+)", does)
    return f"{first}; null: {null[1].strip()}" if is_null and null and null[0] not in first else first

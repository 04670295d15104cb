"""Open data sets and models of the Hub, of its cache, or of a folder that a library has saved.

Code that comes with a data set or a model is never run. Without a network only the cache is asked.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flatout.errors import UserError, did_you_mean, first_line, is_failure, require
from flatout.files import load_json

T = TypeVar("T")
_OTHER_FILE = re.compile(
    r"\.(xlsx?|ods|docx?|pdf|txt|xml|zip|tar|pkl|pickle|sqlite3?|db|avro|orc)$", re.IGNORECASE
)
"""Endings of files that we do not read: no data set is called so."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


def may_be_hub_name(name: str) -> bool:
    """Whether this may be the name of a data set: `name`, `owner/name` or `owner/name:part`."""
    return bool(_HUB_NAME.fullmatch(name)) and not _OTHER_FILE.search(name)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` has saved a folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def from_hub(name: str, where: str) -> Any:
    """A data set of the Hub, or of the cache that `datasets` keeps."""
    path, _, configuration = name.partition(":")
    require(
        not Path(path).exists(),
        where,
        f"{path} is a folder or a file here, and no data set of the Hub",
        hint="Name a file or a folder without the colon.",
    )
    # Any word without an ending may be a name of the Hub: often it is a mistyped file.
    near = did_you_mean(path, [file.name for file in Path().iterdir()])
    datasets = _import_datasets(where, f"no file or folder {name}, and a data set of the Hub", near)
    # `csv:default` would read all files of that form in the folder you are in
    is_reader = "/" not in path and _has_reader(path)
    require(
        not is_reader,
        where,
        f"{path} is a form of files to the library datasets, and no data set",
        hint="Name the files themselves, or a data set as owner/name.",
    )
    ways = (
        "Name a file or a folder; or fetch it once where there is a network, and set HF_HOME to"
        " that cache."
    )
    try:
        with offline_without_network():
            return datasets.load_dataset(path, configuration or None)
    except BaseException as error:
        # of any class: what was fetched may say anything of its columns
        if not is_failure(error):
            raise
        raise UserError(
            where,
            f"no file or folder {name}, and no data set of that name that could be fetched"
            f" ({first_line(error)})",
            hint=f"{near} {ways}".strip(),
        ) from None


def _has_reader(form: str) -> bool:
    """Whether `datasets` has a reader of its own for a form of files: csv, json, text, …"""
    module = f"datasets.packaged_modules.{form}"
    return "." not in form and importlib.util.find_spec(module) is not None


def never_ask_to_run_code() -> None:
    """Let transformers refuse a model's own code at once: it would ask, and wait for an answer."""
    if "transformers" in sys.modules:
        questions: Any = importlib.import_module("transformers.dynamic_module_utils")
        questions.TIME_OUT_REMOTE_CODE = 0  # seconds to answer; at 0 it refuses without asking


def require_complete(folder: Path, where: str) -> None:
    """Refuse a model's folder here that names others to load: the library would fetch them."""
    require(
        not (folder / "adapter_config.json").exists(),
        where,
        f"{folder} holds an adapter of peft, which names another model",
        hint="Merge it into its encoder (merge_and_unload), and name that folder.",
    )
    file = folder / "config.json"
    # a file that cannot be read here is refused: the library may read more of it
    described = load_json(file) if file.exists() else None
    require(
        not _fetches_a_backbone(described),
        where,
        f"config.json in {folder} names a backbone to fetch, or a model of timm",
        hint="Take backbone and use_pretrained_backbone out of it, or name another encoder.",
    )


def _fetches_a_backbone(described: object) -> bool:
    """Whether a configuration, or a part of it, names another model to be built on."""
    if isinstance(described, list):
        return any(map(_fetches_a_backbone, described))
    if not isinstance(described, dict):
        return False
    is_named = isinstance(described.get("backbone"), str)
    is_of_timm = str(described.get("model_type")).startswith("timm")
    is_asked = is_named or is_of_timm or bool(described.get("use_pretrained_backbone"))
    return is_asked or any(map(_fetches_a_backbone, described.values()))


def fetch_model(name: str, where: str, load: Callable[[], T]) -> T:
    """What `load` opens with transformers; a UserError about the setting `where` if it fails."""
    never_ask_to_run_code()
    is_here = Path(name).is_dir()
    if is_here:
        require_complete(Path(name), where)
    try:
        with offline_without_network(is_here=is_here):
            return load()
    except UserError:
        raise
    except BaseException as error:
        # of any class: files of others bring transformers to fail in many ways, torch refuses a
        # pickle among weights by an error of pickle's own, and tokenizers panics
        if not is_failure(error):
            raise
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(
                where,
                f"{name} comes with code of its own, which is never run",
                hint="Name a model whose code is part of transformers.",
            ) from None
        if Path(name).is_dir():
            raise UserError(
                where,
                f"{name} is no folder that transformers can open ({reason})",
                hint="Name one that save_pretrained wrote, with its tokenizer.",
            ) from None
        raise UserError(
            where,
            f"no folder {name}, and nothing of that name in the cache or on the Hub could be"
            f" fetched ({reason})",
            hint="Name a local folder that save_pretrained wrote; or fetch it once where there is"
            " a network, and set HF_HOME to that cache; or train from random weights:"
            " model.pretrained=null.",
        ) from None


@contextmanager
def offline_without_network(*, is_here: bool = False) -> Iterator[None]:
    """Inside it, without a network, only the cache is asked.

    The Hub's library would try for half a minute before it looks there. Of a folder that `is_here`
    nothing is fetched, so nobody is asked.
    """
    from huggingface_hub import constants

    # `datasets` keeps a copy of the switch; a model alone does not load it
    switches: list[Any] = [constants]
    if "datasets" in sys.modules:
        switches.append(sys.modules["datasets"].config)
    before = constants.HF_HUB_OFFLINE
    if is_here or not (before or _is_reached(constants.ENDPOINT)):
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for switch in switches:
            switch.HF_HUB_OFFLINE = before


def _is_reached(address: str) -> bool:
    """Whether the name of a server is known here: without a network it is not."""
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True


def _import_datasets(where: str, source: str, hint: str = "") -> Any:
    """The package `datasets`, which is an extra; `source` needs it."""
    require(
        importlib.util.find_spec("datasets") is not None,
        where,
        f"{source} needs a package that is not installed",
        hint=f"{hint} pip install 'flatout[hub]'.".strip(),
    )
    return importlib.import_module("datasets")


def from_disk(folder: Path, where: str) -> Any:
    """A data set that `save_to_disk` wrote."""
    datasets = _import_datasets(where, f"{folder}, which datasets has saved,")
    try:
        return datasets.load_from_disk(str(folder))
    except BaseException as error:
        # of any class: its files may say anything of their columns
        if not is_failure(error):
            raise
        raise UserError(
            where,
            f"{folder}: not a whole data set ({first_line(error)})",
            hint="Save it again, or name another folder.",
        ) from None

"""A checkpoint as a folder: tensors in safetensors, everything else in JSON, checksums last.

Nothing is pickled, so a checkpoint from elsewhere runs no code. `step-N/` holds
`tensors.safetensors`, `state.json` and `MANIFEST.json`. It is written beside its place, synced, and
renamed when it is whole. The manifest has the size and the checksum of each file, what the
checkpoint is of, and a checksum of itself: no single wrong bit anywhere passes. Open this file to
let a checkpoint hold another kind of value.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import xxhash
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatout.data.store.store import file_checksum
from flatout.distributed.both_lightnings import InBothLightnings
from flatout.engine.lightning_internals import callbacks_of, overrides
from flatout.errors import UserError, out_of_space, require
from flatout.files import (
    errors_of_the_disk,
    load_json,
    put_in_place,
    read_modest,
    sync_file,
    write_synced,
)

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
# key of a checkpoint's dictionary that goes into the manifest: what it is of, readable by itself
ABOUT = "about"
SCHEMA = 2
OWN_FOLDER = "Remove the link, or set output=FOLDER: checkpoints are written to real folders only."
REMOVE_IT = "Remove this folder and resume again: the checkpoint before it is then used."
MAKE_ROOM = (
    "Make room, or set output=FOLDER on another disk. The checkpoints before are kept: resume=auto"
    " uses them."
)


class FolderCheckpointIO(InBothLightnings, CheckpointIO):
    """Writes and reads Lightning's checkpoint dictionaries as folders."""

    def __init__(self, keys: Mapping[str, Any] | None = None) -> None:
        """`keys`: those of callbacks' states that are no texts, by the text that is written."""
        self.keys = keys or {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        target = Path(path)
        require(
            not target.parent.is_symlink(),
            "checkpoint",
            f"{target.parent} is a link",
            hint=OWN_FOLDER,
        )
        beside = target.with_name(f".{target.name}-{os.getpid()}")
        tensors: dict[str, Tensor] = {}
        parts = dict(checkpoint)
        about = parts.pop(ABOUT, {})
        if "callbacks" in parts:
            parts["callbacks"] = by_texts(parts["callbacks"])
        state = as_plain(parts, "", tensors)
        try:
            _separate(tensors)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            with errors_of_the_disk():
                save_file(tensors, beside / TENSORS)
            (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
            # the disk writes while checksums are taken
            with ThreadPoolExecutor(2) as pool:
                synced = [pool.submit(sync_file, beside / name) for name in (TENSORS, STATE)]
                checksums = {
                    TENSORS: _checksum_of_tensors(tensors, beside / TENSORS),
                    STATE: file_checksum(beside / STATE),
                }
                files = {
                    name: {"bytes": (beside / name).stat().st_size, "xxh3": checksum}
                    for name, checksum in checksums.items()
                }
                manifest = {"schema": SCHEMA, ABOUT: about, "files": files}
                write_synced(beside / MANIFEST, sealed(manifest))
                # raises what the disk reported late
                for syncing in synced:
                    syncing.result()
            put_in_place(beside, target)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise out_of_space(error, target.parent, needed, "checkpoint", MAKE_ROOM) from None

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        about = require_whole(folder)
        try:
            # Tensors in a file are not aligned, and sums over unaligned memory differ in their last
            # digit: each is copied.
            stored = load_file(folder / TENSORS, device="cpu")
            tensors = {name: tensor.clone() for name, tensor in stored.items()}
            state = _with_tensors(load_json(folder / STATE), tensors)
            if not isinstance(state, dict):
                raise TypeError(f"{STATE} holds no mapping")
            if "callbacks" in state:
                states = dict(state["callbacks"])
                state["callbacks"] = {self.keys.get(key, key): states[key] for key in states}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            # The checksums are right: another program has written such a folder.
            raise UserError(
                f"checkpoint {folder}",
                f"not a checkpoint of ours: {_words(error)}",
                hint="Name a checkpoint of a run, such as RUN/checkpoints/last.",
            ) from None
        return {**state, ABOUT: about} if about else state

    def remove_checkpoint(self, path: str | Path) -> None:
        # A path may come from the state of a callback: nothing but a checkpoint goes.
        if (Path(path) / MANIFEST).is_file():
            shutil.rmtree(path, ignore_errors=True)


class RoutedCheckpointIO(InBothLightnings, CheckpointIO):
    """Writes the folders `step-N` below one folder; the Trainer's own plugin does everything else.

    A ModelCheckpoint of Lightning in the same Trainer thus writes its files as ever.
    """

    def __init__(self, ordinary: CheckpointIO, folder: Path, keys: Mapping[str, Any]) -> None:
        """`keys`: see `FolderCheckpointIO`."""
        self.ordinary = ordinary
        self.folder = folder.absolute()
        self._folders = FolderCheckpointIO(keys)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        # By name, as Lightning calls it: a plugin of the user's may take it by name alone.
        self._io_of(path).save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        io = self._folders if Path(path).is_dir() else self._io_of(path)
        if map_location is None:  # Lightning passes it for a model in a file alone
            return io.load_checkpoint(path, weights_only=weights_only)
        return io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._io_of(path).remove_checkpoint(path)

    def teardown(self) -> None:
        self.ordinary.teardown()

    def _io_of(self, path: str | Path) -> CheckpointIO:
        target = Path(path).absolute()
        is_ours = target.parent == self.folder and re.fullmatch(r"step-\d+", target.name)
        return self._folders if is_ours else self.ordinary


def route_folders(trainer: L.Trainer, folder: Path) -> None:
    """Let a Trainer write checkpoint folders below `folder`, and read them from anywhere."""
    strategy = trainer.strategy
    standing = strategy.checkpoint_io
    # DeepSpeed writes checkpoints itself. So does our strategy for slices, but in this format.
    writes_itself = overrides(strategy, "save_checkpoint", Strategy)
    require(
        not writes_itself or hasattr(strategy, "share_out"),
        "ExactCheckpoint",
        f"{type(strategy).__name__} writes checkpoints in a format that only it can read",
        hint="Use Lightning's ModelCheckpoint with this strategy.",
    )
    if isinstance(standing, RoutedCheckpointIO):
        standing = standing.ordinary
    keys = {each.state_key: each.state_key for each in callbacks_of(trainer)}
    if isinstance(standing, FolderCheckpointIO):
        standing.keys = by_texts(keys)
    else:
        strategy.checkpoint_io = RoutedCheckpointIO(standing, folder, by_texts(keys))


def require_whole(folder: Path) -> dict[str, Any]:
    """Compare a checkpoint's bytes with its manifest; returns what the checkpoint is of.

    A `UserError` if they differ.
    """
    try:
        text = read_modest(folder / MANIFEST).encode()
        manifest = json.loads(text)
        files = manifest["files"]
        about = dict(manifest[ABOUT])
        manifest.pop("checksum", None)
        if sealed(manifest) != text:
            raise ValueError("its manifest is damaged")
        if set(files) != {TENSORS, STATE}:
            raise ValueError("its manifest names other files than a checkpoint has")
        broken = [
            name for name, written in files.items() if not _is_as_written(folder / name, written)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # A manifest that is damaged, or none of ours, may hold anything.
        hint = "Name one of its folders step-N, or last in it."
        if folder.name.startswith("step-"):
            hint = REMOVE_IT
        raise UserError(
            f"checkpoint {folder}", f"not a whole checkpoint: {_words(error)}", hint=hint
        ) from None
    require(
        not broken,
        f"checkpoint {folder}",
        f"damaged: {', '.join(broken)} differ from what was written",
        hint=REMOVE_IT,
    )
    return about


def _words(error: Exception) -> str:
    return f"no {error} in it" if isinstance(error, KeyError) else str(error)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The `state_dict` of a checkpoint's module.

    A run that averages its weights answers with the average, so that takes their place.
    """
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    average = checkpoint.get("average", {})
    return checkpoint["state_dict"] | {f"model.{name}": mean for name, mean in average.items()}


def as_file(folder: Path) -> io.BytesIO:
    """A checkpoint's weights and hyperparameters as a file in memory.

    Lightning's `load_from_checkpoint` reads files only.
    """
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    file = io.BytesIO()
    names = ("state_dict", "pytorch-lightning_version", "hparams_name")
    parts = {
        name: part
        for name, part in checkpoint.items()
        if name in names or "hyper_parameters" in name
    }
    torch.save(parts, file)
    file.seek(0)
    return file


def _separate(tensors: dict[str, Tensor]) -> None:
    """Copy tensors that share memory with another one, such as tied weights or a view.

    safetensors refuses them.
    """
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        if memory.data_ptr() in taken or tensor.nbytes != memory.nbytes():
            tensors[name] = tensor.clone()
        taken.add(memory.data_ptr())


def _checksum_of_tensors(tensors: dict[str, Tensor], path: Path) -> str:
    """The checksum of a safetensors file, taken from the tensors in memory.

    Reading the file again would double the time of a save.
    """
    # The file is eight bytes with the length of a header, the header, and the tensors in the order
    # of the header:
    #
    #     [ 120 ] [ {"/weight": {"data_offsets": [0, 64]}, …} ] [ bytes of /weight ] …
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    digest.update(length + header)
    described = json.loads(header)
    for name in sorted(tensors, key=lambda name: described[name]["data_offsets"]):
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum of its values.

    Equal values always give equal bytes, so bytes can be compared.
    """
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "checksum": checksum}, indent=1, sort_keys=True).encode()


def _is_as_written(path: Path, written: dict[str, Any]) -> bool:
    is_whole = path.is_file() and path.stat().st_size == written["bytes"]
    return is_whole and file_checksum(path) == written["xxh3"]


def by_texts(states: Mapping[Any, Any]) -> dict[str, Any]:
    """States of callbacks by texts: a key that is none, such as a class, gives its `repr`."""
    by_text = {}
    for key, state in states.items():
        text = key if isinstance(key, str) else repr(key)
        by_text[text] = state
    return by_text


class Unwritable(UserError):
    """A value that no checkpoint can hold."""


def as_plain(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors moved into `tensors` under their paths.

    What JSON cannot say gets a tag that begins with `~`. With the path `/optimizer`:

        {"lr": 0.1, "mean": <tensor>}    →    {"lr": 0.1, "mean": {"~tensor": "/optimizer/mean"}}
        {0: (1, 2)}                      →    {"~pairs": [[0, {"~tuple": [1, 2]}]]}
    """
    # Two values may have one path, as the keys "a/b" and "a" with "b" in it.
    while path in tensors:
        path += "'"
    if isinstance(value, Tensor) and value.layout == torch.strided:
        tensor = value.detach()
        # safetensors has no complex numbers of this size: they become pairs
        is_wide = value.dtype == torch.complex128
        if is_wide:
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensors[path] = tensor.contiguous()
        return {"~complex" if is_wide else "~tensor": path}
    if (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "biufc"
        and value.dtype != np.complex128
    ):
        tensors[path] = torch.from_numpy(np.asarray(value, order="C"))
        return {"~array": path}
    if isinstance(value, Counter):  # the milestones of a MultiStepLR
        return {"~counter": as_plain(list(value.items()), path, tensors)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("~") for key in value):
            return {key: as_plain(item, f"{path}/{key}", tensors) for key, item in value.items()}
        # keys of JSON are texts: others stand in pairs, and hold no tensors
        pairs = []
        for key, item in value.items():
            name = f"{path}/{key}"
            pairs.append([as_plain(key, name, {}), as_plain(item, name, tensors)])
        return {"~pairs": pairs}
    if isinstance(value, list | tuple):
        items = [as_plain(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {"~tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    kind = "sparse tensor" if isinstance(value, Tensor) else type(value).__name__
    kind += f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    allowed = "dicts, lists, tuples, numbers, texts, arrays and dense tensors"
    hint = "Let state_dict() of the callback return such values."
    raise Unwritable("checkpoint", f"value {path} is a {kind}", allowed=allowed, hint=hint)


def leave_out_settings(checkpoint: dict[str, Any]) -> list[str]:
    """Remove hyperparameters that a checkpoint cannot hold; returns a sentence for each.

    Those of your own modules may be any objects, and resuming needs none of them.
    """
    reasons = []
    # the class of OmegaConf's mapping, which is kept as a plain one
    checkpoint.pop("hparams_type", None)
    for name in ("hyper_parameters", "datamodule_hyper_parameters"):
        values = _as_builtin(checkpoint.pop(name, {}))
        for key in list(values):
            try:
                as_plain(values[key], f"/{name}/{key}", {})
            except Unwritable as error:
                del values[key]
                reasons.append(f"{error} Checkpoints leave /{name}/{key} out.")
        if values:
            checkpoint[name] = values
    return reasons


def _as_builtin(value: object) -> Any:
    """Mappings and lists of OmegaConf as Python's own, without an import of it."""
    if isinstance(value, Mapping):
        return {key: _as_builtin(item) for key, item in value.items()}
    if isinstance(value, MutableSequence):
        return [_as_builtin(item) for item in value]
    return value


def _with_tensors(value: object, tensors: dict[str, Tensor]) -> Any:
    """The value that `as_plain` made JSON of, with its tensors in their places."""
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "~tensor" in value:
        return tensors[value["~tensor"]]
    if "~complex" in value:
        return torch.view_as_complex(tensors[value["~complex"]])
    if "~array" in value:
        return tensors[value["~array"]].numpy()
    if "~counter" in value:
        return Counter(dict(_with_tensors(value["~counter"], tensors)))
    if "~tuple" in value:
        return tuple(_with_tensors(item, tensors) for item in value["~tuple"])
    if "~pairs" in value:
        return {
            _with_tensors(key, {}): _with_tensors(item, tensors) for key, item in value["~pairs"]
        }
    return {key: _with_tensors(item, tensors) for key, item in value.items()}

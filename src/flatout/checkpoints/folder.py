"""A checkpoint as a folder: tensors in safetensors, everything else in JSON, checksums last.
Nothing is pickled.

`step-N/` holds `tensors.safetensors`, `state.json` and `MANIFEST.json`, written beside its place,
synced and renamed when it is whole. The manifest has the size and the checksum of each file, what
the checkpoint is of, and a checksum of itself: no single wrong bit anywhere passes. In a Trainer of
other people's, only one folder is ours.
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
from flatout.errors import UserError, out_of_space, require
from flatout.files import put_in_place, sync_file, write_synced

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


class FolderCheckpointIO(CheckpointIO):
    """Writes and reads Lightning's checkpoint dictionaries as folders."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
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
        about = checkpoint.get(ABOUT, {})
        state = as_plain(
            {name: part for name, part in checkpoint.items() if name != ABOUT}, "", tensors
        )
        try:
            _part(tensors)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            _save_tensors(tensors, beside / TENSORS)
            (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
            with ThreadPoolExecutor(2) as pool:  # the disk writes while checksums are taken
                synced = [pool.submit(sync_file, beside / name) for name in (TENSORS, STATE)]
                sums = {
                    TENSORS: _checksum_of_tensors(tensors, beside / TENSORS),
                    STATE: file_checksum(beside / STATE),
                }
                files = {
                    name: {"bytes": (beside / name).stat().st_size, "xxh3": each}
                    for name, each in sums.items()
                }
                write_synced(
                    beside / MANIFEST, sealed({"schema": SCHEMA, ABOUT: about, "files": files})
                )
                for each in synced:
                    each.result()
            put_in_place(beside, target)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise out_of_space(error, target.parent, needed, "checkpoint", MAKE_ROOM) from None

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        about = require_whole(folder)
        try:
            # Tensors in a file are not aligned, and sums over unaligned memory differ in their last
            # digit.
            tensors = {
                name: each.clone()
                for name, each in load_file(folder / TENSORS, device="cpu").items()
            }
            state = _with_tensors(json.loads((folder / STATE).read_text(encoding="utf-8")), tensors)
            if not isinstance(state, dict):
                raise TypeError(f"{STATE} holds no mapping")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise UserError(
                f"checkpoint {folder}",
                f"not a checkpoint of ours: {_words(error)}",
                hint="Name a checkpoint of a run, such as RUN/checkpoints/last.",
            ) from None
        return {**state, ABOUT: about} if about else state

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path, ignore_errors=True)


class RoutedCheckpointIO(CheckpointIO):
    """The folders `step-N` below one folder are ours; the Trainer's own plugin reads and writes
    everything else.
    """

    def __init__(self, ordinary: CheckpointIO, folder: Path) -> None:
        self.ordinary = ordinary
        self.folder = folder.absolute()
        self._folders = FolderCheckpointIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        self._io_of(path).save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        io = self._folders if Path(path).is_dir() else self._io_of(path)
        return io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self._io_of(path).remove_checkpoint(path)

    def teardown(self) -> None:
        self.ordinary.teardown()

    def _io_of(self, path: Any) -> CheckpointIO:
        target = Path(path).absolute()
        is_ours = target.parent == self.folder and re.fullmatch(r"step-\d+", target.name)
        return self._folders if is_ours else self.ordinary


def route_folders(trainer: L.Trainer, folder: Path) -> None:
    """Let a Trainer write checkpoint folders below `folder`, and read them from anywhere."""
    strategy, standing = trainer.strategy, trainer.strategy.checkpoint_io
    writes_itself = type(strategy).save_checkpoint is not Strategy.save_checkpoint
    require(
        not writes_itself or hasattr(strategy, "share_out"),
        "ExactCheckpoint",
        f"{type(strategy).__name__} writes checkpoints in a format that only it can read",
        hint="Use Lightning's ModelCheckpoint with this strategy.",
    )
    if isinstance(standing, RoutedCheckpointIO):
        standing = standing.ordinary
    if not isinstance(standing, FolderCheckpointIO):
        strategy.checkpoint_io = RoutedCheckpointIO(standing, folder)


def require_whole(folder: Path) -> dict[str, Any]:
    """What a checkpoint is of; refused when its bytes are not those that were written."""
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
        files = manifest["files"]
        about = dict(manifest[ABOUT])
        if sealed({name: part for name, part in manifest.items() if name != "checksum"}) != text:
            raise ValueError("its manifest is damaged")
        if set(files) != {TENSORS, STATE}:
            raise ValueError("its manifest names other files than a checkpoint has")
        broken = [
            name for name, written in files.items() if not _is_as_written(folder / name, written)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = (
            REMOVE_IT
            if folder.name.startswith("step-")
            else "Name one of its folders step-N, or last in it."
        )
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
    """The `state_dict` of a checkpoint's module; the running mean of a model's weights where there
    is one.
    """
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    return checkpoint["state_dict"] | {
        f"model.{name}": mean for name, mean in checkpoint.get("average", {}).items()
    }


def as_file(folder: Path) -> io.BytesIO:
    """A checkpoint for Lightning's `load_from_checkpoint`, which reads files only: weights and
    hyperparameters.
    """
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    file = io.BytesIO()
    names = (
        "state_dict",
        "pytorch-lightning_version",
        *(name for name in checkpoint if "hyper_parameters" in name),
    )
    torch.save(
        {name: checkpoint[name] for name in (*names, "hparams_name") if name in checkpoint}, file
    )
    file.seek(0)
    return file


def _part(tensors: dict[str, Tensor]) -> None:
    """Copy tensors that lie in the memory of another one: the format has none that share."""
    taken: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in taken or tensor.nbytes != tensor.untyped_storage().nbytes():
            tensors[name] = tensor.clone()
        taken.add(place)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # one error for all; what the system says stands in its words
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None


def _checksum_of_tensors(tensors: dict[str, Tensor], path: Path) -> str:
    """The checksum of a safetensors file, taken from what it was written from: reading it again
    costs a save twice.
    """
    # The file is eight bytes that tell the length of a header, the header, and the tensors in the
    # order it says.
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    digest.update(length + header)
    places = {
        name: described["data_offsets"]
        for name, described in json.loads(header).items()
        if name in tensors
    }
    for name in sorted(places, key=lambda name: places[name]):
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes with a checksum of its values; there is one way to write them, so bytes
    can be compared.
    """
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "checksum": checksum}, indent=1, sort_keys=True).encode()


def _is_as_written(path: Path, written: dict[str, Any]) -> bool:
    return path.stat().st_size == written["bytes"] and file_checksum(path) == written["xxh3"]


class Unwritable(UserError):
    """A value that no checkpoint can hold."""


def as_plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors moved out under their paths. What JSON cannot say is tagged."""
    while path in tensors:  # of another value whose keys are joined to the same
        path += "'"
    if isinstance(value, Tensor) and value.layout == torch.strided:
        is_wide = value.dtype == torch.complex128  # safetensors has none
        tensors[path] = (
            torch.view_as_real(value.detach().resolve_conj()) if is_wide else value.detach()
        ).contiguous()
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
        items = [(key, item, f"{path}/{key}") for key, item in value.items()]
        return {
            "~pairs": [
                [as_plain(key, name, {}), as_plain(item, name, tensors)]
                for key, item, name in items
            ]
        }
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
    """Hyperparameters of other modules may be any objects, and no resume needs them: a sentence for
    each left out.
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


def _as_builtin(value: Any) -> Any:
    """Mappings and lists of OmegaConf as Python's own, without an import of it."""
    if isinstance(value, Mapping):
        return {key: _as_builtin(item) for key, item in value.items()}
    return [_as_builtin(item) for item in value] if isinstance(value, MutableSequence) else value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
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

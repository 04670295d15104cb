"""Checkpoints of others are data: nothing in them is executed, and no link is followed."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatout.checkpoints.folder import MANIFEST, STATE, TENSORS, FolderCheckpointIO
from flatout.checkpoints.folder import sealed as sealed_manifest
from flatout.checkpoints.kept import shelve
from flatout.data.store.store import file_checksum
from flatout.errors import UserError


def checkpoint(folder: Path, state: object, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint that is whole by its checksums, whatever is in it."""
    folder.mkdir(parents=True)
    save_file(tensors or {"/a": torch.zeros(2)}, folder / TENSORS)
    (folder / STATE).write_text(
        state if isinstance(state, str) else json.dumps(state), encoding="utf-8"
    )
    return sealed(folder)


def sealed(folder: Path) -> Path:
    """With a manifest that fits what is there, checksum and all."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "xxh3": file_checksum(folder / name)}
        for name in (TENSORS, STATE)
    }
    (folder / MANIFEST).write_bytes(
        sealed_manifest(
            {
                "schema": 2,
                "about": {},
                "files": files,
            }
        )
    )
    return folder


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("key", ["_target_", "_partial_", "__reduce__", "~object", "py/object"])
def test_a_checkpoint_that_names_code_is_data(key, tmp_path):
    state = {"callbacks": {"x": {key: "os.mkdir", "_args_": [str(tmp_path / "canary")]}}}
    assert FolderCheckpointIO().load_checkpoint(checkpoint(tmp_path / "step-1", state)) == state
    assert not (tmp_path / "canary").exists()


HOSTILE_STATES = {
    "a tensor that is missing": {"state_dict": {"~tensor": "/nowhere"}},
    "a tensor named by a list": {"state_dict": {"~tensor": ["/a"]}},
    "a tensor by a path": {"state_dict": {"~tensor": "../../x"}},
    "pairs that are none": {"x": {"~pairs": [[1, 2, 3]]}},
    "pairs by a number": {"x": {"~pairs": 7}},
    "a key that is a list": {"x": {"~pairs": [[[], 1]]}},
    "a tuple of a number": {"x": {"~tuple": 7}},
    "no JSON": "{",
    "a list": [1, 2],
    "nothing": "",
    "nested without end": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_a_checkpoint_with_odd_state_is_refused(name, tmp_path):
    folder = checkpoint(tmp_path / "step-1", HOSTILE_STATES[name])
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


def test_a_pickle_in_place_of_tensors_is_refused_and_not_read(tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    (folder / TENSORS).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(sealed(folder))


def test_a_pickle_in_place_of_tensors_is_not_unpickled(tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    (folder / TENSORS).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(Exception):  # noqa: B017 - whichever it is, see above
        FolderCheckpointIO().load_checkpoint(sealed(folder))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/etc/hostname", "~/x", "a/../../outside.txt", "x\0y"]
)
def test_a_checkpoint_that_names_files_outside_is_refused(name, tmp_path):
    (tmp_path / "outside.txt").write_text("kept")
    folder = checkpoint(tmp_path / "step-1", {})
    described = json.loads((folder / MANIFEST).read_text())
    del described["checksum"]
    if os.path.lexists(real := os.path.normpath(folder / name.replace("\0", ""))):
        described["files"][name] = {"bytes": 4, "xxh3": file_checksum(Path(real))}
    else:
        described["files"][name] = {"bytes": 4, "xxh3": "0"}
    (folder / MANIFEST).write_bytes(sealed_manifest(described))
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


@pytest.mark.parametrize(
    "manifest", ["[]", "7", '{"files": []}', '{"files": {"state.json": 7}}', '{"files": {}}', "{"]
)
def test_a_checkpoint_with_an_odd_manifest_is_refused(manifest, tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    with suppress(ValueError, AttributeError, TypeError):
        manifest = sealed_manifest(
            {
                "schema": 2,
                "about": {},
                **json.loads(manifest),
            }
        ).decode()
    (folder / MANIFEST).write_text(manifest)
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


@pytest.mark.parametrize("planted", ["step-9", "best", "last"])
def test_taking_checkpoints_away_takes_a_link_and_not_what_it_leads_to(planted, tmp_path):
    outside = checkpoint(tmp_path / "outside" / "step-1", {})
    folder = tmp_path / "checkpoints"
    checkpoint(folder / "step-2", {})
    (folder / planted).symlink_to(outside)
    for take in (
        lambda: shelve(folder, last=2, best=None),
        lambda: FolderCheckpointIO().remove_checkpoint(folder / planted),
    ):
        try:
            take()
        except (OSError, UserError) as error:
            said = str(error)
            assert "link" in said
    assert sorted(path.name for path in outside.iterdir()) == [MANIFEST, STATE, TENSORS]


def test_a_folder_of_checkpoints_that_is_a_link_is_not_emptied(tmp_path):
    outside = checkpoint(tmp_path / "outside" / "step-1", {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "outside")
    with suppress(UserError):
        shelve(tmp_path / "run" / "checkpoints", last=2, best=None)
    assert outside.is_dir()

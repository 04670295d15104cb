"""Checkpoints of others are data: nothing in them is executed, and no link is followed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.checkpoints.folder import MANIFEST, STATE, TENSORS, FolderCheckpointIO
from flatout.checkpoints.folder import sealed as sealed_manifest
from flatout.checkpoints.kept import shelve
from flatout.checkpoints.odd_state import is_like, is_of_checkpoint, require_own_paths
from flatout.checkpoints.same_run import differences
from flatout.data.store.store import file_checksum
from flatout.errors import UserError
from tests.faults.plants import Planted
from tests.faults.runs import train
from tests.fitting import own_cache
from tests.params import at_once
from tests.run.short_runs import BROKEN, SMALL, contents


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


def test_nothing_but_a_checkpoint_is_taken_away(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    FolderCheckpointIO().remove_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    FolderCheckpointIO().remove_checkpoint(checkpoint(tmp_path / "step-1", {}))
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize(
    "path",
    ["<own>/../mine", "<own>/link/x", "http://x.invalid/leak", "memory::x", "../mine", ["x"]],
)
@pytest.mark.parametrize("key", ["best_model_path", "last_model_path", "best_k_models"])
def test_a_state_of_a_checkpoint_names_no_file_elsewhere_to_take_away(key, path, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "link").symlink_to(tmp_path)
    if isinstance(path, str):
        path = path.replace("<own>", str(own))
    elif key == "best_k_models":
        return  # JSON has no lists for names
    state = {key: {path: 0.5} if key == "best_k_models" else path}
    with pytest.raises(UserError, match="outside of its folder"):
        require_own_paths(state, own, "ModelCheckpoint")


def test_a_state_of_a_checkpoint_may_name_its_own_files_and_those_of_a_folder_before(tmp_path):
    for path in (tmp_path / "own" / "epoch=1.ckpt", tmp_path / "before" / "x.ckpt", ""):
        require_own_paths({"best_model_path": str(path)}, tmp_path / "own", "ModelCheckpoint")
    bucket = "s3://bucket/checkpoints"
    require_own_paths({"last_model_path": f"{bucket}/last.ckpt"}, bucket, "ModelCheckpoint")


def test_a_folder_of_checkpoints_that_is_a_link_is_not_emptied(tmp_path):
    outside = checkpoint(tmp_path / "outside" / "step-1", {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "outside")
    with suppress(UserError):
        shelve(tmp_path / "run" / "checkpoints", last=2, best=None)
    assert outside.is_dir()


# Checkpoints of a run, whole by their checksums, with a value that is odd.


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A copy of `runs`, in which a run of two epochs was ended by a callback after step 14."""
    place = tmp_path_factory.mktemp("place")
    with own_cache(place):
        with pytest.raises(Planted):
            train(BROKEN, place / "runs")
        (place / "runs").rename(place / "kept")
        yield place / "kept"


@pytest.fixture
def cut_short(kept):
    """The place of the runs, as it was when the run ended."""
    runs = kept.parent / "runs"
    shutil.copytree(kept, runs, symlinks=True)
    yield runs
    shutil.rmtree(runs)


def set_state(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(state, tensors):
        for key in keys:
            state = state[key]
        state[last] = value

    return change


def set_tensor(name, tensor):
    def change(state, tensors):
        (key,) = [key for key in tensors if key.endswith(name)]
        tensors[key] = tensor

    return change


def without_the_first_weight(state, tensors):
    del state["state_dict"][next(iter(state["state_dict"]))]


OF_GROUP = ("optimizer_states", 0, "param_groups", 0)
ODD_VALUES = {
    "no version of Lightning": set_state("pytorch-lightning_version", None),
    "a weight is missing": without_the_first_weight,
    "a weight is a number": set_state("state_dict", "model.output.bias", 7),
    "a weight of another shape": set_tensor("model.output.bias", torch.zeros(5000)),
    "a position that is none": set_state("position", "step_in_epoch", None),
    "a rank that is a number": set_state("ranks", 0, -1),
    "random numbers of another generator": set_state("ranks", 0, "random", "numpy", 0, 7),
    "no random numbers": set_tensor("random/numpy/1", torch.zeros(0)),
    "sums that are a list": set_state("callbacks", "RunCurves", "timer", []),
    "a sum that is a list": set_state(
        "callbacks", "RunCurves", "throughput", "first", "computed", []
    ),
    "no weights in a group": set_state(*OF_GROUP, "params", None),
    "a flag that its states do not fit": set_state(*OF_GROUP, "amsgrad", True),
    "a mean of another shape": set_tensor("/0/state/0/exp_avg", torch.zeros(3)),
    "a mean of no number": set_tensor("/0/state/1/exp_avg_sq", torch.zeros(0)),
    "no count of steps": set_tensor("/0/state/0/step", torch.zeros(0)),
}


@pytest.mark.parametrize("name", at_once(*list(ODD_VALUES)[::4], of=ODD_VALUES, seconds=1))
def test_a_checkpoint_with_an_odd_value_is_refused_in_one_sentence(name, cut_short):
    (checkpoint,) = cut_short.glob("*/*/checkpoints/step-14")
    state = json.loads((checkpoint / STATE).read_text())
    tensors = load_file(checkpoint / TENSORS)
    ODD_VALUES[name](state, tensors)
    (checkpoint / STATE).write_text(json.dumps(state))
    save_file(tensors, checkpoint / TENSORS)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for file, written in manifest["files"].items():
        written["bytes"] = (checkpoint / file).stat().st_size
        written["xxh3"] = file_checksum(checkpoint / file)
    del manifest["checksum"]
    (checkpoint / MANIFEST).write_bytes(sealed_manifest(manifest))
    (run,) = cut_short.glob("*/*")
    before = contents(run)
    with pytest.raises(UserError, match="checkpoint"):
        train(SMALL, cut_short)
    after = contents(run)
    # the log tells the refusal; all else is as the run has left it
    added = {name for name in after if after[name] != before.get(name)}
    assert {name for name in added if not name.startswith("log.txt")} == set()
    assert before.keys() <= after.keys()


@pytest.mark.parametrize("name", [STATE, TENSORS, MANIFEST])
def test_a_link_to_itself_in_a_checkpoint_counts_as_damage(name, cut_short):
    (file,) = cut_short.glob(f"*/*/checkpoints/step-14/{name}")
    file.unlink()
    file.symlink_to(name)
    train(SMALL, cut_short)
    assert list(cut_short.glob("*/*/checkpoints/damaged-*"))


@pytest.mark.parametrize("odd", [-1, [3], 1.5, True])
@pytest.mark.parametrize("name", ["settings", "plan", "precision"])
def test_facts_of_a_checkpoint_that_are_of_no_mapping_are_another_run(name, odd):
    now = {"settings": {"seed": 0}, "plan": {"rows": 3}, "precision": "32"}
    found = list(differences(now | {name: odd}, now))
    assert found or name == "plan"


def test_states_are_compared_by_their_form():
    usual = {"rows": 0, "parts_s": {}, "first": [], "name": None}
    assert is_like({"rows": 3.0, "parts_s": {"wait": 0.1}, "first": [1], "name": "x"}, usual)
    for odd in ({"rows": [3]}, {"parts_s": 7}, {"parts_s": {"wait": "x"}}, {"first": 3}, 7):
        assert not is_like(odd, usual)


def test_an_error_of_ones_own_module_as_it_is_restored_keeps_its_traceback():
    namespace = {"__name__": "flatout.checkpoints.position"}
    exec("def load(restore): restore()", namespace)

    def restore():
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        namespace["load"](restore)
    assert not is_of_checkpoint(caught.value)
    with pytest.raises(TypeError) as caught:
        namespace["load"](7)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert is_of_checkpoint(caught.value)

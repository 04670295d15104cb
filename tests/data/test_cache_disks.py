"""A cache on a disk that is full, refuses, or gives other bytes than were written."""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tests.data.caches import RECIPE, build, left_in
from tests.refusals import refused

from flatout.data.store.cache import Cache, recipe_key
from flatout.data.store.store import (
    Column,
    StoreWriter,
)
from flatout.errors import UserError, out_of_space


class FullDisk(io.RawIOBase):
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_disk_refuses_is_told_with_what_is_needed_and_what_is_free(tmp_path):
    def too_large(writer: StoreWriter) -> None:
        writer.expected_rows = 400_000_000
        split = writer.split("train", {"targets": Column("int32")})
        for _ in range(3):
            split.append(targets=np.zeros(1000))
        file = split._files["train/targets.bin"]
        file.close()
        file._file = FullDisk()
        split.append(targets=np.zeros(1000))

    message = (
        r"^data\.cache: no space left in \S+: needs about 1,600 MB, [\d,]+ MB free\. Make room"
        r" .*data\.cache=FOLDER\.$"
    )
    with pytest.raises(UserError, match=message):
        Cache(tmp_path / "cache").open_or_build("rows.csv", RECIPE, too_large)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("are_listed", [True, False])
def test_a_disk_that_gives_other_bytes_than_were_written_ends_the_build_after_some_tries(
    tmp_path, are_listed
):
    builds = []

    def build_on_bad_disk(writer: StoreWriter) -> None:
        builds.append(1)
        assert len(builds) < 9, "built without end"
        build(writer)
        file = writer._splits[0]._files["train/targets.bin"]._file
        file.flush()
        Path(file.name).write_bytes(bytes(file.tell()))

    cache = Cache(tmp_path)
    with pytest.raises(
        UserError, match=r"^cache /\S+: the store is damaged just after it was built"
    ):
        if are_listed:
            with pytest.warns(UserWarning, match="is damaged"):
                cache.open_or_build("rows.csv", RECIPE, build_on_bad_disk)
        else:
            cache.open_or_build_key(recipe_key(RECIPE), "rows.csv", build_on_bad_disk)
    assert len(builds) == 3


def test_a_damaged_unit_is_renamed_before_it_is_removed(tmp_path):
    key = recipe_key(RECIPE)
    cache = Cache(tmp_path)
    folder = cache.open_or_build_key(key, "rows.csv", build).folder
    (folder / "labels.json").write_text("{}", encoding="utf-8")
    held = os.open(folder, os.O_RDONLY)
    try:
        assert cache.open_or_build_key(key, "rows.csv", build).read_text("labels.json") == "[]"
        assert os.fstat(held).st_ino != (tmp_path / key).stat().st_ino
    finally:
        os.close(held)
    assert left_in(tmp_path) == [key]


def test_errors_of_a_source_are_not_told_as_the_caches(tmp_path):
    def unreadable(writer: StoreWriter) -> None:
        build(writer)
        raise OSError(errno.EIO, "the source's disk")

    with pytest.raises(OSError, match="the source's disk"):
        Cache(tmp_path).open_or_build("rows.csv", RECIPE, unreadable)
    assert left_in(tmp_path) == []


REFUSALS = {
    errno.ENOSPC: r"no space left in /\S+: needs about 12 MB, [\d,.]+ MB free\. Mend it\.",
    errno.EDQUOT: r"over your quota in /\S+: needs about 12 MB, [\d,.]+ MB free\. Mend it\.",
    errno.EROFS: r"/\S+ is on a disk that can only be read\. Mend it\.",
    errno.EACCES: r"no permission to write in /\S+\. Mend it\.",
    errno.EIO: r"the disk of /\S+ gives errors: it may be failing\. Mend it\.",
    errno.ENOTDIR: r"cannot write in /\S+: Not a directory\. Mend it\.",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_each_refusal_has_its_words(tmp_path, code):
    error = out_of_space(
        OSError(code, os.strerror(code)), tmp_path / "not/there", 12_300_000, "here", "Mend it."
    )
    assert re.fullmatch("here: " + REFUSALS[code], str(error))


def test_a_cache_in_the_place_of_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with refused("data.cache", "file/cache", "Not a directory", fix="data.cache=FOLDER"):
        Cache(tmp_path / "file" / "cache").open_or_build("rows.csv", RECIPE, build)

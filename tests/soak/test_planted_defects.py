"""Do the tests find defects? Many are planted, each in a copy of the project, and named test files
must fail there.

A defect is a small edit that type checks and runs: a sign, a step too far, a lost weight, a
checksum left out. The copy without a defect passes the same tests, so a failure is the defect's. Of
the default suite only those tests run that are about the edited part. A table at the end names the
test that found each defect.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.soak import choosing

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "tests",
    "conf",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "SECURITY.md",
)
PASSED = 0
FAILED = 1
"""Exit codes of pytest; others mean that no test ran."""


@dataclass(frozen=True)
class Defect:
    """An edit of one file of the sources, and the tests that find it: a file, or one test of a long
    file.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


_ELSEWHERE = (
    "tests/elsewhere/test_steps.py::test_a_step_elsewhere_mixes_no_devices_and_reads_nothing"
)
"""On a device that is not the CPU: takes one of its cases."""
DEFECTS = [
    Defect(
        "a step ends one batch too late",
        "data/batches/plan.py",
        "ends_step=(np.arange(start, stop) + 1) % accumulate == 0",
        "ends_step=np.arange(start, stop) % accumulate == 0",
        "tests/data/test_plan.py",
    ),
    Defect(
        "rows that fill a rank's batch count",
        "data/batches/plan.py",
        "        np.maximum(real, 1),\n        real,\n",
        "        np.maximum(real, 1),\n        np.maximum(real, 1),\n",
        "tests/data/test_plan.py",
    ),
    Defect(
        "a piece of a batch weighs as a whole step",
        "data/batches/flat_batch.py",
        "step_rows=batch.step_rows,",
        "step_rows=stop - start,",
        "tests/data/test_cut.py",
    ),
    Defect(
        "labels of the rows beside",
        "data/batches/gather.py",
        "targets = self.targets[on_device(rows, self.device)]",
        "targets = self.targets[on_device(rows, self.device)].roll(1)",
        "tests/data/test_feed.py",
    ),
    Defect(
        "a store's checksums are not compared",
        "data/store/store.py",
        'return path.stat().st_size == file["bytes"] and file_checksum(path) == file["xxh3"]',
        'return path.stat().st_size == file["bytes"]',
        "tests/data/test_cache.py",
    ),
    Defect(
        "two processes build at once",
        "data/store/lock.py",
        "acquire(build_lock, _PRINT_AFTER_S if waits else 0, _LOOK_S)",
        "folder.exists()",
        "tests/data/test_cache_builders.py",
    ),
    Defect(
        "no row goes to the test",
        "data/tables/splits.py",
        "(position < test).astype(np.int8)",
        "(position < 0).astype(np.int8)",
        "tests/data/test_splits.py",
    ),
    Defect(
        "weights of classes are lost",
        "tasks/classification.py",
        'weight=weights_C, reduction="sum", label_smoothing=smoothing',
        'reduction="sum", label_smoothing=smoothing',
        "tests/tasks/test_classification.py",
    ),
    Defect(
        "a batch's loss is its own mean, not its part of the step's",
        "tasks/classification.py",
        "/ batch.step_rows",
        "/ batch.num_real",
        "tests/tasks/test_step.py",
    ),
    Defect(
        "Lightning's division by the batches of a step is forgotten",
        "tasks/task.py",
        "parts = self.trainer.accumulate_grad_batches * self.trainer.world_size",
        "parts = self.trainer.world_size",
        "tests/tasks/test_plain_trainer.py",
    ),
    Defect(
        "entities that were cut off do not count as missed",
        "tasks/tagging.py",
        "unflatten(0, (3, -1)) + self._lost",
        "unflatten(0, (3, -1)) + 0 * self._lost",
        "tests/tasks/test_tagging.py",
    ),
    Defect(
        "answers and labels are swapped in the metrics",
        "tasks/metrics.py",
        "torch.cat([correct, targets, answers, counts.sum()",
        "torch.cat([correct, answers, targets, counts.sum()",
        "tests/tasks/test_metrics.py",
    ),
    Defect(
        "a temperature is kept although it does not help",
        "tasks/calibration.py",
        "if loss_fitted < loss_before:",
        "if loss_fitted < loss_before + 1:",
        "tests/tasks/test_calibration.py",
    ),
    Defect(
        "the warm-up begins at a rate of zero",
        "engine/optimizer.py",
        "return highest * (step + 1) / (warmup + 1)",
        "return highest * step / (warmup + 1)",
        "tests/engine/test_optimizer.py",
    ),
    Defect(
        "random numbers are not set back before a step is repeated",
        "engine/step_start.py",
        "        restore_random_state(self._random, self._device)\n",
        "",
        "tests/tasks/test_out_of_memory.py::test_random_numbers_begin_where_the_step_began",
    ),
    Defect(
        "a checkpoint's checksums are not compared",
        "checkpoints/folder.py",
        'return is_whole and file_checksum(path) == written["xxh3"]',
        "return is_whole",
        "tests/checkpoints/test_checkpoints.py",
    ),
    Defect(
        "the sign of the bias in ridge regression",
        "baselines/ridge.py",
        "mean_O - mean_D @ weight_DO",
        "mean_O + mean_D @ weight_DO",
        "tests/bits/test_ridge.py",
    ),
    Defect(
        "padding and real tokens are swapped",
        "callbacks/throughput.py",
        "1 - self.tokens / self.computed",
        "self.tokens / self.computed",
        "tests/callbacks/test_alone.py",
    ),
    Defect(
        "answers come in the order of their lengths",
        "inference/text.py",
        "outputs[batch.rows] = self.model(batch).float().cpu()",
        "outputs[batch.rows.sort().values] = self.model(batch).float().cpu()",
        "tests/cli/test_verbs.py::test_a_text_has_the_same_answer_among_others_of_other_lengths",
    ),
    Defect(
        "a path may climb out of its folder",
        "files.py",
        "not is_rooted and not climbs and",
        "not is_rooted and",
        "tests/hostile/test_hostile.py::test_nothing_outside_of_the_folder_of_runs_is_touched",
    ),
    Defect(
        "DDP on a GPU has no argument to move",
        "engine/lightning_internals.py",
        "return float(wrapper(None))",
        "return float(wrapper())",
        "tests/distributed/test_ddp_of_cards.py",
    ),
    Defect(
        "a judged task stays on the host",
        "run/evaluation.py",
        "parts.module.to(device)",
        "parts.module.cpu()",
        "tests/run/test_device.py",
    ),
    Defect(
        "an unfused optimizer is handed what it refuses",
        "engine/step.py",
        "checks_on_host or not is_fused(self.optimizer)",
        "checks_on_host",
        "tests/engine/test_fused_steps.py",
    ),
    Defect(
        "a first token reads the wrong end of a window",
        "models/encoder/layers.py",
        "scores.window is None and type(attention.Wqkv) is nn.Linear",
        "type(attention.Wqkv) is nn.Linear",
        "tests/models/test_attention.py",
    ),
    Defect(
        "a GPU's losses go through a collective of objects",
        "engine/step_losses.py",
        "torch.stack(tensors).cpu()",
        "torch.stack(tensors)",
        "tests/engine/test_step_losses.py",
    ),
    Defect(
        "rows are copied from memory that is not page-locked",
        "data/batches/kept_tensors.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.to(device, non_blocking=True)",
        _ELSEWHERE + "[textcnn]",
    ),
    Defect(
        "a library asks a mask whether it holds padding",
        "models/encoder/network.py",
        'self.described._attn_implementation == "sdpa"',
        "False",
        _ELSEWHERE + "[padded rows]",
    ),
    Defect(
        "a mask of the BiLSTM is made on the host",
        "models/bilstm.py",
        "places_L = count_up(tokens_BL.shape[1], tokens_BL.device)",
        'places_L = count_up(tokens_BL.shape[1], torch.device("cpu"))',
        _ELSEWHERE + "[bilstm]",
    ),
    Defect(
        "places of tokens are made on the host",
        "models/encoder/network.py",
        "count_up(batch.num_tokens, batch.tokens.device) - begins_T",
        'count_up(batch.num_tokens, torch.device("cpu")) - begins_T',
        _ELSEWHERE + "[bert]",
    ),
    Defect(
        "labels are spread on the host",
        "data/batches/flat_batch.py",
        "hot = torch.zeros(size + 1, device=ids.device)",
        "hot = torch.zeros(size + 1)",
        _ELSEWHERE + "[bits]",
    ),
    Defect(
        "numbers of masked rows stay on the host",
        "tasks/masked_language.py",
        "_mix(rows_on_device(batch) ^ start)",
        "_mix(batch.rows ^ start)",
        _ELSEWHERE + "[masked words]",
    ),
    Defect(
        "a recurrent state begins on the host",
        "models/rnn.py",
        "zeros = self.make_state(len(inputs_BLF), inputs_BLF.device)",
        "zeros = self.make_state(len(inputs_BLF))",
        _ELSEWHERE + "[rnn]",
    ),
    Defect(
        "sizes of noise stay on the host",
        "tasks/sequences.py",
        "self._sizes[number] = size_C.to(device)",
        "self._sizes[number] = size_C.cpu()",
        _ELSEWHERE + "[forecast]",
    ),
]


def run_tests(copy: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of a copy of the project, until one fails."""
    paths = os.pathsep.join([str(copy / "src"), str(copy)])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            *options,
            *tests,
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def copy_of_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose named tests pass."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    ended = run_tests(folder, sorted({defect.tests for defect in DEFECTS}))
    assert ended.returncode == PASSED, ended.stdout
    return folder


def require_found(defect: Defect, copy: Path) -> tuple[str, list[str]]:
    """Plant a defect, run its tests, and take it out again: the test that found it, or what is
    wrong.
    """
    path = copy / "src" / "flatout" / defect.file
    sound = path.read_text(encoding="utf-8")
    assert sound.count(defect.old) == 1, f"{defect.file} has changed: {defect.old!r}"
    path.write_text(sound.replace(defect.old, defect.new), encoding="utf-8")
    try:
        ended = run_tests(copy, [defect.tests], "--no-header", "-rfE")
    finally:
        path.write_text(sound, encoding="utf-8")
    finder = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if ended.returncode == FAILED and finder is not None:
        return finder[1], []
    return "missed", [f"{defect.name}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"]


@pytest.mark.soak(seconds=250)
def test_the_tests_find_nearly_every_planted_defect(copy_of_project, survive, record_property):
    """One in twenty may pass."""
    found = {defect.name: require_found(defect, copy_of_project) for defect in DEFECTS}
    record_property(choosing.LINES, [f"{name}: {finder}" for name, (finder, _) in found.items()])
    problems = [problem for _, problem in found.values()]
    missed = [problem for problem in problems if problem]
    none_missed: list[list[str]] = [[]] * len(problems)
    survive(problems if len(missed) > 1 else none_missed)


def test_each_defect_can_be_planted():
    """Code that a defect edits has not changed meanwhile."""
    changed = [
        defect.name
        for defect in DEFECTS
        if (ROOT / "src/flatout" / defect.file).read_text(encoding="utf-8").count(defect.old) != 1
    ]
    assert changed == []

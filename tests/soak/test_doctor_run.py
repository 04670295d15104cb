"""`doctor run` in processes of its own: what it imports, and several ranks under torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.started import begin, said_by_all

pytestmark = pytest.mark.soak(seconds=60)
# The scripts import trainings of these tests.
PATHS = os.pathsep.join(
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
OF_LIGHTNING = """
import sys
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

class Own(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

rows = TensorDataset(torch.randn(800, 8), torch.randint(0, 2, (800,)))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=int(sys.argv[1]), **quiet)
trainer.fit(Own(), DataLoader(rows, 8))
print("imported:", "transformers.trainer" in sys.modules)
"""
OF_TRANSFORMERS = """
import sys
from tests.perf.verdict.transformers_trainings import trainer_of
trainer_of("classification", "out", num_train_epochs=2).train()
print("imported:", "lightning" in sys.modules, "pytorch_lightning" in sys.modules)
"""


@pytest.mark.parametrize(
    ("text", "words", "imported"),
    [(OF_LIGHTNING, ["1"], "imported: False"), (OF_TRANSFORMERS, [], "imported: False False")],
)
def test_a_trainer_is_judged_from_its_import_on_and_no_other_is_imported(
    text, words, imported, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(text, encoding="utf-8")
    process = begin(["flatout", "doctor", "run", "script.py", *words], PYTHONPATH=PATHS)
    said = said_by_all([process], 120)[0]
    assert process.returncode == 0, said
    assert imported in said
    assert "doctor: kept in doctor/verdict.json" in said


@pytest.mark.parametrize(("text", "words"), [(OF_LIGHTNING, ["2"]), (OF_TRANSFORMERS, [])])
def test_each_rank_hands_its_split_to_the_first(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(text, encoding="utf-8")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "flatout", "doctor", "run", "script.py", *words]
    process = begin(command, PYTHONPATH=PATHS)
    said = said_by_all([process], 240)[0]
    assert process.returncode == 0, said
    kept = json.loads(Path("doctor/verdict.json").read_text(encoding="utf-8"))
    assert len(kept["evidence"]["ranks"]) == 2
    assert kept["machine"]["devices"] == 2
    assert said.count("; the slowest: ") == 1
    assert said.count("doctor: kept in") == 1

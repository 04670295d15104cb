"""`graph=on` is refused where no step can be captured: in one sentence, before any data is read."""

from __future__ import annotations

import pytest
import torch

from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, UserError, fit
from flatout.engine.captures import GraphUse
from flatout.engine.graph_choice import require_captures

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("world", "device", "reason"),
    [
        (1, CPU, "steps are captured on CUDA devices, not on a CPU"),
        (2, CARD, "2 devices train"),
        (2, CPU, "steps are captured on CUDA devices, not on a CPU"),
    ],
)
def test_graph_on_is_refused_without_a_card_and_on_several(world, device, reason):
    with pytest.raises(UserError) as refused:
        require_captures(GraphUse.on, world, device)
    assert str(refused.value) == f"graph: on, but {reason}. Leave it at auto."


@pytest.mark.parametrize("asked", [GraphUse.auto, GraphUse.off])
@pytest.mark.parametrize(("world", "device"), [(1, CPU), (2, CARD), (1, CARD)])
def test_auto_and_off_refuse_nothing(asked, world, device):
    require_captures(asked, world, device)


def test_a_run_that_asks_for_captured_steps_on_a_cpu_reads_no_data(tmp_path, capsys):
    data = TextDataConfig(
        sample=HeadlinesConfig(rows=40, eval_rows=10), cache=str(tmp_path / "cache")
    )
    with pytest.raises(UserError, match=r"graph: on, but steps are captured on CUDA devices"):
        fit(data, BiLSTMConfig(embedding=4, hidden=4), folder=tmp_path / "run", graph="on")
    assert not (tmp_path / "cache").exists()
    assert "rows:" not in capsys.readouterr().out

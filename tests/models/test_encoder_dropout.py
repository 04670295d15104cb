"""What an encoder drops in training: each share in the modules that drop it."""

from __future__ import annotations

import pytest
import torch
from tests.models.encoder_cases import FLAT, PADDED, VOCABULARY
from torch import Tensor, nn

from flatout.errors import UserError
from flatout.models.encoder.attention import Scores
from flatout.models.encoder.rectangle_attention import attend_by_rectangles
from flatout.models.encoder.rectangles import lay_out_rows
from flatout.models.encoder.transformer import (
    Outputs,
    TransformerConfig,
)


@pytest.mark.parametrize("is_first", [False, True])
def test_attention_dropout_keeps_the_mean_and_its_gradient_is_of_what_it_computed(
    is_first: bool,
) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 5, 5, 170])
    rows = lay_out_rows(lengths.numpy())
    query = torch.randn(4, 2, 4, requires_grad=True)
    others = torch.randn(183, 2, 2, 4, requires_grad=True)
    every = torch.randn(183, 3, 2, 4, requires_grad=True)
    changed = query if is_first else every

    def attended(share: float, given: Tensor) -> Tensor:
        scores = Scores(0.5, share, None)
        if is_first:
            return attend_by_rectangles(others, given, rows, scores)
        return attend_by_rectangles(given, None, rows, scores)

    with torch.no_grad():
        mean = torch.stack([attended(0.4, changed) for _ in range(400)]).mean(0)
        torch.testing.assert_close(mean, attended(0.0, changed), rtol=0.2, atol=0.2)
    torch.manual_seed(7)
    attended(0.4, changed).square().sum().backward()
    step = 1e-2
    direction = torch.randn_like(changed)
    values = []
    for sign in (1, -1):
        torch.manual_seed(7)
        values.append(
            float(attended(0.4, changed.detach() + sign * step * direction).detach().square().sum())
        )
    assert changed.grad is not None
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(
        float((changed.grad * direction).sum()), rel=2e-2
    )


def shares_dropped(modules: list[nn.Module]) -> set[float]:
    """Of dropout modules, and of attention that keeps its share as a plain number."""
    plain = {getattr(module, "attention_dropout", None) for module in modules}
    return {module.p for module in modules if isinstance(module, nn.Dropout)} | {
        share for share in plain if isinstance(share, float)
    }


@pytest.mark.parametrize("kind", ["single", "tags"])
@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_each_share_to_drop_arrives_in_the_modules_that_drop_it(family: str, kind: str) -> None:
    shares = {"dropout": 0.11, "attention_dropout": 0.22, "head_dropout": 0.33}
    if family == "eurobert":  # it drops some of attention, and nothing else
        shares |= {"dropout": 0.0, "head_dropout": 0.0}
    config = TransformerConfig(family=family, hidden=32, layers=2, heads=4, **shares)
    model = config.build(
        Outputs(["a", "b"], kind), vocabulary_size=VOCABULARY, padding_id=1, separator_id=None
    )
    backbone = list(model.net.base_model.modules())
    head = [module for module in model.net.modules() if module not in set(backbone)]
    assert shares_dropped(backbone) == {0.11, 0.22} - ({0.11} if family == "eurobert" else set())
    assert shares_dropped(head) == ({0.33} if family != "eurobert" else set())


def test_a_share_that_a_family_does_not_drop_is_refused() -> None:
    config = TransformerConfig(family="fnet", hidden=32, layers=2, heads=4, attention_dropout=0.1)
    with pytest.raises(UserError, match=r"model\.attention_dropout: fnet has no such share"):
        config.build(
            Outputs(["a", "b"], "single"),
            vocabulary_size=VOCABULARY,
            padding_id=1,
            separator_id=None,
        )

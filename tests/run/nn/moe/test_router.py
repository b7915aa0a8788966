"""Letters: N tokens, D hidden, X experts, k experts per token."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.run.nn.moe.router import TopKRouter, fp32_output_linear
from meshwright.spec.model import feedforward

HIDDEN = 24


def spec(**changes: Any) -> feedforward.MoESpec:
    return feedforward.MoESpec(**{"count": 8, "top_k": 3, "width": 16, **changes})


def tokens() -> Tensor:
    torch.manual_seed(6)
    return torch.randn(18, HIDDEN)


def test_a_bias_that_balances_moves_choices_and_not_weights() -> None:
    described = spec(router_bias="balance", scoring="sigmoid")
    router = TopKRouter(described, HIDDEN, dtype=torch.float32)
    nn.init.normal_(router.weight)
    x = tokens()
    push = torch.zeros(8)
    push[2] = 10.0
    routes = router(x, push)
    assert (routes.experts_Nk == 2).any(-1).all()
    raw = routes.scores_NX.gather(1, routes.experts_Nk)
    torch.testing.assert_close(routes.weights_Nk, raw / raw.sum(-1, keepdim=True))


def test_tokens_stay_within_the_groups_they_may_use() -> None:
    for scoring in ("softmax", "sigmoid"):
        router = TopKRouter(spec(scoring=scoring, groups=4, groups_used=2), HIDDEN)
        nn.init.normal_(router.weight)
        groups_Nk = router(tokens()).experts_Nk // 2
        assert max(len(set(row)) for row in groups_Nk.tolist()) <= 2


def test_logits_of_16_bit_tokens_are_formed_in_float32() -> None:
    x, weight = tokens().bfloat16(), torch.randn(8, HIDDEN).bfloat16()
    logits = fp32_output_linear(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().t())


def test_groups_that_cannot_be_are_named() -> None:
    with pytest.raises(InputError, match="do not divide into 3 groups"):
        TopKRouter(spec(groups=3), HIDDEN)
    with pytest.raises(InputError, match="its groups have only 2"):
        TopKRouter(spec(groups=4, groups_used=1), HIDDEN)

"""The gated delta rule: chunks against the recurrence they stand for, and the module."""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.positions import PositionInfo, PositionTables
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet, gated_delta_rule
from meshwright.run.nn.weight_init import initialize_weights
from meshwright.spec.model import token_mixers
from meshwright.spec.model.block import NormSpec
from meshwright.spec.model.weights import sum_parameters

HIDDEN = 24
SPEC = token_mixers.GatedDeltaNetSpec(key_heads=2, value_heads=4, key_dim=6, value_dim=5)


def recurrence(
    q_BTHE: Tensor,
    k_BTHE: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """The definition, token by token."""
    state = q_BTHE.new_zeros(*q_BTHE[:, 0].shape, v_BTHV.shape[-1])
    outputs = []
    for t in range(q_BTHE.shape[1]):
        if t and documents_BT is not None:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        state = state * log_a_BTH[:, t, :, None, None].exp()
        old = (k_BTHE[:, t, :, :, None] * state).sum(2)
        written = beta_BTH[:, t, :, None] * (v_BTHV[:, t] - old)
        state = state + k_BTHE[:, t, :, :, None] * written[:, :, None]
        outputs.append((q_BTHE[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1)


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(length)
    return [
        functional.normalize(torch.randn(2, length, 3, 6), dim=-1),
        functional.normalize(torch.randn(2, length, 3, 6), dim=-1),
        torch.randn(2, length, 3, 5),
        -torch.rand(2, length, 3),
        torch.rand(2, length, 3),
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 37])
def test_chunks_are_the_recurrence(length: int, packed: bool) -> None:
    given = [part.requires_grad_() for part in inputs(length)]
    documents_BT = torch.randint(0, 4, (2, length)).sort(1).values if packed else None
    found = gated_delta_rule(*given, documents_BT=documents_BT, chunk=8)
    wanted = recurrence(*(part.double() for part in given), documents_BT=documents_BT)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), given)
    expected = torch.autograd.grad((wanted * weight).sum(), given)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_key_written_again_with_full_weight_is_overwritten() -> None:
    key = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
    values = torch.tensor([[3.0], [7.0]]).view(1, 2, 1, 1)
    keep, full = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
    assert gated_delta_rule(key, key, values, keep, full).flatten().tolist() == [3.0, 7.0]


def test_steep_decays_do_not_overflow() -> None:
    q, k, v, log_a, beta = inputs(37)
    given = [q, k, v, 60 * log_a, beta]
    found = gated_delta_rule(*given, chunk=16)
    wanted = recurrence(*(part.double() for part in given))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def module(dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    made = GatedDeltaNet(SPEC, HIDDEN, NormSpec(), device="cpu", dtype=dtype)
    initialize_weights(made, seed=3)
    return made


def places(x_BTD: Tensor, documents: PackedSequences | None = None) -> PositionInfo:
    tokens = torch.zeros(x_BTD.shape[:2], dtype=torch.long)
    return PositionInfo(PositionTables(64), tokens, documents=documents)


def test_it_has_the_parameters_its_description_counts() -> None:
    made = GatedDeltaNet(SPEC, HIDDEN, NormSpec(), device="meta")
    counted = sum_parameters(SPEC.list_weights(HIDDEN)) + SPEC.count_vector_parameters(
        norm_bias=False
    )
    assert sum(parameter.numel() for parameter in made.parameters()) == counted


def test_packed_documents_do_not_see_each_other() -> None:
    made, x_BTD = module(), torch.randn(1, 21, HIDDEN)
    packed = made(x_BTD, places(x_BTD, PackedSequences.from_lengths([[3, 13, 5]])))
    alone = [made(part, places(part)) for part in x_BTD.split([3, 13, 5], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


def test_recomputing_the_core_changes_no_gradient() -> None:
    made, x_BTD = module(), torch.randn(2, 9, HIDDEN, requires_grad=True)
    weights = list(made.parameters())
    wanted = torch.autograd.grad(made(x_BTD, places(x_BTD)).square().sum(), weights)
    made.recompute = frozenset({"core_attn"})
    found = torch.autograd.grad(made(x_BTD, places(x_BTD)).square().sum(), weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_bf16_stays_near_fp32() -> None:
    precise, rough, x_BTD = module(), module(torch.bfloat16), torch.randn(2, 200, HIDDEN)
    wanted = precise(x_BTD, places(x_BTD))
    found = rough(x_BTD.bfloat16(), places(x_BTD)).float()
    assert (found - wanted).norm() < 0.05 * wanted.norm()

"""Mamba-2: the chunked scan against the recurrence it stands for, and the module around it."""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.positions import PositionInfo, PositionTables
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer, ssd_scan
from meshwright.run.nn.weight_init import initialize_weights
from meshwright.spec.model import token_mixers
from meshwright.spec.model.block import NormSpec
from meshwright.spec.model.weights import sum_parameters

HIDDEN = 24
SPEC = token_mixers.Mamba2Spec(heads=4, head_dim=6, state_dim=5, groups=2)


def recurrence(
    x_BTHP: Tensor,
    step_BTH: Tensor,
    rate_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    *,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """The definition, token by token."""
    shared = x_BTHP.shape[2] // b_BTGN.shape[2]
    b_BTHN, c_BTHN = (part.repeat_interleave(shared, 2) for part in (b_BTGN, c_BTGN))
    state = x_BTHP.new_zeros(*b_BTHN[:, 0].shape, x_BTHP.shape[-1])
    outputs = []
    for t in range(x_BTHP.shape[1]):
        if t and documents_BT is not None:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        step = step_BTH[:, t, :, None, None]
        kept = (step * rate_H[:, None, None]).exp() * state
        state = kept + step * b_BTHN[:, t, :, :, None] * x_BTHP[:, t, :, None]
        outputs.append((c_BTHN[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1)


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(length)
    return [
        torch.randn(2, length, 4, 6),
        torch.rand(2, length, 4),
        -torch.rand(4),
        torch.randn(2, length, 2, 5),
        torch.randn(2, length, 2, 5),
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 37])
def test_the_scan_is_the_recurrence(length: int, packed: bool) -> None:
    given = [part.requires_grad_() for part in inputs(length)]
    documents_BT = torch.randint(0, 4, (2, length)).sort(1).values if packed else None
    found = ssd_scan(*given, documents_BT=documents_BT, chunk=8)
    wanted = recurrence(*(part.double() for part in given), documents_BT=documents_BT)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), given)
    expected = torch.autograd.grad((wanted * weight).sum(), given)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_steep_decays_do_not_overflow() -> None:
    x, step, rate, b, c = inputs(37)
    given = [x, 40 * step, 16 * rate, b, c]
    found = ssd_scan(*given, chunk=16)
    wanted = recurrence(*(part.double() for part in given))
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


def module(dtype: torch.dtype = torch.float32) -> Mamba2Mixer:
    made = Mamba2Mixer(SPEC, HIDDEN, NormSpec(), device="cpu", dtype=dtype)
    initialize_weights(made, seed=3)
    return made


def places(x_BTD: Tensor, documents: PackedSequences | None = None) -> PositionInfo:
    tokens = torch.zeros(x_BTD.shape[:2], dtype=torch.long)
    return PositionInfo(PositionTables(64), tokens, documents=documents)


@pytest.mark.parametrize("changes", [{}, {"conv_bias": False}, {"bias": True, "conv_width": 3}])
def test_it_has_the_parameters_its_description_counts(changes: dict[str, object]) -> None:
    spec = token_mixers.Mamba2Spec(
        **{**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__}, **changes}
    )
    made = Mamba2Mixer(spec, HIDDEN, NormSpec(), device="meta")
    counted = sum_parameters(spec.list_weights(HIDDEN)) + spec.count_vector_parameters(
        norm_bias=False
    )
    assert sum(parameter.numel() for parameter in made.parameters()) == counted


def test_packed_documents_do_not_see_each_other() -> None:
    made, x_BTD = module(), torch.randn(1, 21, HIDDEN)
    packed = made(x_BTD, places(x_BTD, PackedSequences.from_lengths([[3, 13, 5]])))
    alone = [made(part, places(part)) for part in x_BTD.split([3, 13, 5], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_recomputing_the_core_changes_no_gradient() -> None:
    made, x_BTD = module(), torch.randn(2, 9, HIDDEN, requires_grad=True)
    weights = list(made.parameters())
    wanted = torch.autograd.grad(made(x_BTD, places(x_BTD)).square().sum(), weights)
    made.recompute = frozenset({"core_attn"})
    found = torch.autograd.grad(made(x_BTD, places(x_BTD)).square().sum(), weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_bf16_stays_near_fp32() -> None:
    precise, rough, x_BTD = module(), module(torch.bfloat16), torch.randn(2, 300, HIDDEN)
    wanted = precise(x_BTD, places(x_BTD))
    found = rough(x_BTD.bfloat16(), places(x_BTD)).float()
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_states_start_with_memories_from_short_to_long() -> None:
    made = module()
    steps = torch.nn.functional.softplus(made.step_bias)
    assert ((steps > 1e-3) & (steps < 1e-1)).all()
    rates = made.decay_log.exp()
    torch.testing.assert_close(rates[[0, -1]], torch.tensor([1.0, 16.0]))

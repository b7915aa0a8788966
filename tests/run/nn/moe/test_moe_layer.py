"""Letters: B sequences, T positions, N tokens, D hidden, X experts, F an expert's width."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.run.nn.moe.moe_layer import MoELayer, load_balancing_loss
from meshwright.run.nn.recompute import RecomputedFunction
from meshwright.spec.model import feedforward

HIDDEN = 24


def spec(**changes: Any) -> feedforward.MoESpec:
    return feedforward.MoESpec(**{"count": 8, "top_k": 3, "width": 16, **changes})


def made(described: feedforward.MoESpec, seed: int = 5) -> MoELayer:
    torch.manual_seed(seed)
    experts = MoELayer(described, HIDDEN, dtype=torch.float32)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


def tokens() -> Tensor:
    torch.manual_seed(6)
    return torch.randn(2, 9, HIDDEN)


SPECS = {
    "plain": spec(),
    "shared": spec(shared_width=32, shared_gate=True, normalise=False),
    "biases": spec(bias=True, router_bias="linear", activation="swiglu-clamped"),
    "balanced": spec(router_bias="balance", scoring="sigmoid", scale=2.5, groups=4, groups_used=2),
    "latent": spec(latent=8, gated=False, activation="relu2", shared_width=40),
}


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_as_many_as_the_description_counts(name: str) -> None:
    described = SPECS[name]
    counted = described.count_vector_parameters()
    for weight in described.list_weights(HIDDEN):
        bias = weight.fan_out if weight.bias else 0
        counted += weight.copies * (weight.fan_in * weight.fan_out + bias)
    experts = MoELayer(described, HIDDEN, device="meta")
    assert sum(parameter.numel() for parameter in experts.parameters()) == counted


def by_hand(experts: MoELayer, x: Tensor) -> Tensor:
    """Route and compute token by token, expert by expert, as the published formulas say."""
    described = experts.spec
    routes = experts.router(x.reshape(-1, HIDDEN), experts.balance)
    out = torch.zeros_like(x).view(-1, HIDDEN)
    for n, token in enumerate(x.reshape(-1, HIDDEN)):
        total = torch.zeros(described.latent or HIDDEN)
        inner = token if experts.latent_down is None else experts.latent_down(token)
        for expert, weight in zip(routes.experts_Nk[n], routes.weights_Nk[n], strict=True):
            if described.gated:
                bias = 0 if experts.gate_up_bias is None else experts.gate_up_bias[expert]
                gate, up = (experts.gate_up[expert] @ inner + bias).chunk(2)
                if described.activation == "swiglu-clamped":
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
                    act = gate * torch.sigmoid(1.702 * gate) * up
                else:
                    act = nn.functional.silu(gate) * up
            else:
                act = (experts.up[expert] @ inner).relu().square()
            bias = 0 if experts.down_bias is None else experts.down_bias[expert]
            total = total + weight * (experts.down[expert] @ act + bias)
        out[n] = total if experts.latent_up is None else experts.latent_up(total)
        if experts.shared is not None:
            gate = 1.0 if experts.shared_gate is None else experts.shared_gate(token).sigmoid()
            out[n] += gate * experts.shared(token)
    return out.view_as(x)


@pytest.mark.parametrize("name", SPECS)
def test_the_output_is_the_weighted_sum_of_the_chosen_experts(name: str) -> None:
    experts, x = made(SPECS[name]), tokens()
    with torch.no_grad():
        torch.testing.assert_close(experts(x), by_hand(experts, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    experts, x = made(SPECS[name]), tokens()[:1, :4].requires_grad_()
    leaves = [x, *(each for each in experts.parameters() if each.requires_grad)]
    slope = torch.randn_like(x)
    found = torch.autograd.grad(experts(x), leaves, slope)
    wanted = torch.autograd.grad(by_hand(experts, x), leaves, slope)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_recomputing_changes_no_gradient(name: str) -> None:
    x = tokens()

    def gradients(experts: MoELayer) -> list[Tensor]:
        leaves = [each for each in experts.parameters() if each.requires_grad]
        return list(torch.autograd.grad(experts(x).square().sum(), leaves))

    kept, dropping = made(SPECS[name]), made(SPECS[name])
    dropping.recompute = frozenset({"moe_act", "shared_experts"})
    for one, other in zip(gradients(kept), gradients(dropping), strict=True):
        assert torch.equal(one, other)


def load(experts: MoELayer) -> Tensor | None:
    return experts.tokens_per_expert


def test_loads_are_counted_in_training_only_and_not_in_recomputation() -> None:
    experts = made(SPECS["balanced"])
    experts.eval()
    experts(tokens())
    assert load(experts) is None
    experts.train()
    x = tokens().requires_grad_()
    torch.utils.checkpoint.checkpoint(experts, x, use_reentrant=False).sum().backward()
    counted = load(experts)
    assert counted is not None
    assert counted.sum().item() == 18 * 3
    chosen = experts.router(x.view(-1, HIDDEN), experts.balance).experts_Nk
    assert torch.equal(counted, torch.bincount(chosen.flatten(), minlength=8))


def test_overloaded_experts_become_harder_to_choose() -> None:
    experts = made(SPECS["balanced"])
    assert experts.balance is not None
    before = experts.balance.clone()
    experts.tokens_per_expert = torch.tensor([9, 1, 5, 5, 4, 6, 5, 5])
    experts.update_expert_bias(0.001)
    steps = torch.tensor([-1.0, 1, 0, 0, 1, -1, 0, 0]) * 0.001
    torch.testing.assert_close(experts.balance - before, steps, rtol=0, atol=1e-7)
    assert experts.tokens_per_expert.count_nonzero() == 0
    assert not experts.balance.requires_grad


def test_balancing_evens_out_a_skewed_router() -> None:
    experts = made(spec(router_bias="balance", scoring="sigmoid", count=4, top_k=1))
    assert experts.balance is not None
    with torch.no_grad():
        experts.balance.zero_()
        experts.router.weight.mul_(0.1)
        experts.router.weight[0] += 0.05
    x = torch.randn(1, 400, HIDDEN) + 0.2

    def spread() -> float:
        experts(x)
        assert experts.tokens_per_expert is not None
        widest: float = (
            experts.tokens_per_expert.max() / experts.tokens_per_expert.float().mean()
        ).item()
        return widest

    first = spread()
    for _ in range(40):
        experts.update_expert_bias(0.002)
        last = spread()
    assert first > 2
    assert last < 1.2


def test_the_balance_loss_is_one_when_all_is_even_and_more_when_not() -> None:
    even = torch.full((6, 4), 0.25)
    assert load_balancing_loss(even, torch.tensor([3, 3, 3, 3])).item() == pytest.approx(1.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(6, 4)
    assert load_balancing_loss(skewed, torch.tensor([6, 2, 2, 2])).item() == pytest.approx(1.6)


def test_a_balance_loss_is_kept_where_asked_for_and_reaches_the_router() -> None:
    def kept(layer: MoELayer) -> Tensor | None:
        layer(tokens())
        return layer.balance_loss

    experts = made(SPECS["shared"])
    assert kept(experts) is None
    experts.records_balance_loss = True
    loss = kept(experts)
    assert loss is not None
    (slope,) = torch.autograd.grad(loss, [experts.router.weight])
    assert slope.abs().max() > 0


def test_a_layer_that_is_run_again_in_backward_has_the_same_gradients() -> None:
    def gradients(run: Callable[[Tensor], Tensor], experts: MoELayer) -> list[Tensor]:
        experts.records_balance_loss = True
        out = run(tokens().requires_grad_())
        assert experts.balance_loss is not None
        leaves = [each for each in experts.parameters() if each.requires_grad]
        return list(torch.autograd.grad(out.square().sum() + experts.balance_loss, leaves))

    once, twice = made(SPECS["shared"]), made(SPECS["shared"])
    for one, other in zip(
        gradients(once, once), gradients(RecomputedFunction(twice), twice), strict=True
    ):
        assert torch.equal(one, other)
    assert load(twice) is not None
    assert torch.equal(load(once), load(twice))  # type: ignore[arg-type]


def test_equal_inputs_give_equal_bits() -> None:
    experts, x = made(SPECS["shared"]), tokens()
    again = copy.deepcopy(experts)
    assert torch.equal(experts(x), again(x))


def test_no_tokens_give_no_output() -> None:
    assert made(SPECS["shared"])(torch.empty(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.5])
def test_an_expert_with_limited_room_takes_the_first_tokens_that_choose_it(factor: float) -> None:
    experts, x = made(spec()), tokens().view(-1, HIDDEN)
    chosen = experts.router(x).experts_Nk.tolist()
    experts.capacity_factor = factor
    room = experts.get_capacity(len(x))
    assert room == -(-len(x) * 3 * factor // 8)
    visits = experts.route(x, room)
    taken, full = dict.fromkeys(range(8), 0), 0
    for row, weights in zip(chosen, visits.routes.weights_Nk.tolist(), strict=True):
        for expert, weight in zip(row, weights, strict=True):
            assert (weight == 0) == (taken[expert] == room)
            full += taken[expert] == room
            taken[expert] += taken[expert] < room
    assert experts.dropped_counts is not None
    assert experts.dropped_counts.tolist() == [full, len(x) * 3]
    assert full > 0 or factor > 1


def test_experts_with_room_for_all_change_nothing() -> None:
    experts, x = made(SPECS["shared"]), tokens()
    wanted = experts(x)
    experts.capacity_factor = 8 / 3
    assert torch.equal(experts(x), wanted)
    experts.capacity_factor = 0.1
    assert not torch.equal(experts(x), wanted)


def test_nothing_is_dropped_in_evaluation() -> None:
    experts, x = made(spec()).eval(), tokens()
    wanted = experts(x)
    experts.capacity_factor = 0.1
    assert torch.equal(experts(x), wanted)
    assert experts.dropped_counts is None

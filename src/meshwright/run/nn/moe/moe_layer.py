"""`MoELayer`: a mixture of experts; tokens are sorted by expert and multiplied group by group.

Parameters (X experts, D hidden or latent width, F an expert's width):

    router.weight [X, hidden], router.bias [X]      which experts a token visits
    balance [X]                                     float32, moved by `update_expert_bias` alone
    gate_up [X, 2·F, D] or up [X, F, D]             with a gate its rows come first
    down [X, D, F]
    gate_up_bias [X, 2·F] or up_bias, down_bias     where the experts have biases
    shared.*, shared_gate.weight [1, hidden]        experts that every token visits
    latent_down.weight, latent_up.weight            around routed experts that work in fewer numbers

The load of each expert is counted on the device; nothing here waits for the host, and equal inputs
give equal bits. Where other ranks hold some of the experts, or of their width, an `TokenDispatcher`
of `run/parallel` takes the tokens there and back.

With a `capacity_factor` an expert takes no more than so many of the tokens that are routed together
in training, the first ones; choices beyond count for nothing.

Letters: B sequences, T positions, N = B·T tokens, R = N·k sorted rows, X experts, D width.
"""

# Shape suffixes name the fields of Visits.
# ruff: noqa: N815

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.run.kernels.activation.glu import glu
from meshwright.run.kernels.moe.down_proj_combine import grouped_down_proj_combine
from meshwright.run.kernels.moe.grouped_gemm import grouped_gemm
from meshwright.run.kernels.moe.token_permutation import TokenPermutation, permute, sort_by_expert
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.nn.linear.linear import Linear, attach_unused_parameter
from meshwright.run.nn.mlp import MLPLayer, apply_activation
from meshwright.run.nn.moe.router import TopKRouter, TopKRoutes
from meshwright.run.nn.recompute import (
    NO_RECOMPUTE,
    RecomputedFunction,
    RecomputeOpOrFull,
    drop_saved_tensors,
)
from meshwright.spec.model import feedforward


class TokenRouting(NamedTuple):
    """Which experts some tokens visit."""

    routes: TopKRoutes
    permutation: TokenPermutation
    """Where the tokens' copies lie once they are sorted by expert."""
    tokens_per_expert_X: Tensor
    """int32: how many tokens each expert is chosen by."""
    capacity: int | None = None
    """How many of them it takes, the first ones; None where it takes all."""


class TokenDispatcher(Protocol):
    """The way of tokens to experts on other ranks, and back."""

    def __call__(self, experts: "MoELayer", x_BTD: Tensor) -> Tensor:
        """Return what `MoELayer.forward` does, by the parameters that all ranks hold together."""


class MoELayer(nn.Module):
    """Routed and shared experts, as a model's `MoESpec` describes them."""

    balance: nn.Parameter | None
    gate_up: nn.Parameter
    gate_up_bias: nn.Parameter | None
    up: nn.Parameter
    up_bias: nn.Parameter | None
    down: nn.Parameter
    down_bias: nn.Parameter | None
    tokens_per_expert: Tensor | None
    """int64 [X]: tokens that chose each expert since the last `update_expert_bias`, in training."""
    dropped_counts: Tensor | None
    """int64 [2]: choices that found no room since it was zeroed, and all; None without a limit."""

    def __init__(
        self,
        spec: feedforward.MoESpec,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.backend: KernelBackend = "auto"
        self.records_balance_loss = False
        """Each forward sets `load_balancing_loss`: least when all experts have equal load."""
        self.balance_loss: Tensor | None = None
        self.token_dispatcher: TokenDispatcher | None = None
        """Where ranks share the experts or their tokens, how they do."""
        self.all_reduce_sum: Callable[[Tensor], Tensor] | None = None
        """Where ranks share the tokens of a microbatch, adds up what each found in its own."""
        self.adds_bias = True
        """Of ranks that each compute a part of an expert's sum, only one adds `down_bias`."""
        self.capacity_factor: float | None = None
        """Tokens that an expert takes of those routed together, as a multiple of what it would get
        if all got the same; None takes all."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = TopKRouter(spec, hidden, **where)
        balance = None
        if spec.router_bias == "balance":
            # Steps of 0.001 would vanish in bfloat16.
            shape = torch.empty(spec.count, device=device, dtype=torch.float32)
            balance = nn.Parameter(shape, requires_grad=False)
        self.register_parameter("balance", balance)
        self.register_buffer("tokens_per_expert", None, persistent=False)
        self.register_buffer("dropped_counts", None, persistent=False)
        self._add_routed(hidden if spec.latent is None else spec.latent, where)
        self._add_beside(hidden, where)

    def _add_routed(self, width: int, where: dict[str, Any]) -> None:
        spec = self.spec
        inner = 2 * spec.width if spec.gated else spec.width
        first = "gate_up" if spec.gated else "up"
        shapes = {first: (spec.count, inner, width), "down": (spec.count, width, spec.width)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **where)))
            bias = nn.Parameter(torch.empty(shape[:2], **where)) if spec.bias else None
            self.register_parameter(f"{name}_bias", bias)

    def _add_beside(self, hidden: int, where: dict[str, Any]) -> None:
        spec = self.spec
        self.shared: MLPLayer | None = None
        self.shared_gate: Linear | None = None
        self.latent_down: Linear | None = None
        self.latent_up: Linear | None = None
        if spec.shared_width:
            beside = feedforward.MLPSpec(
                width=spec.shared_width, gated=spec.gated, activation=spec.activation
            )
            self.shared = MLPLayer(beside, hidden, **where)
            if spec.shared_gate:
                self.shared_gate = Linear(hidden, 1, bias=False, **where)
        if spec.latent is not None:
            self.latent_down = Linear(hidden, spec.latent, bias=False, **where)
            self.latent_up = Linear(spec.latent, hidden, bias=False, **where)

    def get_initial_values(self) -> dict[str, float]:
        """Return the value that parameters which are not drawn at random start from."""
        names = ("balance", "gate_up_bias", "up_bias", "down_bias")
        return dict.fromkeys(names, 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Send each token to its experts and add up what they make of it."""
        if self.token_dispatcher is not None:
            return self.token_dispatcher(self, x_BTD)
        out_BTD = self.forward_routed_experts(x_BTD.flatten(0, -2)).view(x_BTD.shape)
        beside_BTD = self.forward_shared_experts(x_BTD)
        return out_BTD if beside_BTD is None else out_BTD + beside_BTD

    @torch.no_grad()
    def update_expert_bias(self, rate: float | Tensor) -> None:
        """Make experts with more than their share of tokens harder to choose, others easier.

        Each bias moves by `rate` (DeepSeek-V3 trains with 0.001), and counting begins anew. Over
        many ranks, add up `tokens_per_expert` first. A rate of nought only forgets what was
        counted.
        """
        if self.tokens_per_expert is None:
            return
        if self.balance is not None:
            load = self.tokens_per_expert.to(self.balance.dtype)
            self.balance.add_(torch.sign(load.mean() - load) * rate)
        self.tokens_per_expert.zero_()

    def get_capacity(self, tokens: int) -> int | None:
        """Return how many of so many tokens, routed together, an expert takes; None takes all.

        Nothing is dropped where nothing is trained.
        """
        if self.capacity_factor is None or not self.training:
            return None
        equal = tokens * self.spec.top_k / self.spec.count
        return max(1, min(tokens, ceil(equal * self.capacity_factor)))

    def route(self, x_ND: Tensor, room: int | None = None) -> TokenRouting:
        """Choose the experts of each token, and count; each takes `room` tokens, or all."""
        routes: TopKRoutes = self.router(x_ND, self.balance)
        order = sort_by_expert(routes.experts_Nk, self.spec.count)
        load_X = torch.diff(order.ends_X, prepend=order.ends_X.new_zeros(1))
        if room is not None:
            # A copy's place in its expert's run; the sort keeps the order of tokens.
            place_Nk = order.row_Nk - (order.ends_X - load_X)[routes.experts_Nk]
            weights_Nk = routes.weights_Nk.masked_fill(place_Nk >= room, 0)
            routes = routes._replace(weights_Nk=weights_Nk)
        self._note(load_X, routes.scores_NX, room)
        return TokenRouting(routes, order, load_X, room)

    def forward_routed_experts(self, x_ND: Tensor) -> Tensor:
        """Return what the routed experts, all of them held here, make of tokens."""
        visits = self.route(x_ND, self.get_capacity(len(x_ND)))
        rows_RD = permute(self.project_to_latent(x_ND), visits.permutation, backend=self.backend)

        def output(act_RF: Tensor) -> Tensor:
            return grouped_down_proj_combine(
                act_RF,
                self.down,
                visits.permutation,
                visits.routes.weights_Nk,
                bias_XD=self.down_bias,
                backend=self.backend,
            )

        return self.project_from_latent(self._through(rows_RD, visits.permutation.ends_X, output))

    def forward_local_experts(self, rows_RD: Tensor, ends_X: Tensor) -> Tensor:
        """Return what the experts held here make of rows sorted by expert, not yet weighted."""

        def output(act_RF: Tensor) -> Tensor:
            bias = self.down_bias if self.adds_bias else None
            y_RD = grouped_gemm(act_RF, self.down, ends_X, bias_XO=bias, backend=self.backend)
            if self.adds_bias or self.down_bias is None:
                return y_RD
            return attach_unused_parameter(y_RD, self.down_bias)

        return self._through(rows_RD, ends_X, output)

    def _through(
        self, rows_RD: Tensor, ends_X: Tensor, output: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run sorted rows through the experts; `output` is their last product."""
        first = "gate_up" if self.spec.gated else "up"
        raw = grouped_gemm(
            rows_RD,
            getattr(self, first),
            ends_X,
            bias_XO=getattr(self, f"{first}_bias"),
            backend=self.backend,
        )
        act_RF = self._activate(raw)
        if "moe_act" not in self.recompute:
            return output(act_RF)
        with drop_saved_tensors((act_RF, lambda: self._activate(raw.detach()))):
            return output(act_RF)

    def project_to_latent(self, x_ND: Tensor) -> Tensor:
        """Return tokens in the width that the routed experts read."""
        return x_ND if self.latent_down is None else self.latent_down(x_ND)

    def project_from_latent(self, out_ND: Tensor) -> Tensor:
        """Return what the routed experts made in the width of the model."""
        return out_ND if self.latent_up is None else self.latent_up(out_ND)

    def _activate(self, raw: Tensor) -> Tensor:
        if self.spec.gated:
            return glu(raw, self.spec.activation, backend=self.backend)
        return apply_activation(raw, self.spec.activation)

    def forward_shared_experts(self, x_BTD: Tensor) -> Tensor | None:
        """Return what the shared experts make of all tokens; None where there are none."""
        if self.shared is None:
            return None
        run = RecomputedFunction(self.shared) if "shared_experts" in self.recompute else self.shared
        out_BTD: Tensor = run(x_BTD)
        if self.shared_gate is not None:
            out_BTD = out_BTD * self.shared_gate(x_BTD).sigmoid()
        return out_BTD

    def _note(self, load_X: Tensor, scores_NX: Tensor, room: int | None) -> None:
        """Count tokens and form the balance loss; a recomputation in backward counts nothing."""
        if not self.training:
            return
        loss = None
        if self.records_balance_loss:
            loss = load_balancing_loss(scores_NX, load_X, self.all_reduce_sum)
        # As torch's own checkpointing does: there is a graph task while backward runs.
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return
        self.balance_loss = loss
        if self.tokens_per_expert is None or self.tokens_per_expert.device != load_X.device:
            self.tokens_per_expert = torch.zeros_like(load_X, dtype=torch.int64)
        self.tokens_per_expert += load_X
        if room is not None:
            if self.dropped_counts is None or self.dropped_counts.device != load_X.device:
                self.dropped_counts = torch.zeros(2, dtype=torch.int64, device=load_X.device)
            self.dropped_counts += torch.stack([(load_X - room).clamp(min=0), load_X]).sum(1)


def load_balancing_loss(
    scores_NX: Tensor, load_X: Tensor, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the experts' shares of tokens times their shares of scores: one when all are equal.

    This is Σ f·P of the Switch Transformer (arXiv 2101.03961, eq. 4), with f counted over all
    choices of a token as in DeepSeek-V2 (arXiv 2405.04434, eq. 23–25). Only scores get gradients.
    `total` adds up, over the ranks that share the tokens, what each found in its own.
    """
    shares_NX = scores_NX / scores_NX.sum(-1, keepdim=True)
    tokens_X = load_X.to(scores_NX.dtype)
    experts = load_X.numel()
    if total is None:
        return experts * (tokens_X / tokens_X.sum() * shares_NX.mean(0)).sum()
    count = tokens_X.new_full((1,), len(scores_NX))
    sums = total(torch.cat([shares_NX.sum(0), tokens_X, count]))
    shares_X, tokens_X = sums[:experts] / sums[-1], sums[experts:-1]
    return experts * (tokens_X / tokens_X.sum() * shares_X).sum()

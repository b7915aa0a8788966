"""Gated delta rule (Yang et al., arXiv 2412.06464): linear attention that can overwrite.

    S_t = a_t S_{t-1} + k_t u_tᵀ      u_t = β_t (v_t − a_t S_{t-1}ᵀ k_t)      o_t = S_tᵀ q_t

`a` (in 0 to 1) forgets, `β` is how much of the old value under a key is replaced. Inside a chunk
that state S enters, the writes solve one unit lower triangular system (the paper's section 3.3):

    (I + M) u = β (v − e^c K S)        M_lm = β_l e^{c_l − c_m} k_l·k_m  for m < l

with c the sum of log a from the chunk's start. Products, solve and state are in fp32.

Shapes: B sequences, T positions, D hidden, H value heads of width V, K key heads of width E,
C chunks of L positions.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo
from meshwright.run.nn.recompute import NO_RECOMPUTE, RecomputedFunction, RecomputeOpOrFull
from meshwright.run.nn.sharding.parallel_hooks import (
    ParallelHooks,
    apply_input_hook,
    apply_output_hook,
)
from meshwright.run.nn.ssm.causal_conv1d import CausalConv1d
from meshwright.run.nn.ssm.chunked_scan import RecurrentCache, make_chunks
from meshwright.run.nn.ssm.mamba2 import make_initial_decays
from meshwright.spec.model import block, token_mixers

CHUNK = 64
"""Positions of a chunk; the triangular system has this many rows."""


L2_NORM_EPS = 1e-6
"""Added to the squared length of queries and keys (Qwen3-Next's code)."""


class GatedDeltaNet(nn.Module):
    """The mixer as a model's `GatedDeltaNetSpec` describes it.

    `qkvz.weight` stacks the rows of queries, keys, values and the output's gate z, heads in order;
    `gates.weight` those of β, then of the decay. The heads held are read from `decay_log`.
    """

    def __init__(
        self,
        spec: token_mixers.GatedDeltaNetSpec,
        hidden: int,
        norm: block.NormSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.parallel_hooks: ParallelHooks | None = None
        self.recurrent_cache: RecurrentCache | None = None
        """Where sequences come in pieces, what goes on from the state that a piece left."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        self.qkvz = Linear(hidden, 2 * keys + 2 * values, bias=False, **where)
        self.gates = Linear(hidden, 2 * spec.value_heads, bias=False, **where)
        self.conv = CausalConv1d(2 * keys + values, spec.conv_width, bias=False, **where)
        self.decay_log = nn.Parameter(torch.empty(spec.value_heads, **where))
        self.step_bias = nn.Parameter(torch.empty(spec.value_heads, **where))
        self.norm = NormLayer(spec.value_dim, block.NormSpec(eps=norm.eps), **where)
        self.o = Linear(values, hidden, bias=False, **where)

    def get_initial_values(self) -> dict[str, float | Tensor]:
        """Return the value each vector starts from."""
        return make_initial_decays(self.spec.value_heads)

    def forward(self, x_BTD: Tensor, places: PositionInfo) -> Tensor:
        """Mix the tokens of each sequence."""
        core = RecomputedFunction(self._core) if "core_attn" in self.recompute else self._core
        with apply_input_hook(self.parallel_hooks, x_BTD) as inside:
            made = (self.qkvz(inside), self.gates(inside))
        return apply_output_hook(
            self.parallel_hooks, self.o(core(*made, places.get_document_ids_BT()))
        )

    def _core(self, qkvz_BTC: Tensor, gates_BTG: Tensor, documents_BT: Tensor | None) -> Tensor:
        spec, heads = self.spec, len(self.decay_log)
        shared = spec.value_heads // spec.key_heads
        keys, values = heads // shared * spec.key_dim, heads * spec.value_dim
        mixed, z = qkvz_BTC.split((2 * keys + values, values), -1)
        if self.recurrent_cache is None:
            mixed = functional.silu(self.conv(mixed, documents_BT))
        else:
            mixed = functional.silu(self.recurrent_cache.convolve(self.conv, mixed))
        q, k, v = mixed.split((keys, keys, values), -1)
        beta, step = gates_BTG.float().split((heads, heads), -1)
        rate_H = self.decay_log.float().exp()
        q_BTHE, k_BTHE = (
            _unit(part.unflatten(-1, (-1, spec.key_dim))).repeat_interleave(shared, 2)
            for part in (q, k)
        )
        terms = (
            q_BTHE * spec.key_dim**-0.5,
            k_BTHE,
            v.unflatten(-1, (heads, -1)),
            -rate_H * functional.softplus(step + self.step_bias.float()),
            beta.sigmoid(),
        )
        if self.recurrent_cache is None:
            o_BTHV = gated_delta_rule(*terms, documents_BT=documents_BT)
        else:
            o_BTHV = self.recurrent_cache.scan(*terms)
        normed: Tensor = self.norm(o_BTHV.to(qkvz_BTC.dtype))
        gate: Tensor = functional.silu(z.unflatten(-1, (heads, -1)))
        return (normed * gate).flatten(2)


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length one, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def gated_delta_rule(
    q_BTHE: Tensor,
    k_BTHE: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    documents_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Run the recurrence over whole sequences and return `o_t` for every token, in fp32."""
    terms = (q_BTHE, k_BTHE, v_BTHV, log_a_BTH, beta_BTH)
    return gated_delta_rule_from_state(*terms, documents_BT=documents_BT, chunk=chunk)[0]


def gated_delta_rule_from_state(
    q_BTHE: Tensor,
    k_BTHE: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    state_BHEV: Tensor | None = None,
    documents_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Do the same from a state on (fp32; None is nought); return the state at the end as well."""
    cuts = make_chunks(q_BTHE.shape[1], chunk, documents_BT, q_BTHE.device)
    q, k, v = (cuts.split(part.float()).transpose(2, 3) for part in (q_BTHE, k_BTHE, v_BTHV))
    beta_BCHL = cuts.split(beta_BTH.float()).transpose(2, 3)
    sums_BCHL = cuts.split(log_a_BTH.float()).transpose(2, 3).cumsum(-1)
    decay_BCHLL, kept_BCHL, reads_BCHL, carried_BCH = cuts.compute_decays(sums_BCHL)

    # The solve is linear in its right side, so the part that the state multiplies is solved apart,
    # for all chunks at once. The diagonal of M is read as ones by `unitriangular`.
    weighted = k * beta_BCHL[..., None]
    overlap = (weighted @ k.transpose(-1, -2)) * decay_BCHLL
    right = torch.cat([v * beta_BCHL[..., None], weighted * reads_BCHL[..., None]], -1)
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    own_BCHLV, against_BCHLE = solved.split([v.shape[-1], k.shape[-1]], -1)

    near = (q @ k.transpose(-1, -2)) * decay_BCHLL
    far = q * reads_BCHL[..., None]
    kept = (k * kept_BCHL[..., None]).transpose(-1, -2)
    if state_BHEV is None:
        state_BHEV = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for index in range(v.shape[1]):
        writes = own_BCHLV[:, index] - against_BCHLE[:, index] @ state_BHEV
        outputs.append(far[:, index] @ state_BHEV + near[:, index] @ writes)
        state_BHEV = state_BHEV * carried_BCH[:, index, :, None, None] + kept[:, index] @ writes
    return cuts.join(torch.stack(outputs, 1).transpose(2, 3)), state_BHEV

"""Mamba-2 (Dao and Gu, arXiv 2405.21060): a decaying matrix state per head in place of attention.

    h_t = exp(step_t · rate) h_{t-1} + step_t · b_t x_tᵀ        y_t = c_tᵀ h_t + skip · x_t

`rate` is negative, one number per head; `b`, `c` and `step` come from the token. The scan works in
chunks: inside one the recurrence is a masked product of matrices, between them only the state is
carried. Matrix products run in the inputs' type, decays and the carried state in fp32.

Shapes: B sequences, T positions, D hidden, H heads of width P, G groups of R heads that share `b`
and `c`, N columns of the state, C chunks of L positions.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.kernels.norm.rms_norm import rms_norm
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo
from meshwright.run.nn.recompute import NO_RECOMPUTE, RecomputedFunction, RecomputeOpOrFull
from meshwright.run.nn.sharding.parallel_hooks import (
    ParallelHooks,
    apply_input_hook,
    apply_output_hook,
)
from meshwright.run.nn.ssm.causal_conv1d import CausalConv1d, make_golden_ratio_sequence
from meshwright.run.nn.ssm.chunked_scan import RecurrentCache, make_chunks
from meshwright.spec.model import block, token_mixers

CHUNK = 128
"""Positions of a chunk: work within chunks grows with it, the states that are kept shrink."""


A_INIT_RANGE = (1.0, 16.0)
"""First decay rates, spread over the heads (the paper's code, `A_init_range`)."""
DT_INIT_RANGE = (1e-3, 1e-1)
"""First steps, spread over the heads evenly in their logarithm (`dt_min`, `dt_max`)."""


class Mamba2Mixer(nn.Module):
    """The mixer as a model's `Mamba2Spec` describes it.

    `input.weight` stacks the rows of the gate z, of x, b and c, and of the steps. The heads held
    are read from `decay_log`, so that a slice of whole groups works alone.
    """

    def __init__(
        self,
        spec: token_mixers.Mamba2Spec,
        hidden: int,
        norm: block.NormSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.eps = spec, norm.eps
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.parallel_hooks: ParallelHooks | None = None
        self.recurrent_cache: RecurrentCache | None = None
        """Where sequences come in pieces, what goes on from the state that a piece left."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = spec.heads * spec.head_dim
        mixed = inner + 2 * spec.groups * spec.state_dim
        self.input = Linear(hidden, inner + mixed + spec.heads, bias=spec.bias, **where)
        self.conv = CausalConv1d(mixed, spec.conv_width, bias=spec.conv_bias, **where)
        self.decay_log = nn.Parameter(torch.empty(spec.heads, **where))
        self.step_bias = nn.Parameter(torch.empty(spec.heads, **where))
        self.skip = nn.Parameter(torch.empty(spec.heads, **where))
        self.norm = NormLayer(inner, block.NormSpec(eps=norm.eps), **where)
        self.out = Linear(inner, hidden, bias=spec.bias, **where)

    def get_initial_values(self) -> dict[str, float | Tensor]:
        """Return the value each vector starts from."""
        return {**make_initial_decays(self.spec.heads), "skip": 1.0}

    def forward(self, x_BTD: Tensor, places: PositionInfo) -> Tensor:
        """Mix the tokens of each sequence."""
        core = RecomputedFunction(self._core) if "core_attn" in self.recompute else self._core
        with apply_input_hook(self.parallel_hooks, x_BTD) as inside:
            all_BTC = self.input(inside)
        return apply_output_hook(
            self.parallel_hooks, self.out(core(all_BTC, places.get_document_ids_BT()))
        )

    def _core(self, all_BTC: Tensor, documents_BT: Tensor | None) -> Tensor:
        spec, heads = self.spec, len(self.decay_log)
        groups, inner = heads * spec.groups // spec.heads, heads * spec.head_dim
        maps = groups * spec.state_dim
        z_BTI, mixed, step_BTH = all_BTC.split((inner, inner + 2 * maps, heads), -1)
        if self.recurrent_cache is None:
            mixed = functional.silu(self.conv(mixed, documents_BT))
        else:
            mixed = functional.silu(self.recurrent_cache.convolve(self.conv, mixed))
        x_BTI, b, c = mixed.split((inner, maps, maps), -1)
        x_BTHP = x_BTI.unflatten(-1, (heads, -1))
        terms = (
            x_BTHP,
            functional.softplus(step_BTH.float() + self.step_bias.float()),
            -self.decay_log.float().exp(),
            b.unflatten(-1, (groups, -1)),
            c.unflatten(-1, (groups, -1)),
        )
        if self.recurrent_cache is None:
            y_BTHP = ssd_scan(*terms, documents_BT=documents_BT)
        else:
            y_BTHP = self.recurrent_cache.scan(*terms)
        y_BTHP = y_BTHP + x_BTHP * self.skip[:, None]
        gated = y_BTHP.flatten(2) * functional.silu(z_BTI)
        # The norm is over one group at a time, so that groups can lie on different devices.
        normed = rms_norm(gated.unflatten(-1, (groups, -1)), None, self.eps)
        weight = self.norm.weight
        assert weight is not None, "an RMS norm has weights"
        return normed.flatten(2) * weight


def make_initial_decays(heads: int) -> dict[str, float | Tensor]:
    """Return how fast the state of each head decays at first, and how large its steps are."""
    low, high = DT_INIT_RANGE
    steps = low * (high / low) ** make_golden_ratio_sequence(heads)
    return {
        "decay_log": torch.linspace(*A_INIT_RANGE, heads).log(),
        # The inverse of softplus.
        "step_bias": steps.expm1().log(),
    }


def ssd_scan(
    x_BTHP: Tensor,
    step_BTH: Tensor,
    rate_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    *,
    documents_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Run the recurrence over whole sequences and return `c_tᵀ h_t` for every token."""
    terms = (x_BTHP, step_BTH, rate_H, b_BTGN, c_BTGN)
    return ssd_scan_from_state(*terms, documents_BT=documents_BT, chunk=chunk)[0]


def ssd_scan_from_state(
    x_BTHP: Tensor,
    step_BTH: Tensor,
    rate_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    *,
    state_BGNRP: Tensor | None = None,
    documents_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Do the same from a state on (fp32; None is nought); return the state at the end as well."""
    kind, groups = x_BTHP.dtype, b_BTGN.shape[2]
    cuts = make_chunks(x_BTHP.shape[1], chunk, documents_BT, x_BTHP.device)
    step_BCLH = cuts.split(step_BTH.float())
    sums_BCHL = (step_BCLH * rate_H.float()).transpose(2, 3).cumsum(-1)
    decay_BCHLL, kept_BCHL, reads_BCHL, carried_BCH = cuts.compute_decays(sums_BCHL)
    b_BCGLN = cuts.split(b_BTGN).transpose(2, 3)
    c_BCGLN = cuts.split(c_BTGN).transpose(2, 3)
    x_BCHLP = (cuts.split(x_BTHP) * step_BCLH[..., None].to(kind)).transpose(2, 3)

    # Within a chunk: scores of token l on token m, times the decay between them.
    scores_BCGLL = c_BCGLN @ b_BCGLN.transpose(-1, -2)
    mixing = decay_BCHLL.unflatten(2, (groups, -1)) * scores_BCGLL[:, :, :, None]
    y_BCHLP = mixing.flatten(2, 3).to(kind) @ x_BCHLP

    # What each chunk adds to the state, decayed to the chunk's end.
    gained_BCGLRP = (x_BCHLP * kept_BCHL[..., None].to(kind)).unflatten(2, (groups, -1))
    gained_BCGLRP = gained_BCGLRP.transpose(3, 4)
    states = b_BCGLN.transpose(-1, -2) @ gained_BCGLRP.flatten(4)
    gained = states.unflatten(-1, gained_BCGLRP.shape[4:]).float()
    entering, last_BGNRP = _carry(gained, carried_BCH, state_BGNRP)

    # Across chunks: what a token reads from the state that enters its chunk.
    far_BCGLRP = (c_BCGLN @ entering.flatten(4).to(kind)).unflatten(-1, gained_BCGLRP.shape[4:])
    far_BCHLP = far_BCGLRP.transpose(3, 4).flatten(2, 3)
    y_BCHLP = y_BCHLP + far_BCHLP * reads_BCHL[..., None].to(kind)
    return cuts.join(y_BCHLP.transpose(2, 3)), last_BGNRP


def _carry(
    gained_BCGNRP: Tensor, carried_BCH: Tensor, first_BGNRP: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state that enters each chunk, and the one that leaves the last.

    They follow from what each chunk adds and how much survives it.
    """
    carried = carried_BCH.unflatten(2, (gained_BCGNRP.shape[2], -1))[:, :, :, None, :, None]
    state = torch.zeros_like(gained_BCGNRP[:, 0]) if first_BGNRP is None else first_BGNRP
    entering = []
    for index in range(gained_BCGNRP.shape[1]):
        entering.append(state)
        state = state * carried[:, index] + gained_BCGNRP[:, index]
    return torch.stack(entering, 1), state

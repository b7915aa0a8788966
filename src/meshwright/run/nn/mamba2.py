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

from meshwright.run.kernels.rms_norm import rms_norm
from meshwright.run.nn.chunks import Carried, make_chunks
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.norm import Norm
from meshwright.run.nn.passage import Passage, entered, left
from meshwright.run.nn.positions import Places
from meshwright.run.nn.recompute import NOTHING, Op, Replay
from meshwright.run.nn.short_convolution import ShortConvolution, spread
from meshwright.spec.model import block, mixers

CHUNK = 128
"""Positions of a chunk: work within chunks grows with it, the states that are kept shrink."""


RATES = (1.0, 16.0)
"""First decay rates, spread over the heads (the paper's code, `A_init_range`)."""
STEPS = (1e-3, 1e-1)
"""First steps, spread over the heads evenly in their logarithm (`dt_min`, `dt_max`)."""


class Mamba2(nn.Module):
    """The mixer as a model's `Mamba2` describes it.

    `input.weight` stacks the rows of the gate z, of x, b and c, and of the steps. The heads held
    are read from `decay_log`, so that a slice of whole groups works alone.
    """

    def __init__(
        self,
        spec: mixers.Mamba2,
        hidden: int,
        norm: block.Norm,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.eps = spec, norm.eps
        self.recompute: frozenset[Op] = NOTHING
        self.passage: Passage | None = None
        self.carried: Carried | None = None
        """Where sequences come in pieces, what goes on from the state that a piece left."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = spec.heads * spec.head_dim
        mixed = inner + 2 * spec.groups * spec.state_dim
        self.input = Linear(hidden, inner + mixed + spec.heads, bias=spec.bias, **where)
        self.conv = ShortConvolution(mixed, spec.conv_width, bias=spec.conv_bias, **where)
        self.decay_log = nn.Parameter(torch.empty(spec.heads, **where))
        self.step_bias = nn.Parameter(torch.empty(spec.heads, **where))
        self.skip = nn.Parameter(torch.empty(spec.heads, **where))
        self.norm = Norm(inner, block.Norm(eps=norm.eps), **where)
        self.out = Linear(inner, hidden, bias=spec.bias, **where)

    def first_values(self) -> dict[str, float | Tensor]:
        """Return the value each vector starts from."""
        return {**first_decays(self.spec.heads), "skip": 1.0}

    def forward(self, x_BTD: Tensor, places: Places) -> Tensor:
        """Mix the tokens of each sequence."""
        core = Replay(self._core) if "core_attn" in self.recompute else self._core
        with entered(self.passage, x_BTD) as inside:
            all_BTC = self.input(inside)
        return left(self.passage, self.out(core(all_BTC, places.documents_BT())))

    def _core(self, all_BTC: Tensor, documents_BT: Tensor | None) -> Tensor:
        spec, heads = self.spec, len(self.decay_log)
        groups, inner = heads * spec.groups // spec.heads, heads * spec.head_dim
        maps = groups * spec.state_dim
        z_BTI, mixed, step_BTH = all_BTC.split((inner, inner + 2 * maps, heads), -1)
        if self.carried is None:
            mixed = functional.silu(self.conv(mixed, documents_BT))
        else:
            mixed = functional.silu(self.carried.convolve(self.conv, mixed))
        x_BTI, b, c = mixed.split((inner, maps, maps), -1)
        x_BTHP = x_BTI.unflatten(-1, (heads, -1))
        terms = (
            x_BTHP,
            functional.softplus(step_BTH.float() + self.step_bias.float()),
            -self.decay_log.float().exp(),
            b.unflatten(-1, (groups, -1)),
            c.unflatten(-1, (groups, -1)),
        )
        if self.carried is None:
            y_BTHP = state_space_scan(*terms, documents_BT=documents_BT)
        else:
            y_BTHP = self.carried.scan(*terms)
        y_BTHP = y_BTHP + x_BTHP * self.skip[:, None]
        gated = y_BTHP.flatten(2) * functional.silu(z_BTI)
        # The norm is over one group at a time, so that groups can lie on different devices.
        normed = rms_norm(gated.unflatten(-1, (groups, -1)), None, self.eps)
        weight = self.norm.weight
        assert weight is not None, "an RMS norm has weights"
        return normed.flatten(2) * weight


def first_decays(heads: int) -> dict[str, float | Tensor]:
    """Return how fast the state of each head decays at first, and how large its steps are."""
    low, high = STEPS
    steps = low * (high / low) ** spread(heads)
    return {
        "decay_log": torch.linspace(*RATES, heads).log(),
        # The inverse of softplus.
        "step_bias": steps.expm1().log(),
    }


def state_space_scan(
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
    return state_space_pass(*terms, documents_BT=documents_BT, chunk=chunk)[0]


def state_space_pass(
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
    step_BCLH = cuts.cut(step_BTH.float())
    sums_BCHL = (step_BCLH * rate_H.float()).transpose(2, 3).cumsum(-1)
    decay_BCHLL, kept_BCHL, reads_BCHL, carried_BCH = cuts.decays(sums_BCHL)
    b_BCGLN = cuts.cut(b_BTGN).transpose(2, 3)
    c_BCGLN = cuts.cut(c_BTGN).transpose(2, 3)
    x_BCHLP = (cuts.cut(x_BTHP) * step_BCLH[..., None].to(kind)).transpose(2, 3)

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

"""States of recurrent mixers between the steps of a served model, one of each per sequence.

A sequence's state is what its last token left: the inputs of the short convolution that the next
tokens still reach, and the matrix of the recurrence. It has no positions, so a prefix can only be
shared by copying a state that was kept at its end; blocks of keys do not help.

One token per row is one product each for all rows at once, without asking the host anything. More
go row by row through the chunked scan.

Shapes: R rows, N tokens, C channels, K taps, H heads; others as in `mamba2` and `gated_delta_net`.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.run.nn.ssm.causal_conv1d import CausalConv1d, causal_conv1d
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet, gated_delta_rule_from_state
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer, ssd_scan_from_state
from meshwright.run.serve.model.paged_attention import ForwardContext


class RecurrentLayerState:
    """The states of one layer. The last row belongs to no sequence: padding writes there."""

    def __init__(
        self, forward_context: ForwardContext, rows: int, conv: CausalConv1d, state: Sequence[int]
    ) -> None:
        weight, taps = conv.weight, conv.weight.shape[1]
        self.forward_context = forward_context
        self.conv_state = torch.zeros(
            rows + 1, taps - 1, len(weight), dtype=weight.dtype, device=weight.device
        )
        self.state = torch.zeros(rows + 1, *state, dtype=torch.float32, device=weight.device)

    def convolve(self, conv: CausalConv1d, x_1NC: Tensor) -> Tensor:
        """Convolve, reading the tokens before a piece from where they are kept."""
        step, rows_R = self.forward_context.batch, self._rows()
        before_RKC = self.conv_state[rows_R] * self._goes_on()[:, None, None].to(x_1NC.dtype)
        if step.max_query_len == 1:
            reach_RKC = torch.cat((before_RKC, x_1NC.transpose(0, 1)), 1)
            y_RC = (reach_RKC * conv.weight.t()).sum(1)
            y_RC = y_RC if conv.bias is None else y_RC + conv.bias
            self.conv_state[rows_R] = reach_RKC[:, 1:]
            return y_RC[None]
        pieces, taps = [], conv.weight.shape[1]
        for row, piece_1TC in enumerate(x_1NC.split(step.get_query_lens(), 1)):
            reach = torch.cat((before_RKC[row : row + 1], piece_1TC), 1)
            pieces.append(causal_conv1d(reach, conv.weight, conv.bias)[:, taps - 1 :])
            self.conv_state[rows_R[row]] = reach[0, reach.shape[1] - (taps - 1) :]
        return torch.cat(pieces, 1)

    def scan(self, *terms: Tensor) -> Tensor:
        """Run the recurrence; the terms are those of the mixer's own scan."""
        step, rows_R = self.forward_context.batch, self._rows()
        state = self.state[rows_R]
        state = state * self._goes_on().view(-1, *[1] * (state.dim() - 1))
        if step.max_query_len == 1:
            y, state = self._one(state, *terms)
            self.state[rows_R] = state
            return y
        pieces, begin = [], 0
        for row, count in enumerate(step.get_query_lens()):
            if not count:
                continue
            here = [_piece(term, begin, count) for term in terms]
            y, left = self._many(state[row : row + 1], *here)
            self.state[rows_R[row]] = left[0]
            pieces.append(y)
            begin += count
        return torch.cat(pieces, 1)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give the targets the states of the sources."""
        self.conv_state[targets], self.state[targets] = (
            self.conv_state[sources],
            self.state[sources],
        )

    def _rows(self) -> Tensor:
        rows_R = self.forward_context.batch.state_rows_R
        assert rows_R is not None, "a recurrent model's step says where its states are kept"
        return rows_R

    def _goes_on(self) -> Tensor:
        """Return 1 for rows that go on from an earlier step, 0 for those that begin, fp32."""
        step = self.forward_context.batch
        return (step.seq_lens_R > torch.diff(step.query_start_loc_R1)).float()

    @abstractmethod
    def _one(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        """Take one token of every row."""

    @abstractmethod
    def _many(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        """Take the tokens of one row."""


class MambaLayerState(RecurrentLayerState):
    """States of a `Mamba2Mixer`: R rows, G groups, N columns, heads of a group, P head width."""

    def __init__(self, forward_context: ForwardContext, rows: int, mixer: Mamba2Mixer) -> None:
        spec, heads = mixer.spec, len(mixer.decay_log)
        groups = heads * spec.groups // spec.heads
        shape = (groups, spec.state_dim, heads // groups, spec.head_dim)
        super().__init__(forward_context, rows, mixer.conv, shape)

    def _one(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        x, step, rate_H, b, c = terms
        groups = b.shape[2]
        step_RH = step[0].float()
        decay = (step_RH * rate_H).exp().unflatten(1, (groups, -1))[:, :, None, :, None]
        # As in the scan: the step multiplies x in the inputs' own format.
        fed = (x[0] * step_RH[..., None].to(x.dtype)).unflatten(1, (groups, -1)).float()
        state = state * decay + b[0].float()[..., None, None] * fed[:, :, None]
        y = (c[0].float()[..., None, None] * state).sum(2)
        return y.flatten(1, 2).to(x.dtype)[None], state

    def _many(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        return ssd_scan_from_state(*terms, state_BGNRP=state)


class GatedDeltaLayerState(RecurrentLayerState):
    """States of a `GatedDeltaNet`: R rows, H heads, E key width, V value width."""

    def __init__(self, forward_context: ForwardContext, rows: int, mixer: GatedDeltaNet) -> None:
        spec = mixer.spec
        shape = (len(mixer.decay_log), spec.key_dim, spec.value_dim)
        super().__init__(forward_context, rows, mixer.conv, shape)

    def _one(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_a, beta = (term[0].float() for term in terms)
        state = state * log_a.exp()[..., None, None]
        known = (state * k[..., None]).sum(-2)
        write = beta[..., None] * (v - known)
        state = state + k[..., None] * write[..., None, :]
        return (state * q[..., None]).sum(-2)[None], state

    def _many(self, state: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule_from_state(*terms, state_BHEV=state)


def _piece(term: Tensor, begin: int, count: int) -> Tensor:
    """Return a row's tokens of a term; rates have no tokens."""
    return term if term.dim() == 1 else term[:, begin : begin + count]

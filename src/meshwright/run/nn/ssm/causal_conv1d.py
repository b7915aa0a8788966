"""`CausalConv1d`: each channel convolved with its own few taps over the tokens before it.

The recurrences that replace attention mix neighbouring tokens with it first.

Shapes: B sequences, T positions, C channels, K taps.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Multiples of it, less their whole part, fill 0 to 1 evenly (Weyl, 1916)."""


class CausalConv1d(nn.Module):
    """The convolution with its weights, `weight` [channels, taps] and `bias`."""

    bias: nn.Parameter | None

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps, device=device, dtype=dtype))
        self.global_weight_shape = (channels, taps)
        """Shape of the whole weight, of which a slice of channels may be held."""
        vector = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", vector)

    def get_initial_values(self) -> dict[str, float | Tensor]:
        """Return taps spread evenly over ±1/sqrt(taps), as random ones would be (torch's rule)."""
        channels, taps = self.global_weight_shape
        return {
            "weight": (2 * make_golden_ratio_sequence(channels * taps) - 1).view(channels, taps)
            / math.sqrt(taps)
        }

    def forward(self, x_BTC: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Convolve, never across the start of a document."""
        return causal_conv1d(x_BTC, self.weight, self.bias, documents_BT)


def make_golden_ratio_sequence(count: int) -> Tensor:
    """Return numbers that fill 0 to 1 evenly, neighbours far apart: the same on every machine."""
    return (torch.arange(1, count + 1, dtype=torch.float64) * GOLDEN_RATIO % 1).float()


def causal_conv1d(
    x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents_BT: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its own few taps over the tokens before it and itself.

    The last tap is the token's own. A tap that would reach into another document reads zero.
    """
    taps = weight_CK.shape[1]
    if documents_BT is None:
        y_BCT = functional.conv1d(
            functional.pad(x_BTC.transpose(1, 2), (taps - 1, 0)),
            weight_CK[:, None],
            bias_C,
            groups=weight_CK.shape[0],
        )
        return y_BCT.transpose(1, 2)
    y_BTC = x_BTC * weight_CK[:, -1]
    for back in range(1, min(taps, x_BTC.shape[1])):
        same_BT = documents_BT[:, back:] == documents_BT[:, :-back]
        reach = x_BTC[:, :-back] * weight_CK[:, -1 - back] * same_BT[..., None]
        y_BTC = y_BTC + functional.pad(reach, (0, 0, back, 0))
    return y_BTC if bias_C is None else y_BTC + bias_C

"""`NormLayer`: RMS norm or layer norm over the last axis, alone or fused with the add before it.

The residual stream travels through the blocks as a pair, the last branch's output and the stream
before it, so that each sum is made inside the norm that reads it and costs no pass of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.kernels.norm.rms_norm import add_rms_norm, rms_norm
from meshwright.spec.model import block


class NormLayer(nn.Module):
    """A norm of one width, as a model's `NormSpec` describes it.

    `weight` is absent for a layer norm without weights, `bias` where there is none.
    """

    def __init__(
        self,
        width: int,
        spec: block.NormSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.kind, self.eps, self.unit_offset = spec.kind, spec.eps, spec.unit_offset

        def vector(present: bool) -> nn.Parameter | None:
            made = torch.empty(width, device=device, dtype=dtype) if present else None
            return None if made is None else nn.Parameter(made)

        self.register_parameter("weight", vector(spec.kind != "layer-plain"))
        self.register_parameter("bias", vector(spec.kind != "layer-plain" and spec.bias))

    def get_initial_values(self) -> dict[str, float]:
        """Return the value each parameter starts from: the norm leaves the scale alone."""
        return {"weight": 0.0 if self.unit_offset else 1.0, "bias": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        if self.kind == "rms":
            out = rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)
            return out if self.bias is None else out + self.bias
        weight: Tensor | None = self.weight
        if weight is not None and self.unit_offset:
            weight = weight + 1
        return functional.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)

    def add_and_norm(self, branch: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add a branch to the stream; return the sum normalised, and the sum."""
        if residual is None:
            return self(branch), branch
        if self.kind == "rms" and self.bias is None:
            return add_rms_norm(
                branch, residual, self.weight, self.eps, unit_offset=self.unit_offset
            )
        total = branch + residual
        return self(total), total

"""`make_decoder`: builds a decoder on one device with the precision and recompute of a layout."""

import torch

from meshwright.run.kernels.gemm.gemm import GemmBackend
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import DEFAULT_BUILD_OPTIONS, BuildOptions, build_decoder
from meshwright.run.nn.linear.fp8_conversion import apply_precision
from meshwright.run.nn.linear.linear import set_gemm_backend
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.run.train.train_step import get_weight_dtype
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model


def make_decoder(
    model: Model,
    layout: Layout,
    *,
    device: torch.device,
    seed: int = 0,
    gemm: GemmBackend | None = None,
    options: BuildOptions = DEFAULT_BUILD_OPTIONS,
) -> Decoder:
    """Return a model with its first weights on a device, computing as a layout says."""
    decoder = build_decoder(model, dtype=get_weight_dtype(layout), options=options)
    materialize(decoder, device, seed)
    apply_recompute(decoder.layers, layout)
    if gemm is not None:
        set_gemm_backend(decoder, gemm)
    apply_precision(decoder, layout.precision)
    return decoder

"""Modules made from a `Model`: its layers, their loss, their precision, and checkpoints of others.

decoder_builder       builds a `Decoder` of a `Model` without memory; `materialize` allocates it
Decoder, BatchLoss    tokens in, logits or a loss out
apply_precision       which GEMMs run in fp8, and why others do not
apply_recompute       what backward recomputes, as a `Layout` says
huggingface           loads and saves Hugging Face checkpoints
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.nn import huggingface
    from meshwright.run.nn.decoder import BatchLoss, Decoder
    from meshwright.run.nn.decoder_builder import BuildOptions
    from meshwright.run.nn.linear.fp8_conversion import PrecisionReport, apply_precision
    from meshwright.run.nn.linear.fp8_linear import Fp8Recipe
    from meshwright.run.nn.linear.linear import Linear, set_gemm_backend
    from meshwright.run.nn.recompute import apply_recompute
    from meshwright.run.nn.weight_init import materialize

_MODULES = {
    "Decoder": "meshwright.run.nn.decoder",
    "Fp8Recipe": "meshwright.run.nn.linear.fp8_linear",
    "Linear": "meshwright.run.nn.linear.linear",
    "BatchLoss": "meshwright.run.nn.decoder",
    "BuildOptions": "meshwright.run.nn.decoder_builder",
    "PrecisionReport": "meshwright.run.nn.linear.fp8_conversion",
    "huggingface": "meshwright.run.nn.huggingface",
    "materialize": "meshwright.run.nn.weight_init",
    "apply_precision": "meshwright.run.nn.linear.fp8_conversion",
    "set_gemm_backend": "meshwright.run.nn.linear.linear",
    "apply_recompute": "meshwright.run.nn.recompute",
}

__all__ = [
    "BatchLoss",
    "BuildOptions",
    "Decoder",
    "Fp8Recipe",
    "Linear",
    "PrecisionReport",
    "apply_precision",
    "apply_recompute",
    "huggingface",
    "materialize",
    "set_gemm_backend",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)

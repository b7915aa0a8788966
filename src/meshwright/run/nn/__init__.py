"""Modules made from a `Model`: its layers, their loss, their precision, and checkpoints of others.

build.build            a `Decoder` of a `Model`, without memory; `materialise` puts it on a device
Decoder, Loss          tokens in, logits or a loss out
use_precision          which products run in fp8, and why others do not
use_recompute          what backward computes again, as a `Layout` says
huggingface            loads and saves Hugging Face checkpoints
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.nn import huggingface
    from meshwright.run.nn.build import Options
    from meshwright.run.nn.decoder import Decoder, Loss
    from meshwright.run.nn.fp8 import PrecisionReport, use_precision
    from meshwright.run.nn.fp8_linear import Fp8Recipe
    from meshwright.run.nn.initialise import materialise
    from meshwright.run.nn.linear import Linear, use_products
    from meshwright.run.nn.recompute import use_recompute

_HOMES = {
    "Decoder": "meshwright.run.nn.decoder",
    "Fp8Recipe": "meshwright.run.nn.fp8_linear",
    "Linear": "meshwright.run.nn.linear",
    "Loss": "meshwright.run.nn.decoder",
    "Options": "meshwright.run.nn.build",
    "PrecisionReport": "meshwright.run.nn.fp8",
    "huggingface": "meshwright.run.nn.huggingface",
    "materialise": "meshwright.run.nn.initialise",
    "use_precision": "meshwright.run.nn.fp8",
    "use_products": "meshwright.run.nn.linear",
    "use_recompute": "meshwright.run.nn.recompute",
}

__all__ = [
    "Decoder",
    "Fp8Recipe",
    "Linear",
    "Loss",
    "Options",
    "PrecisionReport",
    "huggingface",
    "materialise",
    "use_precision",
    "use_products",
    "use_recompute",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)

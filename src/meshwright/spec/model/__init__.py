"""`Model`: an architecture as a value, with its exact parameter and FLOP counts."""

from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.decoder_builders import build_decoder_model, build_gpt
from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.flops import CONVENTIONS, ModelFlops, count_flops, flops_per_token
from meshwright.spec.model.model import Model, MtpSpec
from meshwright.spec.model.parameters import ParameterCounts, count_parameters
from meshwright.spec.model.rotary import AttentionTemperature, Rotary
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
)
from meshwright.spec.model.vision import VisionProjector, VisionTower
from meshwright.spec.model.weights import Weight

__all__ = [
    "CONVENTIONS",
    "AttentionSpec",
    "AttentionTemperature",
    "BlockSpec",
    "FeedForward",
    "GatedDeltaNetSpec",
    "LatentAttentionSpec",
    "MLPSpec",
    "Mamba2Spec",
    "Mixer",
    "MoESpec",
    "Model",
    "ModelFlops",
    "MtpSpec",
    "NormSpec",
    "ParameterCounts",
    "Rotary",
    "VisionProjector",
    "VisionTower",
    "Weight",
    "build_decoder_model",
    "build_gpt",
    "count_flops",
    "count_parameters",
    "flops_per_token",
]

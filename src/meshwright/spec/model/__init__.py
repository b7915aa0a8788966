"""`Model`: an architecture as a value, with its exact parameter and FLOP counts."""

from meshwright.spec.model.block import Block, Norm
from meshwright.spec.model.build import decoder, gpt
from meshwright.spec.model.feedforward import Experts, FeedForward, Mlp
from meshwright.spec.model.flops import CONVENTIONS, Flops, count_flops, flops_per_token
from meshwright.spec.model.mixers import Attention, GatedDelta, LatentAttention, Mamba2, Mixer
from meshwright.spec.model.model import Model, MultiToken
from meshwright.spec.model.parameters import Parameters, count_parameters
from meshwright.spec.model.positions import Rotary, Temperature
from meshwright.spec.model.vision import Projector, VisionTower
from meshwright.spec.model.weights import Weight

__all__ = [
    "CONVENTIONS",
    "Attention",
    "Block",
    "Experts",
    "FeedForward",
    "Flops",
    "GatedDelta",
    "LatentAttention",
    "Mamba2",
    "Mixer",
    "Mlp",
    "Model",
    "MultiToken",
    "Norm",
    "Parameters",
    "Projector",
    "Rotary",
    "Temperature",
    "VisionTower",
    "Weight",
    "count_flops",
    "count_parameters",
    "decoder",
    "flops_per_token",
    "gpt",
]

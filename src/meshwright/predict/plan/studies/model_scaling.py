"""A model made larger or smaller in the proportions of its family.

Weights of the layers grow with depth times the square of the width. Both grow alike, so that their
ratio stays, as it about does between published sizes of one family. Heads keep their width, and
grouped keys and values their number, as from Llama 3 8B to 405B (arXiv 2407.21783); experts keep
their number and the experts each token visits; vocabularies and vision towers stay.
"""

import math

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    Model,
    MoESpec,
    count_parameters,
)
from meshwright.spec.model.layer_pattern import compress_pattern

MAX_WIDTH_MULTIPLE = 128
"""Widths stay multiples of up to this, heads and layers of up to eight and four."""


def list_family(model: Model) -> tuple[Model, ...]:
    """Return the catalog's models of a model's family, the smallest first."""
    found = [entry.model for entry in catalog.list_models().values()]
    alike = [one for one in found if one.family == model.family]
    return tuple(sorted(alike, key=lambda one: count_parameters(one).total))


def scale_model(model: Model, factor: float) -> Model:
    """Return the model with about `factor` times the weights in its layers.

    Heads come in whole groups, so the width moves in steps; the depth makes up for that.
    """
    if not 0 < factor < math.inf:
        what = f"{factor} is no factor"
        raise InputError([Problem("factor", what, "use a number above 0, like 2")])
    wide = _width_factor(model, factor ** (1 / 3))
    hidden = _to_unit(model.hidden, wide, MAX_WIDTH_MULTIPLE)
    deep = factor / (hidden / model.hidden) ** 2
    names, layers = model.layer_names, _to_unit(model.layers, deep, 4)
    blocks = tuple(_block(block, hidden / model.hidden) for block in model.blocks)
    # Kinds of layer keep their places, as shares of the depth.
    kept = tuple(names[at * model.layers // layers] for at in range(layers))
    if layers == model.layers and hidden == model.hidden:
        return model
    name = f"{model.name}-x{factor:.3g}"
    return replace(model, name=name, hidden=hidden, blocks=blocks, pattern=compress_pattern(kept))


def _width_factor(model: Model, wanted: float) -> float:
    """Return the factor nearest to one wanted with which heads stay whole, in whole groups."""
    for block in model.blocks:
        if isinstance(block.mixer, AttentionSpec | LatentAttentionSpec):
            return _heads(block.mixer, wanted) / block.mixer.heads
    return wanted


def _heads(mixer: AttentionSpec | LatentAttentionSpec, factor: float) -> int:
    grouped = isinstance(mixer, AttentionSpec) and mixer.kv_heads < mixer.heads
    group = mixer.kv_heads if isinstance(mixer, AttentionSpec) and grouped else 1
    unit = math.lcm(group, math.gcd(mixer.heads, 8))
    return unit * max(1, round(mixer.heads * factor / unit))


def _block(block: BlockSpec, factor: float) -> BlockSpec:
    mixer = None if block.mixer is None else _mixer(block.mixer, factor)
    mlp = None if block.mlp is None else _mlp(block.mlp, factor)
    return replace(block, mixer=mixer, mlp=mlp)


def _mixer(mixer: Mixer, factor: float) -> Mixer:
    match mixer:
        case AttentionSpec():
            heads = _heads(mixer, factor)
            kv_heads = heads if mixer.kv_heads == mixer.heads else mixer.kv_heads
            return replace(mixer, heads=heads, kv_heads=kv_heads)
        case LatentAttentionSpec():
            q_rank = (
                None if mixer.q_rank is None else _to_unit(mixer.q_rank, factor, MAX_WIDTH_MULTIPLE)
            )
            kv_rank = _to_unit(mixer.kv_rank, factor, MAX_WIDTH_MULTIPLE)
            return replace(mixer, heads=_heads(mixer, factor), q_rank=q_rank, kv_rank=kv_rank)
        case GatedDeltaNetSpec():
            keys = _to_unit(mixer.key_heads, factor, 8)
            each = mixer.value_heads // mixer.key_heads
            return replace(mixer, key_heads=keys, value_heads=keys * each)
        case Mamba2Spec():
            heads = mixer.groups * max(1, round(mixer.heads * factor / mixer.groups))
            return replace(mixer, heads=heads)


def _mlp(mlp: FeedForward, factor: float) -> FeedForward:
    width = _to_unit(mlp.width, factor, MAX_WIDTH_MULTIPLE)
    if not isinstance(mlp, MoESpec):
        return replace(mlp, width=width)
    shared = _to_unit(mlp.shared_width, factor, MAX_WIDTH_MULTIPLE) if mlp.shared_width else 0
    latent = None if mlp.latent is None else _to_unit(mlp.latent, factor, MAX_WIDTH_MULTIPLE)
    return replace(mlp, width=width, shared_width=shared, latent=latent)


def _to_unit(size: int, factor: float, most: int) -> int:
    """Multiply a size, rounded to the largest power of two up to `most` that divides it."""
    unit = math.gcd(size, most)
    return unit * max(1, round(size * factor / unit))

"""`shrink_model`: a small model of the same kind as a real one, and what was changed to get it.

Widths, counts and depth go down; what decides how a model is computed stays: the kinds of layers
and their order, queries per key, experts per token and their groups, norms, biases, scales. What
layouts divide still divides as they need it, and key heads are fewer than tensor-parallel ranks
where they were before.
"""

import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from msgspec import to_builtins
from msgspec.structs import replace

from meshwright.run.parallel.context_parallel.context_parallel import get_ulysses_degree
from meshwright.run.parallel.verify.model_diff import SizeChange, diff_descriptions
from meshwright.spec.layout import Layout
from meshwright.spec.model import BlockSpec, Model, feedforward, token_mixers
from meshwright.spec.model.layer_pattern import compress_pattern
from meshwright.spec.model.rotary import Rotary

SHRUNK_HIDDEN = 64
SHRUNK_HEAD_DIM = 16
"""Width of a head; enough for rotary positions on a quarter of it."""
DEFAULT_MULTIPLE = 8
"""What widths are multiples of, unless told."""
SHRUNK_VOCAB = 251
"""Words: a prime number, so that no number of ranks divides them."""


class ShrunkModel(NamedTuple):
    """A small model with layouts that fit it."""

    model: Model
    layouts: tuple[Layout, ...]
    changes: tuple[SizeChange, ...]


class _Needs(NamedTuple):
    """What layouts divide."""

    tp: tuple[int, ...]
    heads: int
    """Parts into which heads are shared, by tensor and context parallelism."""
    width: int
    """Parts of a matrix's width."""
    expert_width: int
    experts: int
    """Parts into which experts are shared."""
    sequence_length: int
    """Tokens of a sequence."""
    multiple: int
    """What widths, and a rank's part of them, are multiples of."""

    @property
    def head(self) -> int:
        """Width of a head."""
        return max(SHRUNK_HEAD_DIM, self.multiple)


def shrink_model(
    model: Model,
    layouts: Sequence[Layout],
    *,
    sequence_length: int,
    multiple: int = DEFAULT_MULTIPLE,
) -> ShrunkModel:
    """Make a model small enough for one machine; layouts have to fit the real one.

    Widths stay multiples of `multiple` where they were, which fp8 asks for.
    """
    needs = _Needs(
        tuple(sorted({each.tp for each in layouts})),
        math.lcm(*(each.tp * get_ulysses_degree(each) for each in layouts)),
        math.lcm(*(each.tp for each in layouts)),
        math.lcm(*(each.effective_expert_tp for each in layouts)),
        math.lcm(*(each.ep for each in layouts)),
        sequence_length,
        multiple,
    )
    names = _fewer(model, layouts)
    hidden = min(model.hidden, max(SHRUNK_HIDDEN, multiple))
    small = replace(
        model,
        hidden=hidden,
        vocab=min(model.vocab, SHRUNK_VOCAB),
        blocks=tuple(_block(block, model.hidden, hidden, needs) for block in model.blocks),
        pattern=compress_pattern(names),
        max_positions=_positions(model, sequence_length),
        embedding_scale=_rescaled(model.embedding_scale, math.sqrt(hidden / model.hidden)),
        vision=None,
    )
    fitted = tuple(_fitted(each, model.layers, len(names)) for each in layouts)
    changes = [*diff_descriptions("", to_builtins(model), to_builtins(small))]
    for number, (old, new) in enumerate(zip(layouts, fitted, strict=True), 1):
        changes += diff_descriptions(f"layout {number}: ", to_builtins(old), to_builtins(new))
    return ShrunkModel(small, fitted, tuple(changes))


def _fewer(model: Model, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Take layers at equal distances, the first of each kind among them."""
    names = model.layer_names
    first = {names.index(name) for name in dict.fromkeys(names)}
    step = math.lcm(*(each.chunks for each in layouts if each.stage_layers is None))
    most = max((each.chunks for each in layouts), default=1)
    wanted = max(len(first), most, 2)
    wanted = min(len(names), -(-wanted // step) * step)
    spread = [round(at * (len(names) - 1) / max(1, wanted - 1)) for at in range(wanted)]
    chosen = set(first)
    for index in (*spread[::-1], *range(len(names))):
        if len(chosen) >= wanted:
            break
        chosen.add(index)
    return tuple(names[index] for index in sorted(chosen))


def _positions(model: Model, sequence_length: int) -> int:
    """Shorten a learned table; other positions are formed from what the model was made for."""
    if model.positions != "learned":
        return model.max_positions
    return min(model.max_positions, 2 * sequence_length)


def _block(block: BlockSpec, before: int, hidden: int, needs: _Needs) -> BlockSpec:
    match block.mixer:
        case token_mixers.AttentionSpec():
            mixer: token_mixers.Mixer | None = _attention(block.mixer, needs)
        case token_mixers.LatentAttentionSpec():
            mixer = _latent(block.mixer, needs)
        case token_mixers.GatedDeltaNetSpec():
            mixer = _gated_delta(block.mixer, needs)
        case token_mixers.Mamba2Spec():
            mixer = _mamba(block.mixer, needs)
        case None:
            mixer = None
    match block.mlp:
        case feedforward.MLPSpec(width=width):
            narrow = _scaled(width, before, hidden, needs.width * needs.multiple)
            mlp: feedforward.FeedForward | None = replace(block.mlp, width=narrow)
        case feedforward.MoESpec():
            mlp = _experts(block.mlp, before, hidden, needs)
        case None:
            mlp = None
    return replace(block, mixer=mixer, mlp=mlp)


def _attention(spec: token_mixers.AttentionSpec, needs: _Needs) -> token_mixers.AttentionSpec:
    width = min(spec.head_dim, needs.head)
    ratio = spec.heads // spec.kv_heads
    keys = _key_heads(spec, ratio, needs)
    temperature = spec.temperature
    if temperature is not None:
        floor = min(temperature.floor, max(1, needs.sequence_length // 4))
        temperature = replace(temperature, floor=floor)
    return replace(
        spec,
        heads=keys * ratio,
        kv_heads=keys,
        head_dim=width,
        window=_reach(spec.window, needs.sequence_length),
        chunk=_reach(spec.chunk, needs.sequence_length),
        rotary=_rotary(spec.rotary, spec.head_dim, width),
        # Scores of narrower heads are smaller by the root of the width.
        scale=_rescaled(spec.scale, math.sqrt(spec.head_dim / width)),
        temperature=temperature,
    )


def _key_heads(spec: token_mixers.AttentionSpec, ratio: int, needs: _Needs) -> int:
    """Return the least number of key heads that is shared as the real one is."""
    for keys in range(min(2, spec.kv_heads), spec.kv_heads):
        shared = all(
            (keys >= tp) == (spec.kv_heads >= tp) and (keys % tp == 0 or tp % keys == 0)
            for tp in needs.tp
        )
        if shared and keys * ratio % needs.heads == 0:
            return keys
    return spec.kv_heads


def _latent(
    spec: token_mixers.LatentAttentionSpec, needs: _Needs
) -> token_mixers.LatentAttentionSpec:
    rope = min(spec.rope_dim, needs.head // 2)
    return replace(
        spec,
        heads=_multiple(spec.heads, needs.heads),
        kv_rank=min(spec.kv_rank, needs.head),
        q_rank=None if spec.q_rank is None else min(spec.q_rank, 2 * needs.head),
        nope_dim=min(spec.nope_dim, needs.head),
        rope_dim=rope,
        value_dim=min(spec.value_dim, needs.head),
        rotary=_rotary(spec.rotary, spec.rope_dim, rope),
    )


def _gated_delta(
    spec: token_mixers.GatedDeltaNetSpec, needs: _Needs
) -> token_mixers.GatedDeltaNetSpec:
    keys = _multiple(spec.key_heads, needs.width)
    return replace(
        spec,
        key_heads=keys,
        value_heads=keys * (spec.value_heads // spec.key_heads),
        key_dim=min(spec.key_dim, needs.head),
        value_dim=min(spec.value_dim, needs.head),
    )


def _mamba(spec: token_mixers.Mamba2Spec, needs: _Needs) -> token_mixers.Mamba2Spec:
    groups = _multiple(spec.groups, needs.width)
    return replace(
        spec,
        groups=groups,
        heads=groups * (spec.heads // spec.groups),
        head_dim=min(spec.head_dim, needs.head // 2),
        state_dim=min(spec.state_dim, needs.head),
    )


def _experts(
    spec: feedforward.MoESpec, before: int, hidden: int, needs: _Needs
) -> feedforward.MoESpec:
    shared = spec.shared_width and _scaled(
        spec.shared_width, before, hidden, needs.width * needs.multiple
    )
    latent = spec.latent and _scaled(spec.latent, before, hidden, needs.multiple)
    return replace(
        spec,
        count=_expert_count(spec, needs.experts),
        width=_scaled(spec.width, before, hidden, needs.expert_width * needs.multiple),
        shared_width=shared,
        latent=latent,
    )


def _expert_count(spec: feedforward.MoESpec, ranks: int) -> int:
    """Return the least number of experts that leaves a choice in and among the groups."""
    chosen = -(-spec.top_k // spec.groups_used)
    for each in count(max(2, chosen)):
        found = each * spec.groups
        if found >= spec.count:
            return spec.count
        if found % ranks == 0 and found >= min(spec.count, 2 * spec.top_k):
            return found
    raise AssertionError("counting ends at the real number")


def _rotary(rotary: Rotary | None, before: int, width: int) -> Rotary | None:
    """Let lists with a number for each pair of dimensions have as many as the narrow head."""
    if rotary is None or before == width:
        return rotary
    pairs = int(width * rotary.fraction) // 2
    return replace(
        rotary,
        short_factors=_sampled(rotary.short_factors, pairs),
        long_factors=_sampled(rotary.long_factors, pairs),
    )


def _sampled(numbers: tuple[float, ...], wanted: int) -> tuple[float, ...]:
    if not numbers:
        return numbers
    last = max(1, wanted - 1)
    return tuple(numbers[round(at * (len(numbers) - 1) / last)] for at in range(wanted))


def _reach(size: int | None, sequence_length: int) -> int | None:
    """Let a window end within the sequence."""
    return None if size is None else min(size, max(1, sequence_length // 4))


def _multiple(size: int, parts: int) -> int:
    """Return few of something, more than one where there were, in equal parts."""
    return min(size, parts * -(-min(2, size) // parts))


def _scaled(width: int, before: int, hidden: int, step: int) -> int:
    """Return a width in its proportion to the model's, as a multiple."""
    return min(width, step * max(1, round(width * hidden / before / step)))


def _rescaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _fitted(layout: Layout, before: int, layers: int) -> Layout:
    """Give a layout stages for fewer layers."""
    split = layout.stage_layers
    if split is not None and layers != before:
        split = _split(split, layers)
    most = max(split) if split is not None else -(-layers // layout.chunks)
    again, away = layout.recompute_layers, layout.offload_layers
    return replace(
        layout,
        stage_layers=split,
        recompute_layers=again and min(again, most),
        offload_layers=away and min(away, most),
        global_batch=None,
        optimizer="adamw",
    )


def _split(split: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Share out fewer layers as unevenly as before; chunks without any stay without."""
    found = [min(1, size) for size in split]
    while sum(found) < layers:
        lacks = [
            size / (have + 1) if size else -1.0 for size, have in zip(split, found, strict=True)
        ]
        found[lacks.index(max(lacks))] += 1
    return tuple(found)

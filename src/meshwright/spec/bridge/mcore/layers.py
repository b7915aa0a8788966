"""Which layer is what, in Megatron-Core's settings.

Megatron-Core builds every layer from one set of sizes; lists of marks say which layers are routed,
windowed, linear or without rotation. Hybrid models (layers that hold only a mixer or only a
feed-forward part) spell their layers as one word, `M-M*-`
(megatron/core/models/hybrid/hybrid_layer_allocation.py).
"""

from itertools import pairwise
from typing import Any

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.mcore import attention_config, layer_frequency, moe_config, rope_config
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.block import BlockSpec
from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.model import Model, Positions
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
)

SETTINGS = (
    "hybrid_layer_pattern",
    "moe_layer_freq",
    "window_attn_skip_freq",
    "no_rope_freq",
    "linear_attention_freq",
    "position_embedding_type",
    "use_rotary_position_embeddings",
)

POSITIONS: dict[str, Positions] = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "yarn": "rotary",
    "mrope": "rotary",
    "none": "none",
    "relative": "none",
}
_SYMBOLS: dict[type, str] = {
    Mamba2Spec: "M",
    GatedDeltaNetSpec: "G",
    AttentionSpec: "*",
    LatentAttentionSpec: "+",
    MLPSpec: "-",
    MoESpec: "E",
}
LAYER_SYMBOLS = {
    "M": "mamba",
    "G": "delta",
    "*": "attention",
    "+": "latent",
    "-": "mlp",
    "E": "moe",
}


def is_hybrid(blocks: tuple[BlockSpec, ...]) -> bool:
    """Tell whether the layers need to be spelled one part at a time."""
    return any(
        block.mixer is None or block.mlp is None or isinstance(block.mixer, Mamba2Spec)
        for block in blocks
    )


def write_hybrid_pattern(model: Model, layout: Layout, heads: bool) -> str:
    """Return the layers as one word, with bars between pipeline chunks where they are given.

    The multi-token heads follow behind a stroke, if they are wanted.
    """
    layers = [_block_word(block) for block in model.layer_blocks()]
    if "*" in "".join(layers):
        layers = [word.replace("+", "*") for word in layers]  # one kind of attention per model
    split = layout.stage_layers
    if split is None and layout.virtual_stages > 1 and len(layers) % layout.chunks == 0:
        split = (len(layers) // layout.chunks,) * layout.chunks
    if split is not None and sum(split) == len(layers):
        starts = [sum(split[:index]) for index in range(len(split) + 1)]
        word = "|".join("".join(layers[a:b]) for a, b in pairwise(starts))
    else:
        word = "".join(layers)
    if model.multi_token is not None and heads:
        head = _block_word(model.block(model.multi_token.block))
        word += f"/{head}" * model.multi_token.depth
    return word


def _block_word(block: BlockSpec) -> str:
    return "".join(_SYMBOLS[type(part)] for part in (block.mixer, block.mlp) if part is not None)


def write_layer_lists(blocks: tuple[BlockSpec, ...]) -> dict[str, Any]:
    """Return the lists that say which layers differ from the rest."""
    routed = tuple(int(isinstance(block.mlp, MoESpec)) for block in blocks)
    linear = tuple(int(isinstance(block.mixer, GatedDeltaNetSpec)) for block in blocks)
    windowed = tuple(
        int(isinstance(block.mixer, AttentionSpec) and block.mixer.window is not None)
        for block in blocks
    )
    still = tuple(
        int(isinstance(block.mixer, AttentionSpec) and block.mixer.rotary is None)
        for block in blocks
    )
    attends = [isinstance(block.mixer, AttentionSpec) for block in blocks]
    some_turn = any(a and not s for a, s in zip(attends, still, strict=True))
    return {
        "moe_layer_freq": layer_frequency.write_frequency(routed)
        if 0 < sum(routed) < len(blocks)
        else None,
        "linear_attention_freq": layer_frequency.write_frequency(linear) if any(linear) else None,
        "window_attn_skip_freq": (
            layer_frequency.write_frequency(windowed) if 0 < sum(windowed) < len(blocks) else None
        ),
        "no_rope_freq": layer_frequency.write_frequency(still)
        if some_turn and any(still)
        else None,
    }


class LayerReader:
    """Reads each kind of part once and lays them out layer by layer."""

    def __init__(self, settings: FrameworkConfig, hidden: int) -> None:
        self.settings = settings
        self.hidden = hidden
        kind = settings.text("position_embedding_type") or "learned_absolute"
        if settings.flag("use_rotary_position_embeddings"):
            kind = "rope"
        if kind == "relative":
            settings.add_note("position_embedding_type", "relative positions cannot be held")
        learned: Positions = "learned"
        self.positions = (
            POSITIONS[kind]
            if kind in POSITIONS
            else settings.choice("position_embedding_type", POSITIONS, learned)
        )
        self.latent = settings.flag("multi_latent_attention")
        turns = self.positions == "rotary" or self.latent
        self.rotary = rope_config.read_rope(settings, kind, self.latent) if turns else None
        self.mlp = moe_config.read_mlp(settings, hidden)
        self.experts = (
            moe_config.read_moe(settings, self.mlp) if settings.has("num_experts") else None
        )

    def read_blocks(self, layers: int, pattern: str | None) -> tuple[BlockSpec, ...] | None:
        """Return the block of every layer, None (with the fault recorded) where some is wrong."""
        try:
            return self._hybrid(pattern) if pattern else self._uniform(layers)
        except InputError as error:
            self.settings.problems.extend(error.problems)
            return None

    def _marks(self, key: str, layers: int, first: bool, without: int) -> tuple[int, ...]:
        if not self.settings.has(key):
            return (without,) * layers
        where = self.settings.label(key)
        value = layer_frequency.read_frequency(self.settings.raw(key), where)
        return layer_frequency.expand_frequency(value, layers, first, where)

    def _uniform(self, layers: int) -> tuple[BlockSpec, ...]:
        settings = self.settings
        routed = self._marks("moe_layer_freq", layers, True, int(self.experts is not None))
        linear = self._marks("linear_attention_freq", layers, False, 0)
        windowed = self._marks(
            "window_attn_skip_freq", layers, False, int(settings.has("window_size"))
        )
        if settings.has("no_rope_freq"):
            every = layer_frequency.read_frequency(
                settings.raw("no_rope_freq"), settings.label("no_rope_freq")
            )
            turning = layer_frequency.expand_frequency(
                every, layers, False, settings.label("no_rope_freq")
            )
            still = turning if isinstance(every, tuple) else tuple(1 - mark for mark in turning)
        else:
            still = (0,) * layers
        kinds = [
            (bool(linear[i]), bool(windowed[i] and settings.has("window_size")), bool(still[i]),
             bool(routed[i] and self.experts is not None))
            for i in range(layers)
        ]  # fmt: skip
        made = {kind: self._block(*kind, among=set(kinds)) for kind in dict.fromkeys(kinds)}
        return tuple(made[kind] for kind in kinds)

    def _block(
        self, linear: bool, windowed: bool, still: bool, routed: bool, *, among: set[Any]
    ) -> BlockSpec:
        mixer = self._mixer(linear, windowed, still)
        words = []
        if len({kind[0] for kind in among}) > 1:
            words.append("linear" if linear else "full")
        if len({kind[1] for kind in among}) > 1:
            words.append("local" if windowed else "global")
        if still and any(not kind[2] for kind in among):
            words.append("nope")
        words.append("moe" if routed else "dense")
        mlp: FeedForward | None = self.experts if routed else self.mlp
        return BlockSpec(name="-".join(words), mixer=mixer, mlp=mlp)

    def _mixer(self, linear: bool, windowed: bool, still: bool) -> Mixer | None:
        if linear:
            return attention_config.read_gated_delta_net(self.settings)
        if self.latent:
            return attention_config.read_mla(self.settings, self.rotary)
        turning = None if still else self.rotary
        return attention_config.read_attention(self.settings, self.hidden, turning, windowed)

    def _hybrid(self, pattern: str) -> tuple[BlockSpec, ...] | None:
        settings, word = self.settings, pattern.split("/", 1)[0].replace("|", "")
        strange = sorted(set(word) - set(LAYER_SYMBOLS))
        if strange or not word:
            settings.add_problem(
                "hybrid_layer_pattern",
                f"{strange[:1] or word!r} is not a layer mark",
                f"use {' '.join(LAYER_SYMBOLS)}",
            )
            return None
        parts: dict[str, BlockSpec] = {}
        for symbol in sorted(set(word)):
            parts[symbol] = self._part(symbol)
        return tuple(parts[symbol] for symbol in word)

    def read_mtp_block(self, word: str) -> BlockSpec | None:
        """Return the block of a multi-token head, None where it is more than one block."""
        if not word or set(word) - set(LAYER_SYMBOLS) or len(word) > 2:
            return None
        parts = [self._part(symbol) for symbol in word]
        if len(parts) == 1:
            return parts[0]
        mixer, mlp = parts[0].mixer, parts[1].mlp
        if mixer is None or mlp is None or parts[0].mlp is not None:
            return None
        return BlockSpec(name="head", mixer=mixer, mlp=mlp)

    def _part(self, symbol: str) -> BlockSpec:
        settings, name = self.settings, LAYER_SYMBOLS[symbol]
        if symbol == "E" and self.experts is None:
            settings.add_problem("num_experts", "is needed for the routed layers of the pattern",
                           f"give {settings.label('num_experts')}")  # fmt: skip
        if symbol in "-E":
            return BlockSpec(
                name=name, mlp=self.experts if symbol == "E" and self.experts else self.mlp
            )
        mixer: Mixer | None
        if symbol == "M":
            mixer = attention_config.read_mamba(settings, self.hidden)
        elif symbol == "G":
            mixer = attention_config.read_gated_delta_net(settings)
        elif symbol == "+":
            mixer = attention_config.read_mla(settings, self.rotary)
        else:
            windowed = settings.has("window_size")
            mixer = attention_config.read_attention(settings, self.hidden, self.rotary, windowed)
        # A mixer that could not be read has left its fault; the block only keeps the place.
        return BlockSpec(name=name, mixer=mixer, mlp=self.mlp if mixer is None else None)

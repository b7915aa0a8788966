"""A `Model` in Megatron-Core's settings, and back. Which layer is what stands in `layers`."""

from collections.abc import Callable
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.mcore import attention_config, layers, moe_config, rope_config
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.layer_pattern import MAX_LAYERS, compress_pattern
from meshwright.spec.model.model import Model, MtpSpec
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
)

SETTINGS = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "pad_vocab",
    "max_position_embeddings",
    "untie_embeddings_and_output_weights",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "mtp_num_layers",
    "attention_dropout",
    "hidden_dropout",
    "seq_length",
    *layers.SETTINGS,
    *attention_config.SETTINGS,
    *moe_config.SETTINGS,
    *rope_config.SETTINGS,
)

P = TypeVar("P")


def write_model(model: Model, layout: Layout) -> dict[str, Any]:
    """Return the settings of a model; what they cannot hold is found by reading them back."""
    layer_blocks = model.layer_blocks()
    hybrid = layers.is_hybrid(layer_blocks)
    blocks = layer_blocks
    if hybrid and model.multi_token is not None:
        blocks += (model.block(model.multi_token.block),)  # heads may hold parts of their own
    attention = _first(blocks, lambda block: block.mixer, AttentionSpec)
    latent = _first(blocks, lambda block: block.mixer, LatentAttentionSpec)
    latent = latent if attention is None else None  # one kind of attention per model
    biased = _biased(blocks)
    settings: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": _vocab_step(model.vocab, layout.tp),
        "max_position_embeddings": model.max_positions,
        "untie_embeddings_and_output_weights": not model.tied,
        "normalization": "RMSNorm" if model.norm.kind == "rms" else "LayerNorm",
        "norm_epsilon": model.norm.eps,
        "apply_layernorm_1p": model.norm.unit_offset,
        "add_bias_linear": biased,
        "mtp_num_layers": model.multi_token.depth if model.multi_token else None,
        # Megatron-Core drops a tenth unless told otherwise; models here drop nothing.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    turning = _rotary_of(blocks)
    positions = _position_type(model, turning, latent is not None)
    settings["position_embedding_type"] = positions
    if latent is not None or positions not in {"none", "learned_absolute"}:
        settings |= rope_config.write_rope(turning, latent is not None)
    if positions not in {"rope", "none"}:
        settings["mtp_num_layers"] = None  # Megatron refuses multi-token heads with the others
    settings |= _write_mixers(blocks, attention, latent)
    settings |= _write_feedforward(blocks, biased)
    if hybrid:
        word = layers.write_hybrid_pattern(model, layout, settings["mtp_num_layers"] is not None)
        return settings | {
            "hybrid_layer_pattern": word,
            "experimental_attention_variant": None,  # the word says it
            "num_layers": None,
            "mtp_num_layers": None,
        }
    return settings | layers.write_layer_lists(layer_blocks)


def _first(
    blocks: tuple[BlockSpec, ...], part: Callable[[BlockSpec], Any], kind: type[P]
) -> P | None:
    return next((part(block) for block in blocks if isinstance(part(block), kind)), None)


def _vocab_step(vocab: int, tp: int) -> int:
    """Return the largest usual step that leaves the table as it is, so that nothing is padded."""
    return next((step for step in (128, 64, 32, 16, 8, 4, 2) if vocab % (step * tp) == 0), 1)


def _biased(blocks: tuple[BlockSpec, ...]) -> bool:
    """Megatron-Core has one switch for the biases of all products."""
    parts = [part for block in blocks for part in (block.mixer, block.mlp) if part is not None]
    return any(getattr(part, "out_bias", getattr(part, "bias", False)) for part in parts)


def _rotary_of(blocks: tuple[BlockSpec, ...]) -> Rotary | None:
    mixers_with = (block.mixer for block in blocks)
    return next((r for m in mixers_with if (r := getattr(m, "rotary", None)) is not None), None)


def _position_type(model: Model, turning: Rotary | None, latent: bool) -> str:
    if model.positions == "learned":
        return "learned_absolute"
    if model.positions == "rotary" and turning is not None:
        return rope_config.get_position_type(turning, latent)
    return "none"


def _write_mixers(
    blocks: tuple[BlockSpec, ...],
    attention: AttentionSpec | None,
    latent: LatentAttentionSpec | None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    windows = [
        b.mixer.window for b in blocks if isinstance(b.mixer, AttentionSpec) and b.mixer.window
    ]
    delta = _first(blocks, lambda block: block.mixer, GatedDeltaNetSpec)
    mamba = _first(blocks, lambda block: block.mixer, Mamba2Spec)
    if attention is not None:
        settings |= attention_config.write_attention(attention, windows[0] if windows else None)
    elif latent is not None:
        settings |= attention_config.write_mla(latent)
    else:
        # A model without attention still has to name a head count that divides its width.
        settings |= {"num_attention_heads": 1}
    if delta is not None:
        settings |= attention_config.write_gated_delta_net(delta)
    if mamba is not None:
        settings |= attention_config.write_mamba(mamba)
    return settings


def _write_feedforward(blocks: tuple[BlockSpec, ...], biased: bool) -> dict[str, Any]:
    mlp = _first(blocks, lambda block: block.mlp, MLPSpec)
    experts = _first(blocks, lambda block: block.mlp, MoESpec)
    settings: dict[str, Any] = {}
    part: FeedForward | None = mlp or experts
    if part is not None:
        settings["ffn_hidden_size"] = part.width
        settings |= moe_config.write_activation(part, biased)
    if experts is not None:
        settings |= moe_config.write_moe(experts)
    return settings


def read_model(settings: FrameworkConfig, tp: int, name: str, vocab: int | None) -> Model | None:
    """Return the model that the settings describe, None where they describe none or a part.

    `vocab` is the size of the tokenizer's vocabulary, used where the settings leave it out.
    """
    if not (settings.has("vocab_size") or settings.has("padded_vocab_size")):
        settings.add_implied({"vocab_size": vocab})
    pattern = settings.text("hybrid_layer_pattern")
    missing = _missing(settings, pattern)
    if missing:
        _note_missing(settings, missing, pattern)
        return None
    count = settings.optional_integer("num_layers")
    hidden = settings.optional_integer("hidden_size")
    rows = _read_vocab(settings, tp)
    if hidden is None or rows is None or (count is None and not pattern):
        return None  # the fault is recorded
    if (count or 0) > MAX_LAYERS or len(pattern or "") > MAX_LAYERS:
        settings.add_problem(
            "num_layers", f"is more than {MAX_LAYERS}", f"use at most {MAX_LAYERS}"
        )
        return None
    reader = layers.LayerReader(settings, hidden)
    blocks = reader.read_blocks(count or 0, pattern)
    if not blocks or settings.problems:
        return None
    depth, head = _read_heads(settings, reader, blocks, pattern)
    kinds = dict.fromkeys(blocks)
    if depth:
        kinds[head] = None
    for key in ("attention_dropout", "hidden_dropout"):
        if (part := settings.number(key, 0.0)) != 0.0:
            settings.add_note(
                key, f"a dropout of {part} cannot be held; a model here drops nothing"
            )
    norm = settings.choice("normalization", {"LayerNorm": "layer", "RMSNorm": "rms"}, "layer")
    try:
        return Model(
            name=name,
            hidden=hidden,
            vocab=rows,
            blocks=tuple(kinds),
            pattern=compress_pattern(tuple(block.name for block in blocks)),
            norm=NormSpec(
                kind="rms" if norm == "rms" else "layer",
                eps=settings.number("norm_epsilon", 1e-5),
                bias=norm == "layer",
                unit_offset=settings.flag("apply_layernorm_1p"),
            ),
            tied=not settings.flag("untie_embeddings_and_output_weights"),
            positions=reader.positions,
            max_positions=settings.integer(
                "max_position_embeddings", settings.integer("seq_length", 4096)
            ),
            multi_token=MtpSpec(depth=depth, block=head.name) if depth else None,
        )
    except InputError as error:
        for problem in error.problems:
            settings.add_problem("norm_epsilon", problem.what, problem.fix)
        return None


def _missing(settings: FrameworkConfig, pattern: str | None) -> list[str]:
    """Return the settings without which there is no model and that are not given."""
    attends = pattern is None or bool(set("*+") & set(pattern))
    needed = {
        "num_layers": pattern is None,
        "hidden_size": True,
        "num_attention_heads": attends,
        "vocab_size": not settings.has("padded_vocab_size"),
    }
    return [key for key, asked in needed.items() if asked and not settings.has(key)]


def _note_missing(settings: FrameworkConfig, missing: list[str], pattern: str | None) -> None:
    """Name what a model lacks, where the settings begin to describe one."""
    if not (pattern or settings.has("num_layers") or settings.has("hidden_size")):
        return
    flags = " and ".join(settings.label(key) for key in missing)
    fix = f"give {flags}"
    if missing == ["vocab_size"]:
        fix += ", or the size of the tokenizer's vocabulary (vocab)"
    what = f"the model needs {flags}, which the settings leave out; only the layout is read"
    settings.add_note(missing[0], what, fix)


def _read_vocab(settings: FrameworkConfig, tp: int) -> int | None:
    padded = settings.optional_integer("padded_vocab_size")
    vocab = settings.optional_integer("vocab_size")
    step = settings.integer("make_vocab_size_divisible_by", 128) * tp
    if padded is not None or vocab is None:
        return padded
    return -(-vocab // step) * step if settings.flag("pad_vocab", True) else vocab


def _read_heads(
    settings: FrameworkConfig,
    reader: layers.LayerReader,
    blocks: tuple[BlockSpec, ...],
    pattern: str | None,
) -> tuple[int, BlockSpec]:
    """Return the number of multi-token heads and the block they run."""
    last = blocks[-1]
    if not pattern or "/" not in pattern:
        return settings.integer("mtp_num_layers", 0, least=0), last
    words = pattern.split("/")[1:]
    head = reader.read_mtp_block(words[0])
    if head is None or len(set(words)) > 1:
        settings.add_note("hybrid_layer_pattern", "heads of several layers cannot be held")
    return len(words), head or last

"""A `Model` in Megatron-Core's settings, and back. Which layer is what stands in `layers`."""

from collections.abc import Callable
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.spec.bridge.mcore import feedforward, layers, mixers, rotary
from meshwright.spec.bridge.settings import Settings
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.block import Block, Norm
from meshwright.spec.model.feedforward import Experts, FeedForward, Mlp
from meshwright.spec.model.mixers import Attention, GatedDelta, LatentAttention, Mamba2
from meshwright.spec.model.model import Model, MultiToken
from meshwright.spec.model.pattern import MOST_LAYERS, compress
from meshwright.spec.model.positions import Rotary

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
    *mixers.SETTINGS,
    *feedforward.SETTINGS,
    *rotary.SETTINGS,
)

P = TypeVar("P")


def write(model: Model, layout: Layout) -> dict[str, Any]:
    """Return the settings of a model; what they cannot hold is found by reading them back."""
    layer_blocks = model.layer_blocks()
    hybrid = layers.is_hybrid(layer_blocks)
    blocks = layer_blocks
    if hybrid and model.multi_token is not None:
        blocks += (model.block(model.multi_token.block),)  # heads may hold parts of their own
    attention = _first(blocks, lambda block: block.mixer, Attention)
    latent = _first(blocks, lambda block: block.mixer, LatentAttention)
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
        settings |= rotary.write(turning, latent is not None)
    if positions not in {"rope", "none"}:
        settings["mtp_num_layers"] = None  # Megatron refuses multi-token heads with the others
    settings |= _write_mixers(blocks, attention, latent)
    settings |= _write_feedforward(blocks, biased)
    if hybrid:
        word = layers.hybrid_pattern(model, layout, settings["mtp_num_layers"] is not None)
        return settings | {
            "hybrid_layer_pattern": word,
            "experimental_attention_variant": None,  # the word says it
            "num_layers": None,
            "mtp_num_layers": None,
        }
    return settings | layers.write_marks(layer_blocks)


def _first(blocks: tuple[Block, ...], part: Callable[[Block], Any], kind: type[P]) -> P | None:
    return next((part(block) for block in blocks if isinstance(part(block), kind)), None)


def _vocab_step(vocab: int, tp: int) -> int:
    """Return the largest usual step that leaves the table as it is, so that nothing is padded."""
    return next((step for step in (128, 64, 32, 16, 8, 4, 2) if vocab % (step * tp) == 0), 1)


def _biased(blocks: tuple[Block, ...]) -> bool:
    """Megatron-Core has one switch for the biases of all products."""
    parts = [part for block in blocks for part in (block.mixer, block.mlp) if part is not None]
    return any(getattr(part, "out_bias", getattr(part, "bias", False)) for part in parts)


def _rotary_of(blocks: tuple[Block, ...]) -> Rotary | None:
    mixers_with = (block.mixer for block in blocks)
    return next((r for m in mixers_with if (r := getattr(m, "rotary", None)) is not None), None)


def _position_type(model: Model, turning: Rotary | None, latent: bool) -> str:
    if model.positions == "learned":
        return "learned_absolute"
    if model.positions == "rotary" and turning is not None:
        return rotary.position_type(turning, latent)
    return "none"


def _write_mixers(
    blocks: tuple[Block, ...], attention: Attention | None, latent: LatentAttention | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    windows = [b.mixer.window for b in blocks if isinstance(b.mixer, Attention) and b.mixer.window]
    delta = _first(blocks, lambda block: block.mixer, GatedDelta)
    mamba = _first(blocks, lambda block: block.mixer, Mamba2)
    if attention is not None:
        settings |= mixers.write_attention(attention, windows[0] if windows else None)
    elif latent is not None:
        settings |= mixers.write_latent(latent)
    else:
        # A model without attention still has to name a head count that divides its width.
        settings |= {"num_attention_heads": 1}
    if delta is not None:
        settings |= mixers.write_delta(delta)
    if mamba is not None:
        settings |= mixers.write_mamba(mamba)
    return settings


def _write_feedforward(blocks: tuple[Block, ...], biased: bool) -> dict[str, Any]:
    mlp = _first(blocks, lambda block: block.mlp, Mlp)
    experts = _first(blocks, lambda block: block.mlp, Experts)
    settings: dict[str, Any] = {}
    part: FeedForward | None = mlp or experts
    if part is not None:
        settings["ffn_hidden_size"] = part.width
        settings |= feedforward.write_activation(part, biased)
    if experts is not None:
        settings |= feedforward.write_experts(experts)
    return settings


def read(settings: Settings, tp: int, name: str, vocab: int | None) -> Model | None:
    """Return the model that the settings describe, None where they describe none or a part.

    `vocab` is the size of the tokenizer's vocabulary, used where the settings leave it out.
    """
    if not (settings.given("vocab_size") or settings.given("padded_vocab_size")):
        settings.put({"vocab_size": vocab})
    pattern = settings.text("hybrid_layer_pattern")
    missing = _missing(settings, pattern)
    if missing:
        _note_missing(settings, missing, pattern)
        return None
    count = settings.optional_whole("num_layers")
    hidden = settings.optional_whole("hidden_size")
    rows = _read_vocab(settings, tp)
    if hidden is None or rows is None or (count is None and not pattern):
        return None  # the fault is recorded
    if (count or 0) > MOST_LAYERS or len(pattern or "") > MOST_LAYERS:
        settings.wrong("num_layers", f"is more than {MOST_LAYERS}", f"use at most {MOST_LAYERS}")
        return None
    reader = layers.LayerReader(settings, hidden)
    blocks = reader.blocks(count or 0, pattern)
    if not blocks or settings.problems:
        return None
    depth, head = _read_heads(settings, reader, blocks, pattern)
    kinds = dict.fromkeys(blocks)
    if depth:
        kinds[head] = None
    for key in ("attention_dropout", "hidden_dropout"):
        if (part := settings.number(key, 0.0)) != 0.0:
            settings.note(key, f"a dropout of {part} cannot be held; a model here drops nothing")
    norm = settings.choice("normalization", {"LayerNorm": "layer", "RMSNorm": "rms"}, "layer")
    try:
        return Model(
            name=name,
            hidden=hidden,
            vocab=rows,
            blocks=tuple(kinds),
            pattern=compress(tuple(block.name for block in blocks)),
            norm=Norm(
                kind="rms" if norm == "rms" else "layer",
                eps=settings.number("norm_epsilon", 1e-5),
                bias=norm == "layer",
                unit_offset=settings.flag("apply_layernorm_1p"),
            ),
            tied=not settings.flag("untie_embeddings_and_output_weights"),
            positions=reader.positions,
            max_positions=settings.whole(
                "max_position_embeddings", settings.whole("seq_length", 4096)
            ),
            multi_token=MultiToken(depth=depth, block=head.name) if depth else None,
        )
    except InputError as error:
        for problem in error.problems:
            settings.wrong("norm_epsilon", problem.what, problem.fix)
        return None


def _missing(settings: Settings, pattern: str | None) -> list[str]:
    """Return the settings without which there is no model and that are not given."""
    attends = pattern is None or bool(set("*+") & set(pattern))
    needed = {
        "num_layers": pattern is None,
        "hidden_size": True,
        "num_attention_heads": attends,
        "vocab_size": not settings.given("padded_vocab_size"),
    }
    return [key for key, asked in needed.items() if asked and not settings.given(key)]


def _note_missing(settings: Settings, missing: list[str], pattern: str | None) -> None:
    """Name what a model lacks, where the settings begin to describe one."""
    if not (pattern or settings.given("num_layers") or settings.given("hidden_size")):
        return
    flags = " and ".join(settings.label(key) for key in missing)
    fix = f"give {flags}"
    if missing == ["vocab_size"]:
        fix += ", or the size of the tokenizer's vocabulary (vocab)"
    what = f"the model needs {flags}, which the settings leave out; only the layout is read"
    settings.note(missing[0], what, fix)


def _read_vocab(settings: Settings, tp: int) -> int | None:
    padded = settings.optional_whole("padded_vocab_size")
    vocab = settings.optional_whole("vocab_size")
    step = settings.whole("make_vocab_size_divisible_by", 128) * tp
    if padded is not None or vocab is None:
        return padded
    return -(-vocab // step) * step if settings.flag("pad_vocab", True) else vocab


def _read_heads(
    settings: Settings, reader: layers.LayerReader, blocks: tuple[Block, ...], pattern: str | None
) -> tuple[int, Block]:
    """Return the number of multi-token heads and the block they run."""
    last = blocks[-1]
    if not pattern or "/" not in pattern:
        return settings.whole("mtp_num_layers", 0, least=0), last
    words = pattern.split("/")[1:]
    head = reader.head(words[0])
    if head is None or len(set(words)) > 1:
        settings.note("hybrid_layer_pattern", "heads of several layers cannot be held")
    return len(words), head or last

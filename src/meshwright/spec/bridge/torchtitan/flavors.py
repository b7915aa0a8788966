"""The architectures that torchtitan has by name, as models.

Sizes are those of torchtitan/models/*/__init__.py in torchtitan 0.2.2; debug flavors, Llama 4 and
the ones that only pick an attention kernel are left out.
"""

from collections.abc import Callable
from functools import cache

import msgspec

from meshwright.spec.bridge.spec_diff import LLAMA3_ROPE
from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.decoder_builders import build_decoder_model
from meshwright.spec.model.feedforward import MLPSpec, MoESpec
from meshwright.spec.model.model import Model
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.model.token_mixers import AttentionSpec, LatentAttentionSpec

_LLAMA3 = Rotary(theta=500000.0, scaling="llama3", factor=8.0, **LLAMA3_ROPE)


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Model:
    return build_decoder_model(
        "llama3", layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=128256,
        rotary=_LLAMA3, max_positions=131072,
    )  # fmt: skip


def _qwen3(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    tied: bool = False,
    experts: MoESpec | None = None,
    theta: float = 1e6,
    positions: int = 4096,
) -> Model:
    attention = AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=128, qk_norm="head", rotary=Rotary(theta=theta)
    )
    block = BlockSpec(name="dense", mixer=attention, mlp=MLPSpec(width=ffn))
    if experts is not None:
        block = BlockSpec(name="moe", mixer=attention, mlp=experts)
    return Model(
        name="qwen3",
        family="qwen3",
        hidden=hidden,
        vocab=151936,
        blocks=(block,),
        pattern=f"{layers}*{block.name}",
        norm=NormSpec(eps=1e-6),
        tied=tied,
        max_positions=positions,
    )


def _deepseek(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, *, dense: int, q_rank: int | None,
    experts: MoESpec, mscale: float = 1.0,
) -> Model:  # fmt: skip
    rotary = Rotary(
        interleaved=True, scaling="yarn", factor=40.0, original_positions=4096, beta_fast=32.0,
        beta_slow=1.0, mscale=mscale,
    )  # fmt: skip
    attention = LatentAttentionSpec(
        heads=heads, q_rank=q_rank, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128,
        rotary=rotary,
    )  # fmt: skip
    return Model(
        name="deepseek_v3",
        family="deepseek_v3",
        hidden=hidden,
        vocab=vocab,
        blocks=(
            BlockSpec(name="dense", mixer=attention, mlp=MLPSpec(width=ffn)),
            BlockSpec(name="moe", mixer=attention, mlp=experts),
        ),
        pattern=f"{dense}*dense {layers - dense}*moe",
        max_positions=16384,
    )


def _gpt_oss(layers: int, experts: int) -> Model:
    rotary = Rotary(
        theta=150000.0, scaling="yarn", factor=32.0, original_positions=4096, beta_fast=32.0,
        beta_slow=1.0, truncate=False,
    )  # fmt: skip
    routed = MoESpec(
        count=experts, top_k=4, width=2880, bias=True, router_bias="linear",
        activation="swiglu-clamped",
    )  # fmt: skip
    full = AttentionSpec(
        heads=64, kv_heads=8, head_dim=64, qkv_bias=True, out_bias=True, rotary=rotary, sinks=True
    )
    return Model(
        name="gpt_oss",
        family="gpt_oss",
        hidden=2880,
        vocab=201088,
        blocks=(
            BlockSpec(name="local", mixer=msgspec.structs.replace(full, window=128), mlp=routed),
            BlockSpec(name="global", mixer=full, mlp=routed),
        ),
        pattern=f"{layers // 2}*(local global)",
        max_positions=131072,
    )


def _small_experts(width: int) -> MoESpec:
    return MoESpec(count=128, top_k=8, width=width)


_FLAVORS: dict[tuple[str, str], Callable[[], Model]] = {
    ("llama3", "8B"): lambda: _llama3(32, 4096, 32, 14336),
    ("llama3", "70B"): lambda: _llama3(80, 8192, 64, 28672),
    ("llama3", "405B"): lambda: _llama3(126, 16384, 128, 53248),
    ("qwen3", "0.6B"): lambda: _qwen3(28, 1024, 16, 8, 3072, tied=True),
    ("qwen3", "1.7B"): lambda: _qwen3(28, 2048, 16, 8, 6144, tied=True),
    ("qwen3", "4B"): lambda: _qwen3(36, 2560, 32, 8, 9728, tied=True),
    ("qwen3", "8B"): lambda: _qwen3(36, 4096, 32, 8, 12288),
    ("qwen3", "14B"): lambda: _qwen3(40, 5120, 40, 8, 17408),
    ("qwen3", "32B"): lambda: _qwen3(64, 5120, 64, 8, 25600),
    ("qwen3", "30B-A3B"): lambda: _qwen3(
        48, 2048, 32, 4, 6144, experts=_small_experts(768), positions=262144
    ),
    ("qwen3", "235B-A22B"): lambda: _qwen3(
        94, 4096, 64, 4, 12288, experts=_small_experts(1536), theta=5e6
    ),
    ("deepseek_v3", "16B"): lambda: _deepseek(
        27, 2048, 16, 10944, 102400, dense=1, q_rank=None, mscale=0.7,
        experts=MoESpec(count=64, top_k=6, width=1408, shared_width=2816, normalise=False,
                        router_bias="balance"),
    ),
    ("deepseek_v3", "236B"): lambda: _deepseek(
        60, 5120, 128, 12288, 102400, dense=1, q_rank=1536,
        experts=MoESpec(count=160, top_k=6, width=1536, shared_width=3072, normalise=False,
                        scale=16.0, groups=8, groups_used=3, router_bias="balance"),
    ),
    ("deepseek_v3", "671B"): lambda: _deepseek(
        61, 7168, 128, 18432, 129280, dense=3, q_rank=1536,
        experts=MoESpec(count=256, top_k=8, width=2048, shared_width=2048, scoring="sigmoid",
                        scale=2.5, groups=8, groups_used=4, router_bias="balance"),
    ),
    ("gpt_oss", "20b"): lambda: _gpt_oss(24, 32),
    ("gpt_oss", "120b"): lambda: _gpt_oss(36, 128),
}  # fmt: skip


@cache
def get_flavor_model(name: str, flavor: str) -> Model | None:
    """Return the model of a flavor, None where it is not one of these."""
    made = _FLAVORS.get((name, flavor))
    return made() if made is not None else None


def find_flavor(model: Model) -> tuple[str, str] | None:
    """Return the flavor that has the same matrices in every layer, None where none has."""
    for name, flavor in _FLAVORS:
        known = get_flavor_model(name, flavor)
        if known is not None and _shape(known) == _shape(model):
            return name, flavor
    return None


def _shape(model: Model) -> tuple[object, ...]:
    blocks = {block.name: block.list_weights(model.hidden) for block in model.blocks}
    layers = tuple(blocks[name] for name in model.layer_names)
    return (model.hidden, model.vocab, model.tied, model.vision is None, layers)

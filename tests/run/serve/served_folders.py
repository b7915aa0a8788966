"""Folders of small models, of each kind that is served, with an adapter and its merged weights."""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    Rotary,
)
from meshwright.spec.model.huggingface import load_config
from meshwright.spec.model.token_mixers import Mixer
from tests.run.serve.model.small import made
from tests.run.serve.model.test_gguf import trained

VOCAB = 336
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "": {"model_type": "llama", **_SIZES},
    "window": {"model_type": "mistral", **_SIZES, "sliding_window": 6},
    "latent": {
        "model_type": "deepseek_v3", **_SIZES, **_EXPERTS, "num_key_value_heads": 4,
        "first_k_dense_replace": 2, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 64, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
    },
    "recurrent": {
        "model_type": "nemotron_h", **_SIZES, **_EXPERTS, "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 24,
        "conv_kernel": 4, "use_conv_bias": True, "mlp_hidden_act": "relu2",
    },
}  # fmt: skip
ADAPTED = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj", "out_proj")
_MIXERS: dict[str, Mixer] = {
    "window": AttentionSpec(heads=4, kv_heads=2, head_dim=8, rotary=Rotary(), window=6),
    "latent": LatentAttentionSpec(
        heads=4, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=6, rotary=Rotary()
    ),
    "recurrent": Mamba2Spec(heads=4, head_dim=8, state_dim=6, groups=2),
}


def mixed(kinds: tuple[str, ...]) -> Model:
    """Return a model with layers of several kinds; its weights are drawn."""
    blocks = tuple(
        BlockSpec(name=kind, mixer=_MIXERS[kind], mlp=MLPSpec(width=64)) for kind in kinds
    )
    return Model(
        name="mixed", hidden=32, vocab=VOCAB, blocks=blocks, pattern=" ".join(kinds),
        max_positions=64,
    )  # fmt: skip


@cache
def root() -> Path:
    path = Path(mkdtemp(prefix="served-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def folder(kind: str) -> Path:
    """Write a model of a kind, with words, an adapter, and the same with the adapter merged."""
    path = root() / (kind or "plain")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_hf_checkpoint(made(load_config(path)), path)
    trained(digits=True).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    _adapt(path)
    if kind != "recurrent":
        _draft(path)
    return path


def _draft(path: Path) -> None:
    """Write a draft beside a model, whose guesses are right more often than not."""
    tensors, draw = load_file(path / "model.safetensors"), torch.Generator().manual_seed(9)
    for weight in tensors.values():
        weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=draw))
    (path / "draft").mkdir()
    save_file(tensors, path / "draft" / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(path / name, path / "draft" / name)


def _adapt(path: Path) -> None:
    tensors, low = load_file(path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in ADAPTED:
            a = torch.randn(2, weight.shape[1], generator=generator) / 4
            b = torch.randn(weight.shape[0], 2, generator=generator)
            tensors[name] = weight + 2 * b @ a
            low[f"base_model.model.{module}.lora_A.weight"] = a
            low[f"base_model.model.{module}.lora_B.weight"] = b
    (path / "merged").mkdir()
    (path / "adapter").mkdir()
    save_file(tensors, path / "merged" / "model.safetensors")
    (path / "merged" / "config.json").write_text((path / "config.json").read_text())
    save_file(low, path / "adapter" / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(facts))


@cache
def bare(kinds: tuple[str, ...], *, merged: bool = False, int4: bool = False) -> Decoder:
    """Return a decoder that keeps nothing between tokens."""
    if len(kinds) > 1:
        decoder = build_decoder(mixed(kinds), device="meta", dtype=torch.float32,
                        options=BuildOptions(include_mtp=False))  # fmt: skip
        materialize(decoder, torch.device("cpu"), seed=0)
    else:
        path = folder(kinds[0] if kinds else "")
        decoder = load_served_model(path / "merged" if merged else path, device="cpu",
                              dtype=torch.float32)  # fmt: skip
    if int4:
        quantize_model(decoder, "int4")
    return decoder.eval().requires_grad_(False)


def named(kinds: tuple[str, ...]) -> Path | Model:
    """Return what an engine is started with."""
    return mixed(kinds) if len(kinds) > 1 else folder(kinds[0] if kinds else "")

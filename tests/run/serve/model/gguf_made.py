"""GGUF files of transformers' models and of tokenizers, as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    theirs: Any,
    kind: str = "F32",
    *,
    tokenizer: str = "",
    stretch: Tensor | None = None,
    **facts: Any,
) -> None:
    """Write a model of transformers, matrices quantised as `kind`."""
    config = theirs.config
    name = config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        write_tokenizer(writer, json.loads(tokenizer))
    for key, value in facts.items():
        writer.add_string(key.replace("__", "."), value)
    if stretch is not None:
        writer.add_tensor("rope_freqs.weight", stretch.numpy())
    for key, weight in theirs.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight
        if name == "llama" and key.endswith("q_proj.weight"):
            values = interleaved(weight, config.num_attention_heads)
        if name == "llama" and key.endswith("k_proj.weight"):
            values = interleaved(weight, config.num_key_value_heads)
        data = values.float().numpy()
        quant = gguf.GGMLQuantizationType[kind if data.ndim > 1 else "F32"]
        if quant.name == "F32":
            writer.add_tensor(renamed(key), data)
        else:
            writer.add_tensor(renamed(key), gguf.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(theirs: Any, kind: str) -> None:
    """Give a model the numbers that its matrices have once they were quantised."""
    quant = gguf.GGMLQuantizationType[kind]
    for weight in theirs.parameters():
        if weight.dim() > 1:
            numbers = gguf.dequantize(gguf.quantize(weight.data.numpy(), quant), quant)
            weight.data.copy_(torch.from_numpy(numbers))


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of heads as llama.cpp turns them."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def renamed(key: str) -> str:
    """Return llama.cpp's name of a tensor."""
    name, ending = key.rsplit(".", 1)
    if name.startswith("model.layers."):
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{ending}"
    return f"{NAMES[name]}.{ending}"


def write_tokenizer(writer: Any, described: dict[str, Any]) -> None:
    """Write the vocabulary of a `tokenizer.json`, with facts under `gguf` that it cannot say."""
    special = {each["id"]: each["content"] for each in described["added_tokens"]}
    vocab = {**described["model"]["vocab"], **{word: number for number, word in special.items()}}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    facts = described["gguf"]
    writer.add_tokenizer_model(facts["model"])
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    if "scores" in facts:
        writer.add_token_scores(facts["scores"])
    else:
        writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(facts["bos"])
    writer.add_eos_token_id(facts["eos"])
    writer.add_unk_token_id(facts["bos"])
    writer.add_add_bos_token(facts["add_bos"])
    if "template" in facts:
        writer.add_chat_template(facts["template"])

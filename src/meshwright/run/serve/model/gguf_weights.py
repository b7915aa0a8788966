"""A decoder from a GGUF file: the model its facts describe, and weights by the names of llama.cpp.

Facts and names are brought to those of Hugging Face, whose tables then do the rest. llama.cpp turns
neighbouring elements of a head where Hugging Face turns halves, and its converter interleaves the
rows of queries and keys of the `llama` architecture to suit; they are put back in order here.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface.hf_loader import load_tensors_into
from meshwright.run.serve.model.gguf_file import GgufFile
from meshwright.spec.model import AttentionSpec, Model
from meshwright.spec.model.huggingface import read_config

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_STRETCH = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_OUTSIDE = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def load_gguf(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """Build the model that a file describes and fill it, dequantised to `dtype`."""
    with GgufFile(path) as file:
        model = model_from_gguf(file)
        decoder = build_decoder(model, device="meta", dtype=dtype)
        load_tensors_into(decoder, _Weights(file, model), device=device)
    return decoder.eval().requires_grad_(False)


def load_gguf_into(decoder: Decoder, path: str | Path) -> None:
    """Fill a decoder that has been built from a file, to be trained on."""
    with GgufFile(path) as file:
        load_tensors_into(decoder, _Weights(file, decoder.model))


def model_from_gguf(file: GgufFile) -> Model:
    """Return the model that a file's facts describe."""
    kind = file.metadata_str("general.architecture")
    if kind not in _ARCHITECTURES or file.metadata(f"{kind}.expert_count"):
        what = f"{kind!r} is not read here" if kind not in _ARCHITECTURES else "it has experts"
        fix = f"use a dense {', '.join(_ARCHITECTURES)} file, or the Hugging Face folder"
        raise InputError([Problem(f"{file.path}: general.architecture", what, fix)])
    heads, hidden = (
        file.metadata_int(f"{kind}.attention.head_count"),
        file.metadata_int(f"{kind}.embedding_length"),
    )
    if heads < 1 or _EMBEDDING not in file.names:
        what = f"has {heads} attention heads" if heads < 1 else f"has no tensor {_EMBEDDING}"
        raise InputError([Problem(str(file.path), what, "fetch it again")])
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": file.metadata_int(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.metadata_int(f"{kind}.attention.head_count_kv", heads),
        "head_dim": file.metadata_int(f"{kind}.attention.key_length", hidden // heads),
        "intermediate_size": file.metadata_int(f"{kind}.feed_forward_length"),
        "max_position_embeddings": file.metadata_int(f"{kind}.context_length"),
        "rms_norm_eps": file.metadata_float(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.metadata_float(f"{kind}.rope.freq_base", 10_000.0),
        "vocab_size": file.shape(_EMBEDDING)[0],
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": "blk.0.attn_q.bias" in file.names,
        **_stretched(file, kind),
    }
    model = read_config(config, file.metadata_str("general.name", file.path.stem))
    if _STRETCH not in file.names:
        return model
    # Llama 3's stretched wavelengths stand in the file as a factor for each pair of dimensions.
    factors = tuple(file.read(_STRETCH).double().tolist())
    blocks = []
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rotary is not None
        rotary = replace(
            mixer.rotary,
            scaling="longrope",
            short_factors=factors,
            long_factors=factors,
            attention_factor=1.0,
        )
        blocks.append(replace(block, mixer=replace(mixer, rotary=rotary)))
    return replace(model, blocks=tuple(blocks))


def _stretched(file: GgufFile, kind: str) -> dict[str, Any]:
    rule = file.metadata_str(f"{kind}.rope.scaling.type", "none")
    if rule == "none":
        return {}
    if rule not in {"linear", "yarn"}:
        what = f"positions are stretched by {rule!r}"
        where = f"{file.path}: {kind}.rope.scaling.type"
        raise InputError([Problem(where, what, "use a file with none, linear or yarn")])
    factor = file.metadata_float(f"{kind}.rope.scaling.factor", 1.0)
    scaling: dict[str, Any] = {"rope_type": rule, "factor": factor}
    original = file.metadata_int(f"{kind}.rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


class _Weights:
    """A file's tensors under the names of Hugging Face."""

    def __init__(self, file: GgufFile, model: Model) -> None:
        self.folder, self._file = file.path, file
        self._names = {
            theirs: name for name in file.names if name != _STRETCH for theirs in [_renamed(name)]
        }
        self.shapes = {theirs: file.shape(name) for theirs, name in self._names.items()}
        mixer = model.blocks[0].mixer
        assert isinstance(mixer, AttentionSpec)
        self._heads = {"q_proj": mixer.heads, "k_proj": mixer.kv_heads}
        self._interleaved = model.family == "llama"

    def files(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the one file with all names."""
        yield self.folder.name, list(self._names)

    def read(self, name: str, device: torch.device) -> Tensor:
        """Read one tensor, rows of heads in the order of Hugging Face."""
        tensor = self._file.read(self._names[name]).to(device)
        heads = self._heads.get(name.split(".")[-2]) if self._interleaved else None
        if heads is None:
            return tensor
        rows: Tensor = tensor.unflatten(0, (heads, -1, 2))
        return rows.transpose(1, 2).reshape(tensor.shape)

    def unreadable(self, name: str) -> str:
        """Every tensor can be tried; reading says where one cannot."""
        del name
        return ""


def _renamed(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    found = _LAYER.fullmatch(name)
    if found and found[2] in _INSIDE:
        return f"model.layers.{found[1]}.{_INSIDE[found[2]]}.{found[3]}"
    # Left as it is: filling the decoder names it as one too many.
    return name

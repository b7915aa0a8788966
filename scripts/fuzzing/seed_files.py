"""Small valid files of models, tokenizers, topologies, settings and data sets, to be mutated."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

from meshwright.run.train.checkpoint.metadata import (
    FORMAT_VERSION,
    CheckpointMetadata,
    SavedChunk,
    SavedFile,
    SavedTensor,
    encode_metadata,
)

_ROOT = Path(__file__).parents[2]
_TOPOLOGIES = _ROOT / "tests" / "spec" / "cluster" / "data"
_GRAPH = (
    '<graphs version="1"><graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="24" '
    'speedinter="12.5" latencyinter="1.5" typeintra="NVL" typeinter="PXN" samechannels="0">'
    '<channel><net dev="3"/><gpu dev="0"/><gpu dev="1"/><net dev="0"/></channel></graph></graphs>'
)
_MSCCL = (
    '<algo name="x" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="allgather" '
    'inplace="0" outofplace="1" minBytes="0" maxBytes="0">'
    + "".join(
        f'<gpu id="{rank}" i_chunks="1" o_chunks="2" s_chunks="0"><tb id="0" send="{1 - rank}" '
        f'recv="{1 - rank}" chan="0"><step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" '
        f'dstoff="{rank}" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb></gpu>'
        for rank in range(2)
    )
    + "</algo>"
)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 360, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
}  # fmt: skip
_MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None
}  # fmt: skip
_QWEN3_NEXT = LLAMA | {
    "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "rope_scaling": None,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def make_xml(_folder: Path) -> Iterator[bytes]:
    """Topologies and search graphs of NCCL, and an algorithm of MSCCL."""
    for path in sorted(_TOPOLOGIES.glob("*.xml")):
        yield path.read_bytes()
    yield _GRAPH.encode()
    yield _MSCCL.encode()


def make_topology_text(_folder: Path) -> Iterator[bytes]:
    """What `nvidia-smi topo -m` prints, and Slurm's topology.conf."""
    for path in sorted(_TOPOLOGIES.glob("*.txt")):
        yield path.read_bytes()
    yield b"SwitchName=s0 Nodes=t[0-3]\nSwitchName=s1 Nodes=t[4-7]\nSwitchName=c Switches=s[0-1]\n"
    yield b"BlockName=b0 Nodes=n[00-17]\nBlockName=b1 Nodes=n[18-35]\nBlockSizes=18,36\n"


def make_spec(_folder: Path) -> Iterator[bytes]:
    """A job as TOML, JSON and YAML, and a collective."""
    for path in sorted((_ROOT / "examples").glob("*.toml")):
        yield path.read_bytes()
    yield b'model = "llama3-8b"\ncluster = "h100-superpod"\n[layout]\ntp = 8\npp = 2\n'
    yield b'{"model": "llama3-8b", "cluster": {"nodes": 4}, "layout": {"tp": 2}}'
    yield b"---\nmodel: &m llama3-8b\ncluster: {nodes: 4, gpu: *m}\nlayout:\n  tp: 8\n"
    moves = [[0, 0, 0, 1, 0, 0]]
    sweep = {"span": 1, "shift": [0], "moves": moves}
    yield json.dumps({
        "name": "x", "op": "all-gather", "ranks": 2, "chunks": 2, "slots": 2, "sweeps": [sweep],
    }).encode()  # fmt: skip


def make_hf_config(_folder: Path) -> Iterator[bytes]:
    """Configurations of several families."""
    for config in (LLAMA, _MIXTRAL, _QWEN3_NEXT):
        yield json.dumps(config).encode()


def make_gguf(folder: Path) -> Iterator[bytes]:
    """A small decoder with each kind of vocabulary."""
    for kind in ("gpt2", "llama"):
        path = folder / f"{kind}.gguf"
        write_small_gguf(path, kind, "F32" if kind == "gpt2" else "Q8_0")
        yield path.read_bytes()


def write_small_gguf(path: Path, kind: str = "gpt2", dtype: str = "F32", **facts: Any) -> None:
    """Write a decoder of one layer, as llama.cpp's converter does."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 8),
        (writer.add_block_count, 1), (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 2), (writer.add_head_count_kv, 1),
        (writer.add_vocab_size, 8),
    ):  # fmt: skip
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    tokens = ["<s>", "</s>", "a", "b", "ab", "\u2581", "<0x0A>", "c"]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 6, 1])
    if kind == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0, -5.0])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    for key, value in facts.items():
        writer.add_string(key.replace("__", "."), value)
    shapes = {
        "token_embd": (8, 8), "output_norm": (8,), "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8), "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (8, 8),
        "blk.0.ffn_up": (8, 8), "blk.0.ffn_down": (8, 8),
    }  # fmt: skip
    quantised = gguf.GGMLQuantizationType[dtype]
    for name, shape in shapes.items():
        numbers = np.ones(shape if dtype == "F32" else (*shape[:-1], 32), np.float32)
        if dtype == "F32" or len(shape) == 1:
            writer.add_tensor(f"{name}.weight", numbers)
        else:
            packed = gguf.quantize(numbers, quantised)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_safetensors(_folder: Path) -> Iterator[bytes]:
    """Plain, quantised and low-rank tensors."""
    yield save({"a.weight": torch.ones(4, 8), "b": torch.zeros(3, dtype=torch.bfloat16)})
    yield save(
        {
            "w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1),
            "x_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8),
            "x_scales": torch.zeros(1, 2, 1, dtype=torch.uint8),
        }
    )  # fmt: skip
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    yield save(
        {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}
    )


def make_tokenizer(_folder: Path) -> Iterator[bytes]:
    """Byte-level BPE, unigram, word pieces and whole words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    end = "<|im_start|>"
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, end: 3}, [("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(r"\p{N}{1,3}|\s+", "isolated"), pre_tokenizers.ByteLevel()]
    )
    bpe.decoder, bpe.normalizer = decoders.ByteLevel(), normalizers.NFC()
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A $B", special_tokens=[(end, 3)]
    )
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0, True))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Replace("b", "a"), normalizers.Lowercase(), normalizers.Strip()]
    )
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Punctuation()
    for tokenizer in (bpe, unigram, pieces, words):
        tokenizer.add_special_tokens([end, "</s>"])
        tokenizer.enable_padding(length=8)
        tokenizer.enable_truncation(16, stride=2)
        yield tokenizer.to_str().encode()


def make_text_parquet(_folder: Path) -> Iterator[bytes]:
    """Rows of text, and of conversations."""
    messages = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]] * 3
    for columns in (
        {"text": ["a", "b", None], "n": [1, 2, 3]},
        {"messages": messages, "text": pa.array(["x", "y", "x"]).dictionary_encode()},
    ):
        written = io.BytesIO()
        pq.write_table(pa.table(columns), written)
        yield written.getvalue()


def make_records(_folder: Path) -> Iterator[bytes]:
    """Lines of JSON, a list of objects, and traces of requests."""
    rows = [{"text": "a", "prompt": "b", "id": n, "messages": [{"role": "user"}]} for n in range(3)]
    yield "\n".join(map(json.dumps, rows)).encode()
    yield json.dumps(rows).encode()
    mooncake = {"timestamp": 27, "input_length": 6, "output_length": 5, "hash_ids": [46, 47]}
    yield "\n".join([json.dumps(mooncake)] * 3).encode()
    yield b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    columns = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    yield columns + b"\n5,GPT,472,18,490,API\n"


def make_checkpoint(_folder: Path) -> Iterator[bytes]:
    """The record of a checkpoint of two ranks."""
    files = tuple(
        SavedFile(name=f"rank-0000{rank}.safetensors", header_bytes=64, data_bytes=48,
                  block_bytes=64, checksums=(1, 2))
        for rank in range(2)
    )  # fmt: skip
    halves = tuple(
        SavedChunk(offsets=(3 * rank, 0), sizes=(3, 4), file=rank, start=64) for rank in range(2)
    )
    tensor = SavedTensor(dtype="F32", shape=(6, 4), chunks=halves)
    extra = msgspec.Raw(b'{"a": [1, null]}')
    record = CheckpointMetadata(
        format=FORMAT_VERSION, serial=3, step=150, ranks=2, files=files, tensors={"w": tensor},
        extra=extra,
    )  # fmt: skip
    yield encode_metadata(record)

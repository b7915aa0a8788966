"""Loading: what is refused and how it is said, and what may differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import read_config

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 32,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 8,
    "vocab_size": 32,
}
WEIGHTS = "model.safetensors"


def made(model: Model, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = build_decoder(model, dtype=dtype)
    materialize(decoder, "cpu", seed=1)
    return decoder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def equal(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_everything_amiss_is_listed_at_once(llama: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 16)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
        tensors["lm_head.weight"] = torch.zeros(32, 16, dtype=torch.int32)

    change(llama, edit)
    with pytest.raises(InputError) as caught:
        load_hf_checkpoint(None, llama)
    found = {problem.where.rsplit(": ", 1)[1]: problem.what for problem in caught.value.problems}
    assert found == {
        "model.norm.weight": "is missing; it fills final_norm.weight",
        "model.layers.1.self_attn.k_proj.weight": "is missing; it fills layers.1.mixer.qkv.weight",
        "model.layers.0.mlp.up_proj.weight": "has shape [7, 16], not [24, 16]",
        "model.layers.2.mlp.up_proj.weight": "a llama model of this shape has no such tensor",
        "lm_head.weight": "holds I32, not floating-point values",
    }


def test_a_checkpoint_of_another_model_is_told_in_a_few_lines(llama: Path) -> None:
    wider = read_config({**LLAMA, "hidden_size": 32, "head_dim": 8, "num_hidden_layers": 3})
    with pytest.raises(InputError) as caught:
        load_hf_checkpoint(wider, llama)
    said = [problem.what for problem in caught.value.problems]
    assert len(said) <= 8
    # Nine tensors of the layer that is not there, and as many of each of the others.
    assert "6 more tensors are missing, 9 in all" in said
    assert "18 more tensors have other shapes, 21 in all" in said


def test_a_faulty_checkpoint_leaves_the_decoder_as_it_was(llama: Path) -> None:
    decoder, before = made(read_config(LLAMA)), made(read_config(LLAMA))
    change(llama, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(InputError):
        load_hf_checkpoint(decoder, llama)
    assert equal(decoder, before)


def test_a_decoder_is_filled_where_it_is_in_its_own_type(llama: Path) -> None:
    decoder = build_decoder(read_config(LLAMA), device="cpu", dtype=torch.bfloat16)
    assert load_hf_checkpoint(decoder, llama) is decoder
    assert equal(decoder, made(read_config(LLAMA)).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_built_in_the_type_asked_for(llama: Path, dtype: torch.dtype) -> None:
    decoder = load_hf_checkpoint(read_config(LLAMA), llama, device="cpu", dtype=dtype)
    assert equal(decoder, made(read_config(LLAMA)).to(dtype))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(InputError, match=r"only pickled weights \(pytorch_model.bin\).*run code"):
        load_hf_checkpoint(read_config(LLAMA), tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds neither model\.safetensors nor"):
        load_hf_checkpoint(read_config(LLAMA), tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        load_hf_checkpoint(read_config(LLAMA), tmp_path / "absent")


def test_a_cut_off_file_is_refused(llama: Path) -> None:
    whole = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        load_hf_checkpoint(None, llama)


def test_every_absent_shard_is_named(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path, shard_bytes=4000)
    shards = sorted(tmp_path.glob("model-*"))
    for path in (shards[0], shards[2]):
        path.unlink()
    with pytest.raises(InputError) as caught:
        load_hf_checkpoint(None, tmp_path)
    assert [problem.where for problem in caught.value.problems] == [str(shards[0]), str(shards[2])]


@pytest.mark.parametrize("file", ["../secret.safetensors", "weights.bin", 3])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match="not a safetensors file of the folder"):
        load_hf_checkpoint(read_config(LLAMA), tmp_path)


def test_an_index_that_lists_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path, shard_bytes=4000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["model.extra.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match=r"lists model.extra.weight, which model-\d+-of"):
        load_hf_checkpoint(None, tmp_path)


def test_a_tied_model_reads_past_a_copy_of_the_table(llama: Path) -> None:
    tied = read_config({**LLAMA, "tie_word_embeddings": True})
    change(llama, lambda tensors: tensors.update({"m.rotary_emb.inv_freq": torch.zeros(4)}))
    decoder = load_hf_checkpoint(tied, llama, dtype=torch.float32)
    assert decoder.head.weight is None


def test_names_without_their_root_are_understood(tmp_path: Path) -> None:
    """GPT-2's own checkpoint says `h.0.ln_1.weight`, and holds the causal mask as `attn.bias`."""
    save_hf_checkpoint(made(read_config(GPT2)), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**short, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / WEIGHTS)
    assert equal(load_hf_checkpoint(None, tmp_path, dtype=torch.float32), made(read_config(GPT2)))

"""Saving: files, index, config, types."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.spec.model.huggingface import load_config, read_config
from tests.run.nn.huggingface.test_hf_loader import GPT2, LLAMA, equal, made

INDEX = "model.safetensors.index.json"
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 130, "vocab_size": 64,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 136,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip


def test_small_models_are_one_file(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path / "new" / "folder")
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for _ in range(2):  # the second time over the files of the first
            save_hf_checkpoint(made(read_config(LLAMA)), tmp_path / "model")
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*")}
            assert set(modes.values()) == {0o666 & ~umask}, modes
    finally:
        os.umask(before)


def test_shards_hold_no_more_than_asked_and_are_indexed(tmp_path: Path) -> None:
    decoder = made(read_config(LLAMA))
    save_hf_checkpoint(decoder, tmp_path, shard_bytes=4000)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert shards[-1].name == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    held: dict[str, str] = {}
    for path in shards:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 4000
        held |= dict.fromkeys(tensors, path.name)
    assert index["weight_map"] == held
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    assert index["metadata"]["total_size"] == size
    assert equal(load_hf_checkpoint(None, tmp_path, dtype=torch.float32), decoder)


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    decoder = made(read_config(LLAMA))
    save_hf_checkpoint(decoder, tmp_path, shard_bytes=1)
    assert all(len(load_file(path)) == 1 for path in tmp_path.glob("*.safetensors"))
    assert equal(load_hf_checkpoint(None, tmp_path, dtype=torch.float32), decoder)


def test_an_older_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path, shard_bytes=4000)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_hf_checkpoint(made(read_config(GPT2)), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path, shard_bytes=4000)
    assert not (tmp_path / "model.safetensors").exists()
    assert equal(load_hf_checkpoint(None, tmp_path, dtype=torch.float32), made(read_config(LLAMA)))


def test_the_config_describes_the_model(tmp_path: Path) -> None:
    model = read_config(LLAMA, name=tmp_path.name)
    save_hf_checkpoint(made(model), tmp_path, dtype=torch.float16)
    assert load_config(tmp_path) == model
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "float16"


@pytest.mark.parametrize(
    ("dtype", "kind"), [(None, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16")]
)
def test_weights_are_written_in_the_type_asked_for(
    tmp_path: Path, dtype: torch.dtype | None, kind: str
) -> None:
    save_hf_checkpoint(made(read_config(DEEPSEEK)), tmp_path, dtype=dtype)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    # Balancing moves by a thousandth a step, which bf16 cannot say.
    assert kinds.pop("model.layers.1.mlp.gate.e_score_correction_bias") == "F32"
    assert set(kinds.values()) == {kind}


def test_fp8_rounds_the_products_of_layers_by_blocks(tmp_path: Path) -> None:
    decoder = made(read_config(DEEPSEEK))
    save_hf_checkpoint(decoder, tmp_path, dtype=torch.float8_e4m3fn)
    tensors = load_file(tmp_path / "model.safetensors")
    up = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert tensors[up].dtype == torch.float8_e4m3fn
    assert tensors[f"{up}_scale_inv"].shape == (2, 2)
    for name in ("lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.norm"):
        assert tensors[f"{name}.weight"].dtype == torch.bfloat16
    back = load_hf_checkpoint(None, tmp_path, dtype=torch.float32)
    for (name, ours), theirs in zip(decoder.named_parameters(), back.parameters(), strict=True):
        # e4m3 keeps three bits of the fraction.
        torch.testing.assert_close(theirs, ours, rtol=2**-4, atol=1e-4, msg=name)


def test_a_decoder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="decoder: has no weights yet"):
        save_hf_checkpoint(build_decoder(read_config(LLAMA)), tmp_path)


def test_a_type_that_no_checkpoint_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dtype: torch\.int8 cannot be written"):
        save_hf_checkpoint(made(read_config(LLAMA)), tmp_path, dtype=torch.int8)

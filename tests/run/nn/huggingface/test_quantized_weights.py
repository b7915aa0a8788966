"""Eight and four bits back to numbers."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.huggingface.quantized_weights import (
    dequantize_fp8,
    dequantize_mxfp4,
    quantize_fp8,
)
from meshwright.spec.model.huggingface import read_config
from tests.run.nn.huggingface.test_hf_loader import LLAMA, made

FP8 = torch.float8_e4m3fn


def test_a_block_of_fp8_is_multiplied_by_its_own_scale() -> None:
    weight = torch.ones(130, 200).to(FP8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    numbers = dequantize_fp8(weight, scale)
    assert (numbers[:128, :128] == 1).all()
    assert (numbers[:128, 128:] == 2).all()
    assert (numbers[128:, :128] == 3).all()
    assert (numbers[128:, 128:] == 4).all()


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor([2.0]), torch.full((3, 1), 2.0)])
def test_scales_of_tensors_and_rows_are_understood(scale: torch.Tensor) -> None:
    assert (dequantize_fp8(torch.ones(3, 5).to(FP8), scale) == 2).all()


@pytest.mark.parametrize("kind", [FP8, torch.float8_e5m2])
def test_every_code_of_fp8_is_the_number_that_torch_takes_it_for(kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(kind)
    numbers = dequantize_fp8(codes, torch.ones(1, 2))
    assert torch.equal(numbers.nan_to_num(-1), codes.float().nan_to_num(-1))
    assert torch.equal(numbers.isnan(), codes.float().isnan())


def test_a_matrix_narrower_than_a_block_still_has_scales_of_blocks() -> None:
    scale = torch.tensor([[1.0], [2.0]])
    numbers = dequantize_fp8(torch.ones(130, 20).to(FP8), scale)
    assert numbers[:, 0].tolist() == [1.0] * 128 + [2.0] * 2


def test_rounding_to_fp8_keeps_the_largest_of_a_block_and_three_bits_of_the_rest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 140)
    weight[128:256] = 0
    small, scale = quantize_fp8(weight)
    assert (small.dtype, small.shape, scale.shape) == (FP8, weight.shape, (3, 2))
    numbers = dequantize_fp8(small, scale)
    assert (numbers[128:256] == 0).all()
    largest = weight[:128, :128].abs().argmax()
    torch.testing.assert_close(
        numbers[:128, :128].flatten()[largest], weight[:128, :128].flatten()[largest]
    )
    torch.testing.assert_close(numbers, weight, rtol=2**-4, atol=1e-4)


def test_mxfp4_by_hand() -> None:
    # 0x21: 0.5 in the low half, 1.0 in the high; 0xF9: -0.5 and -6.0; 2^(129-127) = 4.
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 15] = 0x21, 0xF9
    scales = torch.tensor([[[129], [127]]], dtype=torch.uint8)
    numbers = dequantize_mxfp4(blocks, scales)
    assert numbers.shape == (1, 32, 2)
    assert numbers[0, :2, 0].tolist() == [2.0, 4.0]
    assert numbers[0, 30:, 1].tolist() == [-0.5, -6.0]
    assert numbers.count_nonzero() == 4


def test_gpt_oss_is_read_from_mxfp4(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_oss", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    save_hf_checkpoint(made(read_config(config)), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(0)
    for name, out in (("gate_up_proj", 64), ("down_proj", 32)):
        whole = f"model.layers.0.mlp.experts.{name}"
        del tensors[whole]
        tensors[f"{whole}_blocks"] = torch.randint(0, 256, (2, out, 1, 16), dtype=torch.uint8)
        tensors[f"{whole}_scales"] = torch.randint(120, 128, (2, out, 1), dtype=torch.uint8)
    save_file(tensors, path)
    loaded = dict(load_hf_checkpoint(None, tmp_path, dtype=torch.float32).named_parameters())
    packed = "model.layers.0.mlp.experts.gate_up_proj"
    # Gate and up take turns in theirs; ours has all gates first, and rows where theirs has columns.
    numbers = dequantize_mxfp4(tensors[f"{packed}_blocks"], tensors[f"{packed}_scales"]).float()
    turned = numbers.transpose(1, 2)
    assert torch.equal(
        loaded["layers.0.mlp.gate_up"], torch.cat([turned[:, ::2], turned[:, 1::2]], 1)
    )


def test_fp8_without_fitting_scales_is_refused(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    tensors[up], tensors[down] = tensors[up].to(FP8), tensors[down].to(FP8)
    tensors[f"{down}_scale_inv"] = torch.ones(5, 1)
    save_file(tensors, path)
    with pytest.raises(InputError) as caught:
        load_hf_checkpoint(None, tmp_path)
    assert [problem.what for problem in caught.value.problems] == [
        "holds F8_E4M3 without scales",
        "has scales of shape [5, 1], which fit no blocks of [128, 128]",
    ]


def test_fp8_weights_are_read_with_the_blocks_that_the_config_says(tmp_path: Path) -> None:
    save_hf_checkpoint(made(read_config(LLAMA)), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.ones(16, 24).to(FP8)
    tensors[f"{name}_scale_inv"] = torch.arange(6.0).view(2, 3)
    save_file(tensors, path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8").rstrip().rstrip("}").rstrip()
    (tmp_path / "config.json").write_text(
        config + ', "quantization_config": {"weight_block_size": [8, 8]}}', encoding="utf-8"
    )
    loaded = dict(load_hf_checkpoint(None, tmp_path, dtype=torch.float32).named_parameters())
    wanted = torch.arange(6.0).view(2, 3).repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(loaded["layers.0.mlp.down.weight"], wanted)

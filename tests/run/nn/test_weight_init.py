"""First weights depend on seed, name and place alone, so any sharding starts from the same."""

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.nn.weight_init import (
    INIT_STD,
    allocate_parameters,
    fill_normal,
    get_init_std,
    materialize,
)
from meshwright.spec.model import NormSpec, build_decoder_model, build_gpt


def made(seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_decoder_model("small", layers=layers, hidden=64, heads=4, ffn=96, vocab=101)
    built = build_decoder(model, dtype=dtype)
    materialize(built, "cpu", seed)
    return built


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    first, second, other = made(3), made(3), made(4)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, second.get_parameter(name))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_memory_is_given_as_torch_gives_it_without_its_python_references() -> None:
    class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert "like" not in func.__name__  # of tensors without memory: loads sympy
            return func(*args, **kwargs or {})

    model = build_decoder_model("small", layers=1, hidden=64, heads=4, ffn=96, vocab=101)
    ours, torchs = (
        build_decoder(model, dtype=torch.bfloat16),
        build_decoder(model, dtype=torch.bfloat16),
    )
    torchs.to_empty(device="cpu")
    with Watched():  # type: ignore[no-untyped-call]
        allocate_parameters(ours, "cpu")
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert (one.dtype, one.device, one.stride()) == (other.dtype, other.device, other.stride())
        assert one.requires_grad == other.requires_grad


def test_a_slice_of_a_parameter_is_filled_as_in_the_whole() -> None:
    whole = torch.empty(6, 40, 8)
    fill_normal(whole, "name", 0, 0.02)
    rows, columns = (IndexRange(20, 30), IndexRange(5, 8)), (IndexRange(2, 4),)
    held = ShardSpec((6, 40, 8), ((IndexRange(1, 3),), rows, columns))
    part = torch.empty(held.shape)
    fill_normal(part, "name", 0, 0.02, held)
    assert torch.equal(part, held.select_local(whole))
    assert torch.equal(part[:, 10:], whole[1:3, 5:8, 2:4])


def test_a_parameter_does_not_depend_on_what_else_the_model_has() -> None:
    weight = "layers.1.mixer.qkv.weight"
    assert torch.equal(made(layers=2).get_parameter(weight), made(layers=5).get_parameter(weight))


def test_matrices_are_normal_and_those_that_end_a_branch_smaller() -> None:
    built = made(layers=8)
    into = torch.cat([built.get_parameter(f"layers.{i}.mlp.gate_up.weight") for i in range(8)])
    out = torch.cat([built.get_parameter(f"layers.{i}.mlp.down.weight") for i in range(8)])
    assert into.std().item() == pytest.approx(0.02, rel=0.01)
    assert out.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.01)
    assert into.mean().item() == pytest.approx(0, abs=2e-4)
    # The fourth moment of a normal distribution is three times its variance squared.
    assert (into / 0.02).pow(4).mean().item() == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "ends_branch"),
    [
        ("layers.0.mixer.o.weight", True),
        ("layers.0.mixer.out.weight", True),
        ("layers.0.mlp.down.weight", True),
        ("layers.0.mlp.down", True),  # of experts, one parameter
        ("layers.0.mlp.shared.down.weight", True),
        ("multi_token.0.block.mlp.down.weight", True),
        ("layers.0.mixer.down.weight", False),  # of latent attention
        ("layers.0.mixer.qkv.weight", False),
        ("embedding.weight", False),
    ],
)
def test_a_product_ends_a_branch_by_its_place(name: str, ends_branch: bool) -> None:
    assert (get_init_std(name, 8) < INIT_STD) == ends_branch


def test_numbers_of_one_parameter_do_not_follow_those_of_another() -> None:
    one, two = torch.empty(100_000), torch.empty(100_000)
    fill_normal(one, "layers.0.mlp.down.weight", 0, 1.0)
    fill_normal(two, "layers.1.mlp.down.weight", 0, 1.0)
    assert abs((one * two).mean().item()) < 0.015
    assert abs((one[1:] * one[:-1]).mean().item()) < 0.015


def test_norms_start_as_nothing_and_biases_at_nought() -> None:
    built = build_decoder(build_gpt("g", layers=1, hidden=8, heads=2, vocab=5), dtype=torch.float32)
    materialize(built, "cpu")
    assert torch.equal(built.get_parameter("final_norm.weight"), torch.ones(8))
    assert torch.equal(built.get_parameter("layers.0.mixer.qkv.bias"), torch.zeros(24))
    offset = NormSpec(unit_offset=True)
    gemma = build_decoder_model("m", layers=1, hidden=8, heads=2, ffn=8, vocab=5, norm=offset)
    built = build_decoder(gemma)
    materialize(built, "cpu")
    assert torch.equal(
        built.get_parameter("final_norm.weight"), torch.zeros(8, dtype=torch.bfloat16)
    )

"""Rotary tables equal those of transformers for every stretching rule."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")
pytest.importorskip("transformers", reason="the reference of rotary positions")

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.positions import (
    PositionInfo,
    PositionTables,
    compute_alibi_slopes,
    compute_query_scale,
    compute_rotary_frequencies,
)
from meshwright.spec.model.huggingface.config_fields import ConfigFields
from meshwright.spec.model.huggingface.rope_fields import read_rope
from meshwright.spec.model.rotary import AttentionTemperature, Rotary

WIDTH, MOST = 32, 256
SHORT, LONG = [1.0 + i / 16 for i in range(16)], [2.0 + i / 4 for i in range(16)]

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [48, 200, 300])
def test_frequencies_equal_those_of_transformers(name: str, length: int) -> None:
    kind = name.partition("-")[0]
    rope = {"rope_type": kind, "rope_theta": 5000.0, **SCALINGS[name]}
    config = LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=MOST,
        rope_parameters=rope,
    )
    expected, multiplier = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    rotary = read_rope(ConfigFields({"rope_parameters": rope}), ("rope_theta", 10000.0))
    found, factor = compute_rotary_frequencies(rotary, WIDTH, length, MOST)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(multiplier)


def places(length: int, **options: Any) -> PositionInfo:
    return PositionInfo(PositionTables(MOST), torch.zeros(2, length, dtype=torch.long), **options)


def test_a_share_of_the_head_turns_that_many_dimensions() -> None:
    turns = places(5).get_rotary(Rotary(fraction=0.25), WIDTH)
    assert turns.cos.shape == (5, WIDTH // 8)
    assert turns.cos.dtype == torch.float32


def test_documents_start_again_at_position_nought() -> None:
    rotary = Rotary()
    packed = places(8, documents=PackedSequences.from_lengths([[3, 5], [8]])).get_rotary(
        rotary, WIDTH
    )
    plain = places(8).get_rotary(rotary, WIDTH)
    assert torch.equal(packed.cos[0, 3:], plain.cos[:5])
    assert torch.equal(packed.sin[1], plain.sin)


def test_given_positions_may_reach_beyond_the_tokens_at_hand() -> None:
    positions = torch.tensor([[4, 5], [6, 7]])
    found = places(2, positions=positions, max_position_count=8).get_rotary(Rotary(), WIDTH)
    assert torch.equal(found.cos[1, 1], places(8).get_rotary(Rotary(), WIDTH).cos[7])


def test_a_table_is_made_once_and_grows() -> None:
    tables, device = PositionTables(MOST), torch.device("cpu")
    first = tables.get_rotary(Rotary(), WIDTH, 8, device)
    longer = tables.get_rotary(Rotary(), WIDTH, 16, device)
    again = tables.get_rotary(Rotary(), WIDTH, 8, device)
    assert torch.equal(first.cos, again.cos)
    assert again.cos.data_ptr() == longer.cos.data_ptr()


@pytest.mark.parametrize("heads", [8, 12, 112])
def test_slopes_equal_those_of_bloom(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2)
    # Its bias is slope · position: at position 1, the slope.
    expected = build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(compute_alibi_slopes(heads), expected)


def test_queries_grow_with_the_logarithm_of_their_step() -> None:
    temperature = AttentionTemperature(floor=4, scale=0.5)
    growth = compute_query_scale(temperature, torch.tensor([0, 2, 3, 11]))
    expected = 1 + 0.5 * torch.log1p(torch.tensor([0.0, 0.0, 1.0, 3.0]))
    torch.testing.assert_close(growth, expected)

"""Parameter counts, part by part, against products written out by hand."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    NormSpec,
    build_decoder_model,
    build_gpt,
    count_parameters,
)


def test_llama_by_hand() -> None:
    # 8B of Llama 3: grouped queries, gated MLP, untied head, no biases.
    counted = count_parameters(get_model("llama3.1-8b"))
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    assert counted.mixer == 32 * attention
    assert counted.mlp == 32 * 3 * 4096 * 14336
    assert counted.norms == 65 * 4096
    assert counted.embedding == counted.head == 128256 * 4096
    assert counted.total == counted.active == 8_030_261_248
    assert counted.matmul == counted.total - counted.embedding - counted.norms


def test_gpt_by_the_formula_of_the_megatron_papers() -> None:
    # 12lh²(1 + 13/12h + (V + s)/12lh), which leaves out the final layer norm's 2h.
    layers, hidden, vocab, positions = 96, 12288, 51200, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + positions) * hidden
    assert count_parameters(get_model("megatron-175b")).total == formula + 2 * hidden


def test_experts_by_hand() -> None:
    counted = count_parameters(get_model("mixtral-8x7b"))
    expert = 3 * 4096 * 14336
    assert counted.experts == 32 * 8 * expert
    assert counted.router == 32 * 4096 * 8
    assert counted.mlp == 0
    assert counted.total - counted.active == 32 * 6 * expert


def test_latent_attention_by_hand() -> None:
    block = get_model("deepseek-v3").blocks[0]
    assert isinstance(block.mixer, LatentAttentionSpec)
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys = 7168 * (512 + 64) + 512 + 512 * 128 * 256
    out = 128 * 128 * 7168
    found = sum(weight.parameters for weight in block.mixer.list_weights(7168))
    assert found + block.mixer.count_vector_parameters(norm_bias=False) == queries + keys + out


def test_router_bias_of_deepseek_counts_one_number_per_expert() -> None:
    base = get_model("deepseek-v3")
    experts = base.moe
    assert experts is not None
    assert count_parameters(base).router == 58 * (7168 * 256 + 256)


@pytest.mark.parametrize(
    ("name", "hub_total", "tables"),
    [
        # Hub totals without FP8 scales; each multi-token head stores both tables again.
        ("deepseek-v3", 684_489_845_504, 2),
        ("glm-4.5", 358_337_791_296, 2),
    ],
)
def test_multi_token_head_makes_up_the_hub_total(name: str, hub_total: int, tables: int) -> None:
    described = get_model(name)
    counted = count_parameters(described)
    copies = tables * described.vocab * described.hidden
    assert counted.total + counted.multi_token + copies == hub_total


def test_multi_token_head_of_qwen3_next_makes_up_its_hub_total() -> None:
    # Its config does not tell of the head: one full-attention layer that shares both tables.
    base = get_model("qwen3-next-80b-a3b")
    counted = count_parameters(
        msgspec.structs.replace(base, multi_token=MtpSpec(depth=1, block="global"))
    )
    assert counted.total + counted.multi_token == 81_324_862_720


def test_tied_head_counts_once_and_multiplies_all_the_same() -> None:
    free = build_decoder_model("x", layers=2, hidden=64, heads=4, ffn=128, vocab=1000)
    tied = msgspec.structs.replace(free, tied=True)
    assert count_parameters(free).total - count_parameters(tied).total == 64_000
    assert count_parameters(free).matmul == count_parameters(tied).matmul


def test_learned_positions_count_with_their_spare_rows() -> None:
    short = build_gpt("x", layers=1, hidden=64, heads=4, vocab=100, max_positions=10)
    spare = msgspec.structs.replace(short, position_offset=2)
    assert count_parameters(spare).embedding == (100 + 12) * 64
    assert count_parameters(msgspec.structs.replace(short, positions="alibi")).embedding == 6400


def test_shared_expert_its_gate_and_the_latent_width_by_hand() -> None:
    experts = MoESpec(count=4, top_k=2, width=8, shared_width=16, shared_gate=True, latent=32)
    weights = {weight.name: weight.parameters for weight in experts.list_weights(64)}
    assert weights == {
        "router": 64 * 4, "shared_gate": 64 * 16, "shared_up": 64 * 16, "shared_down": 16 * 64,
        "shared_gate_scalar": 64, "latent_down": 64 * 32, "latent_up": 32 * 64,
        "expert_gate": 4 * 32 * 8, "expert_up": 4 * 32 * 8, "expert_down": 4 * 8 * 32,
    }  # fmt: skip


def test_biases_and_norms_by_hand() -> None:
    attention = AttentionSpec(
        heads=4, kv_heads=2, head_dim=16, qkv_bias=True, out_bias=True, qk_norm="head", sinks=True
    )
    block = BlockSpec(name="b", mixer=attention, mlp=MLPSpec(width=8, bias=True), norms="sandwich")
    one = Model(
        name="x", hidden=64, vocab=10, blocks=(block,), pattern="b",
        norm=NormSpec(kind="layer", bias=True), final_norm=False, tied=True,
    )  # fmt: skip
    counted = count_parameters(one)
    products = 64 * 64 * 2 + 64 * 32 * 2 + (64 + 32 + 32) + 64
    assert counted.mixer == products + 2 * 16 * 2 + 4
    assert counted.mlp == 3 * 64 * 8 + 8 + 8 + 64
    assert counted.norms == 4 * 2 * 64


@pytest.mark.parametrize(
    ("place", "norms"),
    [("pre", 2), ("post", 2), ("sandwich", 4), ("parallel", 2), ("parallel-shared", 1)],
)
def test_norms_of_a_block(place: str, norms: int) -> None:
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=8)
    block = BlockSpec(name="b", mixer=attention, mlp=MLPSpec(width=8), norms=place)  # type: ignore[arg-type]
    assert block.count_norms() == norms


def test_layer_norm_without_weights_counts_nothing() -> None:
    assert count_parameters(get_model("olmo-7b")).norms == 0


def test_recurrent_mixers_against_the_shapes_of_transformers() -> None:
    # Qwen3NextGatedDeltaNet and NemotronHMamba2Mixer, built on the meta device.
    delta = GatedDeltaNetSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    shapes = 12288 * 2048 + 64 * 2048 + 2048 * 4096 + 8192 * 4 + 32 + 32 + 128
    assert (
        sum(w.parameters for w in delta.list_weights(2048)) + delta.count_vector_parameters(False)
        == shapes
    )
    mamba = Mamba2Spec(heads=128, head_dim=64, state_dim=128, groups=8)
    shapes = 4096 * 18560 + 8192 * 4096 + 10240 * 4 + 10240 + 128 * 3 + 8192
    assert (
        sum(w.parameters for w in mamba.list_weights(4096)) + mamba.count_vector_parameters(False)
        == shapes
    )


@pytest.mark.parametrize("name", list_models())
def test_parts_add_up_and_active_is_no_more_than_all(name: str) -> None:
    counted = count_parameters(get_model(name))
    assert 0 < counted.active <= counted.total
    assert counted.active == counted.total or counted.experts > 0
    assert counted.matmul <= counted.active + counted.embedding


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
def test_layers_add_up(dense: int, sparse: int, shared: int) -> None:
    experts = MoESpec(count=4, top_k=1, width=16, shared_width=16 * shared)
    both = build_decoder_model(
        "x", layers=dense + sparse, hidden=32, heads=4, ffn=64, vocab=50, experts=experts,
        dense_layers=dense,
    )  # fmt: skip
    attention = 4 * 32 * 32
    each = 32 * 4 + 3 * 32 * 16 * (4 + shared)
    norms = (2 * (dense + sparse) + 1) * 32
    total = (dense + sparse) * attention + dense * 3 * 32 * 64 + sparse * each + norms + 2 * 50 * 32
    assert count_parameters(both).total == total

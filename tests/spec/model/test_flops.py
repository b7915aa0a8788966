"""FLOPs per token, against other people's formulas and counting by hand."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import (
    CONVENTIONS,
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    Model,
    MoESpec,
    NormSpec,
    build_decoder_model,
    build_gpt,
    count_flops,
    count_parameters,
    flops_per_token,
)


def test_forward_by_hand() -> None:
    tiny = build_decoder_model("x", layers=2, hidden=8, heads=2, ffn=16, vocab=10)
    length = 3
    matrices = 4 * 8 * 8 + 3 * 8 * 16
    # Three tokens see 1, 2 and 3 positions; scores and sum are two products of width 8 each.
    attention = 4 * 8 * (1 + 2 + 3) / 3
    forward = 2 * (2 * matrices + attention) + 2 * 8 * 10
    assert count_flops(tiny, length).forward == forward
    assert count_flops(tiny, length).backward == 2 * forward
    assert count_flops(tiny, length).total == flops_per_token(tiny, length) == 3 * forward


@given(
    st.integers(1, 96),
    st.sampled_from([512, 1024, 4096, 12288]),
    st.sampled_from([512, 2048, 8192]),
)
def test_sc21_equals_the_formula_of_its_paper(layers: int, hidden: int, length: int) -> None:
    # Narayanan et al. 2021, equation 3: F = 96 B s l h² (1 + s/6h + V/16lh), recompute included.
    vocab = 51200
    described = build_gpt("x", layers=layers, hidden=hidden, heads=8, vocab=vocab)
    bracket = 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    formula = 96 * layers * hidden**2 * bracket
    # The paper counts the output head without its recompute, so it is 24/32 of ours there.
    head = 6 * hidden * vocab
    ours = flops_per_token(described, length, "sc21") - head * 4 / 3 + head
    assert ours == pytest.approx(formula, rel=1e-12)


def test_palm_equals_the_formula_of_its_paper() -> None:
    # PaLM (arXiv 2204.02311) appendix B: 6N + 12 L H Q T per token.
    described = get_model("llama3.1-8b")
    counted = count_parameters(described)
    assert flops_per_token(described, 4096, "palm") == 6 * counted.matmul + 12 * 32 * 4096 * 4096


def test_405b_equals_the_figure_of_the_mlperf_scripts() -> None:
    # 21,508 TFLOP for a sample of 8,192 tokens with the whole attention square.
    described = get_model("llama3.1-405b")
    assert flops_per_token(described, 8192, "palm") * 8192 / 1e12 == pytest.approx(21508, rel=1e-4)


def test_half_the_square_lies_between_weights_and_the_whole() -> None:
    described = get_model("llama3.1-8b")
    weights = flops_per_token(described, 8192, "6N")
    whole = flops_per_token(described, 8192, "palm")
    assert flops_per_token(described, 8192, "megatron") == (weights + whole) / 2


@pytest.mark.parametrize("name", list_models())
def test_exact_never_exceeds_the_whole_square(name: str) -> None:
    described = get_model(name)
    for length in (1, 1000, 100_000):
        exact = flops_per_token(described, length)
        assert flops_per_token(described, length, "6N") <= exact
        assert exact <= flops_per_token(described, length, "palm") * (1 + 1e-12)


@given(st.integers(1, 60), st.none() | st.integers(1, 70), st.none() | st.integers(1, 70))
def test_attention_counts_the_pairs_that_are_visible(
    length: int, window: int | None, chunk: int | None
) -> None:
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=4, window=window, chunk=chunk)
    pairs = sum(
        (window is None or query - key < window)
        and (chunk is None or query // chunk == key // chunk)
        for query in range(length)
        for key in range(query + 1)
    )
    # Two products of two FLOPs per pair, over 2 heads of width 4.
    assert attention.core_flops(length) == pytest.approx(4 * 8 * pairs / length)


def test_windows_bound_the_growth_with_length() -> None:
    local = AttentionSpec(heads=2, kv_heads=1, head_dim=4, window=128)
    assert local.core_flops(10**6) < 4 * 8 * 128
    assert local.core_flops(10**6) == pytest.approx(4 * 8 * 128, rel=1e-4)


def test_bidirectional_attention_sees_everything() -> None:
    both = AttentionSpec(heads=2, kv_heads=1, head_dim=4, causal=False)
    assert both.core_flops(50) == both.non_causal_flops(50) == 4 * 8 * 50


def test_only_chosen_experts_cost() -> None:
    def sparse(top_k: int) -> float:
        experts = MoESpec(count=8, top_k=top_k, width=32)
        return flops_per_token(
            build_decoder_model(
                "x", layers=1, hidden=16, heads=2, ffn=8, vocab=10, experts=experts
            ),
            4,
        )

    assert sparse(2) - sparse(1) == 6 * 3 * 16 * 32


def test_recurrence_costs_the_same_at_any_length() -> None:
    described = get_model("nemotron-h-8b")
    mamba = next(block for block in described.blocks if block.name == "mamba")
    assert mamba.core_flops(10) == mamba.core_flops(10**6) == 4 * 128 * 64 * 128


def test_length_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="length: 0 is not a whole number of at least 1"):
        count_flops(get_model("gpt2"), 0)


def test_unknown_convention_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean megatron"):
        flops_per_token(get_model("gpt2"), 8, "megatrn")
    assert set(CONVENTIONS) == {"6N", "exact", "megatron", "palm", "sc21"}


@pytest.mark.parametrize("name", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_megatron_halves_the_square_of_attention_and_no_recurrence(name: str) -> None:
    described = get_model(name)
    halves = sum(
        layers * block.non_causal_flops(8192) / 2
        for block, layers in described.count_layers_by_block()
        if isinstance(block.mixer, AttentionSpec)
    )
    palm = flops_per_token(described, 8192, "palm")
    assert flops_per_token(described, 8192, "megatron") == pytest.approx(palm - 3 * halves)
    # Half a square is a little less than the causal positions, which hold the diagonal too.
    exact = flops_per_token(described, 8192)
    assert flops_per_token(described, 8192, "megatron") == pytest.approx(exact, rel=1e-3)


def test_multi_token_head_costs_its_block_its_join_and_the_output_head() -> None:
    described = get_model("deepseek-v3")
    assert described.multi_token is not None
    block = described.block(described.multi_token.block)
    alone = msgspec.structs.replace(described, multi_token=None)
    matrices = sum(weight.flops for weight in block.list_weights(7168)) + 2 * (2 * 7168 * 7168)
    head = 2 * described.vocab * 7168
    counted = count_flops(described, 4096)
    assert counted.multi_token == matrices + head + block.core_flops(4096)
    assert counted.forward == count_flops(alone, 4096).forward + counted.multi_token
    assert counted.backward == 2 * counted.forward
    assert count_flops(alone, 4096).multi_token == 0
    added = {
        name: flops_per_token(described, 4096, name) - flops_per_token(alone, 4096, name)
        for name in CONVENTIONS
    }
    assert added["6N"] == 3 * (matrices + head)
    assert added["palm"] == pytest.approx(added["6N"] + 3 * block.non_causal_flops(4096))
    assert added["megatron"] == pytest.approx(added["6N"] + 1.5 * block.non_causal_flops(4096))


def test_further_multi_token_heads_cost_as_much_as_the_first() -> None:
    one = get_model("deepseek-v3")
    assert one.multi_token is not None
    three = msgspec.structs.replace(
        one, multi_token=msgspec.structs.replace(one.multi_token, depth=3)
    )
    assert count_flops(three, 512).multi_token == 3 * count_flops(one, 512).multi_token


def _from_row(row: dict[str, Any]) -> Model:
    """Build the model of a published run from the figures that its row gives."""
    shape = row["model"]
    attention = AttentionSpec(
        heads=shape["heads"], kv_heads=shape["kv_heads"], head_dim=shape["head_dim"]
    )
    dense = BlockSpec(
        name="dense", mixer=attention, mlp=MLPSpec(width=shape["ffn"], gated=shape["ffn_gated"])
    )
    blocks, pattern = [dense], f"{shape['layers']}*dense"
    if shape["experts"]:
        experts = MoESpec(
            count=shape["experts"],
            top_k=shape["topk"],
            width=shape["expert_ffn"],
            shared_width=(shape["shared_experts"] or 0) * shape["expert_ffn"],
        )
        blocks.append(BlockSpec(name="moe", mixer=attention, mlp=experts))
        pattern = f"{shape['layers'] - shape['moe_layers']}*dense {shape['moe_layers']}*moe"
    return Model(
        name="row", hidden=shape["hidden"], vocab=shape["vocab"], blocks=tuple(blocks),
        pattern=pattern, tied=shape["tied_embeddings"], norm=NormSpec(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows(shared: Path) -> list[dict[str, Any]]:
    """Published runs of plain decoders: no latent attention, windows or recurrences."""
    path = shared / "validation" / "training_runs.json"
    if not path.is_file():
        pytest.skip("needs shared/validation/training_runs.json")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [
        row
        for row in found
        if "n_active_matmul_params" in row.get("derived", {})
        and not {"attn", "hybrid", "window"} & set(row["model"])
    ]


@pytest.mark.real
def test_matmul_parameters_equal_those_derived_for_published_runs(
    rows: list[dict[str, Any]],
) -> None:
    wrong = {}
    for row in rows:
        ours = count_parameters(_from_row(row)).matmul
        if ours != row["derived"]["n_active_matmul_params"]:
            wrong[row["model"]["name"]] = (ours, row["derived"]["n_active_matmul_params"])
    assert wrong == {}
    assert len({row["model"]["name"] for row in rows}) > 40


@pytest.mark.real
@pytest.mark.parametrize(
    ("key", "convention"),
    [("tflops_6N", "6N"), ("tflops_6N_attn_causal", "megatron"), ("tflops_6N_attn_full", "palm")],
)
def test_flops_equal_those_derived_for_published_runs(
    rows: list[dict[str, Any]], key: str, convention: str
) -> None:
    compared, wrong = 0, {}
    for row in rows:
        derived = row["derived"]
        if key not in derived or not row["seq"]:
            continue
        ours = flops_per_token(_from_row(row), row["seq"], convention)
        tflops = ours * derived["tokens_per_s_per_gpu"] / 1e12
        compared += 1
        # The table rounds to two decimals.
        if not math.isclose(tflops, derived[key], rel_tol=1e-4, abs_tol=0.006):
            wrong[row["id"]] = (tflops, derived[key])
    assert wrong == {}
    assert compared > 500


@pytest.mark.real
@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("DeepSeek-V3 671B", "deepseek-v3"),
        ("Kimi-K2 1T", "kimi-k2"),
        ("GPT-OSS-120B", "gpt-oss-120b"),
        ("GPT-OSS-20B", "gpt-oss-20b"),
    ],
)
def test_matmul_parameters_of_unusual_models(shared: Path, published: str, name: str) -> None:
    path = shared / "validation" / "training_runs.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    row = next(row for row in found if row["model"]["name"] == published)
    ours = count_parameters(msgspec.structs.replace(get_model(name), multi_token=None)).matmul
    assert ours == row["derived"]["n_active_matmul_params"]

"""Attention counts what its recorded arguments say, and tells what it had to assume."""

from typing import Any

import pytest

from meshwright.observe.analyze.compute_efficiency.flop_formulas import (
    EQUAL_LENGTHS_NOTE,
    FLOP_FORMULAS,
    UNKNOWN_MASK_NOTE,
    OperatorCall,
)

Q = [2, 8, 128, 64]
FULL = 2.0 * 2 * 8 * 128 * 128 * (64 + 64)
SDPA = "aten::_scaled_dot_product_{}_attention"
N = ""


def _count(name: str, dims: list[Any], given: list[str]) -> float:
    found = FLOP_FORMULAS[name](OperatorCall(dims, given))
    assert found is not None
    assert found.assumption == ""
    return found.flops


@pytest.mark.parametrize("causal", ["False", "True"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("flash", [N, N, N, "0.", "{}", "False", N]),
        # `compute_log_sumexp` comes first, and is true in training.
        ("efficient", [N, N, N, N, "True", "0.", "{}", N]),
        ("cudnn", [N, N, N, N, "True", "0.", "{}", "False", N]),
        ("cudnn", [N, N, N, "0.", "{}", "False", N]),  # Before PyTorch 2.5.
    ],
)
def test_forward_reads_whether_it_is_causal(kind: str, given: list[str], causal: str) -> None:
    count = _count(SDPA.format(kind), [Q, Q, Q], [one.format(causal) for one in given])
    assert count == (FULL / 2 if causal == "True" else FULL)


@pytest.mark.parametrize("causal", ["False", "True"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("flash", [N] * 8 + ["128", "128", "0.", "{}", N, N, N]),
        ("efficient", [N] * 9 + ["0.", "[True, True, True, False]", "{}", N]),
        ("cudnn", [N] * 11 + ["128", "128", "0.", "{}", N]),
    ],
)
def test_backward_takes_five_products_for_two(kind: str, given: list[str], causal: str) -> None:
    name = SDPA.format(kind) + "_backward"
    count = _count(name, [Q] * 4, [one.format(causal) for one in given])
    assert count == 2.5 * (FULL / 2 if causal == "True" else FULL)


def test_fewer_heads_of_keys_and_other_widths_of_values_are_counted_as_they_are() -> None:
    query, key, value = [1, 32, 100, 192], [1, 8, 300, 192], [1, 8, 300, 128]
    flags = [N, N, N, "0.", "False", "False"]
    count = _count(SDPA.format("flash"), [query, key, value], flags)
    assert count == 2.0 * 32 * 100 * 300 * (192 + 128)
    flags = [N] * 10 + ["0.", "False"]
    back = _count(SDPA.format("flash") + "_backward", [query, query, key, value], flags)
    assert back == 2.0 * 32 * 100 * 300 * (3 * 192 + 2 * 128)


def test_a_causal_mask_has_its_corner_where_the_operator_puts_it() -> None:
    few, many = [1, 1, 10, 4], [1, 1, 40, 4]
    flags = [N, N, N, "0.", "True", "False"]
    assert _count(SDPA.format("flash"), [few, many, many], flags) == 16.0 * (10 * 10 / 2)
    few, many = [1, 10, 1, 4], [1, 40, 1, 4]
    flags = [N, N, N, "0.", "1.", "True", "-1", "-1"]
    count = _count("flash_attn::_flash_attn_forward", [few, many, many], flags)
    assert count == 16.0 * (10 * 40 - 10 * 10 / 2)


def test_a_window_leaves_a_band() -> None:
    query = [1, 1000, 1, 4]
    flags = [N, N, N, "0.", "1.", "True", "99", "0"]
    count = _count("flash_attn::_flash_attn_forward", [query] * 3, flags)
    assert count == 16.0 * (1000 * 100 - 100 * 100 / 2)


def test_the_mask_of_efficient_attention_is_a_number() -> None:
    query = [2, 128, 8, 64]
    for kind, part in (("0", 1.0), ("1", 0.5), ("2", 0.5)):
        given = [N] * 6 + ["128", "128", "0.", kind, "True"]
        dims = [query] * 3 + [[]] * 8
        assert _count("aten::_efficient_attention_forward", dims, given) == part * FULL


@pytest.mark.parametrize("query", [[1024, 8, 64], [1, 1024, 8, 64]])
def test_packed_sequences_count_where_they_are_about_equal(query: list[int]) -> None:
    rule = FLOP_FORMULAS["aten::_flash_attention_forward"]
    given = [N] * 5 + ["260", "260", "0.", "False", "False", N, N, N]
    found = rule(OperatorCall([query] * 3 + [[5], [5]], given))
    assert found is not None
    assert (found.flops, found.assumption) == (
        2.0 * 8 * 4 * 256 * 256 * (64 + 64),
        EQUAL_LENGTHS_NOTE,
    )
    given[5] = "700"
    assert rule(OperatorCall([query] * 3 + [[5], [5]], given)) is None


def test_an_unknown_mask_counts_in_full_and_that_is_said() -> None:
    found = FLOP_FORMULAS[SDPA.format("flash")](OperatorCall([Q, Q, Q], []))
    assert found is not None
    assert (found.flops, found.assumption) == (FULL, UNKNOWN_MASK_NOTE)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ([96, 32], [4, 32, 16], 2 * 96 * 32 * 16),
        ([4, 8, 32], [4, 32, 16], 2 * 4 * 8 * 32 * 16),
        ([64, 96], [96, 16], 2 * 64 * 96 * 16),
        ([4, 8, 32], [32, 80], 2 * 8 * 32 * 80),
    ],
)
def test_groups_share_out_what_they_take(a: list[int], b: list[int], flops: float) -> None:
    for name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):
        assert _count(name, [a, b, [4]], []) == flops


def test_a_transposed_convolution_takes_its_kernel_at_every_place_of_the_image() -> None:
    image, weight = [2, 16, 8, 8], [16, 4, 3, 3]
    given = [N, N, N, "[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]", "1"]
    forward = 2.0 * 2 * 8 * 8 * 16 * 4 * 9
    assert _count("aten::convolution", [image, weight], given) == forward
    given = [N] * 4 + ["[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]", "1", "[True, True, False]"]
    dims = [[2, 4, 16, 16], image, weight]
    assert _count("aten::convolution_backward", dims, given) == 2 * forward


@pytest.mark.slow
def test_pytorchs_own_counter_agrees() -> None:
    counter = pytest.importorskip("torch.utils.flop_counter")
    query, key, value = [2, 8, 96, 64], [2, 8, 128, 64], [2, 8, 128, 32]
    flags = [N, N, N, "0.", "False", "False"]
    forward = _count(SDPA.format("flash"), [query, key, value], flags)
    assert forward == counter.sdpa_flop_count(query, key, value)
    out = [2, 8, 96, 32]
    flags = [N] * 10 + ["0.", "False"]
    backward = _count(SDPA.format("flash") + "_backward", [out, query, key, value], flags)
    assert backward == counter.sdpa_backward_flop_count(out, query, key, value)
    image, weight, made = [8, 3, 32, 32], [16, 3, 3, 3], [8, 16, 15, 15]
    given = [N, N, N, "[2, 2]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    convolved = _count("aten::convolution", [image, weight], given)
    assert convolved == counter.conv_flop_count(image, weight, made)
    image, weight, made = [2, 16, 8, 8], [16, 4, 3, 3], [2, 4, 17, 17]
    given = [N, N, N, "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"]
    convolved = _count("aten::convolution", [image, weight], given)
    assert convolved == counter.conv_flop_count(image, weight, made, transposed=True)
    assert _count("aten::bmm", [[4, 3, 5], [4, 5, 7]], []) == counter.bmm_flop([4, 3, 5], [4, 5, 7])

"""The order of layers as one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.model.layer_pattern import (
    MAX_LAYERS,
    compress_pattern,
    expand_pattern,
    is_block_name,
)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("dense", "d"),
        ("3*dense 2*moe", "dddmm"),
        ("2*(2*local global)", "llgllg"),
        ("  2 * ( dense  moe ) dense ", "dmdmd"),
        ("2*(2*(dense moe) local)", "dmdmldmdml"),
        ("0*dense moe", "m"),
    ],
)
def test_pattern_is_expanded(pattern: str, names: str) -> None:
    assert "".join(name[0] for name in expand_pattern(pattern)) == names


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("dense",), "dense"),
        (("dense",) * 32, "32*dense"),
        (("dense",) * 3 + ("moe",) * 58, "3*dense 58*moe"),
        ((("local",) * 5 + ("global",)) * 10 + ("local",) * 2, "10*(5*local global) 2*local"),
        (("a",) + ("b", "c") * 4 + ("d",), "a 4*(b c) d"),
        (("a", "b"), "a b"),
    ],
)
def test_names_are_compressed(names: tuple[str, ...], pattern: str) -> None:
    assert compress_pattern(names) == pattern


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("", "names no layer"),
        ("0*dense", "names no layer"),
        ("3*", "is not followed by a block name"),
        ("3*4*dense", "is not followed by a block name"),
        ("3*)", "is not followed by a block name"),
        ("2*(dense", "opens a bracket it never closes"),
        ("dense)", "closes a bracket it never opened"),
        ("3 dense", "cannot be read at '3 dense'"),
        ("dense; moe", "cannot be read at '; moe'"),
        ("99999999*dense", "has more than"),
        ("100*(100*(100*dense))", "has more than"),
        ("(" * 30 + "a" + ")" * 30, "nests more than 20"),
    ],
)
def test_broken_pattern_is_refused_with_a_fix(pattern: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        expand_pattern(pattern)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.fix


@given(st.lists(st.sampled_from(["a", "b", "local", "global-moe"]), min_size=1, max_size=80))
def test_compressed_names_expand_to_themselves(names: list[str]) -> None:
    assert expand_pattern(compress_pattern(tuple(names))) == tuple(names)


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=6).filter(
        lambda names: len(set(names)) > 1
    ),
    st.integers(2, 40),
)
def test_repeated_group_is_written_once(group: list[str], times: int) -> None:
    assert len(compress_pattern(tuple(group) * times)) <= len(f"{times}*({' '.join(group)})")


def test_compressing_the_most_layers_is_quick_and_right() -> None:
    names = ("a", "b", "b") * (MAX_LAYERS // 3)
    assert compress_pattern(names) == f"{MAX_LAYERS // 3}*(a 2*b)"


@given(st.text(max_size=20) | st.from_regex(r"[0-9*() abm-]{1,16}", fullmatch=True))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_pattern(text)
    except InputError as refusal:
        incomplete = [p for p in refusal.problems if not (p.where and p.what and p.fix)]
    else:
        incomplete = []
        assert all(is_block_name(name) for name in names)
    assert incomplete == []

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.cluster.hostlist import collapse_hostlist, expand_hostlist

WORDS = st.from_regex(re.compile(r"[a-z][a-z-]{0,4}"), fullmatch=True)
NAMES = st.builds(
    lambda word, number, width, tail: f"{word}{number:0{width}d}{tail}",
    WORDS,
    st.integers(0, 30),
    st.integers(1, 3),
    st.sampled_from(["", "", "-ib", ".local"]),
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tux", ["tux"]),
        ("tux[0-3,12]", ["tux0", "tux1", "tux2", "tux3", "tux12"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[99-101]", ["n99", "n100", "n101"]),
        ("a1,b[2-3], c", ["a1", "b2", "b3", "c"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("n[1,x[5-6]]y", ["n1y", "nx5y", "nx6y"]),
    ],
)
def test_a_list_expands_in_order(text: str, names: list[str]) -> None:
    assert list(expand_hostlist(text)) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n1]", "n[3-1]", "n[]", "n[1,,2]", "n[a-b]", "a,,b", "", "n[1-9999999]"]
)
def test_a_broken_list_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InputError) as caught:
        expand_hostlist(text, "topology.conf: line 3")
    assert caught.value.problems[0].where == "topology.conf: line 3"


def test_a_list_that_multiplies_without_end_is_refused() -> None:
    with pytest.raises(InputError, match="names over 1,000,000 hosts"):
        expand_hostlist("n" + "[1-1000]" * 5)


def test_runs_become_ranges_and_widths_stay_apart() -> None:
    assert collapse_hostlist(["n1", "n2", "n3", "n05", "n06", "m1"]) == "n[1-3,05-06],m1"


@given(st.lists(NAMES, max_size=40))
def test_collapse_then_expand_gives_the_names_back(names: list[str]) -> None:
    text = collapse_hostlist(names)
    assert list(expand_hostlist(text)) == names if names else text == ""


@given(st.text(alphabet="n0123[],-x ", max_size=30))
def test_any_text_expands_or_is_refused(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017
        return
    assert names
    assert expand_hostlist(collapse_hostlist(names)) == names or any(
        set("[], ") & set(name) for name in names
    )

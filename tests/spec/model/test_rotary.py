"""How many positions a token attends to, against counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.model import AttentionTemperature, Rotary
from meshwright.spec.model.rotary import mean_context_length


def visible(query: int, key: int, window: int | None, chunk: int | None, causal: bool) -> bool:
    if not causal:
        return True
    if key > query:
        return False
    if window is not None and query - key >= window:
        return False
    return chunk is None or query // chunk == key // chunk


@given(
    st.integers(1, 40),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_mean_context_equals_the_count_of_visible_pairs(
    length: int, window: int | None, chunk: int | None, causal: bool
) -> None:
    pairs = sum(
        visible(query, key, window, chunk, causal)
        for query in range(length)
        for key in range(length)
    )
    assert mean_context_length(length, window, chunk, causal) == pytest.approx(
        pairs / length, rel=1e-12
    )


@pytest.mark.parametrize("field", ["theta", "fraction", "factor"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rotary_refuses_what_is_not_above_zero(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        Rotary(**{field: value})  # type: ignore[arg-type]


def test_temperature_refuses_a_step_of_zero() -> None:
    with pytest.raises(InputError, match="floor"):
        AttentionTemperature(floor=0, scale=0.1)

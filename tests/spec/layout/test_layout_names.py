"""Layouts in words: short enough for a table, and the same wherever they are named."""

from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_names import format_degrees, format_short_name


def test_a_short_name_has_the_degrees_above_one() -> None:
    assert format_short_name(Layout()) == "1 GPU"
    assert format_short_name(Layout(tp=11)) == "tp 11"
    assert format_short_name(Layout(tp=2, pp=4, dp=8, ep=2)) == "tp 2 pp 4 dp 8 ep 2"
    assert format_short_name(Layout(tp=2, pp=4), ", ") == "tp 2, pp 4"


def test_degrees_that_no_layout_has_are_named_as_well() -> None:
    assert format_degrees(4, 1, 1, 8) == "tp 4 ep 8"

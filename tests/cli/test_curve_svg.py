"""Curves as pictures: what is in them, and that odd figures do not break them."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

from meshwright.cli.curve_svg import Chart, Curve, draw
from meshwright.cli.train_page import curves

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def lines(picture: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]  # type: ignore[misc]
        for element in ET.fromstring(picture).iter(f"{SVG}polyline")
    ]


def test_a_curve_is_drawn_with_its_name_and_last_value() -> None:
    picture = draw([Chart("loss", [Curve("trained", [(1, 5.0), (2, 4.0), (3, 2.5)])], "nats")])
    assert {"loss (nats)", "trained 2.5", "step"} <= set(texts(picture))
    (line,) = lines(picture)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)


def test_steps_are_marked_at_round_places() -> None:
    picture = draw([Chart("loss", [Curve("", [(1, 0.0), (118, 1.0)])])])
    assert {"50", "100"} <= set(texts(picture))
    assert "59.5" not in texts(picture)


def test_no_step_is_marked_that_there_is_not() -> None:
    picture = draw(
        [Chart("loss", [Curve("trained", [(step, 99.0 + step) for step in range(1, 12)])])]
    )
    assert {"5", "10"} <= set(texts(picture))
    assert not {"2.5", "7.5"} & set(texts(picture))


def test_a_count_that_stays_nought_has_no_negative_side() -> None:
    picture = draw([Chart("silent", [Curve("groups", [(1, 0.0), (2, 0.0)])])])
    assert not any(text.startswith("-") for text in texts(picture))


def test_a_floor_is_part_of_the_axis() -> None:
    points = [(1, 10.0), (2, 11.0)]
    assert "0" not in texts(draw([Chart("speed", [Curve("", points)])]))
    assert "0" in texts(draw([Chart("speed", [Curve("", points)], floor=0.0)]))


def test_figures_that_are_no_numbers_are_left_out() -> None:
    picture = draw([Chart("loss", [Curve("", [(1, 3.0), (2, math.nan), (3, math.inf), (4, 2.0)])])])
    assert len(lines(picture)[0]) == 2


def test_charts_without_points_are_left_out() -> None:
    full = Chart("here", [Curve("", [(1, 1.0)])])
    assert "absent" not in texts(draw([full, Chart("absent", [Curve("", [])])]))
    assert texts(draw([])) == []
    assert "bad" not in texts(draw([Chart("bad", [Curve("", [(1, math.nan)])])]))


def test_long_curves_are_drawn_by_means() -> None:
    (line,) = lines(draw([Chart("", [Curve("", [(n, n % 2) for n in range(100_000)])])]))
    assert len(line) <= 600


def test_a_picture_is_as_wide_as_its_longest_name() -> None:
    short, long = (
        ET.fromstring(draw([Chart("load", [Curve(name, [(1, 1.0), (2, 2.0)])])]))
        for name in ("a", "a-file-with-a-long-name 64 requests/s")
    )
    assert short.attrib["width"] == "760"
    (label,) = [one for one in long.iter(f"{SVG}text") if (one.text or "").startswith("a-file")]
    # No letter of the font is much wider than half its size, on average.
    assert float(label.attrib["x"]) + 6.5 * len(label.text or "") < float(long.attrib["width"])


def test_labels_do_not_lie_on_each_other() -> None:
    both = [Curve("one", [(1, 1.0), (2, 2.0)]), Curve("other", [(1, 1.5), (2, 2.0)])]
    places = [
        float(element.attrib["y"])
        for element in ET.fromstring(draw([Chart("", both)])).iter(f"{SVG}text")
        if (element.text or "").startswith(("one", "other"))
    ]
    assert abs(places[0] - places[1]) >= 14


def test_the_page_of_a_run_shows_its_curves() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 5.0, "gradient_norm": 1.0},
        {"step": 2, "loss": None, "gradient_norm": 2.0, "tokens_per_s": 10.0},
        {"step": 2, "held_out_loss": 4.5},
    ]
    found = texts(curves(rows))
    assert {"loss (nats per token)", "held out 4.5", "gradient norm", "speed (tokens/s)"} <= set(
        found
    )


def test_labels_of_many_curves_stay_apart_and_above_the_axis() -> None:
    curves = [Curve(f"curve {number}", [(0, 0.0), (1, number / 100)]) for number in range(7)]
    picture = draw([Chart("loss", [*curves, Curve("high", [(0, 0.0), (1, 10.0)])])])
    labels = [text for text in ET.fromstring(picture).iter(f"{SVG}text") if "fill" in text.attrib]
    heights = sorted(float(label.attrib["y"]) for label in labels)
    assert len(heights) == 8
    assert min(b - a for a, b in pairwise(heights)) >= 14.9
    (axis,) = (text for text in ET.fromstring(picture).iter(f"{SVG}text") if text.text == "step")
    assert heights[-1] < float(axis.attrib["y"]) - 10

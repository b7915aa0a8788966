"""Curves as pictures: what is in them, and that odd figures do not break them."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts
from meshwright.cli.train.page import draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def lines(picture: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]  # type: ignore[misc]
        for element in ET.fromstring(picture).iter(f"{SVG}polyline")
    ]


def test_a_curve_is_drawn_with_its_name_and_last_value() -> None:
    picture = draw_line_charts(
        [LineChart("loss", [ChartLine("trained", [(1, 5.0), (2, 4.0), (3, 2.5)])], "nats")]
    )
    assert {"loss (nats)", "trained 2.5", "step"} <= set(texts(picture))
    (line,) = lines(picture)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)


def test_steps_are_marked_at_round_places() -> None:
    picture = draw_line_charts([LineChart("loss", [ChartLine("", [(1, 0.0), (118, 1.0)])])])
    assert {"50", "100"} <= set(texts(picture))
    assert "59.5" not in texts(picture)


def test_no_step_is_marked_that_there_is_not() -> None:
    picture = draw_line_charts(
        [LineChart("loss", [ChartLine("trained", [(step, 99.0 + step) for step in range(1, 12)])])]
    )
    assert {"5", "10"} <= set(texts(picture))
    assert not {"2.5", "7.5"} & set(texts(picture))


def test_a_count_that_stays_nought_has_no_negative_side() -> None:
    picture = draw_line_charts([LineChart("silent", [ChartLine("groups", [(1, 0.0), (2, 0.0)])])])
    assert not any(text.startswith("-") for text in texts(picture))


def test_a_floor_is_part_of_the_axis() -> None:
    points = [(1, 10.0), (2, 11.0)]
    assert "0" not in texts(draw_line_charts([LineChart("speed", [ChartLine("", points)])]))
    assert "0" in texts(draw_line_charts([LineChart("speed", [ChartLine("", points)], y_min=0.0)]))


def test_figures_that_are_no_numbers_are_left_out() -> None:
    picture = draw_line_charts(
        [LineChart("loss", [ChartLine("", [(1, 3.0), (2, math.nan), (3, math.inf), (4, 2.0)])])]
    )
    assert len(lines(picture)[0]) == 2


def test_charts_without_points_are_left_out() -> None:
    full = LineChart("here", [ChartLine("", [(1, 1.0)])])
    assert "absent" not in texts(draw_line_charts([full, LineChart("absent", [ChartLine("", [])])]))
    assert texts(draw_line_charts([])) == []
    assert "bad" not in texts(
        draw_line_charts([LineChart("bad", [ChartLine("", [(1, math.nan)])])])
    )


def test_long_curves_are_drawn_by_means() -> None:
    (line,) = lines(
        draw_line_charts([LineChart("", [ChartLine("", [(n, n % 2) for n in range(100_000)])])])
    )
    assert len(line) <= 600


def test_a_picture_is_as_wide_as_its_longest_name() -> None:
    short, long = (
        ET.fromstring(
            draw_line_charts([LineChart("load", [ChartLine(name, [(1, 1.0), (2, 2.0)])])])
        )
        for name in ("a", "a-file-with-a-long-name 64 requests/s")
    )
    assert short.attrib["width"] == "760"
    (label,) = [one for one in long.iter(f"{SVG}text") if (one.text or "").startswith("a-file")]
    # No letter of the font is much wider than half its size, on average.
    assert float(label.attrib["x"]) + 6.5 * len(label.text or "") < float(long.attrib["width"])


def test_labels_do_not_lie_on_each_other() -> None:
    both = [ChartLine("one", [(1, 1.0), (2, 2.0)]), ChartLine("other", [(1, 1.5), (2, 2.0)])]
    places = [
        float(element.attrib["y"])
        for element in ET.fromstring(draw_line_charts([LineChart("", both)])).iter(f"{SVG}text")
        if (element.text or "").startswith(("one", "other"))
    ]
    assert abs(places[0] - places[1]) >= 14


def test_the_page_of_a_run_shows_its_curves() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 5.0, "grad_norm": 1.0},
        {"step": 2, "loss": None, "grad_norm": 2.0, "tokens_per_s": 10.0},
        {"step": 2, "eval_loss": 4.5},
    ]
    found = texts(draw_curves(rows))
    assert {"loss (nats per token)", "held out 4.5", "gradient norm", "speed (tokens/s)"} <= set(
        found
    )


def test_labels_of_many_curves_stay_apart_and_above_the_axis() -> None:
    curves = [ChartLine(f"curve {number}", [(0, 0.0), (1, number / 100)]) for number in range(7)]
    picture = draw_line_charts(
        [LineChart("loss", [*curves, ChartLine("high", [(0, 0.0), (1, 10.0)])])]
    )
    labels = [text for text in ET.fromstring(picture).iter(f"{SVG}text") if "fill" in text.attrib]
    heights = sorted(float(label.attrib["y"]) for label in labels)
    assert len(heights) == 8
    assert min(b - a for a, b in pairwise(heights)) >= 14.9
    (axis,) = (text for text in ET.fromstring(picture).iter(f"{SVG}text") if text.text == "step")
    assert heights[-1] < float(axis.attrib["y"]) - 10
